"""The files of a study for people: its reports, the page, and its tables as CSV.

All of them are pure functions of the result, so that a study that is derived again has the same, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sidelight.exporter.ci.markdown import escaped, verdict_markdown
from sidelight.exporter.document import BLANK, Block, Prose, without_controls
from sidelight.exporter.text import without_padding
from sidelight.methodology.compliance.statement import Compliance
from sidelight.methodology.report.content import StudyContent, answer, further, heading, sections
from sidelight.methodology.report.minimum import minimum
from sidelight.methodology.report.page import study_page
from sidelight.methodology.report.tables import as_csv, results_table, steps_table
from sidelight.methodology.study.findings import StudyFindings
from sidelight.methodology.study.result import StudyResult
from sidelight.rundir.printable.text import printable_json


def study_files(result: StudyResult, findings: StudyFindings, compliance: Compliance) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file.

    report.txt, report.md, report-minimum.txt, report.html, tables/NAME.csv, and the test's documents as
    tables/NAME.json
    """
    study = _content(result, findings, compliance)
    yield "report.txt", without_padding(study_report(result, findings, compliance))
    yield "report.md", _markdown(study)
    yield "report-minimum.txt", minimum(study)
    yield "report.html", study_page(study)
    for table in (*findings.tables, results_table(result), steps_table(result.steps)):
        yield f"tables/{table.name}.csv", as_csv(table)
    for name, document in findings.documents.items():
        text = msgspec.json.format(msgspec.json.encode(document), indent=2).decode()
        yield f"tables/{name}.json", f"{printable_json(text)}\n"


def _markdown(study: StudyContent) -> str:
    """Return verdict, answer and heading, short enough for a comment."""
    title, *others = (block.text for block in heading(study))
    content = (*further(study.result), study.compliance.sentence, " · ".join((title, *others)))
    return f"{verdict_markdown(study.result.verdict)}\n\n" + "\n\n".join(map(escaped, content)) + "\n"


def _content(result: StudyResult, findings: StudyFindings, compliance: Compliance) -> StudyContent:
    return StudyContent(
        result=without_controls(result), findings=without_controls(findings), compliance=without_controls(compliance)
    )


def study_report(result: StudyResult, findings: StudyFindings, compliance: Compliance) -> Iterator[Block]:
    """Yield the whole report of a study."""
    study = _content(result, findings, compliance)
    yield from heading(study)
    yield BLANK
    yield from answer(study)
    for section in sections(study):
        yield from (BLANK, Prose(section.title, "strong"), BLANK)
        yield from section.content
