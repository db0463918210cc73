"""The correlation of a run: the times of each request, by client and server together, and where the wait went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from correlator.breakdown import Parts, break_down
from correlator.estimate import attribute
from correlator.estimate.intervals import Observed, observe, pick
from correlator.estimate.percentiles import (
    ServerMeans,
    ServerPercentiles,
    drained_means,
    server_means,
    server_percentiles,
)
from correlator.estimate.table import Attribution
from correlator.exact.clock_offset import ClockOffset, clock_offsets
from correlator.exact.join import join
from correlator.exact.matching import Matched, matched
from correlator.exact.table import Joined
from correlator.live.reasons import NOT_COMPARED
from correlator.opening import WatchRun
from correlator.replay import Replayed
from correlator.requests import address
from correlator.statistics.association import associations, rank_correlation
from correlator.statistics.queueing import while_waiting
from correlator.statistics.server_load import met_at_submission
from correlator.statistics.tail import tail_shares
from exporter.summary.correlation import PERCENTILES, Correlation, Evidence, Findings, ReceivedSpans, correlation
from exporter.summary.slowest import slowest
from exporter.summary.timeline import timeline
from loadgen.host.round_trip import RoundTrip
from loadgen.requests.metrics import input_tokens, span_s, ttft_ns
from loadgen.requests.table import RequestLog
from recorded.gateway_spans import GatewaySpan, nested
from recorded.run import Run
from rundir.columns import Floats, Texts, take
from rundir.fields import UNSET
from rundir.stats import Missing
from scraper.spans.requests import PROBE
from scraper.window.window import Window, slice_edges

ONLY_GREW = Missing(
    "the queue only grew while the load lasted, so that its length says no more than how long that had been"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Correlated:
    """Where each request of a run spent its time, those of the warm-up too, and what that rests on; columns [n].

    `observed` is what each endpoint's scrapes show of the ends of requests, `refusal` is as of `Joined`.
    """

    parts: Parts
    refusal: Texts
    attribution: Attribution
    observed: Sequence[Observed | Missing]
    clocks: Mapping[str, ClockOffset]
    records: Matched | None = None


def correlated(run: Run) -> Correlated:
    """Return every request's times: exact ones from spans and replies, for all others estimates from scrapes.

    Those of a watch are as they were when its requests ended.
    """
    if isinstance(run, WatchRun):
        return _watched(run, run.watched)
    records = matched(run.requests, run.timings) if run.timings.clocks else None
    joined = join(run.requests, run.spans, records)
    observed = [observe(endpoint) for endpoint in run.endpoints]
    attribution = attribute(run.requests, run.endpoints, observed)
    round_trips = _round_trips(run)
    own_urls = [url for url, trip in round_trips.items() if trip.own_address is True]
    clocks = clock_offsets(run.requests, joined, own_urls)
    parts = break_down(
        run.requests,
        joined,
        attribution,
        clocks,
        gateways=_gateways(run, joined),
        round_trip_s=_round_trip_s(run, round_trips),
    )
    return Correlated(
        parts=parts,
        refusal=joined.refusal,
        attribution=attribution,
        observed=observed,
        clocks=clocks.by_engine,
        records=records,
    )


def _watched(run: Run, watched: Replayed) -> Correlated:
    unknown = ClockOffset(offset_ns=None, error_ns=None, pairs=0, reason=NOT_COMPARED)
    return Correlated(
        parts=watched.parts,
        refusal=np.full(len(watched.parts), "", dtype=np.object_),
        attribution=watched.attribution,
        observed=[observe(endpoint) for endpoint in run.endpoints],
        clocks={"": unknown},
    )


def _gateways(run: Run, joined: Joined) -> list[tuple[GatewaySpan, ...]]:
    """Return the gateways that each request passed [n]: those of its own trace, and of that of its engine's span."""
    pairs = zip(run.requests.trace_id.tolist(), joined.trace_id.tolist(), strict=True)
    return [nested(*(run.gateways.get(trace, ()) for trace in dict.fromkeys(pair))) for pair in pairs]


def _round_trips(run: Run) -> dict[str, RoundTrip]:
    """Return the round trip of TCP to the server of each URL that was asked, where one was measured."""
    measured = msgspec.convert(run.manifest.get("network_rtt_ms", []), list[RoundTrip])
    by_address = {address(trip.url): trip for trip in measured if trip.median is not None}
    return {url: by_address[address(url)] for url in set(run.requests.endpoint_url) if address(url) in by_address}


def _round_trip_s(run: Run, round_trips: Mapping[str, RoundTrip]) -> Floats:
    """Return the round trip to the server that each request asked [n], NaN where none was measured."""
    by_url = {url: trip.median / 1e3 for url, trip in round_trips.items() if trip.median is not None}
    return np.array([by_url.get(url, np.nan) for url in run.requests.endpoint_url], dtype=np.float64)


def correlation_of(run: Run, times: Correlated, window: Window, slice_ns: int, *, steady: bool = True) -> Correlation:
    """Return the `correlation` object of a run's summary: of the measured requests, in slices of `slice_ns`.

    Where the queue only grew, its length stands for the time since the load began, and no threshold is sought in it.
    """
    rows = run.requests.phase == "measure"
    measured, parts = take(run.requests, rows), take(times.parts, rows)
    edges = slice_edges(window, slice_ns)[0].tolist() if window.end_ns > window.start_ns else []
    met = met_at_submission(measured, run.endpoints)
    waiting, running = met["requests_waiting"], met["requests_running"]
    findings = Findings(
        parts=parts,
        refusal=times.refusal[rows],
        attribution=take(times.attribution, rows),
        clocks=times.clocks,
        means=_means(run, times, measured, window),
        ok=measured.status == "ok",
        submit_ns=measured.submit_ns,
        workload_class=measured.workload_class,
        endpoint_url=measured.endpoint_url,
        edges_ns=edges,
        percentiles=_percentiles(run, times, window),
        spans=_spans(run),
        records=times.records,
        associations=associations(measured, {"ttft_ms": parts.ttft_s}, run.endpoints),
        tail=tail_shares(parts, measured.submit_ns, waiting if steady else ONLY_GREW),
        timeline=timeline(measured.submit_ns, parts.ttft_s, run.endpoints, window) if edges else UNSET,
        slowest=slowest(measured, parts, waiting, running, start_ns=window.start_ns),
        evidence=Evidence(
            while_waiting=while_waiting(run.endpoints, window),
            prefill_input_tokens_rho=rank_correlation(parts.prefill_s, input_tokens(measured)),
        ),
    )
    return correlation(findings)


def _percentiles(
    run: Run, times: Correlated, window: Window
) -> dict[Literal["queue_ms", "prefill_ms"], ServerPercentiles | Missing]:
    """Read percentiles of the server's queue and prefill times in the window, by exact times where there are any.

    Those of a request that ended well count, whether or not it could be estimated.
    """
    exact = np.isin(times.parts.source, ("trace", "response"))
    ended = exact & (times.attribution.quality == "none") & (run.requests.status == "ok")
    best = {"interval": np.where(ended, 0, times.attribution.interval)}
    for part in ("queue", "prefill"):
        best[f"{part}_s"] = getattr(times.parts, f"{part}_s")
        best[f"{part}_sd_s"] = np.where(exact, 0.0, getattr(times.attribution, f"{part}_sd_s"))
    table = take(replace(times.attribution, **best), run.requests.phase == "measure")
    observed = [_since(engine, window.start_ns) for engine in times.observed if isinstance(engine, Observed)]
    wanted = list(PERCENTILES.values())
    return {
        "queue_ms": server_percentiles(table, observed, "queue", wanted),
        "prefill_ms": server_percentiles(table, observed, "prefill", wanted),
    }


def _since(engine: Observed, start_ns: int) -> Observed:
    """Leave out the intervals that ended at or before a moment."""
    return replace(engine, ends=pick(engine.ends, np.flatnonzero(engine.ends.end_ns > start_ns)))


def _spans(run: Run) -> ReceivedSpans | None:
    """Return what the receivers of spans counted, None where none listened."""
    if run.span_counts is None:
        return None
    counts = msgspec.structs.asdict(run.span_counts)
    counts["turned_away"] += counts.pop("no_memory")
    del counts["unwritten"]  # part of those turned away
    for name in ("cut_connections", "unauthorized", "incomplete"):  # nothing was read of these
        del counts[name]
    return ReceivedSpans(
        **counts,
        request_spans=run.watched.engine_spans if isinstance(run, WatchRun) else int((run.spans.fault == "").sum()),
        health_probes=run.watched.probes if isinstance(run, WatchRun) else run.spans.refused.get(PROBE, 0),
        receiver_deaths=run.receiver_deaths,
    )


def _means(run: Run, times: Correlated, measured: RequestLog, window: Window) -> ServerMeans:
    """Return what the histograms' sums tell of the run as a whole."""
    # The server observes requests that finished; one that failed or was cancelled is in none of its sums.
    ok = take(measured, measured.status == "ok")
    means = server_means(
        ok.end_ns,
        ttft_ns(ok.submit_ns, ok.first_token_ns) / 1e9,
        times.observed,
        window,
        no_server=run.manifest.get("server_missing") or "",
    )
    if isinstance(run, WatchRun) or any(isinstance(engine, Observed) for engine in times.observed):
        return means
    output_ns = np.where(ok.first_output_ns >= 0, ok.first_output_ns, ok.first_token_ns)
    wait_s = float(np.mean(span_s(ok.submit_ns, output_ns))) if len(ok) else np.nan
    return drained_means(means, run.endpoints, window, sent=len(measured), wait_s=wait_s)
