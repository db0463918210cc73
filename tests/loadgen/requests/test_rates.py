"""Offered, realised and served: three rates of one load, none of which counts the drain."""

from __future__ import annotations

from typing import Any

import pytest
from logs import request_log

from sidelight.loadgen.requests.rates import CLOSED, failed_share, outage, rates
from sidelight.loadgen.requests.table.log import RequestLog

SECOND = 10**9


def steady(count: int = 40, *, took_ms: float = 1000.0, late_ms: float = 0.0) -> RequestLog:
    """A request each half second, each of which takes as long."""
    return request_log(
        *(
            {"scheduled": 500 * n, "dispatch": (500 + late_ms) * n, "end": (500 + late_ms) * n + took_ms}
            for n in range(count)
        )
    )


def test_what_was_served_leaves_out_ramp_and_drain():
    """40 requests in 19.5 s, and 4 s until the last has ended: 2 a second were offered, sent and served."""
    load = rates(steady(took_ms=4000.0), end_ns=int(23.5 * SECOND), open_loop=True)
    assert (19.5, 8.0, 4.0) == pytest.approx((load.load_s, load.ramp_s, load.drain_s))
    assert load.offered_requests_per_s == pytest.approx(2.0)
    assert load.realised_requests_per_s == pytest.approx(2.0)
    assert load.served_requests_per_s == pytest.approx(2.0, rel=0.06)
    assert (32, 8) == (load.ended_in_load, load.open_at_end)


def test_a_late_generator_sends_less_than_was_offered():
    """Offered is what the schedule wanted."""
    load = rates(steady(late_ms=125.0), end_ns=None, open_loop=True)
    assert load.offered_requests_per_s == pytest.approx(2.0)
    assert load.realised_requests_per_s == pytest.approx(1.6)
    assert (None, "no request ended") == (load.drain_s, dict(load.missing or {})["drain_s"])


def test_what_failed_ended_but_was_not_served():
    """Half of the requests are refused."""
    rows = ({"scheduled": 500 * n, "dispatch": 500 * n, "end": 500 * n + 100} for n in range(100))
    log = request_log(*(row | ({"status": "refused"} if n % 2 else {}) for n, row in enumerate(rows)))
    load = rates(log, end_ns=50 * SECOND, open_loop=True)
    assert load.served_requests_per_s == pytest.approx(1.0, rel=0.05)
    assert load.ended_in_load == 99


def test_nothing_is_said_to_be_served_by_a_load_as_short_as_its_requests():
    """Two requests' time is the ramp; the counts stand all the same."""
    load = rates(steady(took_ms=15_000.0), end_ns=35 * SECOND, open_loop=True)
    assert load.served_requests_per_s is None
    assert load.missing == {"served_requests_per_s": "the load lasted 19.5 s, and its first requests took 15.0 s"}
    assert (10, 30) == (load.ended_in_load, load.open_at_end)


def test_a_closed_loop_offers_no_rate():
    """It has a realised and a served one."""
    load = rates(steady(), end_ns=21 * SECOND, open_loop=False)
    assert load.offered_requests_per_s is None
    assert load.missing == {"offered_requests_per_s": CLOSED}
    assert load.realised_requests_per_s == pytest.approx(2.0)


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_requests_have_no_rate(count: int):
    """With the reason of each."""
    load = rates(steady(count), end_ns=SECOND, open_loop=True)
    assert (load.load_s, load.realised_requests_per_s, load.open_at_end) == (None, None, count)
    assert isinstance(load.missing, dict)
    assert set(load.missing.values()) == {"fewer than two requests were sent"}


def test_requests_of_one_instant_have_no_rate():
    """As at a barrier."""
    log = request_log(*({"scheduled": 0, "dispatch": 0, "end": 100 * n} for n in range(1, 9)))
    load = rates(log, end_ns=SECOND, open_loop=True)
    assert (load.load_s, load.offered_requests_per_s, load.served_requests_per_s) == (0.0, None, None)
    assert isinstance(load.missing, dict)
    assert load.missing["realised_requests_per_s"] == "all requests were sent at one moment"


CONNECT: dict[str, Any] = {"status": "failed", "error": "connect: Connection refused"}
RESET: dict[str, Any] = {"status": "failed", "error": "reset: Connection reset by peer"}
LIMITED: dict[str, Any] = {"status": "refused", "error": "http_429: slow down"}


def ended_as(*kinds: dict[str, Any]) -> RequestLog:
    """A request each half second that takes a second, each of which ends as it is said."""
    return request_log(*({"dispatch": 500 * n, "end": 500 * n + 1000, **kind} for n, kind in enumerate(kinds)))


def test_a_server_that_answers_nothing_any_more_is_an_outage():
    """20 replies, the last 10.5 s into the load; then 3 are broken off, and 12 find no server."""
    log = ended_as(*[{}] * 20, *[RESET] * 3, *[CONNECT] * 12)
    seen = outage(log)
    assert seen is not None
    assert (10.5, {"connect": 12, "reset": 3}) == (pytest.approx(seen.at_s), seen.errors)
    assert failed_share(log) == pytest.approx(15 / 35)


def test_a_server_that_never_answered_has_no_last_answer():
    """As one that ended while requests were prepared."""
    seen = outage(ended_as(*[CONNECT] * 8))
    assert seen is not None
    assert (None, {"connect": 8}) == (seen.at_s, seen.errors)


@pytest.mark.parametrize(
    "kinds",
    [
        [{}] * 20,
        [{}] * 20 + [RESET] * 4,
        [{}] * 20 + [LIMITED] * 20,
        [{}] * 20 + [CONNECT] * 20 + [{}],
        ([RESET] * 4 + [{}]) * 5 + [RESET] * 5,
        [{}] * 20 + [{"status": "cancelled", "error": "cancelled: stopped"}] * 20,
    ],
    ids=["all-well", "few", "limits-rate", "came-back", "always-bad", "ended-by-us"],
)
def test_failures_that_are_no_outage(kinds: list[dict[str, Any]]):
    """Refusals are answers, a server that comes back did not end, and of many failures some come last."""
    assert outage(ended_as(*kinds)) is None


def test_no_request_is_no_outage():
    """And no share of failures."""
    assert (None, 0.0) == (outage(request_log()), failed_share(request_log()))
