"""Clients that leave: which, when, and how they are counted."""

from __future__ import annotations

import msgspec
import pytest
from logs import request_log

from sidelight.loadgen.plan.fitting import PlanOrder, numbered
from sidelight.loadgen.plan.leaving import leaving_of
from sidelight.loadgen.records import PlannedRequest
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.loadgen.requests.slo.results import slo_result
from sidelight.loadgen.requests.summary import client_summary


@pytest.mark.parametrize(
    ("text", "ratio", "after_ns"), [("5%@2s", 0.05, 2e9), ("0.5%@250ms", 0.005, 25e7), ("100%@1m", 1, 6e10)]
)
def test_a_share_and_a_time(text: str, ratio: float, after_ns: float):
    leaving = leaving_of(text, 7)
    assert leaving is not None
    assert (ratio, after_ns) == (leaving.ratio, leaving.after_ns)


@pytest.mark.parametrize("text", ["5%", "2s", "5@2s", "101%@2s", "5%@2", "-5%@2s", "5%@2h"])
def test_what_is_no_share_and_time(text: str):
    with pytest.raises(ValueError, match="5%@2s"):
        leaving_of(text, 7)


def test_the_seed_draws_who_leaves():
    """The same requests each time, about the share asked for, others by another seed; none without the option."""
    draws = [[leaving_of("5%@2s", seed).after(index) for index in range(10_000)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert {-1, 2_000_000_000} == set(draws[0])
    assert 10_000 - draws[0].count(-1) == pytest.approx(500, abs=100)
    assert leaving_of(None, 1) is None


def test_the_plan_says_who_leaves():
    """Every turn of a session may be left; a replay's own are drawn anew."""
    turns = (PlannedRequest(index=-1, turn=1), PlannedRequest(index=-1, turn=2))
    request = PlannedRequest(index=-1, turns=turns, leave_ns=5)
    for text, leave_ns in (("100%@2s", 2_000_000_000), (None, -1)):
        order = PlanOrder(phase="measure", leaving=leaving_of(text, 1))
        planned = numbered(request, order, index=4, offset_ns=9, ordinal=2)
        assert [(4, leave_ns), (5, leave_ns), (6, leave_ns)] == [
            (turn.index, turn.leave_ns) for turn in (planned, *planned.turns)
        ]
        assert (9, 2, -1) == (planned.offset_ns, planned.session, planned.turns[0].offset_ns)


def test_those_who_left_are_counted_by_themselves():
    """No error, no failure of an objective; absent where none left."""
    row = {"submit": 0, "first": 10, "last": 30, "end": 40, "output": 3}
    log = request_log(row, row | {"status": "left", "first": -1, "last": -1, "end": 2_000}, row | {"status": "failed"})
    got = client_summary(log)
    assert (3, 1, 1, 1, {}) == (got.requests.sent, got.requests.ok, got.requests.left, got.requests.failed, got.errors)
    objectives = slo_result(parse_slo("error_rate<60%,ttft_p50<50ms"), log, request_metrics(log), {}, stopped=False)
    assert [0.5, 2] == [objectives.objectives[0].value, objectives.objectives[0].requests]
    assert "left" not in msgspec.to_builtins(client_summary(request_log(row)).requests)
