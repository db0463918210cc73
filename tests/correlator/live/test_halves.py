"""One request in two traces: the client's span in one, in the other what is behind a gateway that passes none on."""

from __future__ import annotations

import base64
import json
import lzma
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import MS, NOON, SERVER, S, call, engine, export, span

from sidelight.correlator.live.breakdown import EndedRequests
from sidelight.correlator.live.requests import MOST_HALVES, WAIT_S, SpanRequests
from sidelight.correlator.live.traces import TracedRequest
from sidelight.scraper.spans.log import ExportRecord, packed

ROUTERS = Path(__file__).parents[2] / "data" / "router_spans.jsonl.xz"
SETTLED_S = 6.5


def watched(
    exports: Iterable[ExportRecord], *, until_s: float = 60.0
) -> tuple[list[TracedRequest], list[EndedRequests]]:
    """The requests of exports as a watch finds them, looking twice a second; nothing is left at the end."""
    requests = SpanRequests(nullcontext)
    waiting = sorted(exports, key=lambda item: item.received_ns)
    finished: list[TracedRequest] = []
    ended: list[EndedRequests] = []
    for half_s in range(round(2 * until_s)):
        now_ns = NOON + half_s * S // 2
        while waiting and waiting[0].received_ns <= now_ns:
            requests.spans.take(waiting.pop(0))
        for item, all_of_it in zip((finished, ended), requests.ended(now_ns), strict=True):
            item.extend(all_of_it)  # type: ignore[arg-type]
    for item, all_of_it in zip(
        (finished, ended), requests.ended(NOON + round(until_s * S), all_of_it=True), strict=True
    ):
        item.extend(all_of_it)  # type: ignore[arg-type]
    return finished, ended


def replied(sent: Span, response_id: str, name: str = "gen_ai.response.id") -> Span:
    sent.attributes.add(key=name).value.string_value = response_id
    return sent


def traffic(count: int, *, per_s: float = 4.0, seed: int = 0, ahead_ms: float = 0.0) -> list[ExportRecord]:
    """So many requests through a gateway that begins another trace; each side exports its own once a second.

    The queue's time is the request's number in ms, so that a breakdown shows whose span it is of.
    """
    rng = np.random.default_rng(seed)
    clients: dict[int, list[Span]] = {}
    engines: dict[int, list[Span]] = {}
    at_ms = 0.0
    for number in range(count):
        at_ms += float(rng.exponential(1e3 / per_s))
        prefill_ms, decode_ms, way_in_ms, way_out_ms = rng.uniform((20, 300, 2, 1), (80, 900, 3, 2)).tolist()
        ttft_ms = number + prefill_ms
        arrived_ms = at_ms + way_in_ms
        end_ms = arrived_ms + ttft_ms + decode_ms
        first_ms = way_in_ms + ttft_ms + way_out_ms
        whole = {"start_ms": at_ms, "end_ms": end_ms + way_out_ms, "trace": b"c%015d" % number}
        clients.setdefault(int(end_ms / 1e3) + 1, []).append(call("client", first_ms=first_ms, **whole))
        behind = {"start_ms": arrived_ms, "end_ms": end_ms, "trace": b"e%015d" % number, "clock_ms": ahead_ms}
        times = {"queue_ms": float(number), "prefill_ms": prefill_ms, "decode_ms": decode_ms, "ttft_ms": ttft_ms}
        sent = engine("engine", "router", e2e_ms=end_ms - arrived_ms, **times, **behind)
        engines.setdefault(int(end_ms / 1e3) + 3, []).append(sent)
    return [
        *(export(spans, at_s=at_s, service="users") for at_s, spans in clients.items()),
        *(export(spans, at_s=at_s, service="llm") for at_s, spans in engines.items()),
    ]


def parts_of(ended: Iterable[EndedRequests]) -> list[tuple[str, str, str]]:
    """Source, quality and why there is none, of each request."""
    rows = [
        row
        for item in ended
        for row in zip(item.parts.source.tolist(), item.parts.quality.tolist(), item.reason.tolist(), strict=True)
    ]
    return sorted(rows)


@pytest.mark.parametrize("ahead_ms", [0.0, 900.0])
def test_requests_without_a_common_id_are_joined_by_time(ahead_ms: float):
    """Each counts once, with its own engine's times whatever the engine's clock says, and its quality says how."""
    finished, ended = watched(traffic(60, ahead_ms=ahead_ms))
    assert 60 == len(finished)
    assert [("trace", "by_time", "")] * 60 == parts_of(ended)
    numbers = [
        (int(bytes.fromhex(trace_id)[1:]), round(1e3 * queue_s))
        for item in ended
        for trace_id, queue_s in zip(item.requests.trace_id.tolist(), item.parts.queue_s.tolist(), strict=True)
    ]
    assert [(number, number) for number in range(60)] == sorted(numbers)


def test_a_common_id_joins_where_times_would_not():
    """The reply's, which clients state and engines name their spans by; one request alone is enough, and exact."""
    sent = [
        export([replied(call("c", trace=b"c" * 16), "chatcmpl-1")], at_s=1),
        export([replied(engine("e", "x", trace=b"e" * 16), "chatcmpl-1", "gen_ai.request.id")], at_s=3),
    ]
    finished, ended = watched(sent)
    assert ["id"] == [request.joined for request in finished]
    assert [("trace", "exact", "")] == parts_of(ended)
    assert 0.05 == pytest.approx(float(ended[-1].parts.queue_s[0]))


def test_an_id_that_two_have_joins_neither():
    """Nor is the nearer one taken."""
    sent = [
        export([replied(call("c", trace=b"c%015d" % place), "chatcmpl-1") for place in range(2)], at_s=1),
        export([replied(engine("e", "x", trace=b"e" * 16), "chatcmpl-1", "gen_ai.request.id")], at_s=3),
    ]
    _, ended = watched(sent)
    assert ["no_client_span", "no_engine_span", "no_engine_span"] == [reason for _, _, reason in parts_of(ended)]


def test_a_gateway_that_begins_the_trace_has_its_part():
    """Its span is the outermost there: where clients' spans came without an engine's, it is a gateway's."""
    behind = {"trace": b"g" * 16}
    front = span(
        "POST", "front", kind=SERVER, start_ms=5, end_ms=990, attributes={"url.path": "/v1/completions"}, **behind
    )
    inner = call("inner", "front", first_ms=230, start_ms=45, end_ms=985, **behind)
    llm = replied(engine("e", "inner", **behind), "cmpl-1", "gen_ai.request.id")
    sent = [
        export([replied(call("c", trace=b"c" * 16), "cmpl-1")], at_s=1, service="users"),
        export([front, inner], at_s=1.2, service="gate"),
        export([llm], at_s=1.2, service="llm"),
    ]
    finished, ended = watched(sent)
    assert [("id", ["gate"])] == [(request.joined, [item.service for item in request.gateways]) for request in finished]
    (parts,) = (item.parts for item in ended)
    assert 0.070 == pytest.approx(float(parts.gateway_s[0]))  # 40 before its call, 230 in it, less the engine's 200
    assert b"c" * 16 == finished[0].trace_id


def test_a_gateway_that_a_request_begins_at_has_the_first_output_of_its_call():
    """LiteLLM, of a client without a trace: its server span states none, and the engine begins a trace of its own."""
    whole = {"start_ms": 0, "end_ms": 990, "trace": b"g" * 16}
    front = span("POST", "front", kind=SERVER, attributes={"url.path": "/v1/chat/completions"}, **whole)
    inner = call("inner", "front", first_ms=230, start_ms=45, end_ms=985, trace=b"g" * 16)
    llm = replied(engine("e", "x", trace=b"e" * 16), "cmpl-1", "gen_ai.request.id")
    sent = [
        export([replied(front, "cmpl-1"), inner], at_s=1.2, service="gate"),
        export([llm], at_s=1.2, service="llm"),
    ]
    _, ended = watched(sent)
    (item,) = ended
    first_ms = (item.requests.first_token_ns[0] - item.requests.submit_ns[0]) / MS
    assert 275 == first_ms  # 45 before its call, 230 in it
    assert 0.075 == pytest.approx(float(item.parts.gateway_s[0]))  # less the engine's 200


def test_halves_without_a_counterpart_are_given_out():
    """At once where only one side sends spans, and after WAIT_S where both do."""
    alone = SpanRequests(nullcontext)
    alone.spans.take(export([call("c", trace=b"c" * 16)]))
    assert [] == alone.ended(NOON + round(SETTLED_S * S))[0]
    (only,) = alone.ended(NOON + round(7.5 * S))[0]
    assert only.client is not None
    both = SpanRequests(nullcontext)
    both.spans.take(export([call("c", trace=b"c" * 16)]))
    both.spans.take(export([engine("e", "x", trace=b"e" * 16)]))
    assert [] == both.ended(NOON + round(7.5 * S))[0]
    assert {"halves": 2} == both.halves.sizes
    assert [] == both.ended(NOON + round((7.0 + WAIT_S) * S))[0]
    assert 2 == len(both.ended(NOON + round((8.0 + WAIT_S) * S))[0])
    assert {"halves": 0} == both.halves.sizes


def test_no_half_is_given_up_while_no_receiver_runs():
    """It is awaited from when there is one again."""
    requests = SpanRequests(nullcontext)
    requests.spans.take(export([call("c", trace=b"c" * 16)]))
    requests.spans.take(export([engine("e", "x", trace=b"e" * 16)]))
    requests.ended(NOON + 8 * S)
    requests.missed(NOON + 100 * S)
    assert [] == requests.ended(NOON + 101 * S)[0]
    assert 2 == len(requests.ended(NOON + round((100 + WAIT_S) * S))[0])


def test_what_waits_is_bounded():
    """However many halves come, those kept are MOST_HALVES of a side; what had to make room is given out."""
    requests = SpanRequests(nullcontext)
    count = 3 * MOST_HALVES
    spans = [call("c", trace=b"c%015d" % place) for place in range(count)]
    spans += [engine("e", "x", trace=b"e%015d" % place) for place in range(count)]
    requests.spans.take(export(spans))
    finished = requests.ended(NOON + 8 * S)[0]
    assert 2 * (count - MOST_HALVES) == len(finished)
    assert {"halves": 2 * MOST_HALVES} == requests.halves.sizes
    assert 2 * MOST_HALVES == len(requests.ended(NOON + 8 * S, all_of_it=True)[0])


def recorded(router: str) -> list[ExportRecord]:
    """What a real router and the engine behind it sent of one request, at NOON."""
    rows = [json.loads(line) for line in lzma.decompress(ROUTERS.read_bytes()).splitlines()]
    return [
        packed(row["received_ns"], row["via"], base64.b64decode(row["export"])) for row in rows if row["of"] == router
    ]


def test_sglang_router_leaves_one_request_in_two_traces():
    """It begins a trace at the engine. Its client, which states the reply's id, is joined with what is there."""
    exports = recorded("sglang-router")
    begin_ns = min(item.span.start_time_unix_nano for record in exports for item in record.spans())
    end_ns = max(item.span.end_time_unix_nano for record in exports for item in record.spans())
    client = replied(call("c", trace=b"c" * 16), "chatcmpl-a457738140384fcbbcd62957cec605ab")
    client.start_time_unix_nano, client.end_time_unix_nano = begin_ns - 2 * MS, end_ns + 2 * MS
    first = next(item for item in client.attributes if item.key == "gen_ai.response.time_to_first_chunk")
    first.value.double_value = 0.014
    sent = export([client], service="users-app")
    requests = SpanRequests(nullcontext)
    for item in (*exports, packed(exports[-1].received_ns, "grpc", sent.body())):
        requests.spans.take(item)
    finished, (ended,) = requests.ended(exports[-1].received_ns, all_of_it=True)
    assert ["id"] == [request.joined for request in finished]
    assert ["exact"] == ended.parts.quality.tolist()
    assert 0.010457852 == float(ended.parts.prefill_s[0])
    assert 0.014 - 0.01088737 == pytest.approx(float(np.nansum([ended.parts.network_s, ended.parts.gateway_s])))


def test_vllm_router_passes_the_trace_on():
    """So there is nothing to look for: the client's span and the engine's are in one trace."""
    exports = recorded("vllm-router")
    requests = SpanRequests(nullcontext)
    for item in exports:
        requests.spans.take(item)
    finished, (ended,) = requests.ended(exports[-1].received_ns, all_of_it=True)
    assert (["trace"], ["exact"]) == ([request.joined for request in finished], ended.parts.quality.tolist())
