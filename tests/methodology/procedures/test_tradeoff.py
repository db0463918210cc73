"""The test of the tradeoff on the simulated engine: its levels, and the points that follow from its curve."""

from __future__ import annotations

import pytest
from virtual_study import assert_reported, play

from sidelight.methodology.procedures.tradeoff import TRADEOFF
from sidelight.methodology.study.model import Parameters, StudySettings
from sidelight.simulator.settings import EngineSettings


def test_the_curve_of_an_engine():
    """Levels ascend as shares of the capacity; beyond it requests pile up, and the objective fails before."""
    parameters = Parameters(
        capacity=5.85, levels=(1.2, 0.1, 0.5, 0.8, 1.0), duration=40.0, requests=30, slo="ttft_p99<500ms"
    )
    steps, findings = play(
        TRADEOFF, StudySettings(test="tradeoff", scale="short", parameters=parameters, seed=1), EngineSettings()
    )
    assert [each.step.share for each in steps] == [0.1, 0.5, 0.8, 1.0, 1.2]
    assert steps[0].step.duration == 30 / 0.585
    assert steps[-1].outcome.stability is not None
    assert steps[-1].outcome.stability.verdict == "growing"
    results = findings.results
    stable, growing = results["stable_requests_per_s"].value, results["growing_requests_per_s"].value
    assert (stable or 0) < (growing or 0)
    loads = dict(zip((each.step.share for each in steps), (row[3] for row in findings.tables[0].rows), strict=True))
    assert results["optimal_requests_per_s"].value in [loads[0.5], loads[0.8]]
    assert [plot.name for plot in findings.plots][3:] == ["ttft-parts", "seats", "kv-cache"]
    assert findings.answer[2].startswith("The limit is how many requests the engine runs at once")


def test_a_verdict_is_of_the_load_that_was_realised():
    """What counts are the tokens that requests ask for: those of a short step are shorter or longer by chance."""
    parameters = Parameters(
        capacity=5.85, capacity_tokens=936.0, levels=(0.5, 0.9, 1.0, 1.1, 1.2), duration=20.0, requests=10
    )
    steps, findings = play(
        TRADEOFF, StudySettings(test="tradeoff", scale="short", parameters=parameters, seed=5), EngineSettings()
    )
    loads: dict[str | None, list[float]] = {}
    for each in steps:
        verdict = each.outcome.stability.verdict if each.outcome.stability else None
        loads.setdefault(verdict, []).append((each.outcome.realised_tokens_per_s or 0) / 936 * 5.85)
    growing = min(loads["growing"])
    assert findings.results["growing_requests_per_s"].value == pytest.approx(growing)
    stable = max(load for load in loads["stable"] if load < growing)
    assert findings.results["stable_requests_per_s"].value == pytest.approx(stable)


@pytest.mark.parametrize(
    ("slo", "which"),
    [("ttft_p99<500ms", "the best level within the objectives"), ("ttft_p99<1ms", "the highest shown stable")],
)
def test_the_minimum_report_has_the_times_and_the_throughput_of_a_level(slo: str, which: str):
    """Of the best level, else of the highest that was sustained; it says which, and why a throughput is missing."""
    parameters = Parameters(capacity=5.85, levels=(0.3, 0.6, 1.2), duration=40.0, requests=30, slo=slo)
    steps, findings = play(
        TRADEOFF, StudySettings(test="tradeoff", scale="short", parameters=parameters, seed=1), EngineSettings()
    )
    results, level = findings.results, steps[1].outcome
    assert_reported(findings, steps[1], which)
    assert results["peak_output_tokens_per_s"].at == "7.02 requests/s offered (120 % of the capacity), step 3"
    best = results["optimal_output_tokens_per_s"]
    if "500ms" in slo:
        assert (best.value, best.ci95) == (level.output_tokens_per_s, level.output_tokens_ci95)
        assert best.at.startswith("3.51 requests/s offered (60 % of the capacity)")
    else:
        assert best.missing == "no level meets ttft_p99<1ms"
