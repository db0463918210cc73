"""Several runs beside each other: read, summarised and written as one page; their directories stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group

from exporter.comparison import LABELS, Compared, comparison
from exporter.html import as_comparison
from exporter.html.data import Recorded
from exporter.report import without_controls
from rundir.columns import take
from rundir.printable import printable
from sidecar.directory import write_text
from sidecar.errors import ConfigurationError
from sidecar.progress import Terminal
from sidecar.report.derive import evaluate, recorded

DEFAULT_OUTPUT = Path("comparison.html")


def compare(paths: Sequence[Path], output: Path) -> None:
    """Write the page of several runs, and print what it says in text.

    Raises ConfigurationError for more runs than a page shows, for one that is named twice, and for one that sent
    nothing; CannotWrite.
    """
    _check(paths)
    compared: list[Compared] = []
    records: list[Recorded] = []
    for label, path in zip(LABELS, paths, strict=False):
        derived = evaluate(path)
        run = derived.run
        if not derived.summary.client.requests.sent:
            raise ConfigurationError(f"{path}: no requests were measured in it, so there is nothing to compare")
        rows = run.requests.phase == "measure"
        compared.append(
            Compared(
                label=label,
                name=printable(path.resolve().name),
                summary=without_controls(derived.summary),
                measured=take(run.requests, rows),
                parts=take(derived.times.parts, rows),
            )
        )
        records.append(recorded(derived))
    write_text(output, as_comparison(compared, records))
    console = Terminal(highlight=False)
    console.print(Group(*comparison(compared)))
    console.print(f"\nWritten: {output}", soft_wrap=True)


def _check(paths: Sequence[Path]) -> None:
    if len(paths) > len(LABELS):
        raise ConfigurationError(f"report: {len(paths)} runs, but a page compares at most {len(LABELS)}")
    resolved = [path.resolve() for path in paths]
    for at, path in enumerate(resolved):
        if path in resolved[:at]:
            raise ConfigurationError(f"report: {paths[at]} is named twice; give the directories of different runs")
