"""The load of a run: which of its requests count as ended, and loads that are not judged."""

from __future__ import annotations

import numpy as np
import pytest
from engine_series import engine
from logs import request_log
from queues import Served, loaded

from sidelight.correlator.load.sustained import CLOSED, NOTHING_SENT, stability_of
from sidelight.loadgen.requests.table.log import RequestLog


def sent(queue: Served, **differs: object) -> RequestLog:
    """The requests of a queue; those that took more than 15 s are as `differs` says."""
    rows = ({"dispatch": 1e3 * a, "end": 1e3 * e} for a, e in zip(queue.arrived_s, queue.ended_s, strict=True))
    took_s = queue.ended_s - queue.arrived_s
    return request_log(*(row | (differs if took > 15 else {}) for row, took in zip(rows, took_s, strict=True)))


def test_an_open_loop_is_judged_by_its_requests():
    """Twice what the system can serve."""
    stability = stability_of(sent(loaded(2.0, seconds=60)), [], closed_loop=False)
    assert stability.verdict == "growing"
    assert stability.capacity_per_s == pytest.approx(6.0, rel=0.15)


def test_a_page_is_taken_into_account():
    """Half of the capacity, and a page on which nothing waits."""
    page = engine(range(60), waiting=np.zeros(60))
    stability = stability_of(sent(loaded(0.5, seconds=60)), [page], closed_loop=False)
    assert (stability.verdict, stability.queued_ratio) == ("stable", 0.0)


@pytest.mark.parametrize(
    "given_up",
    [
        {"status": "failed", "error": "timeout: no first byte within 15 s"},
        {"status": "cancelled", "error": "cancelled: the run was stopped"},
        {"status": "in_flight", "end": -1},
    ],
    ids=lambda given: given["status"],
)
def test_a_cancelled_request_stays_in_flight(given_up: dict[str, object]):
    """It ended for its client, not for what the system was asked to do."""
    assert stability_of(sent(loaded(2.0, seconds=60), **given_up), [], closed_loop=False).verdict == "growing"


def test_a_request_that_a_cap_held_back_is_in_flight_from_when_it_was_due():
    """Its client waited all the same, although the system never had more than so many."""
    queue = loaded(2.0, seconds=60)
    rows = (
        {"dispatch": 1e3 * begun, "end": 1e3 * ended, "held_ns": int(1e9 * (begun - due))}
        for due, begun, ended in zip(queue.arrived_s, queue.begun_s, queue.ended_s, strict=True)
    )
    log = request_log(*rows)
    assert stability_of(log, [], closed_loop=False).verdict == "growing"


@pytest.mark.parametrize(
    ("rows", "closed_loop", "reason"),
    [
        ((), False, NOTHING_SENT),
        (({"dispatch": 0, "end": 1},), True, CLOSED),
    ],
)
def test_some_loads_are_not_judged(rows: tuple[dict[str, object], ...], closed_loop: bool, reason: str):
    """None was sent, or so many at most were in flight that no number of them could grow."""
    stability = stability_of(request_log(*rows), [], closed_loop=closed_loop)
    assert (stability.verdict, stability.reason) == (None, reason)


def test_a_load_that_mostly_failed_was_not_shown_to_be_sustained():
    """What fails at once does not pile up."""
    queue = loaded(0.5, seconds=60)
    refused = {"status": "failed", "error": "connect: Connection refused"}
    rows = [
        {"dispatch": 1e3 * due, "end": 1e3 * end} | (refused if n % 5 == 0 else {})
        for n, (due, end) in enumerate(zip(queue.arrived_s, queue.ended_s, strict=True))
    ]
    judgement = stability_of(request_log(*rows), [], closed_loop=False)
    assert (None, "20% of the requests failed") == (judgement.verdict, judgement.reason)
