"""The report on standard output."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import msgspec
from rich.text import Text

from sidelight.exporter.report.sections import report, sections
from sidelight.exporter.summary.result import Summary
from sidelight.exporter.text import print_on
from sidelight.recorded.errors import SidelightError
from sidelight.rundir.printable.text import escaped, printable
from sidelight.sidecar.progress.reporter import Terminal
from sidelight.sidecar.report.derive import derive


def print_report(summary: Summary, path: Path | None, *, said: Collection[str] = ()) -> None:
    """Print the report, and under it the path and files written. None: they could not be written.

    `said` are warnings that standard error has had: where it is the same stream, they are not printed again.
    """
    console = Terminal(highlight=False)
    if said and _one_stream():
        summary = msgspec.structs.replace(summary, warnings=[text for text in summary.warnings if text not in said])
    print_on(console, report(summary), again=sections(summary)["verdict"])
    if path is not None:
        console.print(Text(f"\nWritten to {escaped(str(path))}: {files_in(path)}"), soft_wrap=True)


def files_in(path: Path) -> str:
    """Return the names of the files in a directory, as a person may see them."""
    return ", ".join(sorted(printable(item.name) for item in path.iterdir() if not item.name.startswith(".")))


def _one_stream() -> bool:
    """Return whether standard output and standard error go to the same place: a terminal, or one log."""
    with suppress(OSError, ValueError):
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
        return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)
    return False


def report_up_to(error: SidelightError, *, span_bytes: int | None = None) -> None:
    """Print the report of the data recorded up to an error, where there are any."""
    if error.run_directory is not None:
        print_report(derive(error.run_directory, span_bytes=span_bytes).summary, error.run_directory)
