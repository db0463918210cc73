"""The commands of studies: which test, how it is shown, and what it is worth as an exit code."""

# No postponed annotations: cyclopts reads those of a command.
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.text import Text

from sidelight.methodology.options import ALL, TESTS, CompareOptions, StudyOptions, SweepOptions
from sidelight.recorded.errors import ConfigurationError, DamagedRun, Interrupted
from sidelight.rundir.files import holder
from sidelight.rundir.printable.text import escaped
from sidelight.sidecar.cli.arguments import translate
from sidelight.sidecar.cli.messages import nearest
from sidelight.sidecar.options.config import command_as_recorded
from sidelight.sidecar.options.fields import check_bounds
from sidelight.sidecar.progress.reporter import Mode, Progress, Terminal, is_terminal, mode_for

if TYPE_CHECKING:
    from sidelight.methodology.execution.derive import DerivedStudy
    from sidelight.methodology.execution.verb import StudyEnd

STUDY, LOCK = "study.json", ".lock"  # as in methodology.execution.record, which takes long to import


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
    from sidelight.methodology.execution import verb  # noqa: PLC0415  what --help need not import

    if name != ALL:
        return _study(name, options)
    if options.plan:
        _print("\n".join(verb.plan(options, name)))
        return 0
    with Progress(_mode(options)) as progress:
        codes = [0]
        for test, said, code in verb.all_tests(options, _command(options), progress):
            progress.close()
            _print(f"{test:16} {said}")
            codes.append(code)
        return max(codes)


def run_comparison(*, options: CompareOptions = CompareOptions()) -> int:  # noqa: B008  as above
    """Compare systems: which is better, by how much, how sure that is, and which part of the TTFT makes it.

    A, B, ... are URLs, or NAME=URL: each pair of runs sends the same requests at the same moments to all of them, in a
    random order. By default at 70 % of what the first one can serve.
      sidelight compare before=http://127.0.0.1:8000 after=http://127.0.0.1:8001 --scale short
      sidelight compare http://127.0.0.1:8000 http://127.0.0.1:8001 --rate 4 --pairs 5 --duration 60s --gate

    One server, set up again for each by a command: see --variant.

    Or they are recorded: directories of runs of each, or studies. A claim needs three runs of each.
      sidelight compare before=runs/before after=runs/after --margin 5%

    Exit codes as of run; 1 where --gate is given and a configuration is worse than the first.
    """
    check_bounds(options)
    if not options.runs:
        if len(options.variant) < 2 and options.resume is None and not _several(options):
            raise ConfigurationError(
                "compare.systems", "compare: two systems are needed: sidelight compare A B, each a URL or a directory"
            )
        return _study("compare", options)
    if options.variant:
        raise ConfigurationError(
            "compare.mixed", f"compare: {options.runs[0]} is recorded, and {options.variant[0]} is not; give either"
        )
    from sidelight.methodology.execution.recorded import compare_recorded  # noqa: PLC0415  as above

    return _shown(compare_recorded(options, _command(options)))


def run_sweep(*, options: SweepOptions = SweepOptions()) -> int:  # noqa: B008  as above
    """Measure options of `run` over several values, all combined and each several times, as one long table.

    Three runs each of two input lengths at 1, 4 and 16 requests in flight, in random order:
      sidelight sweep http://127.0.0.1:8000 --vary input-tokens=512,4096 --vary concurrency=1,4,16 \\
        --output-tokens 128 --duration 30s --repeat 3

    tables/ has the runs (sweep.csv), the tables of siclait and asiai, and exo.json that of exo's bench.
    """
    check_bounds(options)
    if not options.varied and options.resume is None:
        raise ConfigurationError(
            "option.missing", "sweep: nothing is varied; give an option and its values: --vary concurrency=1,4,16"
        )
    return _study("sweep", options)


def _several(options: StudyOptions) -> bool:
    """Return whether --config declares several configurations by a mapping."""
    return any(text.startswith("{") for text in options.variant)


def _study(name: str, options: StudyOptions) -> int:
    """Run one study and print its report, or print its plan."""
    from sidelight.methodology.execution import verb  # noqa: PLC0415  as above

    if options.plan:
        _print("\n".join(verb.plan(options, name)))
        return 0
    with Progress(_mode(options)) as progress:
        ended = verb.test(options, name, _command(options), progress)
        progress.close()
        progress.done(str(ended.path), ended.result.status)
    return _shown(ended)


def _shown(ended: "StudyEnd") -> int:
    _print_report(ended.derived, ended.path)
    if ended.error is not None and not isinstance(ended.error, Interrupted):
        raise ended.error
    _require_sound(ended.derived, ended.path)
    return ended.code


def _mode(options: StudyOptions) -> Mode:
    return mode_for(quiet=options.quiet, as_json=options.json, stream_is_terminal=is_terminal(sys.stderr))


def _command(options: StudyOptions) -> list[str]:
    return ["sidelight", *command_as_recorded(translate(sys.argv[1:]).arguments, type(options))]


def report_again(path: Path, *, as_json: bool, outside: bool) -> int:
    """Derive a study again, and print its report, or its result as JSON.

    Raises ConfigurationError; when it is printed, CannotWrite where its files could not be written, and DamagedRun.
    """
    from sidelight.methodology.execution.derive import derive_study  # noqa: PLC0415  as above

    derived = derive_study(path, outside=outside)
    if process := holder(path / LOCK):
        Progress("lines").warn(f"{path}: process {process} still goes on with it; this is of the steps that have ended")
    if as_json:
        sys.stdout.write(derived.json)
    else:
        _print_report(derived, path)
    _require_sound(derived, path)
    return 0


def _require_sound(derived: "DerivedStudy", path: Path) -> None:
    """Raise an error for results that were not written or are damaged. CannotWrite if files could not be written,
    DamagedRun if a part of the recorded data is lost.
    """
    if derived.unwritten is not None:
        raise derived.unwritten
    if derived.damage:
        raise DamagedRun("study.damaged", f"{path}: {derived.damage}")


def _require_test(name: str) -> None:
    tests = [*TESTS, ALL]
    if not name:
        raise ConfigurationError("option.missing", f"test: which test is missing; tests: {', '.join(tests)}")
    if name not in tests:
        raise ConfigurationError(
            "test.unknown", f"{name[:40]}: there is no such test; tests: {', '.join(tests)}{nearest(name, tests)}"
        )


def _print_report(derived: "DerivedStudy", path: Path) -> None:
    from sidelight.exporter.document import without_controls  # noqa: PLC0415  as above
    from sidelight.exporter.report.verdict import verdict_blocks  # noqa: PLC0415  as above
    from sidelight.exporter.text import print_on  # noqa: PLC0415  as above
    from sidelight.methodology.report.files import study_report  # noqa: PLC0415  as above
    from sidelight.sidecar.report.printing import files_in  # noqa: PLC0415  as above

    content = study_report(derived.result, derived.findings, derived.compliance)
    print_on(Terminal(highlight=False), content, again=verdict_blocks(without_controls(derived.result.verdict)))
    if derived.unwritten is None:
        _print(f"Written to {escaped(str(path))}: {files_in(path)}")


def _print(text: str) -> None:
    Terminal(highlight=False).print(Text(text), soft_wrap=True)
