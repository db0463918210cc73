"""Methodology section of a summary: what the draft asks for, and how sure its numbers are."""

from __future__ import annotations

import msgspec

from correlator.opening import WatchRun
from exporter.evaluation.measured import MeasuredRun, closed_loop, engine_here
from exporter.summary.result import Methodology
from loadgen.requests.warmup import WarmupStatement
from methodology.compliance import DRAFT
from methodology.compliance.facts import facts_of
from methodology.compliance.runs import TEST, comply_run
from methodology.percentiles import percentile_intervals
from methodology.stability import Stability
from recorded.run import Run
from rundir.stats import Statistics
from scraper.hardware.summary import gpu_names

UNTESTED = "no test of the draft was run; this is a plain measurement"
STUDIES = ("test", "compare", "sweep")  # commands whose runs are steps
OF_STUDY = "this run is a step of a study, whose compliance.json says which requirements are met"


def methodology_of(measured_run: MeasuredRun, stability: Stability, ttft_ms: Statistics) -> Methodology:
    """Return the `methodology` section of a summary."""
    run, measured, parts = measured_run.run, measured_run.requests, measured_run.parts
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


def _warm_up(run: Run) -> WarmupStatement | None:
    """Return the recorded statement on the warm-up, None if the warm-up never ended."""
    recorded = next((event.data for event in run.events if event.name == "warmup"), None)
    return msgspec.convert(recorded, WarmupStatement | None)
