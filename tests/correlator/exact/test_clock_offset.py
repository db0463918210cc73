"""The engine's clock against ours: between the bounds that causality sets, with an error that covers the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import log_of

from sidelight.correlator.exact.clock_offset import (
    NO_AGREEMENT,
    NO_BOUNDS,
    NO_PAIRS,
    ClockOffset,
    clock_offsets,
    first_token_ns,
)
from sidelight.correlator.exact.table import Joined, unjoined
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.nodes import ClockLine, NodeClock, NodeTime

Ints = npt.NDArray[np.int64]
MS = 10**6
START_NS = 1_700_000_000 * 10**9


def seen(*rows: tuple[float, float, float], url: Any = "http://engine") -> RequestLog:
    """Return requests by when they were sent, first answered and ended, ms; below 0: never."""
    stamps = np.array([[START_NS + int(ms * MS) if ms >= 0 else -1 for ms in row] for row in rows], dtype=np.int64)
    submit_ns, first_output_ns, end_ns = stamps.reshape(-1, 3).T
    return log_of(len(stamps), submit_ns=submit_ns, first_output_ns=first_output_ns, end_ns=end_ns, endpoint_url=url)


def traced(*rows: tuple[float, float, float], ahead_ms: float | Sequence[float] = 0.0, clock: Any = "") -> Joined:
    """Return spans by when the engine saw a request arrive, answer and end, ms; its clock is ahead. NaN: unknown."""
    at_ms, first_ms, end_ms = np.array(rows, dtype=np.float64).reshape(-1, 3).T
    joined = unjoined(len(rows))
    ahead_ns = (np.broadcast_to(ahead_ms, len(rows)) * MS).astype(np.int64)
    for column, ms in ((joined.arrival_ns, at_ms), (joined.end_ns, end_ms)):
        known = np.isfinite(ms)
        column[known] = START_NS + (ms[known] * MS).astype(np.int64) + ahead_ns[known]
    joined.ttft_s[:], joined.clock[:] = (first_ms - at_ms) / 1e3, clock
    return joined


def only(requests: RequestLog, joined: Joined) -> ClockOffset:
    """Return the clock of the only engine."""
    (offset,) = clock_offsets(requests, joined).by_engine.values()
    return offset


@pytest.mark.parametrize("ahead_ms", [0.0, 250.0, -3_600_000.0])
def test_the_tightest_bounds_of_all_requests_count(ahead_ms: float):
    """One took 1 ms to the engine, another 3 ms back: the middle of -1 and 3, and half of their distance."""
    offset = only(seen((0, 60, 100), (10, 63, 120)), traced((1, 50, 90), (15, 60, 110), ahead_ms=ahead_ms))

    assert ClockOffset(offset_ns=round((1 - ahead_ms) * MS), error_ns=2 * MS, pairs=2) == offset


def test_the_error_of_a_nodes_clock_is_added():
    """To the requests that its workers stamped, and to the whole offset; the offset itself stays."""
    requests, joined = seen((0, 60, 100), (10, 63, 120)), traced((1, 50, 90), (15, 60, 110))
    requests = replace(requests, worker=np.array([0, 1]))
    line = ClockLine(at_ns=(0, 1), offset_ns=(0, 0), error_ns=3 * MS)
    node = NodeTime(clock=NodeClock("east", (1,), 0), line=line)
    offsets = clock_offsets(requests, joined, nodes=[node])
    assert [2 * MS, 5 * MS] == offsets.error_ns.tolist()
    assert [ClockOffset(offset_ns=MS, error_ns=5 * MS, pairs=2)] == [*offsets.by_engine.values()]


@pytest.mark.parametrize(
    ("ahead_ms", "offset_ms", "error_ms"),
    [
        (0.0, 0.0, 160.0),  # 1 ms on its way in, 160 in a gateway on its way out: the middle would be 79.5
        (50.0, 0.0, 110.0),  # another machine at the end of a tunnel: 0 is possible, and so is its true -50
        (-30.0, 109.5, 80.5),  # the clock cannot be ours
    ],
)
def test_a_clock_that_may_be_ours_is_0_where_it_can_be(ahead_ms: float, offset_ms: float, error_ms: float):
    """Of an engine that was asked at an address of this machine; the error is what the stamps bound, and holds."""
    requests, spans = seen((0, 220, 300)), traced((1, 60, 140), ahead_ms=ahead_ms)
    (offset,) = clock_offsets(requests, spans, ["http://engine"]).by_engine.values()
    assert ClockOffset(offset_ns=round(offset_ms * MS), error_ns=round(error_ms * MS), pairs=1) == offset
    assert -ahead_ms == pytest.approx(offset.offset_ns / MS, abs=offset.error_ns / MS)  # type: ignore[operator]
    (elsewhere,) = clock_offsets(requests, spans, ["http://other"]).by_engine.values()
    assert elsewhere.offset_ns != 0


def test_the_end_of_a_reply_bounds_it_too():
    """Of a reply in one piece there is no first output."""
    assert ClockOffset(offset_ns=0, error_ns=2 * MS, pairs=1) == only(seen((0, -1, 100)), traced((2, 50, 98)))


@pytest.mark.parametrize(
    ("requests", "spans", "reason"),
    [
        (seen(), traced(), NO_PAIRS),
        (seen((0, 60, 100)), traced((np.nan, np.nan, np.nan)), NO_PAIRS),
        (seen((0, -1, -1)), traced((1, 50, 90)), NO_BOUNDS),
        (seen((0, 60, 100)), traced((1, 50, 121)), NO_AGREEMENT),
        (
            seen((0, 60, 100), (1000, 1060, 1100)),
            traced((1, 50, 90), (901, 950, 990)),
            (
                "its stamps contradict each other by 89 ms: its clock was set during the run, or several engines are "
                "behind it whose spans have no service.instance.id"
            ),
        ),
    ],
)
def test_what_cannot_be_known_has_a_reason(requests: RequestLog, spans: Joined, reason: str):
    offset = only(requests, spans)
    assert (None, None, reason) == (offset.offset_ns, offset.error_ns, offset.reason)


def test_bounds_that_contradict_each_other_by_little_are_an_error_of_that_size():
    """One of our stamps was late by 4 ms: the offset lies between the two."""
    offset = only(seen((4, 60, 100), (10, 61, 120)), traced((0, 60, 90), (12, 60, 110)))
    assert ClockOffset(offset_ns=2 * MS, error_ns=2 * MS, pairs=2) == offset


def test_a_wrong_span_does_not_move_the_clock():
    """One of twelve is an hour off: it is left out and counted; the others decide."""
    sent = [1000.0 * number for number in range(12)]
    requests = seen(*((at, at + 60, at + 100) for at in sent))
    spans = traced(
        *((at + 1 + (3_600_000 if at == 0 else 0), at + 50 + (3_600_000 if at == 0 else 0), at + 90) for at in sent)
    )

    assert ClockOffset(offset_ns=(10 - 1) * MS // 2, error_ns=11 * MS // 2, pairs=11, left_out=1) == only(
        requests, spans
    )


def test_a_first_token_is_known_with_arrival_and_ttft():
    assert [START_NS + 50 * MS, -1, -1] == first_token_ns(
        traced((1, 50, 90), (np.nan, 50, 90), (1, np.nan, 90))
    ).tolist()


@pytest.mark.parametrize(
    ("url", "clock", "names"),
    [
        (["http://a", "http://b"] * 3, "", ["http://a", "http://b"]),
        ("http://gateway", ["one", "two"] * 3, ["one at http://gateway", "two at http://gateway"]),
        # Processes of two machines that have the same number, each behind a URL of its own.
        (["http://a", "http://b"] * 3, "7", ["7 at http://a", "7 at http://b"]),
    ],
    ids=["by URL", "by resource", "by both"],
)
def test_each_engine_has_its_own_clock(url: Any, clock: Any, names: list[str]):
    """Two of them, 5 s apart: each from its own requests, and each request uses its engine's."""
    sent = [100.0 * number for number in range(6)]
    requests = seen(*((at, at + 60, at + 100) for at in sent), url=url)
    spans = traced(*((at + 2, at + 56, at + 90) for at in sent), ahead_ms=[0.0, 5000.0] * 3, clock=clock)

    offsets = clock_offsets(requests, spans)

    near = ClockOffset(offset_ns=MS, error_ns=3 * MS, pairs=3)
    far = ClockOffset(offset_ns=-4999 * MS, error_ns=3 * MS, pairs=3)
    assert dict(zip(names, (near, far), strict=True)) == offsets.by_engine
    assert [MS, -4999 * MS] * 3 == offsets.offset_ns.tolist()
    assert [3 * MS] * 6 == offsets.error_ns.tolist()


def test_an_engine_that_contradicts_itself_does_not_cost_the_other_its_clock():
    """Nor does an engine with a single request get another's error."""
    requests = seen((0, 60, 100), (10, 90, 120), (1000, 1060, 1100), (2000, 2060, 2100), url=["a", "b", "c", "c"])
    spans = traced((1, 58, 90), (15, 60, 110), (1001, 1050, 1090), (1901, 1950, 1990))

    offsets = clock_offsets(requests, spans)

    errors = {name: offset.error_ns for name, offset in offsets.by_engine.items()}
    assert {"a": int(1.5 * MS), "b": int(7.5 * MS), "c": None} == errors
    assert [False, False, True, True] == np.isnan(offsets.offset_ns).tolist()


def test_engines_without_an_instance_id_contradict_each_other():
    """Behind one URL: nothing is guessed, and the reason names the attribute that would distinguish them."""
    sent = [100.0 * number for number in range(6)]
    requests = seen(*((at, at + 60, at + 100) for at in sent))
    offset = only(requests, traced(*((at + 2, at + 56, at + 90) for at in sent), ahead_ms=[0.0, 5000.0] * 3))
    assert offset.offset_ns is None
    assert "several engines are behind it whose spans have no service.instance.id" in offset.reason


WAYS_MS = st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), min_size=1, max_size=20)


@given(st.lists(st.tuples(WAYS_MS, st.integers(-599_000, 599_000)), min_size=1, max_size=4), st.randoms())
def test_each_truth_is_within_its_engines_error(engines: list[tuple[list[tuple[float, float]], int]], chance: Random):
    """However many engines, whatever their clocks, and in whatever order their requests come."""
    rows = [(number, way, ahead_ms) for number, (ways, ahead_ms) in enumerate(engines) for way in ways]
    chance.shuffle(rows)
    sent = [1000.0 * number for number in range(len(rows))]
    requests = seen(*((at, at + go + 100 + back, at + 1150) for at, (_, (go, back), _) in zip(sent, rows, strict=True)))
    spans = traced(
        *((at + go, at + go + 100, np.nan) for at, (_, (go, _), _) in zip(sent, rows, strict=True)),
        ahead_ms=[ahead_ms for _, _, ahead_ms in rows],
        clock=[str(number) for number, _, _ in rows],
    )

    offsets = clock_offsets(requests, spans)

    assert [len(ways) for ways, _ in engines] == [
        offsets.by_engine[f"{number} at http://engine"].pairs for number in range(len(engines))
    ]
    off_ns = offsets.offset_ns + np.array([ahead_ms * MS for _, _, ahead_ms in rows])
    assert (np.abs(off_ns) <= offsets.error_ns + 10).all()


@given(st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), min_size=10, max_size=40), st.data())
def test_one_in_ten_wrong_by_seconds_do_not_move_the_clock(ways_ms: list[tuple[float, float]], data: st.DataObject):
    """Whether they agree with each other or not: the others decide, and these are counted."""
    lies_ms = st.one_of(st.integers(-600_000, -2200), st.integers(2200, 600_000))
    lies = data.draw(st.lists(lies_ms, min_size=1, max_size=len(ways_ms) // 10))
    ahead_ms = lies + [0] * (len(ways_ms) - len(lies))
    sent = [1000.0 * number for number in range(len(ways_ms))]
    requests = seen(*((at, at + go + 100 + back, at + 1150) for at, (go, back) in zip(sent, ways_ms, strict=True)))
    spans = traced(
        *((at + go, at + go + 100, np.nan) for at, (go, _) in zip(sent, ways_ms, strict=True)), ahead_ms=ahead_ms
    )

    offset = only(requests, spans)

    assert (len(ways_ms) - len(lies), len(lies)) == (offset.pairs, offset.left_out)
    assert abs(offset.offset_ns) <= offset.error_ns + 10


@pytest.mark.parametrize("ttft_ms", [1e13, 1e21, -1e21, np.inf, np.nan])
def test_a_first_token_later_than_any_stamp_is_unknown(ttft_ms: float):
    assert [-1] == first_token_ns(traced((0, ttft_ms, 90))).tolist()
