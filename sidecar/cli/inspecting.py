"""Commands that inspect: report, doctor, schema, and the simulated engine."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from sidelight.recorded.errors import CannotWrite, ConfigurationError, unsaved
from sidelight.sidecar.cli import draft
from sidelight.sidecar.options.fields import (
    OUTPUT,
    Formats,
    Outside,
    TraceUrl,
    Untrusted,
    Verbose,
    check_formats,
    check_trace_url,
    flag,
    option,
)
from sidelight.sidecar.options.load import DoctorOptions, RunOptions
from sidelight.sidecar.options.spans import ExportOptions, OtlpCa, OtlpHeader, SpanOptions, check_exports, check_spans
from sidelight.sidecar.options.watch import ScrapeOptions, WatchOptions
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.report import bounded

if TYPE_CHECKING:
    from sidelight.exporter.evaluation.evaluate import Evaluated


def simulate(*arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> int:
    """Serve the simulated engine alone, for experiments. See `sidelight simulate --help`."""
    from sidelight.simulator.__main__ import main as serve  # noqa: PLC0415  as above

    return serve(arguments, prog="sidelight simulate")


Base = Annotated[Path | None, option(OUTPUT, "Put the times of the run in this directory beside in report.md.")]
Output = Annotated[
    Path | None,
    option(
        OUTPUT, "Where the page of several runs is written, of shards the directory. Default: comparison.html, as-one."
    ),
]


def report(  # noqa: PLR0913  an argument is an option
    run_directory: Annotated[Path, Parameter(name="RUN", help="A run directory; of several, one page is written.")],
    *others: Annotated[Path, Parameter(show=False)],
    formats: Formats = (),
    trace_url: TraceUrl = None,
    exports: ExportOptions = ExportOptions(),  # noqa: B008  frozen
    otlp_header: OtlpHeader = (),
    otlp_ca: OtlpCa = None,
    as_json: Annotated[bool, flag(OUTPUT, "Print summary.json in place of the report.", name="--json")] = False,
    output: Output = None,
    as_one: Annotated[bool, flag(OUTPUT, "Report the directories of all shards of a watch as of one.")] = False,
    base: Base = None,
    outside: Outside = False,
    untrusted: Untrusted = True,
    verbose: Verbose = False,
) -> int:
    """Derive the results of a run or of a study again from its directory, also of an interrupted or crashed one.

    Without --formats, the formats of the run are written. Of several runs, one page: their times beside each
    other, and what differs in the configuration. The directories stay as they are.

    sidelight report before=runs/before after=runs/after --output difference.html

    For a pull request, its comment with the times of the main branch beside its own:

    sidelight report run --base main-run

    All shards of a watch, one report:

    sidelight report shard-0 shard-1 shard-2 --as-one
    """
    del verbose, untrusted  # which are read before
    from sidelight.sidecar.report import derive  # noqa: PLC0415  as above

    check_formats(formats)
    check_trace_url(trace_url)
    spans = SpanOptions(otlp_header=otlp_header, otlp_ca=otlp_ca)
    check_spans(spans)
    check_exports(exports)
    if others and not as_one:
        more = as_json or trace_url or base or set(formats) - {"html"} or exports != ExportOptions()
        return _compare_runs([run_directory, *others], output, is_plain=not more)
    if output is not None and not as_one:
        raise ConfigurationError(
            "option.not-here", "--output: is for several runs; of one, all files are written into its directory"
        )
    try:
        if not as_one and (run_directory / draft.STUDY).is_file():
            return draft.report_study(run_directory, as_json=as_json, outside=outside)
        if as_one:
            paths, place = [run_directory, *others], output or derive.AS_ONE
            derived = derive.derive_as_one(paths, place, formats, trace_url=trace_url)
        else:
            derived = derive.derive(run_directory, formats, trace_url=trace_url, processes=bounded.processes(sys.argv))
        _show(derived, base=base, as_json=as_json)
        _send(derived, exports, spans)
        derive.require_sound(derived)
    except CannotWrite as error:
        raise unsaved(error) from error
    return 0


def _send(derived: Evaluated, exports: ExportOptions, spans: SpanOptions) -> None:
    """Send a run's results where they were asked to go."""
    if exports != ExportOptions():
        from sidelight.sidecar.report import span_export  # noqa: PLC0415  as above

        span_export.send_results(derived, exports, spans, Progress("lines"))


def _show(derived: Evaluated, *, base: Path | None, as_json: bool) -> None:
    """Write a run's report beside its base, if there is one, and print it."""
    from sidelight.sidecar.report import derive, printing  # noqa: PLC0415  as above

    if base is not None and derived.unwritten is None:
        from sidelight.sidecar.report import comparison  # noqa: PLC0415  as above

        comparison.write_change(derived, base)
    if as_json:
        sys.stdout.write(derive.as_json(derived.summary))
    else:
        printing.print_report(derived.summary, derived.run.path if derived.unwritten is None else None)


def _compare_runs(paths: Sequence[Path], output: Path | None, *, is_plain: bool) -> int:
    from sidelight.sidecar.report import comparison  # noqa: PLC0415  as above

    if not is_plain:
        raise ConfigurationError(
            "option.not-here", "report: of several runs, only --formats html and --output can be given"
        )
    comparison.compare(paths, output or comparison.DEFAULT_OUTPUT)
    return 0


def capture(
    run_directory: Annotated[Path, Parameter(name="RUN", help="The directory of a run or a watch.")],
    *,
    out: Annotated[Path, option(OUTPUT, "The file that --trace reads.")] = Path("trace.jsonl"),
    verbose: Verbose = False,
) -> int:
    """Write recorded traffic as a trace: when requests came and how long they were, without any text or name.

    What production sent is sent again, as often and as fast as you say:

    sidelight capture watches/monday --out monday.jsonl

    sidelight run http://HOST:8000 --trace monday.jsonl --rate 2x

    Spans hold no text: which prompts share a beginning is not in it, and sessions are single requests.
    """
    del verbose  # which is read before
    from sidelight.sidecar.report.capture import write_trace  # noqa: PLC0415  as above

    print(f"Written to {out}: {write_trace(run_directory, out)}")  # noqa: T201  its result
    return 0


def doctor(options: DoctorOptions = DoctorOptions()) -> int:  # noqa: B008  as above
    """Examine an endpoint before a run: whether it answers and streams, its engine, its metrics, what is missing.

    sidelight doctor http://127.0.0.1:8000

    With --gateway: whether traces and request ids pass through it, what its spans tell, and what to change.

    sidelight doctor --gateway http://127.0.0.1:4000 --otlp-listen 127.0.0.1:4317 --url http://127.0.0.1:8000
    """
    from sidelight.sidecar.doctor import examination  # noqa: PLC0415  as above
    from sidelight.sidecar.options.checks import check_doctor  # noqa: PLC0415  as above

    return asyncio.run(examination.examine(check_doctor(options)))


def schema(
    of: Annotated[
        Literal[
            "config",
            "scrape-config",
            "watch-config",
            "test-config",
            "summary",
            "result",
            "predicted",
            "sut",
            "server-metrics",
        ],
        Parameter(help="Which schema; config is that of `run`, sut that of --sut, predicted that of `predict --json`."),
    ] = "config",
    /,
) -> int:
    """Print a JSON Schema: of a configuration file, of summary.json, result.json, or server_metrics_export.json."""
    from sidelight.sidecar.options import schema as schemas  # noqa: PLC0415  as above

    schema_of: dict[str, Callable[[], dict[str, Any]]] = {
        "config": lambda: schemas.configuration(RunOptions),
        "scrape-config": lambda: schemas.configuration(ScrapeOptions),
        "watch-config": lambda: schemas.configuration(WatchOptions),
        "test-config": lambda: schemas.configuration(draft.options_of("test")),
        "summary": schemas.summary,
        "result": draft.result_schema,
        "predicted": draft.predicted_schema,
        "sut": schemas.declaration,
        "server-metrics": schemas.server_metrics,
    }
    print(json.dumps(schema_of[of](), indent=2))  # noqa: T201  its result
    return 0
