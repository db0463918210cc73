"""Commands that measure: demo, run, scrape, watch."""

from __future__ import annotations

import asyncio
import random
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from rich.text import Text

from sidelight.recorded.errors import ConfigurationError, Interrupted, LoadIncomplete, SidelightError, TargetNotMeasured
from sidelight.sidecar.cli.arguments import translate
from sidelight.sidecar.options.access import ListenOpen
from sidelight.sidecar.options.config import command_as_recorded
from sidelight.sidecar.options.fields import (
    DEFAULT_FORMATS,
    Formats,
    JsonProgress,
    Listen,
    Out,
    Quiet,
    Verbose,
    read_seconds,
)
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.options.watch import ScrapeOptions, WatchOptions, check_scrape, check_watch
from sidelight.sidecar.progress.reporter import Progress, Terminal, discard, is_terminal, mode_for

if TYPE_CHECKING:
    from sidelight.exporter.evaluation.evaluate import Evaluated
    from sidelight.recorded.run import Run

    # What is made of a run that has ended.
    Finish = Callable[[Run], tuple[Evaluated, Evaluated]]

MISSED = 1
LOOPBACK = "127.0.0.1"
PAIR = ("prefill", "decode")
OF_PAIR = ("--kv-transfer", "5ms+1GB/s", "--max-num-seqs", "32")


def demo(  # noqa: PLR0913  an argument is an option
    *,
    rate: Annotated[float, Parameter(help="Requests per second.")] = 6.0,
    duration: Annotated[float, Parameter(help="Time of measured load.", converter=read_seconds)] = 7.0,
    seed: Annotated[int, Parameter(help="The same seed sends the same requests at the same times.")] = 42,
    engine: Annotated[
        Literal["vllm", "sglang", "trtllm"], Parameter(help="Engine whose metrics page is simulated.")
    ] = "vllm",
    disaggregated: Annotated[
        bool, Parameter(help="A prefill engine, a decode engine and their router, of vLLM.", negative="")
    ] = False,
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
    if disaggregated and engine != "vllm":
        message = f"--disaggregated: not with --engine {engine}; leave --engine out: the engine is vLLM's"
        raise ConfigurationError("option.contradictory", message)
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
    roles = PAIR if disaggregated else ()
    return _measured(load, lambda progress, finish: _demonstrate(load, engine, roles, progress, finish))


async def _demonstrate(
    options: RunOptions, engine: str, roles: Sequence[str], progress: Progress, finish: Finish
) -> Evaluated:
    """Run a session against a simulated engine in its own process, or against engines with roles and their router.

    The engines send their spans to the session.
    """
    from sidelight.sidecar.options.checks import check_run  # noqa: PLC0415  --help must not pay for what a run imports
    from sidelight.sidecar.run import session  # noqa: PLC0415  as above
    from sidelight.sidecar.run.processes.child import START_TIMEOUT_S, Child  # noqa: PLC0415  as above

    options = replace(options, otlp_listen=free_pair())
    check_run(replace(options, url=("http://127.0.0.1",)))  # report what is wrong with it before an engine is started
    of_engine = ("--engine", engine, "--seed", str(options.seed), "--otlp-endpoint", f"http://{options.otlp_listen}")
    with TemporaryDirectory(prefix="sidelight-") as scratch:
        async with AsyncExitStack() as processes:

            async def start(name: str, *arguments: str) -> str:
                arguments = ("sidelight.simulator", *arguments, "--exit-on-eof")
                child = Child(f"simulated {name}", arguments, stderr=Path(scratch) / "simulator.stderr")
                ready = await (await processes.enter_async_context(child)).expect("ready", timeout_s=START_TIMEOUT_S)
                progress.stage(f"simulated {name} at {ready['url']}")
                return str(ready["url"])

            if roles:
                pair = [await start(f"{role} engine", *of_engine, "--role", role, *OF_PAIR) for role in roles]
                url = await start("router", "--router", *pair)
                options = replace(options, metrics=tuple(f"{each}/metrics" for each in pair))
            else:
                url = await start(f"{engine} engine", *of_engine)
            checked = check_run(replace(options, url=(url,)))
            return await session.run(checked, command=_command(), progress=progress, finish=finish)


def free_pair() -> str:
    """Return a HOST:PORT of the loopback that is free at this moment, as is PORT+1.

    Below the ports that systems give to outgoing connections: one of those may take it before we listen.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server((LOOPBACK, port)), socket.create_server((LOOPBACK, port + 1)):
            return f"{LOOPBACK}:{port}"


def run(options: RunOptions = RunOptions()) -> int:  # noqa: B008  frozen, and cyclopts reads the default
    """Load a server while scraping its metrics; write a run directory and print the report.

    Four requests a second of 512 tokens in and 128 out, whatever the server does (open loop):
      sidelight run http://127.0.0.1:8000 --rate 4 --duration 30s --input-tokens 512 --output-tokens 128
    500 requests, always 16 in flight (closed loop):
      sidelight run http://127.0.0.1:8000 --concurrency 16 --requests 500
    At 1, 4 and 16 in flight, three times each (sidelight sweep):
      sidelight run http://127.0.0.1:8000 --concurrency 1,4,16 --duration 30s
    A schedule with at most 64 requests in flight, lengths around 512 tokens:
      sidelight run http://127.0.0.1:8000 --rate 20 --concurrency 64 --input-tokens normal:512,64
    A gate for CI, with an API key:
      SIDELIGHT_API_KEY=... sidelight run https://HOST --rate 4 --duration 5m --slo "ttft_p99<500ms"

    Times are seconds, or have a unit: 500ms, 30s, 5m, 1h.
    Options of AIPerf, GuideLLM and vllm bench serve that mean the same are understood;
    for others, an error says what to write.
    """
    from sidelight.sidecar.options.checks import check_run  # noqa: PLC0415  as above
    from sidelight.sidecar.run import session  # noqa: PLC0415  as above

    checked = check_run(options)
    return _measured(
        checked,
        lambda progress, finish: session.run(checked, command=_command(), progress=progress, finish=finish),
    )


def scrape(options: ScrapeOptions = ScrapeOptions()) -> int:  # noqa: B008  as above
    """Collect server metrics only, for a duration or until Ctrl-C.

    sidelight scrape http://127.0.0.1:8000 --duration 5m
    """
    from sidelight.sidecar.run import scrape as scraping  # noqa: PLC0415  as above

    checked = check_scrape(options)
    return _measured(
        checked,
        lambda progress, finish: scraping.scrape(checked, command=_command(), progress=progress, finish=finish),
    )


def watch(options: WatchOptions = WatchOptions()) -> int:  # noqa: B008  as above
    """Observe production without any load: receive spans, scrape engines, serve the breakdown of TTFT on /metrics.

    SIGTERM or Ctrl-C ends it once pending requests are counted, and writes a report of what the logs still hold; SIGHUP
    reloads --config. See docs/how-to/watch-in-production.md.
    """
    from sidelight.sidecar.watch import service as resident  # noqa: PLC0415  as above

    checked = check_watch(options)
    mode = mode_for(quiet=options.quiet, as_json=options.json, stream_is_terminal=is_terminal(sys.stderr))
    with Progress(mode) as progress:
        try:
            outcome, path = asyncio.run(resident.watch(checked, command=_command(), progress=progress))
        except SidelightError as error:
            from sidelight.sidecar.report import printing  # noqa: PLC0415  as above

            printing.report_up_to(error, span_bytes=resident.SPAN_BYTES_AT_END)
            raise
        try:
            Terminal(highlight=False).print(Text(outcome), soft_wrap=True)
        except OSError:  # its terminal has gone: the report is written all the same
            discard(sys.stdout)
        progress.stage(f"deriving the report; a second signal skips it, `sidelight report {path}` derives it later")
        from sidelight.sidecar.report import derive, printing  # noqa: PLC0415  as above

        derived = derive.derive(path, span_bytes=resident.SPAN_BYTES_AT_END)
        progress.done(str(path), derived.summary.status)
    printing.print_report(derived.summary, path)
    if derived.unwritten is not None:
        raise derived.unwritten
    return 0


def _measured(
    options: RunOptions | ScrapeOptions,
    measure: Callable[[Progress, Finish], Coroutine[Any, Any, Evaluated]],
) -> int:
    """Measure, derive, print and export. Results of an interrupted run are printed as well; the exit code is 130."""
    mode = mode_for(quiet=options.quiet, as_json=options.json, stream_is_terminal=is_terminal(sys.stderr))
    with Progress(mode) as progress:

        def finish(measured: Run) -> tuple[Evaluated, Evaluated]:
            from sidelight.sidecar.report import derive, printing  # noqa: PLC0415  what it imports would make the first request wait

            derived = derive.derive_run(measured)
            progress.done(str(measured.path), derived.summary.status)
            printing.print_report(derived.summary, measured.path, said=progress.warned)
            return derived, derived

        results: list[Evaluated] = []  # the result of a task is formatted, all columns, whenever SIGINT is handled

        async def measured() -> None:
            results.append(await measure(progress, finish))

        try:
            asyncio.run(measured())
        except SidelightError as error:
            from sidelight.sidecar.report import printing  # noqa: PLC0415  as above

            printing.report_up_to(error)
            raise
    from sidelight.sidecar.report import derive  # noqa: PLC0415  as above

    (derived,) = results
    summary, path = derived.summary, derived.run.path
    if isinstance(options, RunOptions) and (options.otlp_export or options.prometheus_write):
        from sidelight.sidecar.report import span_export  # noqa: PLC0415  as above

        span_export.send_results(derived, options, options, progress)
    derive.require_sound(derived)
    if summary.status == "interrupted":
        return Interrupted.exit_code
    requests = summary.client.requests
    if summary.workload.name and not requests.ok:
        raise TargetNotMeasured(
            "target.no-success", f"none of {requests.sent} requests succeeded; {path} holds their errors"
        )
    if summary.integrity.lost_shares:
        # Also where an objective was missed: what took a node may have taken the time of others.
        raise LoadIncomplete("load.incomplete", f"a share of the load was not sent; {path} holds what was recorded")
    slo = summary.client.slo
    if summary.client.outage and (slo is None or slo.met):
        raise TargetNotMeasured(
            "target.stopped", f"the server stopped answering before the load ended; {path} holds what it did until then"
        )
    # An objective that cannot be evaluated was not shown to be met.
    return 0 if slo is None or slo.met else MISSED


def _command() -> list[str]:
    return command_as_recorded(translate(sys.argv[1:]).arguments, RunOptions)
