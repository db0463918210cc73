"""The table of output formats: the files of `--formats`, but for those of `exporter.server_metrics`.

A new format is a module with its writer and one row here: options, help and `report` read the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from sidelight.exporter.server_metrics import EXPORTS

if TYPE_CHECKING:
    from sidelight.exporter.evaluation.evaluate import Evaluated

MARKDOWN, OPENMETRICS = "report.md", "openmetrics.txt"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFormat:
    """A format of `--formats`.

    writer      a function that returns the file's text, as `module:function`, imported when it is wanted
    content     what it is given: the `summary`, or the evaluated `run` and the link of `--trace-url`
    """

    name: str
    file: str
    writer: str
    content: Literal["summary", "run"] = "summary"
    note: str = ""

    def text(self, derived: Evaluated, *, trace_url: str) -> str:
        """Return the file's text for a run."""
        module, _, function = self.writer.partition(":")
        write = getattr(import_module(module), function)
        text: str = write(derived.summary) if self.content == "summary" else write(derived, trace_url=trace_url)
        return text


OUTPUT_FORMATS = (
    OutputFormat(name="text", file="report.txt", writer="sidelight.exporter.report.sections:as_text"),
    OutputFormat(name="html", file="report.html", writer="sidelight.sidecar.live.final:as_page", content="run"),
    OutputFormat(name="markdown", file=MARKDOWN, writer="sidelight.exporter.ci.markdown:as_markdown"),
    OutputFormat(name="junit", file="junit.xml", writer="sidelight.exporter.ci.junit:as_junit"),
    OutputFormat(
        name="openmetrics", file=OPENMETRICS, content="run",
        writer="sidelight.sidecar.report.openmetrics:openmetrics_of",
        note="the live page over time, for promtool",
    ),
)  # fmt: skip
FORMATS = (*(export.name for export in EXPORTS), *(output.name for output in OUTPUT_FORMATS))


def files_of_formats() -> str:
    """Return a sentence on the files of the formats, for the help of `--formats`."""
    notes = {output.name: f" ({output.note})" if output.note else "" for output in OUTPUT_FORMATS}
    files = [f"{output.name} is {output.file}{notes[output.name]}" for output in OUTPUT_FORMATS]
    return f"The first {len(EXPORTS)} are server metrics (jsonl, parquet: every scrape), {', '.join(files)}"
