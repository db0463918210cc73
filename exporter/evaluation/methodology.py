"""Methodology section of a summary: what the draft asks for, and how sure its numbers are."""

from __future__ import annotations

from importlib import import_module

import msgspec

from sidelight.correlator.load.stability import Stability
from sidelight.correlator.opening import WatchRun
from sidelight.correlator.statistics.percentiles import percentile_intervals
from sidelight.exporter.evaluation.measured import MeasuredRun, closed_loop, engine_here
from sidelight.exporter.summary.result import DRAFT, Methodology, RunStatement
from sidelight.loadgen.requests.self_check.nodes import unknown_clocks
from sidelight.loadgen.requests.summary import ClientSummary
from sidelight.loadgen.requests.warmup import WarmupStatement
from sidelight.recorded.run import Run
from sidelight.scraper.hardware.summary import gpu_names

UNTESTED = "no test of the draft was run; this is a plain measurement"
STUDIES = ("test", "compare", "sweep")  # commands whose runs are steps
OF_STUDY = "this run is a step of a study, whose compliance.json says which requirements are met"
# Imported by name: the draft's building stands above this one, and judges a run from what is below.
JUDGE = "sidelight.methodology.compliance.runs"


def methodology_of(measured_run: MeasuredRun, stability: Stability, client: ClientSummary) -> Methodology:
    """Return the `methodology` section of a summary."""
    run = measured_run.run
    command = list(run.manifest.get("command") or ())
    is_step = bool({*command[1:2]} & {*STUDIES})
    is_tested = len(measured_run.requests) > 0 and not isinstance(run, WatchRun) and not is_step
    return Methodology(
        draft=DRAFT,
        tests=_statements(measured_run, client) if is_tested else {},
        missing=OF_STUDY if is_step else UNTESTED,
        stability=stability,
        warmup=_warm_up(run),
        percentiles=percentile_intervals(measured_run.requests, measured_run.parts),
    )


def _statements(measured_run: MeasuredRun, client: ClientSummary) -> dict[str, RunStatement]:
    """Return the compliance of a plain run with the draft, by test."""
    run = measured_run.run
    events = {event.name: event.data for event in run.events if event.data.get("phase") != "warmup"}
    about = {**run.manifest, **events, "gpus": gpu_names(run.hardware, run.endpoints, engine_here=engine_here(run))}
    statements: dict[str, RunStatement] = import_module(JUDGE).statements_of(
        (measured_run.requests, measured_run.parts, run.endpoints, about), client.ttft_ms, closed_loop=closed_loop(run)
    )
    return {test: _with_losses(run, client, test, statement) for test, statement in statements.items()}


def _with_losses(run: Run, client: ClientSummary, test: str, statement: RunStatement) -> RunStatement:
    """Return a statement, not compliant after a lost share or with an unknown clock."""
    reasons = ["a share of its load was not sent"] if run.integrity.lost_shares else []
    reasons += [
        f"the clock of {node.node} is known to {node.clock_error_ms:.1f} ms only"
        for node in unknown_clocks(client.by_node or ())
    ]
    if not reasons:
        return statement
    sentence = f"As a {test} test, this run is not compliant: {reasons[0]}."
    return msgspec.structs.replace(statement, verdict="not compliant", sentence=sentence)


def _warm_up(run: Run) -> WarmupStatement | None:
    """Return the recorded statement on the warm-up, None if the warm-up never ended."""
    recorded = next((event.data for event in run.events if event.name == "warmup"), None)
    return msgspec.convert(recorded, WarmupStatement | None)
