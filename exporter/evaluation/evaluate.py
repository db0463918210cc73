"""Evaluation of a recorded run, whole: its window, its requests' times, and its summary."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.load.reuse import RunReuse, request_reuse
from sidelight.correlator.load.sustained import stability_of
from sidelight.correlator.opening import WatchRun
from sidelight.exporter.evaluation.client import client_of, hardware_of, self_check_of, workload
from sidelight.exporter.evaluation.correlation import correlation_of
from sidelight.exporter.evaluation.measured import MeasuredRun, closed_loop, measured_run
from sidelight.exporter.evaluation.methodology import methodology_of
from sidelight.exporter.evaluation.server import engines_of, finished_requests, server_of
from sidelight.exporter.evaluation.warnings import warnings
from sidelight.exporter.report.advice import advised
from sidelight.exporter.report.verdict import verdict_of
from sidelight.exporter.summary.gateways import beside_pages
from sidelight.exporter.summary.result import MeasuredWindow, Status, Summary, Tool
from sidelight.exporter.summary.watched import watched_traffic
from sidelight.recorded.errors import CannotWrite
from sidelight.recorded.run import Run
from sidelight.rundir.clock import iso_ms
from sidelight.scraper.window.window import Window
from sidelight.twin.seats import more_seats


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """A recorded run and all that its outputs are made of; `parts` are the times of all its requests [n].

    `reuse` is that of their prompts. `unwritten` is why a derived file could not be written.
    """

    run: Run
    window: Window
    slice_ns: int
    parts: Parts
    reuse: RunReuse
    summary: Summary
    unwritten: CannotWrite | None = None


def evaluate(run: Run) -> Evaluated:
    """Return the evaluation of a run: a pure function of its logs."""
    measured = measured_run(run)
    reuse = request_reuse(run, measured.times.joined, pools=any(measured.times.roles))
    return Evaluated(
        run=run,
        window=measured.window,
        slice_ns=measured.slice_ns,
        parts=measured.times.parts,
        reuse=reuse,
        summary=summarise(measured, reuse),
    )


def summarise(measured: MeasuredRun, reuse: RunReuse) -> Summary:
    """Return `summary.json` of a run: its sections, each from its measured part."""
    run, window, manifest = measured.run, measured.window, measured.run.manifest
    hardware = hardware_of(measured)
    client = client_of(measured, hardware)
    server = server_of(run, window, measured.slice_ns, measured.times.roles)
    stability = stability_of(measured.requests, run.endpoints, closed_loop=closed_loop(run))
    correlation = correlation_of(measured, reuse, steady=stability.verdict != "growing")
    if server.gateways:
        by_page = beside_pages(correlation.gateways, server.gateways)
        correlation = msgspec.structs.replace(correlation, gateways=by_page)
    sent = workload(run)
    check = self_check_of(run, measured.requests, window)
    whole = Summary(
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
        config=manifest["config"],
        workload=sent,
        client=client,
        server=server,
        correlation=correlation,
        hardware=hardware,
        self_check=check,
        methodology=methodology_of(measured, stability, client),
        watch=watched_traffic(run, run.watched, window) if isinstance(run, WatchRun) else UNSET,
    )
    if advised(whole).raises:
        whole = msgspec.structs.replace(
            whole, more_seats=more_seats(run, finished_requests(server), pages=engines_of(run))
        )
    return msgspec.structs.replace(whole, verdict=verdict_of(whole))
