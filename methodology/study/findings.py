"""Findings of a test: numbers with their intervals, tables, plots, and the evidence for its sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from sidelight.exporter.summary.verdict import StudyVerdict
from sidelight.rundir.fields import NO_UNIT, Count, doc
from sidelight.rundir.printable.numbers import figure

Cell = float | int | str | bool | None
COUNTS = frozenset({"requests", "gaps", "modes"})  # units of what is counted: such numbers are whole


class ResultQuantity(Struct, frozen=True, kw_only=True):
    """One result: a number, how sure it is, and how it was come by."""

    value: Annotated[float | None, doc("The number; null where missing.", "its unit")]
    unit: Annotated[str, doc("Its unit; 1 for a pure number.")]
    ci95: Annotated[tuple[float | None, float | None] | None, doc("95 % interval; an end or all null: not known.")] = (
        None
    )
    n: Annotated[Count | None, doc("Values that it rests on.", "values")] = None
    tau: Annotated[float | None, doc("How many values in a row count as one independent value.", "values")] = None
    method: Annotated[str, doc("How it and its interval were computed.")] = ""
    at: Annotated[str, doc("The load at which it was measured, in words; empty: the whole study.")] = ""
    missing: Annotated[str, doc("Why it is null.")] = ""
    sample: Annotated[
        float | None, doc("Of a percentile: that of these values themselves, however few.", "its unit")
    ] = None

    @property
    def shown(self) -> float | None:
        """Return the number as tables show it: a count whole, a percentile of too few values that of the sample."""
        if self.value is not None and self.unit in COUNTS and self.value.is_integer():
            return int(self.value)
        return self.sample if self.value is None else self.value

    def in_sample(self) -> str:
        """Return a percentile of too few values as it stands in a sentence: that of the sample, and what it exceeds."""
        bound = "" if self.ends[0] is None else f", at least {figure(self.ends[0])} {self.unit}"
        return f"{figure(self.sample or 0)} {self.unit} in the sample{bound}"

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """Return the ends of its interval, None of one that is not known."""
        return self.ci95 or (None, None)

    def interval(self) -> str:
        """Return the interval, or its known end, as text behind the number; else nothing.

        Nothing, too, of a number that is known exactly.
        """
        low, high = self.ends
        if low is not None and low == high:
            return ""
        if low is not None and high is not None:
            return f" ({figure(low)} to {figure(high)}, 95 %)"
        known = [f"{word} {figure(end)}" for word, end in (("at least", low), ("at most", high)) if end is not None]
        return f" ({known[0]}, 95 %)" if known else ""


class ResultColumn(Struct, frozen=True, kw_only=True):
    """A column of a table."""

    name: Annotated[str, doc("Its name in the CSV file, with the unit.")]
    title: Annotated[str, doc("Its heading for people.")]
    digits: Annotated[int | None, doc("Significant digits for people; null: as it is.", NO_UNIT)] = 3


class ResultTable(Struct, frozen=True, kw_only=True):
    """A table of the report, named as the draft names it; also written as tables/NAME.csv."""

    name: Annotated[str, Meta(pattern="^[a-z0-9-]+$"), doc("Its file's name.")]
    title: Annotated[str, doc("Its heading.")]
    columns: tuple[ResultColumn, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: Annotated[str, doc("What a reader must know of it.")] = ""


class PlotLine(Struct, frozen=True, kw_only=True):
    """A line, a set of marks or a layer of a plot."""

    name: str
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


class Plot(Struct, frozen=True, kw_only=True):
    """A plot of the report."""

    name: Annotated[str, Meta(pattern="^[a-z0-9-]+$"), doc("Names it.")]
    title: Annotated[str, doc("Its heading.")]
    kind: Annotated[Literal["line", "steps", "marks", "stack"], doc("How it is drawn.")]
    x_title: str
    y_title: str
    lines: tuple[PlotLine, ...]
    log_x: bool = False
    log_y: bool = False


class SupportingNumber(Struct, frozen=True, kw_only=True):
    """A number that a sentence of the report rests on."""

    claim: Annotated[str, doc("The sentence.")]
    quantity: Annotated[str, doc("What was measured, by its name in docs/reference/metrics where it has one.")]
    run: Annotated[str, doc("The step's directory.")]
    value: Annotated[float | None, doc("The number.")]


class StudyFindings(Struct, frozen=True, kw_only=True):
    """Findings from the steps of a study."""

    answer: Annotated[tuple[str, ...], doc("The result in a few sentences: what, how sure, what limits it.")]
    results: Annotated[dict[str, ResultQuantity], doc("Results by name.")]
    evidence: Annotated[tuple[SupportingNumber, ...], doc("What the sentences rest on.")] = ()
    tables: tuple[ResultTable, ...] = ()
    plots: tuple[Plot, ...] = ()
    notes: Annotated[tuple[str, ...], doc("How the draft was read where it is open, and what deviates from it.")] = ()
    passed: Annotated[bool | None, doc("Whether stated criteria hold; null: none, or not decided.")] = None
    documents: Annotated[dict[str, Any], doc("Further JSON files beside the tables, by name.")] = {}
    verdict: Annotated[StudyVerdict | None, doc("The verdict of a comparison; null: that follows from the steps.")] = (
        None
    )


def evidence(claim: str, run: str, values: Mapping[str, float | None]) -> list[SupportingNumber]:
    """Return the evidence for a sentence in a run, by the names of the quantities."""
    return [SupportingNumber(claim=claim, quantity=name, run=run, value=value) for name, value in values.items()]


def table(
    name: str,
    title: str,
    titles: Mapping[str, str],
    rows: Iterable[Sequence[Cell]],
    note: str = "",
    digits: Mapping[str, int | None] | None = None,
) -> ResultTable:
    """Return a table by the names and headings of its columns; their digits where these are not 3."""
    digits = digits or {}
    columns = tuple(ResultColumn(name=each, title=head, digits=digits.get(each, 3)) for each, head in titles.items())
    return ResultTable(name=name, title=title, columns=columns, rows=tuple(map(tuple, rows)), note=note)


def plot(
    name: str,
    title: str,
    axes: tuple[str, str],
    lines: Iterable[PlotLine],
    *,
    kind: Literal["line", "steps", "marks", "stack"] = "line",
    **scales: bool,
) -> Plot:
    """Return a plot by the titles of its two axes; `log_x`, `log_y`: these are logarithmic."""
    x_title, y_title = axes
    return Plot(name=name, title=title, kind=kind, x_title=x_title, y_title=y_title, lines=tuple(lines), **scales)
