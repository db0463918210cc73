"""Panel and line of one moment of `run`. On a terminal, a panel keeps its size from refresh to refresh; elsewhere it is
a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.text import Text

from rundir.printable.numbers import brief, brief_ms, percent
from rundir.printable.text import printable, sparkline

WIDTH = 80  # at most; on a narrower terminal lines end before a word
LABEL, CELL = 8, 12
SENTENCE = 220  # letters of the usual sentence
BAR = 4 * CELL  # columns of bars and of sparklines
_GAPS = re.compile(r"(?<=\S)(?:  +|(?<!\d) (?![\d ]))")  # but for those between a number, its label and its unit
# The parts of the TTFT: what they are called, and how their piece of the bar looks, by more than its colour.
PARTS = {
    "network": ("outside", "░", "blue"),
    "gateway": ("gateway", "▞", "magenta"),
    "queue": ("queue", "█", "yellow"),
    "prefill": ("prefill", "▓", "green"),
    "other": ("other", "▒", "cyan"),
}


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
class Line:
    """A text in one line, cut before a word where it is too narrow. No number is cut or parted from its unit."""

    text: Text

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        shown = self.text
        if shown.cell_len > options.max_width:
            ends = [gap.start() for gap in _GAPS.finditer(shown.plain) if gap.start() < options.max_width]
            shown = Text.assemble(shown[: max(ends, default=options.max_width - 1)], ("…", "dim"))
        yield shown


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text over as many lines as it takes, at least a usual one's. They are kept free before the text is known."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = list(self.text.wrap(console, options.max_width))
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
    """Return the panel: the client's numbers, where its TTFT goes, and the engine's numbers. A run's has as many lines
    from the first to the last.
    """
    heading = Text.assemble((view.phase, "bold"), f"  {_elapsed(view)}")
    if view.lateness_p99_ms is not None:
        heading.append(f"   requests leave up to {brief_ms(view.lateness_p99_ms)} late (p99)", style="dim")
    rows = [*(map(Line, _client(view)) if view.loaded else ()), *_engine(view)]
    if view.loaded:
        rows.append(Sentence(Text(printable(view.cause), style="bold")))
    return Panel(Group(Line(heading), *rows), title="sidelight", title_align="left", border_style="cyan", width=WIDTH)


def _client(view: View) -> Iterator[Text]:
    yield _row(
        "client",
        cell("sent", f"{view.sent}"),
        cell("ok", f"{view.ok}", "green"),
        cell("failed", f"{view.failed}", "red" if view.failed else ""),
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
    yield _row("", Text("  ").join(_legend(view.ttft_parts_ms)))
    if view.objectives:
        missed_first = sorted(view.objectives, key=lambda each: each.met is not False)
        yield _row("SLO", Text("  ").join(map(_standing, missed_first)))


def _engine(view: View) -> Iterator[RenderableType]:
    gauges = _row(
        "engine",
        cell("running", brief(view.running)),
        cell("waiting", brief(view.waiting), "yellow" if view.waiting else ""),
        cell("KV cache", percent(view.kv_cache_usage_ratio)),
    )
    if view.silent and view.running is None and view.waiting is None:
        why = printable(next(iter(view.silent.values())))
        gauges = _row("engine", Text(f"no answer {why}", style="bold red"))
    elif view.silent:
        gauges.append_text(Text.assemble("  ", cell("silent pages", f"{len(view.silent)}", "red")))
    yield Line(gauges)
    yield waiting_row(view.waiting_lately)


@dataclass(frozen=True, slots=True)
class WaitingLine:
    """Numbers of waiting requests lately, the latest to the right, and their maximum. The earliest are cut off
    first.
    """

    blocks: str
    most: str

    @property
    def text(self) -> Text:
        """Return the whole line."""
        return self._within(len(self.blocks))

    def _within(self, room: int) -> Text:
        return _row("waiting", Text.assemble((self.blocks[-room:], "yellow"), (self.most, "dim")))

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        yield self._within(max(1, options.max_width - LABEL - len(self.most)))


def waiting_row(waiting: Sequence[float | None]) -> WaitingLine:
    """Return the line of the requests that waited."""
    most = max((value for value in waiting if value is not None), default=None)
    return WaitingLine(sparkline(waiting).rjust(BAR), f"  up to {brief(most)}")


def _row(label: str, *cells: Text) -> Text:
    """Return a line of cells at fixed places, whatever their numbers."""
    row = Text(f"{label:{LABEL}}", style="bold cyan")
    for at, shown in enumerate(cells):
        row.append_text(shown)
        if at < len(cells) - 1:
            row.append(" " * max(1, CELL - shown.cell_len))
    return row


def _bar(parts_ms: Mapping[str, float]) -> Text:
    """Return a bar of fixed length with each part's share; dots where nothing is known yet."""
    whole_ms, bar, end, begun_ms = sum(parts_ms.values()), Text(), 0, 0.0
    for name, (_, glyph, colour) in PARTS.items() if whole_ms > 0 else ():
        begun_ms += parts_ms.get(name, 0.0)
        length = round(BAR * begun_ms / whole_ms) - end
        bar.append(glyph * length, style=colour)
        end += length
    return bar if end else Text("·" * BAR, style="dim")


def _legend(parts_ms: Mapping[str, float]) -> Iterator[Text]:
    for name, (label, glyph, colour) in PARTS.items():
        if mean_ms := parts_ms.get(name):
            yield Text.assemble((glyph, colour), (f" {label} ", "dim"), (brief_ms(mean_ms), "bold"))


def _standing(standing: Standing) -> Text:
    """Return an objective and its verdict, without its value: that is some seconds older than the numbers above it."""
    verdict, style = {True: ("met", "bold green"), False: ("MISSED", "bold red"), None: ("not known", "")}[standing.met]
    return Text.assemble((f"{printable(standing.objective)} ", "dim"), (verdict, style))


def row(*cells: Text) -> Text:
    return Text("   ").join(cells)


def cell(label: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{label} ", "dim"), (value, f"bold {style}".strip()))


def _elapsed(view: View) -> str:
    if view.planned_requests is not None:
        return f"{view.ok + view.failed} of {view.planned_requests} requests, {view.elapsed_s:.0f} s"
    if view.planned_s is None:
        return f"{view.elapsed_s:.0f} s"
    if view.elapsed_s > view.planned_s:
        return f"{view.planned_s:.0f} s, draining for {view.elapsed_s - view.planned_s:.0f} s"
    return f"{view.elapsed_s:.0f} of {view.planned_s:.0f} s"
