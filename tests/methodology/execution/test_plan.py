"""What --plan says that a study takes, beside what studies took."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidelight.methodology.execution.asking import common_options
from sidelight.methodology.execution.derive import procedure_named
from sidelight.methodology.execution.plan import expected
from sidelight.methodology.execution.verb import asked_of, plan
from sidelight.methodology.options import StudyOptions
from sidelight.methodology.procedures import PROCEDURES

# Seconds from the first step's begin to the last one's end, --scale short on the simulated engine: over sockets; the
# last four in virtual time, to which 3 s a step and warm-ups are added.
TOOK_S = {
    "throughput": 822,
    "ttft": 332,
    "itl": 192,
    "tradeoff": 312,
    "capacity": 452,
    "fairness": 352,
    "prefix-cache": 591,
    "memory-pressure": 541,
    "long-context": 120,
    "guardrail": 480,
}
GUARDS = tuple(f"{name}=http://127.0.0.1:9" for name in ("baseline", "input", "output", "full"))


@pytest.mark.parametrize("name", TOOK_S)
def test_a_plan_is_what_a_short_study_took(name: str):
    """Within 30 %; the capacity comes from the study of throughput, where a test can use it."""
    of_throughput: dict[str, Any] = {"capacity": 5.69} if name in ("ttft", "itl", "tradeoff") else {}
    options = StudyOptions(scale="short", isolated=True, variant=GUARDS if name == "guardrail" else (), **of_throughput)
    procedure = PROCEDURES[name]
    asked = msgspec.structs.replace(asked_of(options, procedure)[0], max_model_len=8192)
    planned = expected(procedure, asked, common_options(options, procedure))
    assert planned.seconds == pytest.approx(TOOK_S[name], rel=0.3)


def test_a_short_step_has_no_longer_warm_up_unless_the_draft_was_asked_for():
    """A comparison's and a sweep's numbers are not the draft's."""
    short = {"duration": 10.0}
    first = {
        (name, scale): expected(procedure, asked, common).steps[0].step.warm_up
        for name, scale in (("throughput", "letter"), ("throughput", "short"), ("compare", "letter"))
        for procedure in [procedure_named(name)]
        for options in [StudyOptions(scale=scale, variant=GUARDS[:2] if name == "compare" else (), **short)]
        for asked in [asked_of(options, procedure)[0]]
        for common in [common_options(options, procedure)]
    }
    assert list(first.values()) == ["draft", "short", "short"]


def test_a_faster_system_serves_more_at_once():
    """Its plan is that of as many simulated engines, whether the test has the capacity among its numbers or not."""
    ends = [[*plan(StudyOptions(scale="short", capacity=each), "capacity")] for each in (5.8, 58)]
    levels = [max(float(line.split()[2]) for line in lines[:-1]) for lines in ends]
    assert levels[1] > 5 * levels[0]
    assert "of it warm-up" in ends[0][0]
    assert not any("simulated engine" in line for line in ends[0])
