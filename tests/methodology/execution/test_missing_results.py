"""Studies whose steps lack results: each test ends with a report of what there is."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spoilt_studies import Spoilt, asked_of, failed_where, spoilt_study, study_of

from sidelight.methodology.procedures import PROCEDURES
from sidelight.methodology.study.model import Step, StepData

NO_TIMES = {
    "ttft": "no step at the stated load counts",
    "fairness": "the mixed load was not measured",
    "prefix-cache": "no step with the cache off, cold or warm counts",
    "guardrail": "no level of the input configuration counts",
}
NO_NUMBER = re.compile(r"(?<![\w-])(nan|inf|None|NaN)(?![\w.-])")


@pytest.mark.parametrize("name", PROCEDURES)
@settings(max_examples=2)
@given(seed=st.integers(0, 10**6), wholes=st.sampled_from([0.0, 0.5, 0.8]))
def test_a_study_is_reported_whatever_its_steps_lack(name: str, seed: int, wholes: float):
    """None raises, and none shows a value that is missing as a number."""
    study = spoilt_study(name, seed, wholes=wholes)
    for file, text in study.files.items():
        assert [] == [line for line in text.splitlines() if NO_NUMBER.search(line)], file


@pytest.mark.parametrize("name", PROCEDURES)
def test_a_study_without_a_step_has_no_number_and_says_why(name: str):
    """One that was cut short still has its report; in the minimum one it names what was not measured."""
    asked = asked_of(name, np.random.default_rng(1))
    findings = PROCEDURES[name].findings(asked, [], lambda _: pytest.fail("there is no step"))
    assert findings.answer
    assert {None} >= {each.value for each in findings.results.values()}
    assert all(each.missing for each in findings.results.values())
    if name not in ("throughput", "compare", "sweep"):
        assert NO_TIMES.get(name, "no level counts") == findings.results["ttft_p50_ms"].missing


def test_a_study_that_is_not_complete_has_passed_nothing():
    """Whatever its steps show: it fails its gate, and whether it complies with the draft is not judged."""
    studies = [study for seed in range(5) if not complete(study := spoilt_study("compare", seed, wholes=0.1))]
    assert studies
    for study in studies:
        assert study.result.passed is None
        assert "criteria hold." not in study.files["report.txt"]
        assert "was not decided, so that --gate fails" in " ".join(study.files["report.txt"].split())
        assert "not judged" == study.compliance.verdict


def complete(study: Spoilt) -> bool:
    return study.result.status == "complete"


def untrusted(data: StepData) -> StepData:
    return replace(data, doubts={"load": "It may be wrong by up to 10 ms: held up."})


@pytest.mark.parametrize("name", PROCEDURES)
def test_of_a_study_without_a_step_that_counts_nothing_is_judged(name: str):
    """No count of requests, runs or lines of a checklist is stated of steps that are void."""
    study = study_of(asked_of(name, np.random.default_rng(1)), lambda _, data: untrusted(data))
    text = " ".join(study.files["report.txt"].split())
    assert ("partial", None) == (study.result.status, study.result.passed)
    assert "Success: no step counts; " in text
    assert not re.search(r"was completed|were measured\.|No request has|has been measured\b", text)
    assert not any(row[1] in ("not met", "checked") for each in study.findings.tables for row in each.rows)


def test_pairs_that_are_whole_are_in_turn():
    """Though a run whose like is void stands between them."""

    def spoil(step: Step, data: StepData) -> StepData:
        return untrusted(data) if step.label == "pair-2-b" else data

    study = study_of(asked_of("compare", np.random.default_rng(1)), spoil)
    states = {row[0]: row[1] for row in study.findings.tables[-1].rows}
    assert "checked" == states["Tested at the same time: configurations in turn"]
    assert "over 4 of 5 pairs" in study.result.answer[0]


def test_a_run_without_a_success_leaves_a_gate_undecided():
    """It has no ratio to its like: the other pairs alone must not pass for all."""

    def spoil(step: Step, data: StepData) -> StepData:
        return failed_where(data, np.full(len(data.requests), step.label == "pair-2-b"))

    study = study_of(asked_of("compare", np.random.default_rng(1)), spoil)
    assert ("complete", None) == (study.result.status, study.result.passed)
    verdicts = {row[0]: row[7] for row in study.findings.tables[0].rows}
    assert "no request of a run of b ended ok" in str(verdicts["Completed requests/s"])
