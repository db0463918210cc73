"""`report.html` of a study: the report's sections and tables, and its plots by the views' own page code."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from sidelight.exporter.document import Section
from sidelight.exporter.html.markup import escape, page_header, section
from sidelight.exporter.html.page import as_page
from sidelight.exporter.html.sections import NO_SCRIPT
from sidelight.methodology.report.content import StudyContent, answer, heading, sections
from sidelight.methodology.study.findings import PlotLine
from sidelight.methodology.study.result import StepRecord

STYLES = ("page.css", "study.css")
SCRIPTS = ("plot.js", "hues.js", "study.js")
MOST_POINTS = 1000  # of a line: more are not seen as such


def study_page(study: StudyContent) -> str:
    """Return the page: one file that connects to nothing, whose tables stand without its script."""
    plots = study.findings.plots
    data = {"plots": [msgspec.structs.asdict(plot) | {"lines": [*map(_line, plot.lines)]} for plot in plots]}
    title = f"Sidelight study {study.result.study_id}"
    return as_page(title, _sections(study), data, styles=STYLES, scripts=SCRIPTS)


def _sections(study: StudyContent) -> Iterator[str]:
    yield page_header(heading(study)) + NO_SCRIPT
    yield section(Section(name="answer", content=tuple(answer(study))))
    for each in sections(study):
        yield section(each)
        if each.name == "details":
            yield _links(study.result.steps)


def _links(steps: Sequence[StepRecord]) -> str:
    """Return links to the reports of the steps' own runs."""
    links = (f'<a href="{quote(step.run)}/report.txt">{escape(step.run)}</a>' for step in steps)
    return f"<p>Reports of the single steps: {', '.join(links)}.</p>" if steps else ""


def _line(line: PlotLine) -> dict[str, Any]:
    """Return a line as JSON has it: without places that are not numbers, and thinned where points are many."""
    count = len(line.x)
    places = [
        at
        for at in np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).astype(int)).tolist()
        if math.isfinite(line.x[at])
    ]
    columns = {"x": line.x, "y": line.y, "low": line.low or (None,) * count, "high": line.high or (None,) * count}
    return {"name": line.name} | {name: [_number(values[at]) for at in places] for name, values in columns.items()}


def _number(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
