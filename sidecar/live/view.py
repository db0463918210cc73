"""Live state of a run. Its logs are read as they grow, into the tables that the report takes, and counted.

A TTFT counts when the first token has come and tokens as they come, as far as the workers wrote that, which takes them
a second at most; all else counts when a request has ended. In flight and sent are as the workers last reported them.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from sidelight.exporter.prometheus.snapshot import GeneratorCounts, SaidVerdict, Snapshot, said
from sidelight.loadgen.requests.slo.objectives import Slo
from sidelight.loadgen.requests.slo.results import SloResult
from sidelight.loadgen.requests.table.fold import InFlightRequest
from sidelight.recorded.failures import ErrorCount
from sidelight.recorded.logs import News, RunLogs
from sidelight.rundir.clock import AnchoredClock
from sidelight.rundir.columns import take
from sidelight.scraper.series.log import FailureRecord, ScrapeRow
from sidelight.sidecar.live.engine import Engines, about_engine
from sidelight.sidecar.live.lately import Flow
from sidelight.sidecar.live.load import LoadProgress
from sidelight.sidecar.live.sending import Browsers
from sidelight.sidecar.live.tally import QUANTILES, Tally, rates_so_far
from sidelight.sidecar.progress.panel import Standing, View, panel_rows
from sidelight.sidecar.version import VERSION

if TYPE_CHECKING:
    from sidelight.exporter.prometheus.events import EventStream
    from sidelight.exporter.summary.verdict import RunVerdict
    from sidelight.sidecar.live.breakdown import LiveParts

STALE_RATIO = 1.01  # of the quantiles
TOKENS_S = 5.0  # the output rate is of so long ago
TTFT = {"p50": "0.5", "p99": "0.99"}  # the quantiles of the verdict, beside which their objectives stand
BESIDE = tuple(f"ttft_{level}" for level in TTFT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """Description of a run: its labels, engine version, objectives and links. `about` names the model, workload and
    URL; `engine_version` is the one stated at `/version`; `tags` are labels of every series; `trace_url` is where
    traces are looked at; `unread` is why neither pages nor spans of the engine come, "" where they may.
    """

    about: Mapping[str, str] = field(default_factory=dict)
    engine_version: str = ""
    planned_requests: int | None = None
    slo: Slo | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    trace_url: str = ""
    unread: str = ""


class LiveRun:
    """Live views of a run, and the reader of its logs. A context manager.

    An endpoint without a page for `stale_s` seconds is said to be silent, and its gauges are not shown. Browsers
    are sent over `stream` what came.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        clock: AnchoredClock,
        planned_s: float | None,
        stale_s: float,
        loaded: bool = True,
        protocol: str = "chat",
        described: Described = Described(),
        stream: EventStream | None = None,
    ) -> None:
        self._run_id = run_id
        self._clock = clock
        self.logs = RunLogs(path, run_id=run_id, protocol=protocol, follow=True)
        self._load = LoadProgress(self.logs.requests, clock, planned_s)
        self._stale_s = stale_s
        self._loaded = loaded
        self._described = described
        self._tallies = defaultdict[str, Tally](partial(Tally, stale_ratio=STALE_RATIO, slo=described.slo))
        self._received, self._tokens_per_s = Flow(window_s=TOKENS_S, least_s=1e-3), 0.0
        self._engines = Engines(self.logs.pages)
        self._parts: LiveParts | None = None
        title, url = f"Sidelight run {run_id}", described.trace_url
        self._browsers = Browsers(stream, title, run_id=run_id, trace_url=url) if stream else None
        self._said: SaidVerdict | None = None
        self._shown = False  # somebody wants snapshots
        self.shows_parts = False  # somebody wants the parts of the TTFT in views
        self._flow = Flow()
        self.failures = ErrorCount("the live view cannot show all of the run, which goes on")

    @property
    def engine_version(self) -> str:
        """Return the engine's version as stated at `/version`, or ""."""
        return self._described.engine_version

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.logs.__exit__()

    def enter(self, phase: str, *, start_ns: int | None = None) -> None:
        """Begin a phase, now or at a moment: the view counts from there."""
        self._load.enter(phase, start_ns)
        for flow in (self._flow, self._received):
            flow.counts.clear()
        self._count_tokens(self._load.phase_ns)
        if phase == "measure":
            for engine in self._engines.views.values():
                engine.highest.clear()

    def leave(self) -> None:
        """End the phase: nothing of it is scheduled any more."""
        self._load.leave()

    def poll(self) -> None:
        """Read new data of the logs, and count them. Data that cannot be counted are left out, and `errors` rises."""
        news = self.logs.read(spans=self._parts is not None)
        for stat in news.worker_stats:
            self._load.take(stat)
        for phase in dict.fromkeys(news.requests.phase):
            with self.failures.guard():
                self._tallies[phase].count(take(news.requests, news.requests.phase == phase))
        with self.failures.guard():
            self._stream()
        for scrape in news.scrapes:
            with self.failures.guard():
                self._show_page(scrape)
        with self.failures.guard():
            self._break_down(news)
        if self._shown and self._load.measured_ns is not None:
            with self.failures.guard():
                self._engines.estimate_quantiles(self._load.measured_ns, self._clock.now_ns())

    @property
    def errors(self) -> int:
        """Return the number of errors in reading or showing; their data are not in the view."""
        return self.failures.count + sum(log.count for log in self.logs.unreadable.values())

    def engines(self) -> set[str]:
        views = self._engines.views.values()
        return {engine.known.engine.name for engine in views if engine.known.engine is not None}

    def view(self) -> View:
        tally = self._tallies[self._load.phase]
        now_ns = self._clock.now_ns()
        ttft_s = dict(zip(QUANTILES, tally.samples["ttft"].quantiles, strict=False))
        elapsed_s = max(0.0, (now_ns - self._load.phase_ns) / 1e9)
        sent, waiting = self._load.submitted(self._load.phase), self._gauge("requests_waiting")
        lateness_s = tally.lateness_quantiles_s().get("0.99")
        slo = self.slo() if self._described.slo else None
        return View(
            phase=self._load.phase,
            loaded=self._loaded,
            elapsed_s=elapsed_s,
            planned_s=(self._load.load_s or None) if self._load.phase == "measure" else None,
            sent=sent,
            ok=tally.statuses["ok"],
            failed=tally.statuses["failed"] + tally.statuses["refused"],
            in_flight=self._load.in_flight,
            output_tokens_per_s=self._tokens_per_s or None,
            ttft_p50_ms=1e3 * ttft_s["0.5"] if ttft_s else None,
            ttft_p99_ms=1e3 * ttft_s["0.99"] if ttft_s else None,
            running=self._gauge("requests_running"),
            waiting=waiting,
            kv_cache_usage_ratio=self._gauge("kv_cache_usage"),
            lateness_p99_ms=None if lateness_s is None else 1e3 * lateness_s,
            verdict=self._verdict(),
            waiting_lately=self._engines.waiting_lately(waiting, now_ns),
            objectives=[
                Standing(objective=each.text, met=each.met, value=each.value, unit=each.unit)
                for each in (slo.objectives if slo else ())
                if f"{each.metric}_{each.statistic}" not in BESIDE or each.value is None
            ],
            planned_requests=self._described.planned_requests if self._load.phase == "measure" else None,
            silent=self._engines.silent(self._stale_s),
        )

    def snapshot(self) -> Snapshot:
        """Return the measured phase so far for the Prometheus page."""
        self._shown = True
        tally = self._tallies["measure"]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu = {f"worker-{stat.worker}": stat.cpu_ns / 1e9 for stat in self._load.workers.values()}
        version = self.engine_version
        elapsed_s = self._load.measured_s
        if verdict := self._verdict():
            self._said = said(self._said, verdict, self._clock.now_ns())
        load_s = self._load.load_s or elapsed_s
        client = tally.client_counts(
            in_flight=self._load.in_flight,
            scheduled=self._load.scheduled("measure"),
            submitted=self._load.submitted("measure"),
            slo=self.slo(),
        )
        return Snapshot(
            version=VERSION,
            run_id=self._run_id,
            phase=self._load.phase,
            client=replace(client, rates=rates_so_far(client, elapsed_s, min(elapsed_s, load_s))),
            generator=GeneratorCounts(
                schedule_lateness=tally.lateness,
                lateness_quantiles_s=tally.lateness_quantiles_s(),
                cpu_seconds={**cpu, "conductor": usage.ru_utime + usage.ru_stime},
                loop_delay_max_s=self._load.worst_delay_ns / 1e9 if self._load.workers else None,
                live_errors=self.errors,
            ),
            engines=self._engines.counts(version),
            parts=None
            if self._parts is None
            else replace(
                self._parts.counts,
                pending=self._parts.pending,
                largest={} if tally.failing else self._parts.largest,
            ),
            about={**self._described.about, **about_engine(list(self._engines.views.values()), version)},
            labels={"run_id": self._run_id, **self._described.tags},
            verdict=self._said and self._said.verdict,
        )

    def _verdict(self) -> RunVerdict | None:
        """Return the verdict on the last minute; None before a request has ended."""
        if self._parts is None:
            return None
        phase, now_ns = self._load.phase, self._clock.now_ns()
        tally, sent, scheduled = self._tallies[phase], self._load.submitted(phase), self._load.scheduled(phase)
        offered_per_s, served_per_s = self._flow.rates(now_ns / 1e9, scheduled or 0, tally.statuses["ok"])
        quantiles_s = dict(zip(QUANTILES, tally.samples["ttft"].quantiles, strict=False))
        slo = self.slo() if self._described.slo else None
        return self._parts.latest.verdict(
            self._engines.observed(),
            served_per_s=served_per_s,
            offered_per_s=offered_per_s or None,
            ttft_ms={name: 1e3 * quantiles_s[level] if level in quantiles_s else None for name, level in TTFT.items()},
            sent=sent,
            failed=tally.statuses["failed"] + tally.statuses["refused"],
            error=next((kind for kind, _ in tally.errors.most_common(1)), ""),
            **tally.failing,
            silent=self._engines.silent(self._stale_s),
            ended=bool(served_per_s),
            waiting=self._engines.waiting_lately(self._gauge("requests_waiting"), now_ns),
            objectives=slo.objectives if slo else (),
            unread=self._described.unread,
            late_ms=1e3 * tally.lateness_quantiles_s().get("0.99", 0.0),
        )

    def slo(self) -> SloResult | None:
        """Return the state of the objectives some seconds ago, of the measured phase; None without any."""
        return self._tallies["measure"].slo_lately(self._load.measured_s)

    def _count_tokens(self, now_ns: int) -> None:
        """Keep the rate of the phase's output tokens lately; 0 before there is one."""
        (rate,) = self._received.rates(now_ns / 1e9, self._tallies[self._load.phase].received)
        self._tokens_per_s = rate or 0.0

    def publish(self) -> None:
        """Send new events to browsers."""
        if self._browsers is not None and self._browsers.stream.is_due:
            events = self._browsers.events(lambda: panel_rows(self.view()), self._clock.now_ns())
            self._browsers.stream.publish(*events)

    def _stream(self) -> None:
        """Count the tokens of replies in progress."""
        firsts = defaultdict[str, list[InFlightRequest]](list)
        for first in self.logs.requests.first_tokens():
            firsts[first.phase].append(first)
        for phase in {*firsts, self._load.phase}:
            self._tallies[phase].begin(firsts[phase], streamed=self.logs.requests.streamed[phase])
        self._count_tokens(self._clock.now_ns())

    def _show_page(self, scrape: ScrapeRow | FailureRecord) -> None:
        engine = self._engines.take(scrape)
        if self._browsers is not None and self._browsers.columns is not None:
            self._browsers.columns.scraped(scrape, engine.counts.gauges)

    def _break_down(self, news: News) -> None:
        if (self._shown or self.shows_parts) and self._parts is None and len(news.requests):
            # Not before the first request has ended, which these imports would have kept waiting; best in the warm-up.
            import scipy.special  # noqa: F401, PLC0415  else the first estimate does it, in the midst of the load

            from sidelight.sidecar.live.breakdown import LiveParts  # noqa: PLC0415

            self._parts = LiveParts()
            if self._browsers is not None:
                import sidelight.exporter.html.live  # noqa: F401, PLC0415  which takes as long
        if self._parts is not None:
            now_ns = self._clock.now_ns()
            measured = take(news.requests, news.requests.phase == "measure")
            if len(measured):
                self._parts.ended(measured, now_ns)
            for scrape in news.scrapes:
                self._parts.scraped(scrape)
            self._parts.spans(news.spans)
            self._parts.poll(now_ns)
            released, start_ns = self._parts.released(), self._load.measured_ns
            if self._browsers is not None and start_ns is not None:
                columns = self._browsers.begin(start_ns)
                columns.ended(measured)
                columns.in_flight(self._load.in_flight, now_ns)
                for index, parts in released:
                    columns.counted(index, parts)

    def _gauge(self, quantity: str) -> float | None:
        return self._engines.gauge(quantity, self._stale_s)
