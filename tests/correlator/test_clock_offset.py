"""The engine's clock against ours: between the bounds that causality sets, and with an error that holds the truth."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import log_of

from correlator.clock_offset import NO_BOUNDS, NO_PAIRS, ClockOffset, clock_offset, first_token_ns
from correlator.join import Joined
from loadgen.log import RequestLog

Ints = npt.NDArray[np.int64]
MS = 10**6
START_NS = 1_700_000_000 * 10**9


def seen(*rows: tuple[float, float, float]) -> RequestLog:
    """Requests by when they were sent, first answered and over, ms; below 0: never."""
    stamps = np.array([[START_NS + int(ms * MS) if ms >= 0 else -1 for ms in row] for row in rows], dtype=np.int64)
    submit_ns, first_output_ns, end_ns = stamps.reshape(-1, 3).T
    return log_of(len(stamps), submit_ns=submit_ns, first_output_ns=first_output_ns, end_ns=end_ns)


def told(*rows: tuple[float, float, float], ahead_ms: float = 0.0) -> Joined:
    """Spans by when the engine saw a request arrive, speak and end, ms; its clock is ahead. NaN: not told."""
    ahead_ns = START_NS + int(ahead_ms * MS)
    stamps = {
        "arrival_ns": [-1 if np.isnan(row[0]) else ahead_ns + int(row[0] * MS) for row in rows],
        "end_ns": [-1 if np.isnan(row[2]) else ahead_ns + int(row[2] * MS) for row in rows],
    }
    columns: dict[str, Any] = {}
    for one in fields(Joined):
        if one.name in stamps:
            columns[one.name] = np.array(stamps[one.name], dtype=np.int64)
        elif one.name.endswith("_ms"):
            columns[one.name] = np.full(len(rows), np.nan)
        else:
            columns[one.name] = np.full(len(rows), "", dtype=np.object_)
    columns["ttft_ms"] = np.array([row[1] - row[0] for row in rows])
    return Joined(**columns)


@pytest.mark.parametrize("ahead_ms", [0.0, 250.0, -3_600_000.0])
def test_the_tightest_bounds_of_all_requests_count(ahead_ms: float):
    """One took 1 ms on its way in, another 3 ms on its way out: the middle of -1 and 3, and half of their distance."""
    found = clock_offset(seen((0, 60, 100), (10, 63, 120)), told((1, 50, 90), (15, 60, 110), ahead_ms=ahead_ms))

    assert ClockOffset(offset_ns=round((1 - ahead_ms) * MS), error_ns=2 * MS, pairs=2) == found


def test_the_end_of_a_reply_bounds_it_too():
    """Of a reply in one piece there is no first output."""
    assert ClockOffset(offset_ns=0, error_ns=2 * MS, pairs=1) == clock_offset(seen((0, -1, 100)), told((2, 50, 98)))


@pytest.mark.parametrize(
    ("requests", "spans", "reason"),
    [
        (seen(), told(), NO_PAIRS),
        (seen((0, 60, 100)), told((np.nan, np.nan, np.nan)), NO_PAIRS),
        (seen((0, -1, -1)), told((1, 50, 90)), NO_BOUNDS),
        (
            seen((0, 60, 100), (1000, 1060, 1100)),
            told((1, 50, 90), (901, 950, 990)),
            (
                "its stamps contradict each other by 89 ms: its clock was set during the run, or several engines' "
                "clocks differ"
            ),
        ),
    ],
)
def test_what_cannot_be_known_has_a_reason(requests: RequestLog, spans: Joined, reason: str):
    found = clock_offset(requests, spans)
    assert (None, None, reason) == (found.offset_ns, found.error_ns, found.reason)


def test_bounds_that_contradict_each_other_by_little_are_an_error_of_that_size():
    """A stamp of ours was late by 4 ms: the offset is between the two."""
    found = clock_offset(seen((4, 60, 100), (10, 61, 120)), told((0, 60, 90), (12, 60, 110)))
    assert ClockOffset(offset_ns=2 * MS, error_ns=2 * MS, pairs=2) == found


def test_a_span_that_lies_does_not_move_the_clock():
    """One of twelve is an hour off: it is left out, counted, and what the others say stands."""
    sent = [1000.0 * number for number in range(12)]
    requests = seen(*((at, at + 60, at + 100) for at in sent))
    spans = told(
        *((at + 1 + (3_600_000 if at == 0 else 0), at + 50 + (3_600_000 if at == 0 else 0), at + 90) for at in sent)
    )

    assert ClockOffset(offset_ns=(10 - 1) * MS // 2, error_ns=11 * MS // 2, pairs=11, left_out=1) == clock_offset(
        requests, spans
    )


def test_a_first_token_is_known_with_arrival_and_ttft():
    assert [START_NS + 50 * MS, -1, -1] == first_token_ns(told((1, 50, 90), (np.nan, 50, 90), (1, np.nan, 90))).tolist()


WAYS_MS = st.lists(st.tuples(st.floats(0, 500), st.floats(0, 500)), min_size=1, max_size=20)


@given(WAYS_MS, st.integers(-(10**7), 10**7))
def test_the_truth_is_never_further_away_than_the_error(ways_ms: list[tuple[float, float]], ahead_ms: int):
    """Whatever the ways in and out, alike or not."""
    sent = [1000.0 * number for number in range(len(ways_ms))]
    requests = seen(*((at, at + go + 100 + back, at + 950) for at, (go, back) in zip(sent, ways_ms, strict=True)))
    spans = told(
        *((at + go, at + go + 100, np.nan) for at, (go, _) in zip(sent, ways_ms, strict=True)), ahead_ms=ahead_ms
    )

    found = clock_offset(requests, spans)

    assert found.offset_ns is not None
    assert found.error_ns is not None
    assert abs(found.offset_ns + ahead_ms * MS) <= found.error_ns + 10
