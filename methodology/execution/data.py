"""Tables of a step from its run directory, for a test and its outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.opening import open_run
from sidelight.correlator.statistics.tail import tail_shares
from sidelight.exporter.evaluation.client import self_check_of
from sidelight.exporter.evaluation.measured import closed_loop, engine_here, window_of
from sidelight.exporter.evaluation.times import correlated
from sidelight.exporter.report.alerts import damage_of
from sidelight.exporter.summary.tail import sentence
from sidelight.loadgen.requests.self_check.check import SelfCheck
from sidelight.methodology.compliance.facts import StepFacts, step_facts
from sidelight.methodology.execution.record import step_directory
from sidelight.methodology.study.model import Finished, StepData
from sidelight.methodology.study.outcome import doubts, exceeded_errors
from sidelight.recorded.directory import MANIFEST, RAW
from sidelight.recorded.failures import evaluating
from sidelight.recorded.run import Run
from sidelight.rundir.columns import take
from sidelight.rundir.stats import Missing
from sidelight.scraper.hardware.summary import gpu_names, hardware_summary

_MOST_HELD = 2_000_000  # stamps of chunks: about 100 MB
NO_THRESHOLD = Missing("not sought for a step")
_MANIFEST_FACTS = ("target", "tokenizer", "workload", "clock", "clock_state", "network_rtt_ms", "config")


class Steps:
    """Steps of a study, read on demand. Those read last stay in memory, as long as they are small together.

    `facts` are those of the steps that were read, which the requirements are checked against, and `damage` what is lost
    of their records, by run.
    """

    def __init__(self, study: Path, *, outside: bool = False) -> None:
        """Read the steps of a study; `outside` of it, too, where that is meant."""
        self.facts: dict[str, StepFacts] = {}
        self.damage: dict[str, str] = {}
        self._study, self._outside = study, outside
        self._held: dict[str, StepData] = {}

    def hold(self, run: str, data: StepData) -> None:
        """Add the tables of a step that were not read from its directory."""
        while sum(int(held.requests.chunk_start[-1]) for held in self._held.values()) > _MOST_HELD:
            del self._held[next(iter(self._held))]
        self._held[run] = data

    def read(self, finished: Finished) -> StepData:
        """Return the tables of a step."""
        if finished.run not in self._held:
            self.hold(finished.run, step_data(step_directory(self._study, finished.run, outside=self._outside)))
        data = self._held[finished.run]
        if finished.run not in self.facts:
            self.facts[finished.run] = step_facts(data)
            if data.damage and not finished.outcome.void:
                self.damage[finished.run] = data.damage
        return data

    def facts_of(self, finished: Sequence[Finished]) -> Mapping[str, StepFacts]:
        """Return the facts of all of these steps."""
        for each in finished:
            if each.run not in self.facts:
                self.read(each)
        return self.facts


def step_data(path: Path) -> StepData:
    """Read a step's run directory. Raises ConfigurationError where there is none, or one that no run writes."""
    with evaluating(path, MANIFEST, RAW):
        run = open_run(path)
        return data_of(run, correlated(run).parts)


def data_of(run: Run, parts: Parts, check: SelfCheck | None = None) -> StepData:
    """Return the tables of a run: its measured requests in the order in which they were submitted, and their parts."""
    measured = np.flatnonzero(run.requests.phase == "measure")
    rows = measured[np.argsort(run.requests.submit_ns[measured], kind="stable")]
    requests, parts = take(run.requests, rows), take(parts, rows)
    window = window_of(run)
    if check is None:
        check = self_check_of(run, requests, window)
    return StepData(
        requests=requests,
        parts=parts,
        endpoints=run.endpoints,
        start_ns=window.start_ns,
        end_ns=max(window.start_ns, int(requests.dispatch_ns.max(initial=-1))),
        closed_loop=closed_loop(run),
        status=run.status,
        doubts=doubts(check, requests),
        error_ms={kind: bound.p99 or 0.0 for kind, bound in exceeded_errors(check) if bound.unusable},
        blame=sentence(tail_shares(parts, requests.submit_ns, NO_THRESHOLD))[0],
        damage=damage_of(run.integrity) or "; ".join(lost.reason for lost in run.integrity.lost_shares or ()),
        about=_about(run),
    )


def _about(run: Run) -> Mapping[str, Any]:
    by_name = {event.name: event.data for event in run.events if event.name == "warmup"}
    planned = [event.data for event in run.events if event.name == "planned" and event.data["phase"] == "measure"]
    facts = {name: run.manifest.get(name) for name in _MANIFEST_FACTS}
    is_here = engine_here(run)
    hardware = hardware_summary(
        run.hardware, run.endpoints, window=window_of(run), output_tokens=None, engine_here=is_here
    )
    return {
        **facts,
        "warmup": by_name.get("warmup"),
        "planned": planned[-1] if planned else None,
        "gpus": gpu_names(run.hardware, run.endpoints, engine_here=is_here),
        "gpu_power_watts": hardware.gpu.mean_power_w,
    }
