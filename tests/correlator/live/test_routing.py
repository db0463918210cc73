"""Spans of a trace that reach several shards of a watch: said within two minutes, and in the report."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import count

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import NOON, S, call, engine, export, gateway

from sidelight.correlator.live.reasons import ELSEWHERE, explain_split
from sidelight.correlator.live.requests import SpanRequests
from sidelight.correlator.replay import Replay
from sidelight.scraper.spans.log import ExportRecord

SHARDS = 2
PER_S = 4
LAG_S = 2  # of a client's batch behind its engine's
Route = Callable[[bytes, int], int]  # of a trace, by when it is sent, s


def spans_of(number: int) -> tuple[bytes, Sequence[Span]]:
    trace, clock_ms = (number + 1).to_bytes(16), 1e3 * number / PER_S
    about = {"trace": trace, "clock_ms": clock_ms}
    return trace, [call(**about), gateway("gate", "client", first_ms=260, **about), engine(parent="gate", **about)]


def sent(route: Route, *, until_s: int) -> list[tuple[int, ExportRecord]]:
    """Return the exports of requests, with the shard that each comes to, in the order in which they come."""
    came = []
    for number in range(PER_S * until_s):
        trace, spans = spans_of(number)
        for place, span in enumerate(spans):
            at_s = 1 + number / PER_S + LAG_S * (place == 0)
            came.append((route(trace, int(at_s)), export([span], at_s=at_s)))
    return sorted(came, key=lambda coming: coming[1].received_ns)


def by_trace(trace: bytes, _: int) -> int:
    return trace[-1] % SHARDS


def round_robin() -> Route:
    """Return a route in turns of several senders, whose spans come in any order."""
    turns, senders = [count(number) for number in range(3)], random.Random(7)
    return lambda _trace, _at_s: next(senders.choice(turns)) % SHARDS


def with_one_more_at(second: int) -> Route:
    """Return a route by trace over one shard, and from a second on over two."""
    return lambda trace, at_s: by_trace(trace, at_s) if at_s >= second else 0


def said(exports: Sequence[tuple[int, ExportRecord]], *, is_shard: bool = True) -> Iterator[tuple[int, str]]:
    """Yield when shard 0 says that spans reach others, s, and what."""
    shard = SpanRequests(nullcontext, is_shard=is_shard)
    waiting = [record for number, record in exports if number == 0]
    for at_s in range(150):
        now_ns = NOON + at_s * S
        while waiting and waiting[0].received_ns <= now_ns:
            shard.spans.take(waiting.pop(0))
        shard.ended(now_ns)
        if text := shard.count.breaking(now_ns).get(ELSEWHERE):
            yield at_s, text


def test_round_robin_is_said_within_two_minutes():
    """Each span reaches the next shard; what to set is named."""
    at_s, text = next(said(sent(round_robin(), until_s=140)))
    assert at_s <= 120
    assert "routing_key: traceID" in text


@pytest.mark.parametrize(
    ("route", "is_shard"),
    [(by_trace, True), (with_one_more_at(70), True), (round_robin(), False)],
    ids=["by trace", "a shard was added", "a watch that is alone"],
)
def test_nothing_is_said_of_other_traffic(route: Route, is_shard: bool):
    """Of traces in flight as a shard is added some are incomplete, fewer than 5 % of a minute's."""
    assert [] == list(said(sent(route, until_s=140), is_shard=is_shard))


def test_a_gateway_that_begins_new_traces_is_no_wrong_route():
    """The engine's request has no caller's span anywhere: nothing in front of the shards could bring it here."""
    requests = []
    for number in range(PER_S * 140):
        at_s = number / PER_S
        about = {"clock_ms": 1e3 * at_s}
        client, served = call(trace=b"c%015d" % number, **about), engine(parent="", trace=b"e%015d" % number, **about)
        requests += [(number % 2, export([client], at_s=at_s + 1)), ((number + 1) % 2, export([served], at_s=at_s + 1))]
    assert [] == list(said(requests))


def replayed(exports: Sequence[tuple[int, ExportRecord]], shards: Sequence[int]) -> Replay:
    replay = Replay([], [], nullcontext, shards=len(shards), is_shard=len(shards) == 1)
    for number, record in exports:
        if number in shards:
            replay.take(record, number)
    return replay


def test_the_report_of_a_shard_says_when():
    """By its logs alone."""
    misrouted = replayed(sent(round_robin(), until_s=140), [0]).replayed().misrouted
    assert "in the minute to 22:1" in misrouted
    assert "routing_key: traceID" in misrouted


def test_the_end_of_a_watch_is_no_wrong_route():
    """Spans of the last seconds would still have come."""
    exports = [coming for coming in sent(by_trace, until_s=70) if coming[1].received_ns < NOON + 62 * S]
    assert replayed(exports, [0]).replayed().misrouted == ""


def test_a_report_as_one_counts_the_traces_in_several_shards():
    """Of a shard that was added those in flight, whose spans came before and after; all are joined."""
    moved = replayed(sent(with_one_more_at(70), until_s=100), [0, 1]).replayed()
    assert (4 * 100, 4 * 100) == (moved.traces, len(moved.requests))
    assert {"trace"} == set(moved.parts.source.tolist())
    assert PER_S * LAG_S // SHARDS == moved.split
    assert "" == explain_split(moved.traces, moved.split)
    turned = replayed(sent(round_robin(), until_s=100), [0, 1]).replayed()
    assert {"trace"} == set(turned.parts.source.tolist())
    assert "routing_key: traceID" in explain_split(turned.traces, turned.split)
