"""Counts and times of one phase of a run so far, for the live views. They are added up batch by batch."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import asdict

from sidelight.exporter.prometheus.snapshot import (
    LATENCY_BOUNDS_S,
    LATENESS_BOUNDS_S,
    TOKEN_BOUNDS_S,
    ClientCounts,
    Cumulative,
    add,
    bucketize,
    traced,
)
from sidelight.loadgen.requests.metrics import request_metrics, schedule_lateness_ms, ttft_ns
from sidelight.loadgen.requests.slo.objectives import Slo
from sidelight.loadgen.requests.slo.results import SloResult, SloTally
from sidelight.loadgen.requests.table.fold import InFlightRequest
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.clock import iso_ms
from sidelight.rundir.columns import Floats, Ints, Texts
from sidelight.rundir.stats import Missing

if TYPE_CHECKING:
    from sidelight.loadgen.requests.summary import ClientSummary

STATUSES = ("ok", "failed", "refused", "cancelled")
QUANTILES = ("0.5", "0.9", "0.95", "0.99")
LATENESS_QUANTILES = ("0.5", "0.99")
LATENCIES = ("ttft", "time_per_output_token", "e2e_latency")
LATENESS = "schedule_lateness"
OF_CLASSES = ("ttft", "e2e_latency")
MOST_CLASSES = 20
FAILING = 5  # requests one after another
SLO_EVERY_S, SLO_SHARE = 5.0, 0.01  # objectives are evaluated so often, at the cost of this share of a core at most
# What is counted of rates on the page, by the report's names.
RATES = {
    "offered": "offered_requests_per_s",
    "sent": "realised_requests_per_s",
    "served": "served_requests_per_s",
    "requests": "requests_per_s",
    "goodput": "goodput_requests_per_s",
    "input_tokens": "input_tokens_per_s",
    "output_tokens": "output_tokens_per_s",
}


@dataclass(slots=True)
class TallySample:
    """Values of one metric so far, s, and their quantiles. The quantiles are as of when there were `counted` values."""

    values: array[float] = field(default_factory=lambda: array("d"))
    counted: int = 0
    quantiles: tuple[float, ...] = ()

    def add(self, values_s: Floats, stale_ratio: float, *, passing_s: Collection[float] = ()) -> None:
        """Add the known values; `passing_s` are those that may still change, counted for now. The quantiles are found
        anew with more than `stale_ratio` times the values counted, or fewer.
        """
        self.values.frombytes(values_s[np.isfinite(values_s)].tobytes())
        count = len(self.values) + len(passing_s)
        if count and not self.counted <= count <= stale_ratio * self.counted:
            self.counted = count
            levels = [float(level) for level in QUANTILES]
            values = np.frombuffer(self.values.tobytes() + array("d", passing_s).tobytes())
            self.quantiles = tuple(np.quantile(values, levels).tolist())


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts and histograms since a phase began.

    A TTFT counts when the first token has come, which a view of a run that goes on says by `begin`; all else when a
    request has ended. `received` are the output tokens of the requests that have ended, and those of replies that go
    on as far as was said; it never falls.
    Quantiles are those of all values, or with a `stale_ratio` above 1, which keeps their cost flat in a view that
    counts each second, of the values that were there before that many times more came.
    """

    stale_ratio: float = 1.0
    slo: Slo | None = None
    statuses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATUSES, 0))
    input_tokens: int = 0
    output_tokens: int = 0
    received: int = 0
    ttft: Cumulative = field(default_factory=partial(bucketize, [], LATENCY_BOUNDS_S))
    inter_token: Cumulative = field(default_factory=partial(bucketize, [], TOKEN_BOUNDS_S))
    tpot: Cumulative = field(default_factory=partial(bucketize, [], TOKEN_BOUNDS_S))
    e2e: Cumulative = field(default_factory=partial(bucketize, [], LATENCY_BOUNDS_S))
    lateness: Cumulative = field(default_factory=partial(bucketize, [], LATENESS_BOUNDS_S))
    samples: dict[str, TallySample] = field(
        default_factory=lambda: {name: TallySample() for name in (*LATENCIES, LATENESS)}
    )
    classes: dict[str, dict[str, TallySample]] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)  # requests by the kind of their error
    objectives: SloTally | None = None
    _slo: SloResult | None = None
    _slo_due_s: float = 0.0
    _uncounted: int = 0  # of the requests that ended ok: without a number of tokens
    _ok_tokens: int = 0
    _ok_ns: int = 0  # when the last request ended ok
    _failed: int = 0  # requests since then
    _begun_s: dict[int, float] = field(default_factory=dict)  # TTFT of requests in flight, by index

    def __post_init__(self) -> None:
        if self.slo is not None:
            self.objectives = SloTally(self.slo)

    def begin(self, firsts: Sequence[InFlightRequest], *, streamed: int) -> None:
        """Add requests in flight with a first token. `streamed` tokens have come of all those in flight."""
        self.received = max(self.received, self.output_tokens + streamed)
        if not firsts:
            return
        first_ns = np.array([first.first_token_ns for first in firsts], np.int64)
        ttft_s = ttft_ns(np.array([first.submit_ns for first in firsts], np.int64), first_ns) / 1e9
        self._observe_ttft(ttft_s, np.array([first.trace_id for first in firsts], np.object_), first_ns)
        self._begun_s.update(zip((first.index for first in firsts), ttft_s.tolist(), strict=True))
        self.samples["ttft"].add(np.empty(0), self.stale_ratio, passing_s=self._begun_s.values())

    def _observe_ttft(self, ttft_s: Floats, trace_ids: Texts, first_ns: Ints) -> None:
        self.ttft = add(self.ttft, traced(ttft_s, LATENCY_BOUNDS_S, trace_ids, first_ns))

    def count(self, log: RequestLog) -> None:
        """Add requests that have ended, none of them before."""
        metrics = request_metrics(log)
        for status in log.status:
            self.statuses[str(status)] = self.statuses.get(status, 0) + 1
        self.input_tokens += int(log.input_tokens[log.input_tokens > 0].sum())
        self.output_tokens += int(log.output_tokens[log.output_tokens > 0].sum())
        self.received = max(self.received, self.output_tokens)
        is_new = np.array([self._begun_s.pop(index, None) is None for index in log.index.tolist()], np.bool_)
        self._observe_ttft(metrics.ttft_ms[is_new] / 1e3, log.trace_id[is_new], log.first_token_ns[is_new])
        self.inter_token = add(self.inter_token, bucketize(metrics.itl_ms / 1e3, TOKEN_BOUNDS_S))
        self.tpot = add(self.tpot, bucketize(metrics.tpot_ms / 1e3, TOKEN_BOUNDS_S))
        self.e2e = add(self.e2e, bucketize(metrics.e2e_ms / 1e3, LATENCY_BOUNDS_S))
        lateness_s = schedule_lateness_ms(log) / 1e3
        self.lateness = add(self.lateness, bucketize(lateness_s, LATENESS_BOUNDS_S))
        self.samples[LATENESS].add(lateness_s, self.stale_ratio)
        times_ms = {
            "ttft": metrics.ttft_ms,
            "time_per_output_token": metrics.tpot_ms,
            "e2e_latency": metrics.e2e_ms,
        }
        for name, values_ms in times_ms.items():
            passing_s = self._begun_s.values() if name == "ttft" else ()
            self.samples[name].add(values_ms[log.status == "ok"] / 1e3, self.stale_ratio, passing_s=passing_s)
        self._count_classes(log, times_ms)
        self._count_failures(log)
        if self.objectives is not None:
            self.objectives.add(log, metrics)
            tokens = log.output_tokens[log.status == "ok"]
            self._uncounted += int((tokens < 0).sum())
            self._ok_tokens += int(tokens[tokens >= 0].sum())

    @property
    def failing(self) -> dict[str, Any]:
        """Return the start and the number of requests that only fail; nothing below FAILING requests."""
        since = f"{iso_ms(self._ok_ns)[11:19]} UTC" if self._ok_ns else ""
        return {} if self._failed < FAILING else {"failing": since, "failures": self._failed}

    def _count_failures(self, log: RequestLog) -> None:
        ok = log.status == "ok"
        if ok.any():
            self._ok_ns, self._failed = max(self._ok_ns, int(log.end_ns[ok].max())), 0
        for error in log.error[log.error != ""]:
            self.errors[str(error).partition(":")[0]] += 1
        has_failed = (log.status == "failed") | (log.status == "refused")
        self._failed += int((has_failed & (log.end_ns > self._ok_ns)).sum())

    def _count_classes(self, log: RequestLog, times_ms: Mapping[str, Floats]) -> None:
        """Add the values of requests by their class, of the first classes that come."""
        ok = log.status == "ok"
        for name in sorted(set(log.workload_class[ok].tolist())):
            if name in self.classes or len(self.classes) < MOST_CLASSES:
                samples = self.classes.setdefault(name, {of: TallySample() for of in OF_CLASSES})
                for of, sample in samples.items():
                    sample.add(times_ms[of][ok & (log.workload_class == name)] / 1e3, self.stale_ratio)

    def slo_result(self, duration_s: float) -> SloResult | None:
        """Return the state of the objectives after `duration_s`; None without any."""
        if self.objectives is None:
            return None
        amounts = {
            "output_tokens_per_s": None if self._uncounted else self._ok_tokens,
            "requests_per_s": self.objectives.ok,
            "goodput_requests_per_s": self.objectives.good,
        }
        unknown = Missing("nothing has ended yet, or a reply reports no usage")
        known = self.objectives.requests > 0 and duration_s > 0
        return self.objectives.result(
            {name: amount / duration_s if known and amount is not None else unknown for name, amount in amounts.items()}
        )

    def slo_lately(self, duration_s: float) -> SloResult | None:
        """Return the state of the objectives after `duration_s`, or some seconds earlier; None without any."""
        began_s = monotonic()
        if began_s >= self._slo_due_s:
            self._slo = self.slo_result(duration_s)
            ended_s = monotonic()
            self._slo_due_s = ended_s + max(SLO_EVERY_S, (ended_s - began_s) / SLO_SHARE)
        return self._slo

    def lateness_quantiles_s(self) -> dict[str, float]:
        shown = dict(zip(QUANTILES, self.samples[LATENESS].quantiles, strict=False))
        return {level: shown[level] for level in LATENESS_QUANTILES if level in shown}

    def client_counts(
        self,
        *,
        in_flight: int,
        scheduled: int | None = None,
        submitted: int | None = None,
        slo: SloResult | None = None,
    ) -> ClientCounts:
        """Return the client's counts, with those of its workers, its plan and its objectives."""
        classes = self.classes if len(self.classes) > 1 else {}
        return ClientCounts(
            requests=dict(self.statuses),
            scheduled=scheduled,
            submitted=submitted,
            quantiles={
                (name, level): value
                for name in LATENCIES
                for level, value in zip(QUANTILES, self.samples[name].quantiles, strict=False)
            },
            class_requests={name: len(samples[OF_CLASSES[-1]].values) for name, samples in classes.items()},
            class_quantiles={
                (name, of, level): value
                for name, samples in classes.items()
                for of, sample in samples.items()
                for level, value in zip(QUANTILES, sample.quantiles, strict=False)
            },
            good=None if self.objectives is None else self.objectives.good,
            slo=slo,
            in_flight=in_flight,
            input_tokens=self.input_tokens,
            output_tokens=self.received,
            ttft=self.ttft,
            inter_token=self.inter_token,
            time_per_output_token=self.tpot,
            e2e=self.e2e,
        )


def rates_so_far(counts: ClientCounts, elapsed_s: float, load_s: float) -> dict[str, float]:
    """Return the rates of a measured phase so far. Its load has lasted `load_s` of the `elapsed_s`."""
    amounts = {
        "offered": (counts.scheduled, load_s),
        "sent": (counts.submitted, load_s),
        "requests": (counts.requests["ok"], elapsed_s),
        "goodput": (counts.good, elapsed_s),
        "input_tokens": (counts.input_tokens, elapsed_s),
        "output_tokens": (counts.output_tokens, elapsed_s),
    }
    return {of: amount / over_s for of, (amount, over_s) in amounts.items() if amount is not None and over_s > 0}


def reported_rates(client: ClientSummary) -> dict[str, float]:
    """Return the rates of the report."""
    stated = {**asdict(client.throughput), **asdict(client.rates)}
    return {of: stated[name] for of, name in RATES.items() if stated[name] is not None}
