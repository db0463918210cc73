"""Clocks of nodes against the run's: what an exchange bounds, and what drift is taken out of stamps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sidelight.loadgen.requests.table.log import unknown_requests
from sidelight.recorded.nodes import (
    EDGE,
    ClockExchange,
    NodeClock,
    clock_errors_ns,
    clock_line,
    node_times,
    on_run_time,
    tightest,
)

S = 1_000_000_000
BEGIN_NS = 1_700_000_000 * S
WAYS_NS = st.integers(1_000, 20_000_000)
OFFSETS_NS = st.integers(-1_000 * S, 1_000 * S)
DRIFTS = st.floats(-5e-5, 5e-5)


def exchange(at_ns: int, offset_ns: int, there_ns: int, back_ns: int) -> ClockExchange:
    """Return an exchange by a node whose clock is so far behind the run's."""
    return ClockExchange(at_ns, at_ns + there_ns - offset_ns, at_ns + there_ns + back_ns)


@settings(max_examples=1000)
@given(offset_ns=OFFSETS_NS, there_ns=WAYS_NS, back_ns=WAYS_NS)
def test_the_true_offset_lies_within_the_bound_of_an_exchange(offset_ns: int, there_ns: int, back_ns: int):
    """Also of clocks a thousand seconds apart, and where one way takes 20 ms and the other next to nothing."""
    each = exchange(BEGIN_NS, offset_ns, there_ns, back_ns)
    assert abs(each.offset_ns - offset_ns) <= each.error_ns <= (there_ns + back_ns) // 2 + 1


def drifting(offset_ns: int, drift: float, ways_ns: list[tuple[int, int]], every_ns: int) -> list[ClockExchange]:
    """Return exchanges with a node whose clock drifts: some at once, one every so often, and some at once."""
    at_ns = BEGIN_NS
    exchanges = []
    for number, (there_ns, back_ns) in enumerate(ways_ns):
        node_at_ns = at_ns + there_ns
        true_ns = offset_ns + round(drift * (node_at_ns - BEGIN_NS))
        exchanges.append(ClockExchange(at_ns, node_at_ns - true_ns, node_at_ns + back_ns))
        at_ns = node_at_ns + back_ns + (every_ns if EDGE <= number < len(ways_ns) - EDGE else 0)
    return exchanges


@given(
    offset_ns=OFFSETS_NS,
    drift=DRIFTS,
    ways_ns=st.lists(st.tuples(WAYS_NS, WAYS_NS), min_size=2 * EDGE, max_size=3 * EDGE),
    part=st.floats(0, 1),
)
def test_the_true_offset_lies_within_the_bound_of_a_drifting_clock(
    offset_ns: int, drift: float, ways_ns: list[tuple[int, int]], part: float
):
    """At every moment between the first exchange and the last; what the drift moves within one is some nanoseconds."""
    exchanges = drifting(offset_ns, drift, ways_ns, every_ns=10 * S)
    line = clock_line(exchanges)
    at_ns = round(line.at_ns[0] + part * (line.at_ns[1] - line.at_ns[0]))
    true_ns = offset_ns + drift * (at_ns - BEGIN_NS)
    within_one_ns = 5e-5 * 40_000_000 + 2
    assert abs(int(line.offsets_ns(np.array([at_ns]))[0]) - true_ns) <= line.error_ns + within_one_ns


def test_drift_of_fifty_ppm_over_ten_minutes_is_taken_out():
    """It would be 30 ms; what is left is within a tenth of a millisecond beyond the bound of one exchange."""
    ways_ns = [(300_000 + 1_000 * (number % 97), 350_000) for number in range(2 * EDGE + 60)]
    exchanges = drifting(7 * S, 5e-5, ways_ns, every_ns=10 * S)
    line = clock_line(exchanges)
    assert line.error_ns < tightest(exchanges).error_ns + 100_000
    middle_ns = BEGIN_NS + 300 * S
    assert abs(int(line.offsets_ns(np.array([middle_ns]))[0]) - (7 * S + 15_000_000)) < 100_000


def test_a_clock_that_is_set_widens_the_bound():
    """By what the exchanges between contradict the line."""
    ways_ns = [(100_000, 100_000)] * (2 * EDGE + 8)
    exchanges = drifting(0, 0.0, ways_ns, every_ns=S)
    stepped = [replace_node(each, 5_000_000 * (EDGE < number < EDGE + 5)) for number, each in enumerate(exchanges)]
    assert 5_000_000 <= clock_line(stepped).error_ns <= 5_200_001


def replace_node(each: ClockExchange, by_ns: int) -> ClockExchange:
    return ClockExchange(each.asked_ns, each.node_ns + by_ns, each.answered_ns)


def test_stamps_of_a_drifting_node_are_moved_and_durations_stay():
    """Those of its workers alone; a time that the plan has set stays."""
    exchanges = drifting(3 * S, 5e-5, [(1_000, 1_000)] * (2 * EDGE + 20), every_ns=10 * S)
    (node,) = node_times({"clocks-0.log": [NodeClock("east", (1,), exchanges[0].offset_ns), *exchanges]})
    late_ns = BEGIN_NS + 190 * S
    requests = replace(
        unknown_requests(3),
        index=np.arange(3),
        worker=np.array([0, 1, 1]),
        scheduled_ns=np.full(3, late_ns - 5),
        dispatch_ns=np.full(3, late_ns),
        submit_ns=np.full(3, late_ns + 10),
        end_ns=np.array([late_ns + S, late_ns + S, -1]),
        chunk_ns=np.full(2, late_ns + 20),
        chunk_start=np.array([0, 1, 2, 2]),
    )
    moved = on_run_time(requests, [node], scheduled=np.array([True, True, False]))
    by_ns = moved.dispatch_ns - requests.dispatch_ns
    assert [0, 9_500_000] == [by_ns[0], round(by_ns[1], -5)]
    for name in ("submit_ns", "scheduled_ns"):
        assert (getattr(moved, name) - getattr(requests, name)).tolist()[2] == by_ns[2]
    assert [0, 0, by_ns[2]] == (moved.scheduled_ns - requests.scheduled_ns).tolist()
    assert [0, by_ns[1]] == (moved.chunk_ns - requests.chunk_ns).tolist()
    assert -1 == moved.end_ns[2]
    assert [0, node.line.error_ns, node.line.error_ns] == clock_errors_ns(requests, [node]).tolist()
