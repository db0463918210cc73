"""The commands of studies: which test, how it is shown, and what it is worth as an exit code."""

# No postponed annotations: cyclopts reads those of a command.
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from sidecar.cli.messages import nearest
from sidecar.errors import ConfigurationError, Interrupted
from sidecar.options.config import command_as_recorded
from sidecar.options.fields import check_bounds
from sidecar.options.study import ALL, TESTS, StudyOptions
from sidecar.progress import Progress, Terminal, is_terminal, mode_for

STUDY = "study.json"  # as in sidecar.study.record, which takes long to import


def run_test(
    name: Annotated[str, Parameter(show=False)] = "",
    /,
    *,
    options: StudyOptions = StudyOptions(),  # noqa: B008  frozen, and cyclopts reads the default
) -> int:
    """Run a test of the IETF draft as a study: several runs, each decided on by those before it, and their report.

    NAME is ttft, throughput, tradeoff, itl, capacity, fairness, prefix-cache, memory-pressure, long-context, guardrail,
    or all, in the order of what needs what.

    What an engine can serve, first in minutes, then by the draft's numbers:
      sidelight test throughput http://127.0.0.1:8000 --scale short
      sidelight test throughput http://127.0.0.1:8000 --out studies/throughput
    Its latencies at 70 % of that:
      sidelight test ttft http://127.0.0.1:8000 --load 70% --from studies/throughput
    What it will take, before anything is sent:
      sidelight test all --plan --capacity 6
    Go on with a study that was interrupted:
      sidelight test throughput --resume studies/throughput
    The prefix cache off and on, as two servers:
      sidelight test prefix-cache --variant off=http://127.0.0.1:8000 --variant on=http://127.0.0.1:8001

    Exit codes as of run; 1 also where --require fails, 3 also where a test could not be brought to its end: the report
    says how far it came.
    """
    _require_test(name)
    check_bounds(options)
    from sidecar.study import verb  # noqa: PLC0415  what --help need not import

    if options.plan:
        _print("\n".join(verb.plan(options, name)))
        return 0
    command = ["sidelight", *command_as_recorded(sys.argv[1:], StudyOptions)]
    mode = mode_for(quiet=options.quiet, as_json=options.json, stream_is_terminal=is_terminal(sys.stderr))
    with Progress(mode) as progress:
        if name == ALL:
            became = verb.all_tests(options, command, progress)
            progress.close()
            for test, ended in became:
                _print(f"{test:16} {ended if isinstance(ended, str) else ' '.join(ended.result.answer)}")
            return max((ended.code for _, ended in became if not isinstance(ended, str)), default=0)
        ended = verb.test(options, name, command, progress)
        progress.close()
        progress.done(str(ended.path), ended.result.status)
    _print_report(ended.path)
    if ended.error is not None and not isinstance(ended.error, Interrupted):
        raise ended.error
    return ended.code


def is_study(path: Path) -> bool:
    """Tell whether a directory is that of a study."""
    return (path / STUDY).is_file()


def report_again(path: Path, *, as_json: bool) -> int:
    """Derive a study again, and print its report, or its result as JSON. Raises ConfigurationError."""
    from sidecar.study.derive import RESULT, derive_study  # noqa: PLC0415  as above

    derive_study(path)
    if as_json:
        sys.stdout.write((path / RESULT).read_text())
    else:
        _print_report(path)
    return 0


def _require_test(name: str) -> None:
    tests = [*TESTS, ALL]
    if not name:
        raise ConfigurationError(f"test: which test is missing; tests: {', '.join(tests)}")
    if name not in tests:
        raise ConfigurationError(f"{name[:40]}: there is no such test; tests: {', '.join(tests)}{nearest(name, tests)}")


def _print_report(path: Path) -> None:
    _print((path / "report.txt").read_text())
    names = sorted(item.name for item in path.iterdir() if not item.name.startswith("."))
    _print(f"Written to {path}: {', '.join(names)}")


def _print(text: str) -> None:
    Terminal(highlight=False).print(Text(text), soft_wrap=True)
