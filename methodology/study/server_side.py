"""Engines' metrics during a step, and the limit of its throughput by that evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sidelight.correlator.load.steady import SteadyWindow
from sidelight.correlator.statistics.server_load import EngineSamples, Sources, gauge_samples, leading_endpoints
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.methodology.study.model import Limit, Step, StepData
from sidelight.rundir.columns import Bools, Floats
from sidelight.rundir.stats import Missing
from sidelight.scraper.series.resets import START_TIME, restarts_of, rising, together
from sidelight.scraper.series.table import EndpointSeries

SELDOM = 0.05  # share of the scrapes that saw requests wait
FULL = 0.95  # KV cache usage
NEAR_MOST = 0.9  # share of the most that ever ran; one less counts as well: it has just ended
OFTEN = 0.5  # share of the scrapes
PREEMPTED = 0.01  # preemptions a request, from which on they are no accident
COVERED = 0.9  # share of the window that scrapes must cover, for a rate
NO_PAGE = "no page of an engine shows how many requests wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSide:
    """The engines of the leading kind together, in a step's window; None where no page tells."""

    queued_ratio: float | None
    running_max: float | None
    running_mean: float | None
    waiting_mean: float | None
    flat_ratio: float | None  # share of the scrapes with requests waiting in which the most that ever ran did, nearly
    full_ratio: float | None  # share of them in which the KV cache was full
    kv_cache_max: float | None
    preemptions: float | None
    server_tokens_per_s: float | None
    foreign_ratio: float | None
    restarted: bool
    engine_start_ns: int | None


def server_side(
    log: RequestLog, endpoints: Sequence[EndpointSeries], window: SteadyWindow, start_ns: int
) -> ServerSide:
    """Return the server's metrics for a step with measured requests [n] from `start_ns` on."""
    engines = leading_endpoints(endpoints)
    waiting, running = (
        _within(gauge_samples(endpoints, f"requests_{name}"), window) for name in ("waiting", "running")
    )
    usage = _within(gauge_samples(endpoints, "kv_cache_usage", together="max"), window)
    queued = waiting > 0 if len(waiting) == len(running) else np.zeros(len(running), np.bool_)
    return ServerSide(
        queued_ratio=_mean(waiting > 0) if len(waiting) else None,
        running_max=_most(running),
        running_mean=_mean(running),
        waiting_mean=_mean(waiting),
        flat_ratio=_mean(running[queued] >= min(NEAR_MOST * running.max(), running.max() - 1))
        if queued.any()
        else None,
        full_ratio=_mean(usage[queued] > FULL) if len(usage) == len(queued) else None,
        kv_cache_max=_most(usage),
        preemptions=increase(engines, "preemptions", start_ns),
        server_tokens_per_s=_rate(engines, window),
        foreign_ratio=_foreign_ratio(log, engines, start_ns),
        restarted=any(bool((restarts_of(page).process & (page.at_ns > start_ns)).any()) for page, _ in engines),
        engine_start_ns=_engine_start_ns(engines),
    )


def _within(samples: EngineSamples, window: SteadyWindow) -> Floats:
    """Return the known amounts inside the window."""
    inside = (samples.at_ns >= window.start_ns) & (samples.at_ns <= window.end_ns) & np.isfinite(samples.amount)
    return samples.amount[inside]


def _mean(values: Floats | Bools) -> float | None:
    return float(values.mean()) if len(values) else None


def _most(values: Floats) -> float | None:
    return float(values.max()) if len(values) else None


def cumulative(page: EndpointSeries, sources: Sources, name: str) -> Floats | None:
    """Return a counter over all label sets [t] as if it had never been reset; None where the page has none."""
    source = sources[name]
    if isinstance(source, Missing) or not len(page.at_ns):
        return None
    restarts = restarts_of(page)
    columns = [rising(page, column, restarts).values for column in source.columns]
    return together(columns) if columns else np.zeros(len(page.at_ns))


def increase(engines: Sequence[tuple[EndpointSeries, Sources]], name: str, start_ns: int = 0) -> float | None:
    """Return the increase of a counter since the last scrape before a moment.

    By default it is since the first scrape.
    """
    total = 0.0
    for page, sources in engines:
        values = cumulative(page, sources, name)
        if values is None:
            return None
        total += float(values[-1] - values[reference(page, start_ns)])
    return total if engines else None


def reference(page: EndpointSeries, start_ns: int) -> int:
    return max(0, int(np.searchsorted(page.at_ns, start_ns, side="right")) - 1)


def _rate(engines: Sequence[tuple[EndpointSeries, Sources]], window: SteadyWindow) -> float | None:
    """Return the output tokens that the engines counted in the window, a second; linear between scrapes."""
    rate = 0.0
    for page, sources in engines:
        values = cumulative(page, sources, "generation_tokens")
        if values is None:
            return None
        edges_ns = np.clip([window.start_ns, window.end_ns], page.at_ns[0], page.at_ns[-1])
        covered_s = float(edges_ns[1] - edges_ns[0]) / 1e9
        if covered_s < COVERED * window.duration_s:
            return None
        first, last = np.interp(edges_ns, page.at_ns, values).tolist()
        rate += (last - first) / covered_s
    return rate if engines else None


def _foreign_ratio(log: RequestLog, engines: Sequence[tuple[EndpointSeries, Sources]], start_ns: int) -> float | None:
    """Return the share of the engines' finished requests that were not ours; at most, those that ended here."""
    finished = increase(engines, "requests_finished", start_ns)
    if not finished:
        return None
    since_ns = min(int(page.at_ns[reference(page, start_ns)]) for page, _ in engines)
    until_ns = max(int(page.at_ns[-1]) for page, _ in engines) + 10**9  # the way back to us
    ours = int(((log.end_ns > since_ns) & (log.end_ns <= until_ns)).sum())
    return max(0.0, (finished - ours) / finished)


def _engine_start_ns(engines: Sequence[tuple[EndpointSeries, Sources]]) -> int | None:
    """Return the latest start time of the engines' processes, by the last page of each."""
    stamps = [
        page.values[-1, column]
        for page, _ in engines
        for column, series in enumerate(page.series)
        if series.name == START_TIME and len(page.values)
    ]
    known = [stamp for stamp in stamps if np.isfinite(stamp)]
    return int(1e9 * max(known)) if known else None


def binding(step: Step, server: ServerSide, data: StepData) -> tuple[Limit | None, str]:
    """Return the limit of a step's throughput, and the evidence; None where nothing bound it."""
    if late := data.doubts.get("load"):
        return "client", f"the load generator could not keep up: {late}"
    if server.queued_ratio is None or server.running_max is None:
        return ("unknown", NO_PAGE) if data.closed_loop else (None, "")
    waited = f"requests waited in {100 * server.queued_ratio:.0f} % of the scrapes"
    if server.queued_ratio < SELDOM and data.closed_loop:
        return "client", (
            f"{step.level:g} requests in flight never filled the engine: it ran {server.running_max:.0f} at most, and "
            f"{waited}"
        )
    if server.queued_ratio < (SELDOM if data.closed_loop else OFTEN):
        return None, ""
    preempted = (server.preemptions or 0) > PREEMPTED * len(data.requests)
    flat = (server.flat_ratio or 0) >= OFTEN
    usage = "" if server.kv_cache_max is None else f"KV cache usage reached {100 * server.kv_cache_max:.0f} %"
    full = (server.full_ratio or 0) >= OFTEN or (not flat and (server.kv_cache_max or 0) > FULL)
    if preempted or full:
        times = f"{server.preemptions or 0:.0f} times a running request lost its place"
        return "kv_cache", f"{waited}, {usage or 'the KV cache was full'}, and {times}"
    if flat:
        return "seats", (
            f"{waited} while it ran {server.running_max:.0f} and no more"
            + (usage and f"; the KV cache is not the limit ({100 * (server.kv_cache_max or 0):.0f} % used)")
        )
    return "steps", (
        f"{waited} although the engine ran {server.running_mean:.0f} on the mean and {server.running_max:.0f} at most"
        + (usage and f", and {usage}: a step's time or its budget of tokens is what is short")
    )
