"""Panel and line of one moment of `run`. On a terminal, a panel keeps its size from refresh to refresh; elsewhere it is
a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.segment import Segment
from rich.text import Text

from sidelight.exporter.document import Block, Line, Span, without_controls
from sidelight.exporter.text import render
from sidelight.rundir.printable.numbers import brief, brief_ms, percent
from sidelight.rundir.printable.text import printable, sparkline

if TYPE_CHECKING:
    from sidelight.exporter.summary.verdict import RunVerdict

WIDTH = 80  # at most; on a narrower terminal lines end before a word
LABEL, CELL = 8, 12
LINES, LETTERS = 5, 420  # of the usual verdict: its figures and bar, and its sentences
BAR = 4 * CELL  # columns of sparklines
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

    Tokens are of the last seconds. `verdict` is on the last minute, None before a request has ended; `objectives` stand
    beside none of its figures. `waiting_lately` has the most that waited in each of the last stretches of time.
    `silent` are the metrics pages that no longer answer, each with since when and why. `planned_requests` is of a
    closed loop that ends by their number.
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
    lateness_p99_ms: float | None = None
    verdict: RunVerdict | None = None
    waiting_lately: list[float | None] = field(default_factory=list)
    objectives: list[Standing] = field(default_factory=list)
    silent: Mapping[str, str] = field(default_factory=dict)
    planned_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Reserved:
    """The verdict, over as many lines as it takes, at least a usual one's. They are kept free before it is known."""

    verdict: tuple[Block, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(render(self.verdict), options) if self.verdict else []
        for each in lines:
            yield from (*each, Segment.line())
        yield from [Text("")] * (LINES + LETTERS // options.max_width - len(lines))


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
    head, *numbers = (render([row]) for row in _numbers(view))
    verdict = [Reserved(_verdict(view))] if view.loaded else []
    rows: list[RenderableType] = [head, *verdict, *numbers]
    return Panel(Group(*rows), title="sidelight", title_align="left", border_style="cyan", width=WIDTH)


def panel_rows(view: View) -> Iterator[Block]:
    """Yield the phase, the verdict, the client's numbers, and the engine's."""
    head, *rows = _numbers(view)
    yield from (head, *_verdict(view), *rows)


def _verdict(view: View) -> tuple[Block, ...]:
    """Return the verdict without the empty line that ends it; nothing before there is one."""
    if view.verdict is None:
        return ()
    from sidelight.exporter.report.verdict import verdict_blocks  # noqa: PLC0415  who made the verdict has imported it

    return tuple(verdict_blocks(without_controls(view.verdict)))[:-1]


def _numbers(view: View) -> Iterator[Line]:
    heading = [(view.phase, "strong"), (f"  {_elapsed(view)}", "")]
    if view.lateness_p99_ms is not None:
        heading.append((f"   requests leave up to {brief_ms(view.lateness_p99_ms)} late (p99)", "note"))
    yield Line(tuple(heading), fit="cut")
    if view.loaded:
        yield _row(
            "client",
            cell("sent", f"{view.sent}"),
            cell("ok", f"{view.ok}", "met"),
            cell("in flight", f"{view.in_flight}"),
            cell("tokens/s", brief(view.output_tokens_per_s)),
        )
    yield _engine(view)
    yield waiting_row(view.waiting_lately)
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
