"""`report.md`: verdict, objectives and the main tables in Markdown, short enough for a pull request's comment.

Paragraphs and tables are those of the report for terminals. What servers said is read as text: it marks nothing up,
links to nothing, and mentions neither people nor issues.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.comparison import (
    CAUTION,
    STATISTICS,
    Compared,
    configuration_table,
    same_requests,
    times_table,
)
from sidelight.exporter.document import Figures, PartsBar, Prose, Table, without_controls
from sidelight.exporter.report.alerts import alerts
from sidelight.exporter.report.conclusion import conclusion, evidence
from sidelight.exporter.report.heading import heading
from sidelight.exporter.report.load import rate_lines
from sidelight.exporter.report.tables.breakdown import breakdown_table
from sidelight.exporter.report.tables.client import client_table
from sidelight.exporter.report.tables.shards import shards_section
from sidelight.exporter.report.tables.slowest import work_lines, work_table
from sidelight.exporter.report.verdict import verdict_blocks, verdict_of
from sidelight.exporter.summary.breakdown import json_name
from sidelight.exporter.summary.result import Summary, as_written
from sidelight.exporter.summary.verdict import RunVerdict, StudyVerdict
from sidelight.exporter.text import TRACE, glyph
from sidelight.loadgen.requests.slo.results import ObjectiveResult

_MARKUP = re.compile(r"([\\`*_{}\[\]<>|~#&]|:(?=//)|(?<=www)\.)")
# GitHub and GitLab look for these in the text that is shown, where no backslash stands any more.
_MENTION = re.compile(r"([@#!]|\bGH-)(?=\w)", re.IGNORECASE)
_APART = "\N{ZERO WIDTH SPACE}"
BAR = 40  # characters
_LONGEST = 1000  # characters of a text: GitHub refuses a comment of over 65,536
# Beside a base: all that is gated on, its parts, and the speed of a reply.
BESIDE = {
    "ttft_ms": STATISTICS,
    **dict.fromkeys(map(json_name, TTFT_PARTS), ("mean",)),
    **dict.fromkeys(("tpot_ms", "e2e_ms"), ("p50", "p99")),
}
_VERDICTS = {True: "met", False: "**missed**", None: "**not known**"}


def as_markdown(summary: Summary, *, against_base: tuple[Compared, Compared] | None = None) -> str:
    """Return the page, ending in a newline; beside a base with the second of these runs, its own."""
    return "\n\n".join(filter(None, _blocks(without_controls(as_written(summary)), against_base))) + "\n"


def _blocks(summary: Summary, against_base: tuple[Compared, Compared] | None) -> Iterator[str]:
    loaded = bool(summary.client.requests.sent)
    if loaded or summary.integrity.state == "damaged":
        yield from _verdict(verdict_of(summary))
    if summary.client.slo:
        yield from _objectives(summary.client.slo.objectives)
    yield "\n".join(f"- ! {escaped(alert)}" for alert in alerts(summary))
    if loaded:
        yield from map(escaped, conclusion(summary))
        if against_base:
            yield from _beside(*against_base)
        if not summary.correlation.missing:
            yield _table(breakdown_table(summary.correlation.breakdown, inner=False))
        if summary.correlation.work.waits:
            yield _table(work_table(summary.correlation))
            yield "\n".join(f"- {escaped(line)}" for line in work_lines(summary))
        yield _table(client_table(summary.client))
        yield "\n".join(f"- {escaped(line)}" for line in rate_lines(summary))
    for each in shards_section(summary.watch) if summary.watch else ():
        yield _table(each) if isinstance(each, Table) else ""
    yield " · ".join(escaped(line.text) for line in heading(summary))  # a line of its own could begin a list


def verdict_markdown(verdict: RunVerdict | StudyVerdict) -> str:
    """Return the verdict as Markdown."""
    return "\n\n".join(filter(None, _verdict(verdict)))


def _verdict(verdict: RunVerdict | StudyVerdict) -> Iterator[str]:
    """Yield the verdict: its state, a table of its figures, the bar, why, and what to do."""
    for block in verdict_blocks(verdict):
        match block:
            case Prose(text, tone) if text:
                yield f"**{escaped(text)}**" if "strong" in tone else escaped(text)
            case Figures(cells):
                rows = ([escaped(each[at]) for each in cells] for at in (0, 1))
                yield _rows([next(rows), ["--:"] * len(cells), next(rows)])
            case PartsBar():
                drawn = "".join(glyph(piece) * round(BAR * block.length * share) for piece, share in block.drawn)
                legend = (f"`{glyph(piece)}` {escaped(words)}" for piece, words in block.legend)
                yield escaped(block.label)
                yield f"`{drawn or TRACE}`\n\n{' · '.join(legend)}"


def _objectives(objectives: Sequence[ObjectiveResult]) -> Iterator[str]:
    """Yield the verdict, and a table with a row for each objective."""
    met = sum(objective.met is True for objective in objectives)
    yield f"**{met} of {len(objectives)} objectives met**"
    rows = ((escaped(each.text), _VERDICTS[each.met], escaped(evidence(each))) for each in objectives)
    yield _rows([("objective", "", "measured"), ("---", "---", "---"), *rows])


def _beside(base: Compared, run: Compared) -> Iterator[str]:
    """Yield the run's times beside those of another, and the differences in their configuration."""
    yield f"**Beside run {escaped(base.summary.run_id)}**"
    yield f"In {base.label}: {escaped(verdict_of(base.summary).headline)}"
    yield "\n".join(f"- ! In {base.label}: {escaped(line)}" for line in alerts(base.summary))
    yield escaped(f"{same_requests((base, run))} {CAUTION}")
    yield _table(times_table((base, run), BESIDE))
    yield _table(configuration_table((base, run)))


def _table(table: Table) -> str:
    """Return a table with its title above; labels to the left, numbers to the right; "" of one without rows."""
    columns = table.texts(bars=False)
    rows = list(zip(*(map(escaped, texts) for _, texts in columns), strict=True))
    if not rows:
        return ""
    head = [escaped(column.title) for column, _ in columns]
    rule = ["--:" if column.kind == "numbers" else "---" for column, _ in columns]
    return f"**{escaped(table.title)}**\n\n{_rows([head, rule, *rows])}"


def _rows(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def escaped(text: str) -> str:
    """Return a text that Markdown shows as it is."""
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
    return _MENTION.sub(rf"\1{_APART}", _MARKUP.sub(r"\\\1", text))
