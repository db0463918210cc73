"""The command line: one function per command; an error is one line, and its class gives the exit code."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cyclopts
from cyclopts import App, Group, Parameter
from cyclopts.config import Dict
from rich.text import Text

from recorded.errors import CannotWrite, ConfigurationError, Interrupted, SidelightError, TargetNotMeasured, unsaved
from rundir.printable.masking import register_environment
from sidecar.cli import draft
from sidecar.cli.arguments import translate
from sidecar.cli.help import FLAGS, choose_help
from sidecar.cli.messages import explained, log_to_stderr, of_systems, print_error, unexpected
from sidecar.cli.peers import RENAMED
from sidecar.options.access import ListenOpen
from sidecar.options.config import command_as_recorded, load_yaml
from sidecar.options.fields import (
    DEFAULT_FORMATS,
    OUTPUT,
    Formats,
    JsonProgress,
    Listen,
    Out,
    Outside,
    Quiet,
    TraceUrl,
    Untrusted,
    Verbose,
    check_formats,
    check_trace_url,
    flag,
    option,
    read_seconds,
)
from sidecar.options.load import DoctorOptions, RunOptions
from sidecar.options.spans import (
    ExportOptions,
    OtlpCa,
    OtlpHeader,
    SpanOptions,
    check_exports,
    check_spans,
    forward_access,
)
from sidecar.options.watch import ScrapeOptions, WatchOptions, check_scrape, check_watch
from sidecar.progress.reporter import Progress, Terminal, discard, is_terminal, mode_for
from sidecar.version import VERSION

if TYPE_CHECKING:
    from correlator.breakdown import Parts
    from exporter.evaluation.evaluate import Evaluated
    from exporter.summary.result import Summary
    from recorded.run import Run

    # What is made of a run that has ended, and the parts of its requests.
    Finish = Callable[[Run], tuple[Evaluated, Parts, Summary]]

HELP = """Load-test an LLM engine, scrape its metrics, and report for each request where its time to first token went.

Without an engine of your own:

  sidelight demo

Against your engine:

  sidelight doctor http://HOST:8000
  sidelight run http://HOST:8000 --rate 4 --duration 30s --input-tokens 512 --output-tokens 128"""

MISSED = 1
# The options of a command's configuration file, but for those of `run` and of the draft.
_OPTIONS: dict[str, type] = {
    "scrape": ScrapeOptions,
    "watch": WatchOptions,
}
LOOPBACK = "127.0.0.1"

MEASURE = Group("Measure", sort_key=1)
INSPECT = Group("Inspect", sort_key=2)

app = App(
    name="sidelight",
    help=HELP,
    help_flags=FLAGS,
    version=VERSION,
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # main() prints a line
)


@app.command(group=MEASURE)
def demo(  # noqa: PLR0913  an argument is an option
    *,
    rate: Annotated[float, Parameter(help="Requests per second.")] = 6.0,
    duration: Annotated[float, Parameter(help="Time of measured load.", converter=read_seconds)] = 7.0,
    seed: Annotated[int, Parameter(help="The same seed sends the same requests at the same times.")] = 42,
    engine: Annotated[
        Literal["vllm", "sglang", "trtllm"], Parameter(help="Engine whose metrics page is simulated.")
    ] = "vllm",
    out: Out = None,
    formats: Formats = DEFAULT_FORMATS,
    listen: Listen = None,
    listen_open: ListenOpen = False,
    quiet: Quiet = False,
    json: JsonProgress = False,
    verbose: Verbose = False,
) -> int:
    """Try everything on a simulated engine: load, scrape, correlation and report in about 20 s, without arguments."""
    del verbose  # read by main()
    load = RunOptions(
        rate=rate,
        duration=duration,
        seed=seed,
        warmup=3,
        out=out,
        formats=formats,
        listen=listen,
        listen_open=listen_open,
        quiet=quiet,
        json=json,
    )
    return _measured(load, lambda progress, finish: _demonstrate(load, engine, progress, finish))


async def _demonstrate(options: RunOptions, engine: str, progress: Progress, finish: Finish) -> Evaluated:
    """Run a session against a simulated engine in its own process. The engine sends its spans to the session."""
    from sidecar.options.checks import check_run  # noqa: PLC0415  --help must not pay for what a run imports
    from sidecar.run import session  # noqa: PLC0415  as above
    from sidecar.run.processes import START_TIMEOUT_S, Child  # noqa: PLC0415  as above

    options = replace(options, otlp_listen=free_pair())
    check_run(replace(options, url=("http://127.0.0.1",)))  # report what is wrong with it before an engine is started
    arguments = ["simulator", "--engine", engine, "--seed", str(options.seed), "--exit-on-eof"]
    arguments += ["--otlp-endpoint", f"http://{options.otlp_listen}"]
    with TemporaryDirectory(prefix="sidelight-") as scratch:
        async with Child("simulated engine", arguments, stderr=Path(scratch) / "simulator.stderr") as simulated:
            ready = await simulated.expect("ready", timeout_s=START_TIMEOUT_S)
            progress.stage(f"simulated {engine} engine at {ready['url']}")
            checked = check_run(replace(options, url=(str(ready["url"]),)))
            return await session.run(checked, command=_command(), progress=progress, finish=finish)


def free_pair() -> str:
    """Return a HOST:PORT of the loopback that is free at this moment, as is PORT+1.

    Below the ports that systems give to outgoing connections: one of those may take it before we listen.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server((LOOPBACK, port)), socket.create_server((LOOPBACK, port + 1)):
            return f"{LOOPBACK}:{port}"


@app.command(group=MEASURE, usage="Usage: sidelight run [OPTIONS] URL")
def run(options: RunOptions = RunOptions()) -> int:  # noqa: B008  frozen, and cyclopts reads the default
    """Load a server while scraping its metrics; write a run directory and print the report.

    Four requests a second of 512 tokens in and 128 out, whatever the server does (open loop):
      sidelight run http://127.0.0.1:8000 --rate 4 --duration 30s --input-tokens 512 --output-tokens 128
    500 requests, always 16 in flight (closed loop):
      sidelight run http://127.0.0.1:8000 --concurrency 16 --requests 500
    A schedule with at most 64 requests in flight, lengths around 512 tokens:
      sidelight run http://127.0.0.1:8000 --rate 20 --concurrency 64 --input-tokens normal:512,64
    A gate for CI, with an API key:
      SIDELIGHT_API_KEY=... sidelight run https://HOST --rate 4 --duration 5m --slo "ttft_p99<500ms"

    Times are seconds, or have a unit: 500ms, 30s, 5m, 1h.
    Options of AIPerf, GuideLLM and vllm bench serve that mean the same are understood;
    for others, an error says what to write.
    """
    from sidecar.options.checks import check_run  # noqa: PLC0415  as above
    from sidecar.run import session  # noqa: PLC0415  as above

    checked = check_run(options)
    return _measured(
        checked,
        lambda progress, finish: session.run(checked, command=_command(), progress=progress, finish=finish),
    )


for _name, _path, _operands in draft.COMMANDS:
    app.command(_path, name=_name, group=MEASURE, usage=f"Usage: sidelight {_name} [OPTIONS] {_operands}")


@app.command(group=MEASURE, usage="Usage: sidelight scrape [OPTIONS] [URL]")
def scrape(options: ScrapeOptions = ScrapeOptions()) -> int:  # noqa: B008  as above
    """Collect server metrics only, for a duration or until Ctrl-C.

    sidelight scrape http://127.0.0.1:8000 --duration 5m
    """
    from sidecar.run import session  # noqa: PLC0415  as above

    checked = check_scrape(options)
    return _measured(
        checked,
        lambda progress, finish: session.scrape(checked, command=_command(), progress=progress, finish=finish),
    )


@app.command(group=MEASURE, usage="Usage: sidelight watch [OPTIONS] [URL of a metrics page...]")
def watch(options: WatchOptions = WatchOptions()) -> int:  # noqa: B008  as above
    """Observe production without any load: receive spans, scrape engines, serve the breakdown of TTFT on /metrics.

    SIGTERM or Ctrl-C ends it once pending requests are counted, and writes a report of what the logs still hold; SIGHUP
    reloads --config. See docs/how-to/watch-in-production.md.
    """
    from sidecar.watch import service as resident  # noqa: PLC0415  as above

    checked = check_watch(options)
    mode = mode_for(quiet=options.quiet, as_json=options.json, stream_is_terminal=is_terminal(sys.stderr))
    with Progress(mode) as progress:
        try:
            outcome, path = asyncio.run(resident.watch(checked, command=_command(), progress=progress))
        except SidelightError as error:
            from sidecar.report import derive  # noqa: PLC0415  as above

            derive.report_up_to(error, span_bytes=resident.SPAN_BYTES_AT_END)
            raise
        try:
            Terminal(highlight=False).print(Text(outcome), soft_wrap=True)
        except OSError:  # its terminal has gone: the report is written all the same
            discard(sys.stdout)
        progress.stage(f"deriving the report; a second signal skips it, `sidelight report {path}` derives it later")
        from sidecar.report import derive  # noqa: PLC0415  as above

        derived = derive.derive(path, span_bytes=resident.SPAN_BYTES_AT_END)
        progress.done(str(path), derived.summary.status)
    derive.print_report(derived.summary, path)
    if derived.unwritten is not None:
        raise derived.unwritten
    return 0


@app.command(group=INSPECT, help_flags=[])
def simulate(*arguments: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]) -> int:
    """Serve the simulated engine alone, for experiments. See `sidelight simulate --help`."""
    from simulator.__main__ import main as serve  # noqa: PLC0415  as above

    return serve(arguments, prog="sidelight simulate")


@app.command(group=INSPECT, usage="Usage: sidelight report [OPTIONS] RUN [RUN ...]")
def report(  # noqa: PLR0913  an argument is an option
    run_directory: Annotated[Path, Parameter(name="RUN", help="A run directory; of several, one page is written.")],
    *others: Annotated[Path, Parameter(show=False)],
    formats: Formats = (),
    trace_url: TraceUrl = None,
    exports: ExportOptions = ExportOptions(),  # noqa: B008  frozen
    otlp_header: OtlpHeader = (),
    otlp_ca: OtlpCa = None,
    as_json: Annotated[bool, flag(OUTPUT, "Print summary.json in place of the report.", name="--json")] = False,
    output: Annotated[
        Path | None, option(OUTPUT, "Where the page of several runs is written. Default: comparison.html.")
    ] = None,
    base: Annotated[
        Path | None, option(OUTPUT, "Put the times of the run in this directory beside in report.md.")
    ] = None,
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
    """
    del verbose, untrusted  # which are read before
    from sidecar.report import derive  # noqa: PLC0415  as above

    check_formats(formats)
    check_trace_url(trace_url)
    spans = SpanOptions(otlp_header=otlp_header, otlp_ca=otlp_ca)
    check_spans(spans)
    check_exports(exports)
    if others:
        if as_json or trace_url or base or set(formats) - {"html"} or exports != ExportOptions():
            raise ConfigurationError("report: of several runs, only --formats html and --output can be given")
        return _compare_runs([run_directory, *others], output)
    if output is not None:
        raise ConfigurationError("--output: is for several runs; of one, all files are written into its directory")
    try:
        if (run_directory / draft.STUDY).is_file():
            return draft.report_study(run_directory, as_json=as_json, outside=outside)
        derived = _report_of_run(run_directory, formats, trace_url=trace_url, base=base, as_json=as_json)
        _export(derived, exports, spans, Progress("lines"))
        derive.require_sound(derived)
    except CannotWrite as error:
        raise unsaved(error) from error
    return 0


def _report_of_run(
    path: Path, formats: Sequence[str], *, trace_url: str | None, base: Path | None, as_json: bool
) -> Evaluated:
    from sidecar.report import derive  # noqa: PLC0415  as above

    derived = derive.derive(path, formats, trace_url=trace_url)
    if base is not None and derived.unwritten is None:
        from sidecar.report import comparison  # noqa: PLC0415  as above

        comparison.write_change(derived, base)
    if as_json:
        sys.stdout.write(derive.as_json(derived.summary))
    else:
        derive.print_report(derived.summary, path if derived.unwritten is None else None)
    return derived


def _compare_runs(paths: Sequence[Path], output: Path | None) -> int:
    from sidecar.report import comparison  # noqa: PLC0415  as above

    comparison.compare(paths, output or comparison.DEFAULT_OUTPUT)
    return 0


@app.command(group=INSPECT, usage="Usage: sidelight doctor [OPTIONS] URL")
def doctor(options: DoctorOptions = DoctorOptions()) -> int:  # noqa: B008  as above
    """Examine an endpoint before a run: whether it answers and streams, its engine, its metrics, what is missing.

    sidelight doctor http://127.0.0.1:8000

    With --gateway: whether traces and request ids pass through it, what its spans tell, and what to change.

    sidelight doctor --gateway http://127.0.0.1:4000 --otlp-listen 127.0.0.1:4317 --url http://127.0.0.1:8000
    """
    from sidecar.doctor import examination as examination  # noqa: PLC0415  as above
    from sidecar.options.checks import check_doctor  # noqa: PLC0415  as above

    return asyncio.run(examination.examine(check_doctor(options)))


@app.command(group=INSPECT)
def schema(
    of: Annotated[
        Literal["config", "scrape-config", "watch-config", "test-config", "summary", "result", "sut", "server-metrics"],
        Parameter(help="Which schema; config is that of `run`, sut that of --sut, result that of result.json."),
    ] = "config",
    /,
) -> int:
    """Print a JSON Schema: of a configuration file, of summary.json, result.json, or server_metrics_export.json."""
    from sidecar.options import schema as schemas  # noqa: PLC0415  as above

    schema_of: dict[str, Callable[[], dict[str, Any]]] = {
        "config": lambda: schemas.configuration(RunOptions),
        "scrape-config": lambda: schemas.configuration(ScrapeOptions),
        "watch-config": lambda: schemas.configuration(WatchOptions),
        "test-config": lambda: schemas.configuration(draft.options_of("test")),
        "summary": schemas.summary,
        "result": draft.result_schema,
        "sut": schemas.declaration,
        "server-metrics": schemas.server_metrics,
    }
    print(json.dumps(schema_of[of](), indent=2))  # noqa: T201  its result
    return 0


def _measured(
    options: RunOptions | ScrapeOptions,
    measure: Callable[[Progress, Finish], Coroutine[Any, Any, Evaluated]],
) -> int:
    """Measure, derive, print and export. Results of an interrupted run are printed as well; the exit code is 130."""
    mode = mode_for(quiet=options.quiet, as_json=options.json, stream_is_terminal=is_terminal(sys.stderr))
    with Progress(mode) as progress:

        def finish(measured: Run) -> tuple[Evaluated, Parts, Summary]:
            from sidecar.report import derive  # noqa: PLC0415  what it imports would make the first request wait

            derived = derive.derive_run(measured)
            progress.done(str(measured.path), derived.summary.status)
            derive.print_report(derived.summary, measured.path, said=progress.warned)
            return derived, derived.parts, derived.summary

        try:
            derived = asyncio.run(measure(progress, finish))
        except SidelightError as error:
            from sidecar.report import derive  # noqa: PLC0415  as above

            derive.report_up_to(error)
            raise
    from sidecar.report import derive  # noqa: PLC0415  as above

    summary, path = derived.summary, derived.run.path
    if isinstance(options, RunOptions):
        _export(derived, options, options, progress)
    derive.require_sound(derived)
    if summary.status == "interrupted":
        return Interrupted.exit_code
    requests = summary.client.requests
    if summary.workload.name and not requests.ok:
        raise TargetNotMeasured(f"none of {requests.sent} requests succeeded; {path} holds their errors")
    slo = summary.client.slo
    if summary.client.outage and (slo is None or slo.met):
        raise TargetNotMeasured(
            f"the server stopped answering before the load ended; {path} holds what it did until then"
        )
    # An objective that cannot be evaluated was not shown to be met.
    return 0 if slo is None or slo.met else MISSED


def _export(derived: Evaluated, wanted: ExportOptions, options: SpanOptions, progress: Progress) -> None:
    """Send the results of a run to the servers that were named."""
    if wanted.otlp_export is not None:
        from sidecar.report import span_export  # noqa: PLC0415  as above

        span_export.export_run(derived, wanted.otlp_export, forward_access(options), progress)
    if wanted.prometheus_write is not None:
        from sidecar.report import history  # noqa: PLC0415  as above

        history.write_run(derived.run, derived.parts, derived.summary, wanted, progress)


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code. The last resort: one line for the user, a traceback with --verbose."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verbose = "--verbose" in arguments
    register_environment(os.environ)
    log_to_stderr()
    try:
        translation = translate(arguments)
        arguments = translation.arguments
        if translation.implied and not {"--quiet", "--json"} & set(arguments):
            sys.stderr.write(f"sidelight: {translation.implied}\n")
        if not arguments or arguments[0].startswith("-"):
            draft.describe(app)
        choose_help(app, arguments)
        settings = _read_settings(arguments)
        verbose = verbose or settings.get("verbose") is True
        # Without a command the help is shown, and None returned.
        code = app(arguments, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except cyclopts.CycloptsError as error:
        print_error(explained(error))
        code = ConfigurationError.exit_code
    except SidelightError as error:
        print_error(of_systems(str(error), arguments), trace=verbose)
        code = error.exit_code
    except KeyboardInterrupt:
        # A second signal may cut a task short that was being cancelled; of that asyncio would write a traceback.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        records = arguments[:1] != ["doctor"]
        print_error("interrupted" + ("; `sidelight report RUN` evaluates what a run had recorded" if records else ""))
        code = Interrupted.exit_code
    except BrokenPipeError:
        # The reader of our output has gone: there is nothing left to print, and nowhere to print it.
        discard(sys.stdout)
        code = 0
    except Exception as error:  # noqa: BLE001  the top of the command: one line for all, a traceback on request
        print_error(unexpected(error), trace=verbose)
        code = 3
    sys.exit(code)


def _read_settings(arguments: list[str]) -> dict[str, Any]:
    """Return the values of the command's configuration file, and hand them to the parser. Empty without a file."""
    path = _config_file(arguments)
    if path is None:
        return {}
    command = arguments[0]
    options = draft.options_of(command) if command in draft.OPTIONS else _OPTIONS.get(command, RunOptions)
    settings = load_yaml(path, options, elsewhere=RENAMED)
    app.config = (Dict(settings, source=str(path), use_commands_as_keys=False),)
    return settings


def _config_file(arguments: Sequence[str]) -> Path | None:
    for position, argument in enumerate(arguments):
        if argument == "--config" and position + 1 < len(arguments):
            return Path(arguments[position + 1])
        if argument.startswith("--config="):
            return Path(argument.removeprefix("--config="))
    return None


def _command() -> list[str]:
    return command_as_recorded(translate(sys.argv[1:]).arguments, RunOptions)
