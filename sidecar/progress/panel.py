"""Panel and line of one moment of `run`. On a terminal, a panel keeps its size from refresh to refresh; elsewhere it is
a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.panel import Panel
from rich.text import Text

from correlator.parts import TTFT_PARTS
from exporter.document import Line, Prose, Span
from exporter.text import render, wrapped
from rundir.printable.numbers import brief, brief_ms, percent
from rundir.printable.text import printable, sparkline

WIDTH = 80  # at most; on a narrower terminal lines end before a word
LABEL, CELL = 8, 12
SENTENCE = 220  # letters of the usual sentence
BAR = 4 * CELL  # columns of bars and of sparklines
# The parts of the TTFT: the first word of each, and its piece of the bar.
PARTS = {part.name: (part.label.split()[0], part.glyph) for part in TTFT_PARTS}
Spans = tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """State of an objective: its value in its unit, None where it is not known yet."""

    objective: str
    met: bool | None
    value: float | None
    unit: str


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The numbers of one moment of a run; None is shown as a dash. Without load of our own only the engine is shown.

    Rates are of the last seconds; `offered_per_s` is that of the schedule, of a closed loop what was sent. The means of
    TTFT's parts are of the `broken_down` requests of the measured phase. `cause` is a sentence on the latest, "" where
    too little is known. `waiting_lately` has the most that waited in each of the last stretches of time. `silent` are
    the metrics pages that no longer answer, each with since when and why. `planned_requests` is of a closed loop that
    ends by their number.
    """

    phase: str
    loaded: bool
    elapsed_s: float
    planned_s: float | None
    sent: int
    ok: int
    failed: int
    in_flight: int
    output_tokens_per_s: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    running: float | None
    waiting: float | None
    kv_cache_usage_ratio: float | None
    offered_per_s: float | None = None
    served_per_s: float | None = None
    lateness_p99_ms: float | None = None
    ttft_parts_ms: Mapping[str, float] = field(default_factory=dict)
    broken_down: int = 0
    cause: str = ""
    waiting_lately: list[float | None] = field(default_factory=list)
    objectives: list[Standing] = field(default_factory=list)
    silent: Mapping[str, str] = field(default_factory=dict)
    planned_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Sentence:
    """A paragraph over as many lines as it takes, at least a usual one's. They are kept free before it is known."""

    prose: Prose

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        lines = wrapped(self.prose, options.max_width)
        yield from lines
        yield from [Text("")] * (SENTENCE // options.max_width + 1 - len(lines))


def line(view: View) -> str:
    client = (
        f"sent {view.sent}, ok {view.ok}, failed {view.failed}, in flight {view.in_flight}, "
        f"{brief(view.output_tokens_per_s)} tokens/s, "
        f"TTFT p50 {brief(view.ttft_p50_ms)} p99 {brief(view.ttft_p99_ms)} ms, "
    )
    return (
        f"{view.phase} {_elapsed(view)}: {client if view.loaded else ''}"
        f"engine running {brief(view.running)} waiting {brief(view.waiting)} "
        f"KV {percent(view.kv_cache_usage_ratio)}"
    )


def panel(view: View) -> Panel:
    """Return the panel. A run's has as many lines from the first to the last."""
    rows = [render([row]) if isinstance(row, Line) else Sentence(row) for row in panel_rows(view)]
    return Panel(Group(*rows), title="sidelight", title_align="left", border_style="cyan", width=WIDTH)


def panel_rows(view: View) -> Iterator[Line | Prose]:
    """Yield the client's numbers, where its TTFT goes, and the engine's numbers."""
    heading = [(view.phase, "strong"), (f"  {_elapsed(view)}", "")]
    if view.lateness_p99_ms is not None:
        heading.append((f"   requests leave up to {brief_ms(view.lateness_p99_ms)} late (p99)", "note"))
    yield Line(tuple(heading), fit="cut")
    if view.loaded:
        yield from _client(view)
    yield _engine(view)
    yield waiting_row(view.waiting_lately)
    if view.loaded:
        yield Prose(printable(view.cause), "strong")


def _client(view: View) -> Iterator[Line]:
    yield _row(
        "client",
        cell("sent", f"{view.sent}"),
        cell("ok", f"{view.ok}", "met"),
        cell("failed", f"{view.failed}", "alarm" if view.failed else ""),
        cell("in flight", f"{view.in_flight}"),
    )
    yield _row(
        "per s",
        cell("offered", brief(view.offered_per_s)),
        cell("served", brief(view.served_per_s)),
        cell("tokens", brief(view.output_tokens_per_s)),
    )
    mean_ms = sum(view.ttft_parts_ms.values()) if view.ttft_parts_ms else None
    yield _row(
        "TTFT",
        cell("p50", brief_ms(view.ttft_p50_ms)),
        cell("p99", brief_ms(view.ttft_p99_ms)),
        cell(f"mean of {view.broken_down}:", brief_ms(mean_ms)),
    )
    yield _row("", _bar(view.ttft_parts_ms))
    yield _row("", _joined(_legend(view.ttft_parts_ms)))
    if view.objectives:
        missed_first = sorted(view.objectives, key=lambda each: each.met is not False)
        yield _row("SLO", _joined(map(_standing, missed_first)))


def _engine(view: View) -> Line:
    if view.silent and view.running is None and view.waiting is None:
        why = printable(next(iter(view.silent.values())))
        return _row("engine", ((f"no answer {why}", "alarm strong"),))
    last = cell("KV cache", percent(view.kv_cache_usage_ratio))
    if view.silent:
        last = _joined((last, cell("silent pages", f"{len(view.silent)}", "alarm")))
    waiting = cell("waiting", brief(view.waiting), "warning" if view.waiting else "")
    return _row("engine", cell("running", brief(view.running)), waiting, last)


def waiting_row(waiting: Sequence[float | None]) -> Line:
    """Return the line of waiting requests lately, the latest to the right, and their maximum. The earliest are left out
    first.
    """
    most = max((value for value in waiting if value is not None), default=None)
    blocks = sparkline(waiting).rjust(BAR)
    return Line(
        ((f"{'waiting':{LABEL}}", ""), (blocks, "queue"), (f"  up to {brief(most)}", "note")), "label", fit="shrink"
    )


def _row(label: str, *cells: Spans) -> Line:
    """Return a line of cells at fixed places, whatever their numbers."""
    spans = [(f"{label:{LABEL}}", "")]
    for shown in cells[:-1]:
        spans += *shown, (" " * max(1, CELL - sum(cell_len(text) for text, _ in shown)), "")
    return Line((*spans, *cells[-1]), "label", fit="cut")


def _bar(parts_ms: Mapping[str, float]) -> Spans:
    """Return a bar of fixed length with each part's share; dots where nothing is known yet."""
    whole_ms, bar, end, begun_ms = sum(parts_ms.values()), list[Span](), 0, 0.0
    for name, (_, glyph) in PARTS.items() if whole_ms > 0 else ():
        begun_ms += parts_ms.get(name, 0.0)
        length = round(BAR * begun_ms / whole_ms) - end
        if length:
            bar.append((glyph * length, name))
        end += length
    return tuple(bar) if end else (("·" * BAR, "note"),)


def _legend(parts_ms: Mapping[str, float]) -> Iterator[Spans]:
    for name, (label, glyph) in PARTS.items():
        if mean_ms := parts_ms.get(name):
            yield (glyph, name), (f" {label} ", "note"), (brief_ms(mean_ms), "strong")


def _standing(standing: Standing) -> Spans:
    """Return an objective and its verdict, without its value, which is some seconds old."""
    verdicts = {True: ("met", "met strong"), False: ("MISSED", "alarm strong"), None: ("not known", "")}
    return (f"{printable(standing.objective)} ", "note"), verdicts[standing.met]


def _joined(cells: Iterable[Spans], gap: str = "  ") -> Spans:
    return tuple(span for shown in cells for span in ((gap, ""), *shown))[1:]


def row(*cells: Spans, fit: Literal["wrap", "cut"] = "wrap") -> Line:
    return Line(_joined(cells, "   "), fit=fit)


def cell(label: str, value: str, tone: str = "") -> Spans:
    return (f"{label} ", "note"), (value, f"{tone} strong".strip())


def _elapsed(view: View) -> str:
    if view.planned_requests is not None:
        return f"{view.ok + view.failed} of {view.planned_requests} requests, {view.elapsed_s:.0f} s"
    if view.planned_s is None:
        return f"{view.elapsed_s:.0f} s"
    if view.elapsed_s > view.planned_s:
        return f"{view.planned_s:.0f} s, draining for {view.elapsed_s - view.planned_s:.0f} s"
    return f"{view.elapsed_s:.0f} of {view.planned_s:.0f} s"
