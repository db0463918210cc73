"""Studies whose steps lack results: each test ends with a report of what there is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spoilt_studies import Spoilt, spoilt_study

from methodology.procedures import PROCEDURES

NO_NUMBER = re.compile(r"(?<![\w-])(nan|inf|None|NaN)(?![\w.-])")


@pytest.mark.parametrize("name", PROCEDURES)
@settings(max_examples=10)
@given(seed=st.integers(0, 10**6), wholes=st.sampled_from([0.0, 0.5, 0.8]))
def test_a_study_is_reported_whatever_its_steps_lack(name: str, seed: int, wholes: float):
    """None raises, and none shows a value that is missing as a number."""
    study = spoilt_study(name, seed, wholes=wholes)
    for file, text in study.files.items():
        assert [] == [line for line in text.splitlines() if NO_NUMBER.search(line)], file


def test_a_study_that_is_not_complete_has_passed_nothing():
    """Whatever its steps show: it fails its gate, and whether it complies with the draft is not judged."""
    studies = [study for seed in range(20) if not complete(study := spoilt_study("compare", seed, wholes=0.1))]
    assert studies
    for study in studies:
        assert study.result.passed is None
        assert "criteria hold." not in study.files["report.txt"]
        assert "was not decided, so that --gate fails" in " ".join(study.files["report.txt"].split())
        assert "not judged" == study.compliance.verdict


def complete(study: Spoilt) -> bool:
    return study.result.status == "complete"
