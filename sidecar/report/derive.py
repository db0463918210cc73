"""Outputs of a run, derived from its directory alone; the same directory gives the same bytes."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
from rich.text import Text

from correlator.opening import open_run
from exporter import tables
from exporter.ci.junit import as_junit
from exporter.ci.markdown import as_markdown
from exporter.evaluation.evaluate import Evaluated, evaluate
from exporter.evaluation.server import require_server
from exporter.html import as_html
from exporter.report.sections import as_text, report
from exporter.server_metrics import server_metrics_files
from exporter.server_metrics.source import MetricsSource
from exporter.summary.result import (
    Summary,
    as_written,
)
from exporter.text import print_on
from recorded.directory import MANIFEST, RAW, json_text, write_json, write_text, write_whole
from recorded.errors import CannotWrite, DamagedRun, SidelightError
from recorded.failures import evaluating
from recorded.run import Run
from rundir.printable.text import escaped, printable
from sidecar.live.final import recorded
from sidecar.options.fields import DEFAULT_FORMATS
from sidecar.progress.reporter import Terminal

SUMMARY = "summary.json"
MARKDOWN = "report.md"
OPENMETRICS = "openmetrics.txt"
# Reports that are made of the summary alone: by format, their file and what writes them.
REPORTS = {
    "text": ("report.txt", as_text),
    "markdown": (MARKDOWN, as_markdown),
    "junit": ("junit.xml", as_junit),
}


def derive(
    path: Path, formats: Sequence[str] = (), *, trace_url: str | None = None, span_bytes: int | None = None
) -> Evaluated:
    """Read a run directory as `open_run` does, and derive its files as `derive_run` does.

    Raises ConfigurationError where there is none, or one that holds what no run has written.
    """
    with evaluating(path, MANIFEST, f"{RAW}/"):
        return derive_run(open_run(path, span_bytes=span_bytes), formats, trace_url=trace_url)


def evaluated(path: Path) -> Evaluated:
    """Return the evaluation of a run directory; nothing is written. Raises as `derive` does."""
    with evaluating(path, MANIFEST, f"{RAW}/"):
        return evaluate(open_run(path))


def derive_run(run: Run, formats: Sequence[str] = (), *, trace_url: str | None = None) -> Evaluated:
    """Write the derived files of a run into its directory, and return their contents. Files that cannot be written do
    not stop it: the error is returned.

    `formats` and `trace_url` are those of `--formats` and `--trace-url`; none: those that the run was asked for.
    """
    derived = evaluate(run)
    try:
        _write(
            derived,
            formats or run.manifest["config"].get("formats") or DEFAULT_FORMATS,
            trace_url=trace_url or _link(run.manifest["config"].get("trace_url")),
        )
    except CannotWrite as error:
        return replace(derived, unwritten=error)
    return derived


def _link(trace_url: object) -> str:
    """Return a manifest's link to traces; empty for another kind of link."""
    return trace_url if isinstance(trace_url, str) and trace_url.startswith(("http://", "https://")) else ""


def _write(derived: Evaluated, wanted: Sequence[str], *, trace_url: str) -> None:
    run, summary, path = derived.run, derived.summary, derived.run.path
    write_json(path / SUMMARY, msgspec.to_builtins(as_written(summary)))
    for name, write in server_metrics_files(_server_metrics(derived), wanted):
        write_whole(path / name, write)
    requests = tables.requests_table(run.requests, derived.parts)
    write_whole(path / "requests.parquet", lambda file: tables.write_parquet(requests, file))
    slices = tables.timeslices_table(summary)
    write_whole(path / "timeslices.parquet", lambda file: tables.write_parquet(slices, file))
    for name, (file, write_report) in REPORTS.items():
        if name in wanted:
            write_text(path / file, write_report(summary))
    if "openmetrics" in wanted:
        from exporter.prometheus.openmetrics import as_openmetrics  # noqa: PLC0415  few want it
        from sidecar.report.history import history  # noqa: PLC0415  as above

        steps = history(run, derived.parts, summary)
        write_whole(path / OPENMETRICS, lambda file: file.write(as_openmetrics(steps)))
    if "html" in wanted:
        drawn = recorded(run, derived.parts)
        write_text(path / "report.html", as_html(summary, drawn, trace_url=trace_url))


def as_json(summary: Summary) -> str:
    """Return `summary.json` of a run."""
    return json_text(msgspec.to_builtins(as_written(summary)))


def require_sound(derived: Evaluated) -> None:
    """Raise an error for results that were not written or are damaged. CannotWrite where they could not be written, and
    DamagedRun where records are lost of a run that ended by itself: its results are not those of the run. So too where
    the server's were asked for and the scraper was lost.
    """
    if derived.unwritten is not None:
        raise derived.unwritten
    run = derived.run
    if run.status != "crashed" and run.integrity.state == "damaged":
        raise DamagedRun(
            f"{run.path}: recorded data are damaged, and all results are derived from what is left of them"
        )
    require_server(run)


def print_report(summary: Summary, path: Path | None, *, said: Collection[str] = ()) -> None:
    """Print the report, and under it the path and files written. None: they could not be written.

    `said` are warnings that standard error has had: where it is the same stream, they are not printed again.
    """
    console = Terminal(highlight=False)
    if said and _one_stream():
        summary = msgspec.structs.replace(summary, warnings=[text for text in summary.warnings if text not in said])
    print_on(console, report(summary))
    if path is not None:
        console.print(Text(f"\nWritten to {escaped(str(path))}: {files_in(path)}"), soft_wrap=True)


def report_up_to(error: SidelightError, *, span_bytes: int | None = None) -> None:
    """Print the report of the data recorded up to an error, where there are any."""
    if error.run_directory is not None:
        print_report(derive(error.run_directory, span_bytes=span_bytes).summary, error.run_directory)


def files_in(path: Path) -> str:
    """Return the names of the files in a directory, as a person may see them."""
    return ", ".join(sorted(printable(item.name) for item in path.iterdir() if not item.name.startswith(".")))


def _one_stream() -> bool:
    """Return whether standard output and standard error go to the same place: a terminal, or one log."""
    with suppress(OSError, ValueError):
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
        return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)
    return False


def _server_metrics(derived: Evaluated) -> MetricsSource:
    run = derived.run
    targets = run.manifest.get("metrics_targets", ())
    return MetricsSource(
        endpoints=run.endpoints,
        window=derived.window,
        slice_ns=derived.slice_ns,
        benchmark_id=str(run.manifest["run_id"]),
        input_config=run.manifest["config"],
        tool_version=run.manifest["tool"]["version"],
        configured=[target.get("url") or target["configured"] for target in targets],
        phases=[(phase.name, phase.start_ns, phase.end_ns) for phase in run.phases],
    )
