"""TensorRT-LLM's `/perf_metrics` and its clock read from raw replies, as documented, odd and hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.rundir.stats import Missing
from sidelight.scraper import perf_metrics
from sidelight.scraper.perf_metrics import (
    ReplyRecord,
    SteadyClock,
    TimingLog,
    clock_reading,
    read_log,
    record_of,
    timings,
)
from sidelight.scraper.targets.scrape import Scrape, clock_of

URL = "http://engine.test:8000/perf_metrics"
CLOCK = "http://engine.test:8000/steady_clock_offset"
T0_NS = 1_700_000_000 * 10**9
# Their clock began 1,000 s before ours says T0; the reply was 1 ms on its way to and fro, and 200 ms there.
EXCHANGE = {"receive_ts": 1000.0005, "transmit_ts": 1000.2005}
TIMES = {
    "server_arrival_time": 1001.0,
    "arrival_time": 1001.002,
    "first_scheduled_time": 1001.5,
    "first_token_time": 1002.0,
    "server_first_token_time": None,
    "last_token_time": 1004.0,
}


def reply(url: str, body: object, *, error: str = "", took_ms: int = 201) -> ReplyRecord:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    end_ns = T0_NS + took_ms * 10**6
    scrape = Scrape(url=url, tick_ns=0, request_ns=T0_NS, response_ns=end_ns, status=200, body=raw, error=error)
    return record_of(scrape)


def item(**changes: Any) -> dict[str, Any]:
    return {"request_id": 7, "perf_metrics": {"first_iter": 1, "timing_metrics": {**TIMES, **changes}}}


def test_a_record_by_our_clock():
    """Stamps moved by the clock's offset, durations as the engine has them; arrival is that at the HTTP server."""
    read = timings([reply(CLOCK, EXCHANGE), reply(URL, [item()])])
    assert (1, {}, {}) == (len(read), read.refused, read.failures)
    assert [T0_NS + 10**9] == read.arrival_ns.tolist()
    assert [T0_NS + 2 * 10**9] == read.first_token_ns.tolist()
    assert [T0_NS + 4 * 10**9] == read.last_token_ns.tolist()
    assert [500_000] == read.error_ns.tolist()
    assert (0.498, 0.5, 2.0) == pytest.approx((read.queue_s[0], read.prefill_s[0], read.decode_s[0]))
    assert (1.0, 3.0) == pytest.approx((read.ttft_s[0], read.e2e_s[0]))
    assert {CLOCK: SteadyClock(offset_ns=T0_NS - 1000 * 10**9, error_ns=500_000)} == read.clocks


def test_without_the_servers_arrival_the_engines_stands_for_it():
    """Where it is null, absent, or after the engine's own."""
    odd = [item(server_arrival_time=None), item(server_arrival_time=1001.003), item()]
    del odd[2]["perf_metrics"]["timing_metrics"]["server_arrival_time"]
    read = timings([reply(CLOCK, EXCHANGE), reply(URL, odd)])
    assert [T0_NS + 1_002_000_000] * 3 == read.arrival_ns.tolist()
    assert np.allclose(read.ttft_s, read.queue_s + read.prefill_s)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (item(first_token_time=0.0), perf_metrics.DISORDER),
        (item(first_scheduled_time=1003.0), perf_metrics.DISORDER),
        (item(server_arrival_time=None, arrival_time=-5.0), perf_metrics.DISORDER),
        (item(last_token_time=1e300), perf_metrics.MALFORMED),
        (item(arrival_time=None), perf_metrics.MALFORMED),
        (item(arrival_time="1001"), perf_metrics.MALFORMED),
        ({"request_id": 1}, perf_metrics.MALFORMED),
        ({"request_id": 1, "perf_metrics": None}, perf_metrics.MALFORMED),
        (["a", "list"], perf_metrics.MALFORMED),
        (17, perf_metrics.MALFORMED),
        ({**item(), "ctx_request_id": 3}, perf_metrics.SHARED),
        (
            {"ctx_server": "a", "gen_server": "b", "ctx_perf_metrics": {}, "gen_perf_metrics": {}},
            perf_metrics.SHARED,
        ),
    ],
)
def test_what_cannot_be_used_is_counted_by_its_reason(record: object, reason: str):
    """The records beside it are used."""
    read = timings([reply(CLOCK, EXCHANGE), reply(URL, [item(), record, item()])])
    assert (2, {reason: 1}) == (len(read), read.refused)


def test_readings_that_failed_are_counted():
    """By their error; a body other than a list is one of them."""
    replies = [
        reply(CLOCK, EXCHANGE),
        reply(URL, b"", error="HTTP 500"),
        reply(URL, b"", error="HTTP 500"),
        *(reply(URL, body) for body in (b"[{", b"{}", b"\xff\xfe", b"[" * 100_000)),
        reply(URL, [item()]),
    ]
    read = timings(replies)
    assert (1, {"HTTP 500": 2, "not a list of records, or cut off": 4}) == (len(read), read.failures)


@given(st.binary(max_size=200) | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_no_bytes_are_too_odd(body: bytes | str):
    """Whatever comes, as records or as the clock: something is read, or counted."""
    raw = body.encode() if isinstance(body, str) else body
    read = timings([reply(CLOCK, raw), reply(URL, raw), reply(URL, b"[" + raw + b"]")])
    assert 0 == len(read)
    assert isinstance(read.clocks[CLOCK], Missing)


@pytest.mark.parametrize(
    ("exchanges", "reason"),
    [
        ([], perf_metrics.NO_CLOCK),
        ([reply(CLOCK, b"", error="HTTP 404")], "its clock is not known (/steady_clock_offset): HTTP 404"),
        ([reply(CLOCK, {"receive_ts": None, "transmit_ts": 1.0})], perf_metrics.MALFORMED),
        ([reply(CLOCK, {"receive_ts": 1e300, "transmit_ts": 1e300})], perf_metrics.MALFORMED),
        ([reply(CLOCK, {"receive_ts": 2.0, "transmit_ts": 1.0})], "further apart than the reply took"),
        ([reply(CLOCK, EXCHANGE, took_ms=100)], "further apart than the reply took"),
        ([reply("http://other.test/steady_clock_offset", EXCHANGE)], perf_metrics.NO_CLOCK),
    ],
)
def test_without_a_clock_no_record_is_used(exchanges: list[ReplyRecord], reason: str):
    """Each is refused with the reason: nothing is joined by guess."""
    read = timings([*exchanges, reply(URL, [item(), item()])])
    assert 0 == len(read)
    ((why, count),) = read.refused.items()
    assert reason in why
    assert 2 == count


def test_the_reading_of_the_shortest_way_counts():
    """Its error is half of that way, or by how much another reading contradicts it: clocks drift."""
    slow = {"receive_ts": 1000.05, "transmit_ts": 1000.25}
    read = timings([reply(CLOCK, slow, took_ms=300), reply(CLOCK, EXCHANGE), reply(URL, [])])
    assert SteadyClock(offset_ns=T0_NS - 1000 * 10**9, error_ns=500_000) == read.clocks[CLOCK]
    drifted = {"receive_ts": 1000.0105, "transmit_ts": 1000.2105}
    later = clock_reading(reply(CLOCK, drifted))
    assert SteadyClock(offset_ns=T0_NS - 1000 * 10**9 - 10**7, error_ns=500_000) == later
    read = timings([reply(CLOCK, EXCHANGE), reply(CLOCK, drifted), reply(URL, [])])
    known = read.clocks[CLOCK]
    assert 10**7 - 500_000 == known.error_ns


@given(
    zero_ns=st.integers(0, 10**18),
    there_ns=st.integers(0, 10**9),
    ways_ns=st.tuples(st.integers(0, 10**8), st.integers(0, 10**8)),
)
def test_the_offset_is_right_within_its_error(zero_ns: int, there_ns: int, ways_ns: tuple[int, int]):
    """However the round trip divides into there and back; stamps are floats of seconds, exact to microseconds."""
    receive_ns = T0_NS + ways_ns[0] - zero_ns
    answer = {"receive_ts": receive_ns / 1e9, "transmit_ts": (receive_ns + there_ns) / 1e9}
    raw = json.dumps(answer).encode()
    end_ns = T0_NS + sum(ways_ns) + there_ns + 1000
    known = clock_reading(
        record_of(Scrape(url=CLOCK, tick_ns=0, request_ns=T0_NS, response_ns=end_ns, status=200, body=raw))
    )
    assert abs(known.offset_ns - zero_ns) <= known.error_ns + 1000


def test_two_engines_have_clocks_of_their_own():
    """A page is read by the clock beside it."""
    other = "http://other.test/v1/perf_metrics"
    exchange = {"receive_ts": 2000.0005, "transmit_ts": 2000.2005}
    replies = [reply(CLOCK, EXCHANGE), reply(clock_of(other), exchange), reply(URL, [item()]), reply(other, [item()])]
    read = timings(replies)
    assert {URL: T0_NS + 10**9, other: T0_NS - 999 * 10**9} == dict(
        zip(read.url.tolist(), read.arrival_ns.tolist(), strict=True)
    )


@pytest.mark.parametrize(
    ("url", "clock"),
    [
        (URL, CLOCK),
        ("https://u:p@h/a/perf_metrics/?x=1#y", "https://u:p@h/a/steady_clock_offset"),
        ("http://h/metrics", ""),
        ("http://h/perf_metrics/metrics", ""),
        ("http://h", ""),
        ("http://[", ""),
    ],
)
def test_where_the_clock_stands(url: str, clock: str):
    """Beside the page, and nowhere for other pages."""
    assert clock == clock_of(url)


def test_a_log_gives_replies_back_but_empty_lists(tmp_path: Path):
    """Raw, with their errors; empty replies take no room."""
    log = TimingLog(tmp_path / "timings-0.log")
    replies = [
        Scrape(url=URL, tick_ns=0, request_ns=1, response_ns=2, status=200, body=b'[{"a":1}]'),
        Scrape(url=URL, tick_ns=0, request_ns=3, response_ns=4, status=200, body=b" [ ]\n".replace(b" ]", b"]")),
        Scrape(url=URL, tick_ns=0, request_ns=5, response_ns=6, status=500, error="HTTP 500"),
    ]
    assert ["", "", "HTTP 500"] == [log.append(reply) for reply in replies]
    log.close()
    records = list(read_log(tmp_path / "timings-0.log"))
    assert [record_of(replies[0]), record_of(replies[2])] == records
    assert [b'[{"a":1}]', b""] == [record.body() for record in records]
