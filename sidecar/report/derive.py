"""Everything a run has to say, derived from its directory alone; the same directory gives the same bytes."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import UNSET, UnsetType
from rich.text import Text

from correlator.opening import WatchRun, open_run
from exporter import report as text
from exporter import tables
from exporter.ci.junit import as_junit
from exporter.ci.markdown import as_markdown
from exporter.html import as_html
from exporter.report.heading import urls_of
from exporter.server_metrics import server_metrics_files
from exporter.server_metrics.source import Source
from exporter.summary.gateways import beside_pages
from exporter.summary.result import (
    MeasuredWindow,
    Methodology,
    Status,
    Summary,
    Tokenizer,
    Tool,
    Workload,
    as_written,
)
from loadgen.driver import is_closed_loop
from loadgen.host.clock_sync import ClockSummary
from loadgen.host.cpu_steal import MachineLoad
from loadgen.host.round_trip import RoundTrip
from loadgen.requests.self_check import SelfCheck, self_check
from loadgen.requests.slo import parse_slo
from loadgen.requests.summary import NO_POWER, HeldBack, client_summary, held_back, output_tokens_within
from loadgen.requests.table import RequestLog
from loadgen.requests.warmup import WarmupStatement
from methodology.compliance import DRAFT
from methodology.compliance.facts import facts_of
from methodology.compliance.runs import TEST, comply_run
from methodology.load import stability_of
from methodology.percentiles import percentile_intervals
from methodology.stability import Stability
from methodology.steady import steady_throughput
from recorded.directory import MANIFEST, RAW, json_text, write_json, write_text, write_whole
from recorded.errors import CannotWrite, DamagedRun, SidelightError
from recorded.failures import evaluating
from recorded.run import Run
from rundir.clock import iso_ms
from rundir.columns import take
from rundir.printable import escaped, printable
from rundir.stats import Missing, Statistics
from scraper.hardware.summary import gpu_names, hardware_summary
from scraper.window.window import Window
from sidecar.live.final import recorded
from sidecar.options.fields import DEFAULT_FORMATS
from sidecar.progress import Terminal
from sidecar.report.correlation import Correlated, correlated, correlation_of
from sidecar.report.server import require_server, server_of
from sidecar.report.warnings import warnings
from sidecar.report.watched import watched_traffic, watched_window

SUMMARY = "summary.json"
MARKDOWN = "report.md"
OPENMETRICS = "openmetrics.txt"
MOST_SLICES = 20_000  # of a window: eleven hours in slices of two seconds
# Reports that are made of the summary alone: by format, their file and what writes them.
REPORTS = {
    "text": ("report.txt", text.as_text),
    "markdown": (MARKDOWN, as_markdown),
    "junit": ("junit.xml", as_junit),
}
UNTESTED = "no test of the draft was run; this is a plain measurement"
STUDIES = ("test", "compare", "sweep")  # commands whose runs are steps
OF_STUDY = "this run is a step of a study, whose compliance.json says which requirements are met"


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """A run, the times of its requests, and its `summary.json`. `unwritten` is why a file could not be written."""

    run: Run
    times: Correlated
    summary: Summary
    unwritten: CannotWrite | None = None


def derive(
    path: Path, formats: Sequence[str] = (), *, trace_url: str | None = None, span_bytes: int | None = None
) -> Derived:
    """Read a run directory as `open_run` does, and derive its files as `derive_run` does.

    Raises ConfigurationError where there is none, or one that holds what no run has written.
    """
    with evaluating(path, MANIFEST, f"{RAW}/"):
        return derive_run(open_run(path, span_bytes=span_bytes), formats, trace_url=trace_url)


def evaluate(path: Path) -> Derived:
    """Read a run directory and return what it says; nothing is written. Raises as `derive` does."""
    with evaluating(path, MANIFEST, f"{RAW}/"):
        return _evaluated(open_run(path))


def _evaluated(run: Run) -> Derived:
    times = correlated(run)
    return Derived(run=run, times=times, summary=summarise(run, window_of(run), times))


def derive_run(run: Run, formats: Sequence[str] = (), *, trace_url: str | None = None) -> Derived:
    """Write the derived files of a run into its directory, as far as that is possible, and return what they say.

    `formats` and `trace_url` are those of `--formats` and `--trace-url`; none: those that the run was asked for.
    """
    derived = _evaluated(run)
    try:
        _write(
            derived,
            window_of(run),
            formats or run.manifest["config"].get("formats") or DEFAULT_FORMATS,
            trace_url=trace_url or _link(run.manifest["config"].get("trace_url")),
        )
    except CannotWrite as error:
        return replace(derived, unwritten=error)
    return derived


def _link(trace_url: object) -> str:
    """Return where a manifest says that traces are looked at; empty for another kind of link."""
    return trace_url if isinstance(trace_url, str) and trace_url.startswith(("http://", "https://")) else ""


def _write(derived: Derived, window: Window, wanted: Sequence[str], *, trace_url: str) -> None:
    run, summary, path = derived.run, derived.summary, derived.run.path
    write_json(path / SUMMARY, msgspec.to_builtins(as_written(summary)))
    for name, write in server_metrics_files(_server_metrics(run, window), wanted):
        write_whole(path / name, write)
    requests = tables.requests_table(run.requests, derived.times.parts)
    write_whole(path / "requests.parquet", lambda file: tables.write_parquet(requests, file))
    slices = tables.timeslices_table(summary)
    write_whole(path / "timeslices.parquet", lambda file: tables.write_parquet(slices, file))
    for name, (file, write_report) in REPORTS.items():
        if name in wanted:
            write_text(path / file, write_report(summary))
    if "openmetrics" in wanted:
        from exporter.prometheus.openmetrics import as_openmetrics  # noqa: PLC0415  few want it
        from sidecar.report.history import history  # noqa: PLC0415  as above

        steps = history(run, derived.times.parts, summary)
        write_whole(path / OPENMETRICS, lambda file: file.write(as_openmetrics(steps)))
    if "html" in wanted:
        drawn = recorded(run, derived.times.parts)
        write_text(path / "report.html", as_html(summary, drawn, trace_url=trace_url))


def as_json(summary: Summary) -> str:
    """Return `summary.json` of a run."""
    return json_text(msgspec.to_builtins(as_written(summary)))


def require_sound(derived: Derived) -> None:
    """Raise CannotWrite where results could not be kept, and DamagedRun where records are lost of a run that ended by
    itself: its results are not those of the run. So too where the server's were asked for and the scraper was lost.
    """
    if derived.unwritten is not None:
        raise derived.unwritten
    run = derived.run
    if run.status != "crashed" and run.integrity.state == "damaged":
        raise DamagedRun(
            f"{run.path}: recorded data are damaged, and all results are derived from what is left of them"
        )
    require_server(run)


def window_of(run: Run) -> Window:
    """Return the measured window: from the measured phase's start to the end of the last reply that was whole.

    What hung until it was given up does not stretch the window, but a submission does. A run that the user stopped, and
    a scrape: to the phase's own end. One that was cut short: to the last stamp that anything left. One that never came
    to measuring has an empty window at its start. A watch's begins with the first page or span that was kept.
    """
    phase = next((phase for phase in run.phases if phase.name == "measure"), None)
    if phase is None:
        started_ns = int(run.manifest["started_ns"])
        return Window(start_ns=started_ns, end_ns=started_ns)
    if isinstance(run, WatchRun):
        return watched_window(run, run.watched, phase)
    measured = take(run.requests, run.requests.phase == "measure")
    if run.status == "crashed":
        stamps = [measured.end_ns, measured.last_token_ns, *(endpoint.response_ns for endpoint in run.endpoints)]
    else:
        stamps = [measured.end_ns[measured.status == "ok"], measured.dispatch_ns]
    last = [int(column.max(initial=-1)) for column in stamps]
    if phase.end_ns is not None and (run.status == "interrupted" or max(last) < 0):
        last = [phase.end_ns]
    return Window(start_ns=phase.start_ns, end_ns=max(phase.start_ns, *last))


def summarise(run: Run, window: Window, times: Correlated) -> Summary:
    """Return `summary.json` of a run from the times of its requests."""
    manifest = run.manifest
    measured = take(run.requests, run.requests.phase == "measure")
    config = manifest["config"]
    generated = output_tokens_within(measured, window.start_ns, window.end_ns)
    hardware = hardware_summary(
        run.hardware,
        run.endpoints,
        window=window,
        output_tokens=None if isinstance(generated, Missing) else generated,
        engine_here=engine_here(run),
    )
    watts = hardware.gpu.mean_power_w
    client = client_summary(
        measured,
        start_ns=window.start_ns,
        end_ns=window.end_ns,
        slo=parse_slo(config["slo"]) if config.get("slo") else None,
        power_watts=NO_POWER if watts is None else float(watts),
        concurrency=config.get("concurrency") if closed_loop(run) else None,
        barrier=bool(config.get("barrier")),
        stopped=run.status == "interrupted",
        held=_held_back(run, measured),
    )
    client = msgspec.structs.replace(client, steady=steady_throughput(measured, window.start_ns))
    slice_ns = _slice_ns(run, window)
    server = server_of(run, window, slice_ns)
    stability = stability_of(measured, run.endpoints, closed_loop=closed_loop(run))
    correlation = correlation_of(run, times, window, slice_ns, steady=stability.verdict != "growing")
    if server.gateways:
        by_page = beside_pages(correlation.gateways, server.gateways)
        correlation = msgspec.structs.replace(correlation, gateways=by_page)
    sent = workload(run)
    check = self_check_of(run, measured, window)
    return Summary(
        run_id=manifest["run_id"],
        tool=Tool(**manifest["tool"]),
        status=msgspec.convert(run.status, Status),
        started_at=manifest["started_at"],
        ended_at=manifest.get("ended_at"),
        window=MeasuredWindow(
            start_ns=window.start_ns,
            end_ns=window.end_ns,
            start=iso_ms(window.start_ns),
            end=iso_ms(window.end_ns),
            duration_s=window.duration_s,
        ),
        warnings=list(warnings(run, sent, client, server, correlation, check)),
        integrity=run.integrity,
        config=config,
        workload=sent,
        client=client,
        server=server,
        correlation=correlation,
        hardware=hardware,
        self_check=check,
        methodology=_methodology(run, times, stability, client.ttft_ms),
        watch=watched_traffic(run, run.watched, window) if isinstance(run, WatchRun) else UNSET,
    )


def _methodology(run: Run, times: Correlated, stability: Stability, ttft_ms: Statistics) -> Methodology:
    rows = run.requests.phase == "measure"
    measured, parts = take(run.requests, rows), take(times.parts, rows)
    events = {event.name: event.data for event in run.events if event.data.get("phase") != "warmup"}
    about = {**run.manifest, **events, "gpus": gpu_names(run.hardware, run.endpoints, engine_here=engine_here(run))}
    facts = facts_of(measured, parts, run.endpoints, about)
    command = list(run.manifest.get("command") or ())
    is_step = bool({*command[1:2]} & {*STUDIES})
    is_tested = len(measured) > 0 and not isinstance(run, WatchRun) and not is_step
    return Methodology(
        draft=DRAFT,
        tests={TEST: comply_run(facts, ttft_ms, closed_loop=closed_loop(run))} if is_tested else {},
        missing=OF_STUDY if is_step else UNTESTED,
        stability=stability,
        warmup=_warm_up(run),
        percentiles=percentile_intervals(measured, parts),
    )


def print_report(summary: Summary, path: Path, *, said: Collection[str] = ()) -> None:
    """Print the report, and under it what was written where.

    `said` are warnings that standard error has had: where it is the same stream, they are not printed again.
    """
    console = Terminal(highlight=False)
    if said and _one_stream():
        summary = msgspec.structs.replace(summary, warnings=[text for text in summary.warnings if text not in said])
    if console.is_terminal:
        console.print(text.render(summary))
    else:
        console.print(Text(text.as_text(summary)), end="", soft_wrap=True)
    console.print(Text(f"\nWritten to {escaped(str(path))}: {files_in(path)}"), soft_wrap=True)


def report_up_to(error: SidelightError, *, span_bytes: int | None = None) -> None:
    """Print the report of what was recorded up to an error, where anything was."""
    if error.run_directory is not None:
        print_report(derive(error.run_directory, span_bytes=span_bytes).summary, error.run_directory)


def files_in(path: Path) -> str:
    """Return the names of the files in a directory, as a person may see them."""
    return ", ".join(sorted(printable(item.name) for item in path.iterdir() if not item.name.startswith(".")))


def _one_stream() -> bool:
    """Tell whether standard output and standard error go to the same place: a terminal, or one log."""
    with suppress(OSError, ValueError):
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
        return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)
    return False


def engine_here(run: Run) -> bool:
    """Tell whether the engine ran on the machine whose hardware was read, by the address that was asked for."""
    config = run.manifest["config"]
    host = next((urlsplit(url).hostname or "" for url in (*urls_of(config), *(config.get("metrics") or ()))), "")
    return host in ("localhost", "::1", run.manifest.get("host", {}).get("name")) or host.startswith("127.")


def _server_metrics(run: Run, window: Window) -> Source:
    targets = run.manifest.get("metrics_targets", ())
    return Source(
        endpoints=run.endpoints,
        window=window,
        slice_ns=_slice_ns(run, window),
        benchmark_id=str(run.manifest["run_id"]),
        input_config=run.manifest["config"],
        tool_version=run.manifest["tool"]["version"],
        configured=[target.get("url") or target["configured"] for target in targets],
        phases=[(phase.name, phase.start_ns, phase.end_ns) for phase in run.phases],
    )


def workload(run: Run) -> Workload:
    """Return what was sent, in whose tokens, how much of it was clipped."""
    planned = {event.data["phase"]: event.data for event in run.events if event.name == "planned"}
    measure, manifest = planned.get("measure", {}), run.manifest
    return Workload(
        name=manifest.get("workload", {}).get("label") or manifest["config"].get("workload"),
        seed=manifest["config"].get("seed"),
        tokenizer=msgspec.convert(manifest.get("tokenizer"), Tokenizer | None),
        max_model_len=manifest.get("target", {}).get("max_model_len"),
        planned_requests=measure.get("count"),
        clipped_inputs=measure.get("clipped_inputs"),
        clipped_outputs=measure.get("clipped_outputs"),
        requests_sha256=measure.get("sha256"),
        dropped_turns=measure.get("dropped_turns"),
        missed_lengths=measure.get("missed_lengths"),
        saved_sha256=measure.get("saved_sha256"),
        stated=manifest.get("workload"),
        shares_prefixes=_shares_prefixes(run),
        warmup_requests=int((run.requests.phase == "warmup").sum()),
    )


def _shares_prefixes(run: Run) -> bool | None:
    """Tell whether requests were meant to have prefixes in common: sessions, system prompts, repositories."""
    if not len(run.requests):
        return None
    classes = (run.manifest.get("workload") or {}).get("classes", ())
    shared = any(traffic_class.get("system_prompt") or traffic_class.get("shared_prefix") for traffic_class in classes)
    return bool(shared or (run.requests.session >= 0).any())


def _warm_up(run: Run) -> WarmupStatement | None:
    """Return what was recorded of the warm-up, None where it never ended."""
    recorded = next((event.data for event in run.events if event.name == "warmup"), None)
    return msgspec.convert(recorded, WarmupStatement | None)


def self_check_of(run: Run, measured: RequestLog, window: Window) -> SelfCheck:
    """Return what the load generator's own records say of its error in a window."""
    stats = [stat for stat in run.worker_stats if window.start_ns <= stat.at_ns <= window.end_ns]
    ends = (event.data for event in run.events if event.name == "phase_end" and event.data["phase"] == "measure")
    return self_check(
        measured,
        stats,
        open_loop=not closed_loop(run),
        clock=msgspec.convert(run.manifest.get("clock_state"), ClockSummary | None),
        round_trips=msgspec.convert(run.manifest.get("network_rtt_ms", []), list[RoundTrip]),
        machine=msgspec.convert(next(ends, {}).get("machine"), MachineLoad | None),
    )


def closed_loop(run: Run) -> bool:
    """Tell whether replies alone said when the next request was sent."""
    config = run.manifest["config"]
    return is_closed_loop(**{name: config.get(name) for name in ("concurrency", "rate", "trace")})


def _held_back(run: Run, measured: RequestLog) -> HeldBack | UnsetType:
    """Return what the cap on requests in flight held back; UNSET without one."""
    config = run.manifest["config"]
    if not config.get("concurrency") or closed_loop(run):
        return UNSET
    planned = workload(run).planned_requests
    if run.status != "complete" or planned is None:
        return held_back(measured, cap=config["concurrency"], planned=Missing("the run did not end by itself"))
    return held_back(measured, cap=config["concurrency"], planned=planned)


def _slice_ns(run: Run, window: Window) -> int:
    """Return how long a slice of a window is: as was asked, or longer where there would be more than MOST_SLICES.

    Raises ValueError where that was no time at all.
    """
    asked_ns = int(float(run.manifest["config"]["slice_duration"]) * 1e9)
    if asked_ns <= 0:
        raise ValueError(f"slice_duration of {asked_ns} ns")
    return max(asked_ns, -(-(window.end_ns - window.start_ns) // MOST_SLICES))
