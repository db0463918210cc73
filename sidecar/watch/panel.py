"""Terminal panel of `watch`: where the TTFT of the last minutes went, and the engines' state.

Most important first: a terminal with too few lines cuts off the end. What others wrote is made `printable`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.panel import Panel
from rich.text import Text

from sidelight.correlator.live.reasons import EXPLANATIONS, NO_CLIENT
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.document import Block, Line, Prose, without_controls
from sidelight.exporter.report.heading import by_engines
from sidelight.exporter.report.tables.breakdown import breakdown_table
from sidelight.exporter.report.verdict import page_means, verdict_blocks
from sidelight.exporter.summary.breakdown import Breakdown, json_name, label_of
from sidelight.exporter.summary.slowest import SlowRequest
from sidelight.exporter.summary.verdict import RunVerdict
from sidelight.exporter.text import render
from sidelight.rundir.printable.numbers import brief, count_of, duration, percent, spoken
from sidelight.rundir.printable.text import printable
from sidelight.sidecar.live.lately import RecentRequests
from sidelight.sidecar.progress.panel import cell, row, waiting_row

MOST_ENGINES, MOST_REASONS = 4, 3
WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """State of one scraped page: the last values of its gauges, None where missing. `silence` is the reason why no page
    comes any more, `restarted_s` how long ago the engine was seen to have begun anew, None for not lately.
    """

    url: str
    engine: str
    version: str
    running: float | None
    waiting: float | None
    kv_cache_usage_ratio: float | None
    silence: str = ""
    restarted_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchState:
    """State of a watch at one moment.

    `awaiting_spans` requests (traces) may get more spans, `awaiting_estimates` wait for an estimate. Spans and what
    became of them, `receiver_restarts` and `errors` (our defects) are since the start; `receiver_down` says
    why there is no receiver, "" while there is one. `breaks` say where the traces of nearly all requests break;
    `waiting_lately` has the most that waited in all engines in each column of the last minutes, `page_means_ms` the
    last minute's mean TTFT, queue and prefill by engines' pages, `headroom` a sentence, "" for none, `drift` one for
    each change that lasts.
    """

    elapsed_s: float
    recent: RecentRequests
    engines: Sequence[EngineState]
    awaiting_spans: int
    awaiting_estimates: int
    spans: int
    refused: int
    receiver_restarts: int
    receiver_down: str = ""
    errors: int = 0
    breaks: Sequence[str] = ()
    waiting_lately: Sequence[float | None] = ()
    page_means_ms: Mapping[str, float] = field(default_factory=dict)
    verdict: RunVerdict | None = None
    headroom: str = ""
    drift: Sequence[str] = ()


def panel(state: WatchState) -> Panel:
    """Return the panel; it takes any width, and keeps it from refresh to refresh."""
    title = Text(f"sidelight watch  {_time(state.elapsed_s)}")
    return Panel(render(panel_rows(state)), title=title, title_align="left", border_style="cyan", width=WIDTH)


def panel_rows(state: WatchState) -> Iterator[Block]:
    """Yield the verdict, the engines, the breakdown of the TTFT, and requests without one."""
    if state.verdict is not None:
        yield from verdict_blocks(without_controls(state.verdict))
    if state.headroom:
        yield Prose(printable(state.headroom))
    for change in state.drift:
        yield Prose(f"! {printable(change)}", "warning")
    yield _traffic(state)
    if state.receiver_down:
        yield Prose(f"! {printable(state.receiver_down)}", "alarm strong")
    yield from (_engine(engine) for engine in state.engines[:MOST_ENGINES])
    if len(state.engines) > MOST_ENGINES:
        yield Prose(f"and {len(state.engines) - MOST_ENGINES} more pages", "note")
    if state.engines:
        yield waiting_row(state.waiting_lately)
    yield from _breakdown(state.recent, state.page_means_ms)
    yield from (Prose(printable(f"! In the last minute {text}"), "warning") for text in state.breaks)
    yield from _without(state.recent)
    yield _receiver(state)


def _traffic(state: WatchState) -> Line:
    cells = [cell("pending", f"{state.awaiting_spans + state.awaiting_estimates:,}")]
    if state.awaiting_estimates:
        cells.append(((f"{state.awaiting_estimates:,} of them for an estimate", "note"),))
    return row(*cells)


def _engine(engine: EngineState) -> Line:
    """Return an engine in a line."""
    page = engine.url.removeprefix("http://").removesuffix("/metrics")
    name = (printable(f"{engine.engine or 'engine'} {engine.version}".rstrip()), "label")
    ago = "" if engine.restarted_s is None else f"restarted {_time(engine.restarted_s)} ago"
    restarted = (((ago, "warning strong"),),) if ago else ()
    if engine.silence:
        silent = printable(f"{page} has not answered {engine.silence}"), "alarm strong"
        return row((name,), (silent,), fit="cut")
    return row(
        (name,),
        cell("running", brief(engine.running)),
        cell("waiting", brief(engine.waiting), "warning" if engine.waiting else ""),
        cell("KV cache", percent(engine.kv_cache_usage_ratio)),
        *restarted,
        ((printable(page), "note"),),
        fit="cut",
    )


def _breakdown(recent: RecentRequests, page_means_ms: Mapping[str, float]) -> Iterator[Block]:
    """Yield the parts of the TTFT with a report's labels, and the slowest requests; without any, what pages say."""
    if recent.group is None or not recent.group.breakdown.ttft_ms.count:
        if means := page_means(page_means_ms, " in the last minute"):
            yield Prose(means)
        yield Prose(f"No request with a known TTFT in the last {_time(recent.window_s)}.", "note")
        return
    breakdown = recent.group.breakdown
    title = f"Where the TTFT went: {count_of(breakdown.ttft_ms.count, 'request')} in {_time(recent.window_s)}"
    yield breakdown_table(breakdown, title=title, tail="p95", inner=False, kept_in="")
    for request in recent.slowest:
        yield _slow(request, breakdown)


def _slow(request: SlowRequest, breakdown: Breakdown) -> Line:
    """Return a line on a slow request: its TTFT, longest part and trace id."""
    times = {label_of(part, breakdown): getattr(request, json_name(part)) for part in TTFT_PARTS}
    known = {label: ms for label, ms in times.items() if ms is not None}
    longest = max(known, key=lambda label: known[label], default="")
    where = f"{longest} {spoken(known[longest])}" if longest else "no breakdown"
    trace = f"trace {request.trace_id}", "note"
    return Line((("slow ", "note"), (spoken(request.ttft_ms), "strong"), (f", {where}  ", ""), trace))


def _without(recent: RecentRequests) -> Iterator[Prose]:
    """Yield the number of requests without a breakdown of the TTFT, and the reasons."""
    if not recent.missing:
        return
    count = count_of(sum(recent.missing.values()), "request")
    yield Prose(f"{count} without a breakdown of the TTFT:", "warning")
    for reason, requests in list(recent.missing.items())[:MOST_REASONS]:
        stated = by_engines(recent.engine_only_ms) if reason == NO_CLIENT else ""
        yield Prose(f"  {requests:,}: {EXPLANATIONS[reason]}{f'; {stated}' if stated else ''}")


def _receiver(state: WatchState) -> Line:
    refused = "alarm" if state.refused else ""
    cells = [cell("spans received", f"{state.spans:,}"), cell("refused", f"{state.refused:,}", refused)]
    if state.receiver_restarts:
        cells.append(cell("receiver restarts", f"{state.receiver_restarts:,}", "warning"))
    if state.errors:
        cells.append(cell("defects of Sidelight's", f"{state.errors:,}", "alarm"))
    return row(*cells, (("since the start", "note"),))


def _time(seconds: float) -> str:
    return duration(math.floor(seconds)).replace(".0 s", " s")
