"""The tables of a study: as people read them, and as CSV files."""

from __future__ import annotations

import csv
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from io import StringIO
from itertools import count

from sidelight.exporter import document
from sidelight.exporter.document import BLANK, Block, Prose
from sidelight.methodology.study.findings import Cell, ResultColumn, ResultTable
from sidelight.methodology.study.findings import table as new_table
from sidelight.methodology.study.result import StepRecord, StudyResult
from sidelight.rundir.printable.numbers import count_of, figure
from sidelight.rundir.printable.text import defused

MOST_ROWS = 60
TAU = "tau: number of consecutive values that carry as much information as one independent value."
_NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?")


def as_csv(table: ResultTable) -> str:
    """Return a table as a CSV file: numbers in full, an empty cell where missing.

    A text that a spreadsheet would compute begins with an apostrophe.
    """
    file = StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([defused(column.name) for column in table.columns])
    writer.writerows(
        [defused(value) if isinstance(value, str) else _known(value) for value in row] for row in table.rows
    )
    return file.getvalue()


def _known(value: Cell) -> Cell:
    """Return a cell, None where it is not a number."""
    return None if isinstance(value, float) and math.isnan(value) else value


def shown(content: ResultTable) -> Iterator[Block]:
    """Yield a table for people and its note; of a long one the first rows."""
    if content.rows:
        yield document.Table(
            title=content.title,
            columns=tuple(map(_column, content.columns, zip(*content.rows, strict=True), count())),
            rows=tuple(map(document.Row, content.rows[:MOST_ROWS])),
            label_width=1,
            kept_in=f"tables/{content.name}.csv",
            splits=True,
        )
    else:
        yield Prose(f"{content.title}: empty.", "label")
    if len(content.rows) > MOST_ROWS:
        yield Prose(f"{count_of(len(content.rows) - MOST_ROWS, 'row')} more in tables/{content.name}.csv.", "note")
    if content.note:
        yield from (Prose(content.note, "note"), BLANK)


def _column(column: ResultColumn, values: Sequence[Cell], place: int) -> document.Column:
    """Return a column with a heading hardly wider than the cells below it."""
    show, is_text = partial(number, digits=column.digits), any(isinstance(value, str) for value in values)
    least = 20 if is_text or column.digits is None else 8
    widest = max(least, *(len(show(value)) for value in values[:MOST_ROWS]))
    title = "\n".join(textwrap.wrap(column.title, widest, break_long_words=False))
    return document.Column(title, show, "numbers" if place and not is_text else "words")


def number(value: Cell, digits: int | None = 3) -> str:
    """Return a cell for people, with at least `digits` significant digits (None: as it is); "-" where missing."""
    value = _known(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if digits is None:
        return str(value) if isinstance(value, int) else f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
    return figure(value, digits)


def results_table(result: StudyResult) -> ResultTable:
    """Return every result with its interval; its method, or why it is missing."""
    titles = {
        "result": "Result", "value": "Value", "unit": "Unit", "ci95_low": "95 % interval from", "ci95_high": "to",
        "sample": "In the sample", "n": "Values", "tau": "tau", "method": "How it was computed, or why it is missing",
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for name, each in result.results.items():
        how = f"missing: {each.missing or 'no reason is known'}" if each.value is None else each.method
        rows.append((name, each.value, each.unit, *each.ends, each.sample, each.n, each.tau, how))
    note = TAU if any(row[7] for row in rows) else ""
    return new_table("results", "Results with their 95 % intervals", titles, rows, note)


def steps_table(steps: Sequence[StepRecord]) -> ResultTable:
    """Return the steps in order: the load asked for, the result, and the verdict."""
    titles = {
        "number": "Step", "run": "Directory", "kind": "Kind", "variant": "Variant", "load": "Load", "level": "Level",
        "realised_per_s": "Sent (req/s)", "completed_per_s": "Completed (req/s)",
        "requests": "Requests", "ok": "ok", "stability": "Load was", "limit": "Limit", "void": "Void because",
    }  # fmt: skip
    rows = [
        (
            step.number, step.run, step.kind, step.variant, f"{step.load} loop", step.level, step.realised,
            step.completed, step.requests, step.ok, step.stability, step.limit, step.void,
        )
        for step in steps
    ]  # fmt: skip
    filled = [at for at in range(len(titles)) if at < 3 or any(row[at] not in (None, "") for row in rows)]
    shown = {name: title for at, (name, title) in enumerate(titles.items()) if at in filled}
    note = "Level: requests/s offered by an open loop, requests in flight of a closed loop."
    return new_table("steps", "Steps", shown, ([row[at] for at in filled] for row in rows), note, {"level": None})


def joined(sentences: Iterable[tuple[int, str]]) -> Iterator[tuple[str, str]]:
    """Yield sentences that differ only in numbers once, with their steps and the ranges."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for step, text in sentences:
        groups.setdefault(_NUMBER.sub("{}", text), []).append((step, text))
    for group in groups.values():
        places = zip(*(_NUMBER.findall(text) for _, text in group), strict=True)
        ranges = iter([_range(numbers) for numbers in places])
        yield ", ".join(str(step) for step, _ in group), _NUMBER.sub(lambda _: next(ranges), group[0][1])  # noqa: B023


def _range(numbers: Sequence[str]) -> str:
    ends = (pick(numbers, key=lambda each: float(each.replace(",", ""))) for pick in (min, max))
    return " to ".join(dict.fromkeys(ends))


def requests_table(steps: Sequence[StepRecord]) -> ResultTable:
    """Return a table of the requests of each step by seed and hash."""
    titles = {"number": "Step", "seed": "Seed", "requests_sha256": "SHA-256 of the requests as sent"}
    rows = ((step.number, step.seed, step.requests_sha256 or "not known") for step in steps)
    return new_table("requests", "Requests of the steps", titles, rows, digits={"seed": None})
