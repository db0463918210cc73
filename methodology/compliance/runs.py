"""Requirements that a plain run lacks to be a test of the draft.

Of all tests, `ttft` is the one that is a single run.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from sidelight.exporter.summary.result import RunStatement
from sidelight.loadgen.plan.rates import pace_of
from sidelight.methodology.compliance.facts import StepFacts, facts_of
from sidelight.methodology.compliance.statement import comply
from sidelight.methodology.study.findings import ResultQuantity, StudyFindings
from sidelight.methodology.study.model import Finished, Outcome, Parameters, Step, StudySettings
from sidelight.recorded.system import read_system
from sidelight.rundir.stats import Statistics

TEST = "ttft"
# By which of its statistics a run's TTFT is reported, and how many requests each needs (ttft-count).
_STATISTICS = {**dict.fromkeys(("p50", "p90", "p95", "mean", "min", "max"), 1), "p99": 1000, "p99_9": 10_000}


def statements_of(recorded: tuple[Any, ...], ttft_ms: Statistics, *, closed_loop: bool) -> dict[str, RunStatement]:
    """Return the statements of a run by test; `recorded` are the arguments of `facts_of`."""
    return {TEST: comply_run(facts_of(*recorded), ttft_ms, closed_loop=closed_loop)}


def comply_run(facts: StepFacts, ttft_ms: Statistics, *, closed_loop: bool) -> RunStatement:
    """Return the statement of a run, from its facts and its TTFT."""
    config = facts.about.get("config") or {}
    step = Step(
        kind="run",
        label="run",
        load="closed" if closed_loop else "open",
        level=float((config.get("concurrency") if closed_loop else pace_of(config.get("rate")).per_s) or 0.0),
        seed=config.get("seed") or 0,
        warm_up="none" if config.get("warmup") == 0 else "draft",
    )
    results = {
        f"ttft_{name}_ms": ResultQuantity(value=getattr(ttft_ms, name) if ttft_ms.count >= least else None, unit="ms",
                                    n=ttft_ms.count)
        for name, least in _STATISTICS.items()
    }  # fmt: skip
    statement = comply(
        TEST,
        StudySettings(test=TEST, scale="letter", parameters=Parameters(), seed=step.seed),
        read_system(config.get("sut")),
        [Finished(number=1, run="", step=step, outcome=Outcome(status="complete"))],
        StudyFindings(answer=(), results=results),
        {"": facts},
    )
    return RunStatement(
        verdict=statement.verdict,
        sentence=statement.sentence.replace(f"The {TEST} test is", f"As a {TEST} test, this run is"),
        contradictions=statement.contradictions or UNSET,
        requirements={each.id: each.state for each in statement.requirements},
    )
