"""Several runs beside each other, written as one page; or a run beside a base, in its `report.md`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from sidelight.exporter.ci.markdown import as_markdown
from sidelight.exporter.comparison import LABELS, Compared, comparison, verdict_on
from sidelight.exporter.document import without_controls
from sidelight.exporter.evaluation.evaluate import Evaluated
from sidelight.exporter.html.page import as_comparison
from sidelight.exporter.text import print_on
from sidelight.recorded.directory import write_text
from sidelight.recorded.errors import ConfigurationError, unusable_place
from sidelight.rundir.files import replace_file
from sidelight.rundir.printable.masking import without_secrets
from sidelight.rundir.printable.text import escaped, printable
from sidelight.sidecar.formats import MARKDOWN
from sidelight.sidecar.live.final import recorded
from sidelight.sidecar.options.fields import named_path
from sidelight.sidecar.progress.reporter import Terminal
from sidelight.sidecar.report.derive import evaluated

DEFAULT_OUTPUT = Path("comparison.html")


def compare(paths: Sequence[Path], output: Path) -> None:
    """Write the page of several runs, and print its text. A run is given by itself or as NAME=DIRECTORY.

    Raises ConfigurationError for more runs than a page shows, for one that is named twice, and for one that sent
    nothing, or an output that cannot be written; CannotWrite where the disk is full.
    """
    if len(paths) > len(LABELS):
        raise ConfigurationError(
            "report.too-many", f"report: {len(paths)} runs, but a page compares at most {len(LABELS)}"
        )
    named = [named_path(path, label) for label, path in zip(LABELS, paths, strict=False)]
    labels = [label for label, _ in named]
    if len(set(labels)) < len(labels):
        raise ConfigurationError(
            "compare.names", f"report: {', '.join(labels)}: two runs have one name; give each its own"
        )
    _check([path for _, path in named])
    read = [_evaluated(path) for _, path in named]
    compared = [_compared(label, derived) for label, derived in zip(labels, read, strict=True)]
    page_text = as_comparison(compared, [recorded(derived) for derived in read])
    try:
        replace_file(output, lambda file: file.write(without_secrets(page_text).encode()))
    except OSError as error:
        raise unusable_place("--output", output, error) from error
    console = Terminal(highlight=False)
    print_on(console, comparison(compared), again=verdict_on(compared))
    console.print(Text(f"\nWritten: {escaped(str(output))}"), soft_wrap=True)


def write_change(derived: Evaluated, base: Path) -> None:
    """Write `report.md` of a run beside another one, the base. The directory of the base stays as it is.

    Raises ConfigurationError where that is the run itself, or sent nothing; CannotWrite.
    """
    _check([base, derived.run.path])
    pair = _compared("the base", _evaluated(base)), _compared("This run", derived)
    write_text(derived.run.path / MARKDOWN, as_markdown(derived.summary, against_base=pair))


def _evaluated(path: Path) -> Evaluated:
    derived = evaluated(path)
    if not derived.summary.client.requests.sent:
        raise ConfigurationError(
            "run.empty", f"{path}: no requests were measured in it, so there is nothing to compare"
        )
    return derived


def _compared(label: str, derived: Evaluated) -> Compared:
    name = printable(derived.run.path.resolve().name)
    return Compared(label=label, name=name, summary=without_controls(derived.summary))


def _check(paths: Sequence[Path]) -> None:
    resolved = [path.resolve() for path in paths]
    for at, path in enumerate(resolved):
        if path in resolved[:at]:
            raise ConfigurationError(
                "compare.same-run", f"report: {paths[at]} is named twice; give the directories of different runs"
            )
