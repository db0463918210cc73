"""Requests whose traces break: each is counted by its outermost span, and the service that breaks them is named.

By recordings of real gateways, and by spans made up.
"""

from __future__ import annotations

import base64
import json
import lzma
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import accumulate, permutations, product
from operator import itemgetter
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import SERVER, S, call, engine, export, gateway, sglang_node, span, two_pods

from sidelight.correlator.live.requests import SpanRequests
from sidelight.correlator.replay import Replay, Replayed
from sidelight.scraper.spans.log import ExportRecord, packed

DATA = Path(__file__).parents[2] / "data" / "broken_traces.jsonl.xz"
USERS = 110
PATH = {"url.path": "/v1/chat/completions"}
Sent = Sequence[tuple[float, str, Span]]  # when it came, s; the service that sent it


@dataclass
class Counted:
    """What a watch counted: requests with an outermost span by the source of their breakdown; why others have none."""

    sources: Counter[str] = field(default_factory=Counter)
    missing: Counter[str] = field(default_factory=Counter)
    broken: Mapping[tuple[str, str], int] = field(default_factory=dict)
    whole: int = 0
    breaking: Sequence[str] = ()

    @property
    def requests(self) -> int:
        return self.sources.total()


def exports(sent: Sent) -> list[ExportRecord]:
    return [
        export([sent_span], at_s=at_s, service=service) for at_s, service, sent_span in sorted(sent, key=itemgetter(0))
    ]


def counted(records: Sequence[ExportRecord], *, after_s: float = 60.0) -> Counted:
    """Let records come at their times, looked at twice a second, and as long after the last."""
    windows, counts = SpanRequests(nullcontext), Counted()
    records = sorted(records, key=lambda record: record.received_ns)
    now_ns, end_ns = records[0].received_ns, records[-1].received_ns + round(after_s * S)
    while now_ns < end_ns:
        while records and records[0].received_ns <= now_ns:
            windows.spans.take(records.pop(0))
        for ended in windows.ended(now_ns)[1]:
            counts.sources.update(ended.parts.source[ended.requests.status != ""].tolist())
            counts.missing.update(reason for reason in ended.reason.tolist() if reason)
        counts.breaking = list(windows.count.breaking(now_ns).values()) or counts.breaking
        now_ns += S // 2
    counts.broken, counts.whole = windows.count.broken, windows.count.whole
    assert 0 == windows.pending
    return counts


def replayed(records: Sequence[ExportRecord]) -> Replayed:
    replay = Replay([], [], nullcontext)
    for record in records:
        replay.take(record)
    return replay.replayed()


@pytest.fixture(scope="module")
def recorded() -> Mapping[str, list[ExportRecord]]:
    """The exports of one request through each gateway, in the order in which they came."""
    records: dict[str, list[ExportRecord]] = {}
    for line in lzma.decompress(DATA.read_bytes()).splitlines():
        row = json.loads(line)
        record = packed(row["received_ns"], row["via"], base64.b64decode(row["export"]))
        records.setdefault(row["gateway"], []).append(record)
    return records


def again(records: Sequence[ExportRecord], number: int) -> Iterator[ExportRecord]:
    """Give the exports of a recorded request as those of another, a second later each."""
    for record in records:
        export_ = ExportTraceServiceRequest.FromString(record.body())
        for scopes in export_.resource_spans:
            for sent in (sent for scope in scopes.scope_spans for sent in scope.spans):
                sent.trace_id = number.to_bytes(8) + sent.trace_id[8:]
                sent.start_time_unix_nano += number * S
                sent.end_time_unix_nano += number * S
        yield packed(record.received_ns + number * S, record.via, export_.SerializeToString())


def user(records: Sequence[ExportRecord], number: int) -> ExportRecord:
    """Give the span of the user of a recorded request, in a trace of its own: 5 ms before and after all of it."""
    spans = [received.span for record in records for received in record.spans()]
    sent = call(trace=b"user" + number.to_bytes(12), first_ms=100.0)
    sent.start_time_unix_nano = min(step.start_time_unix_nano for step in spans) - 5_000_000
    sent.end_time_unix_nano = max(step.end_time_unix_nano for step in spans) + 5_000_000
    came = export([sent], service="users-app")
    return packed(records[-1].received_ns, "grpc", came.body())


@pytest.mark.parametrize(
    ("gateway", "broken", "why"),
    [
        (
            "sglang-router",
            {("smg", "new_trace"): USERS},
            "smg begins a new trace instead of going on with that of the header traceparent",
        ),
        (
            "dynamo",
            {("dynamo-frontend", "new_trace"): USERS},
            "dynamo-frontend begins a new trace instead of going on with that of the header traceparent",
        ),
        ("vllm-router", {}, ""),
    ],
)
def test_a_real_gateway_that_breaks_traces_is_named(
    recorded: Mapping[str, list[ExportRecord]],
    gateway: str,
    broken: Mapping[tuple[str, str], int],
    why: str,
):
    """One of sglang-router, which begins a trace of its own, and of Dynamo, which does so for an odd header; beside
    one that only passes the header on. Live and in the report.
    """
    records = []
    for number in range(USERS):
        several = list(again(recorded[gateway], number))
        records += several if not broken else [*several, user(several, number)]
    counts = counted(records)
    assert (broken, USERS) == (counts.broken, counts.whole + sum(counts.broken.values()))
    assert all(why in text for text in counts.breaking)
    assert bool(why) == bool(counts.breaking)
    replay = replayed(sorted(records, key=lambda record: record.received_ns))
    assert (broken, counts.whole) == (replay.broken, replay.whole)


def split(
    number: int, *, at_s: float = 0.0, client_s: float = 0.0, engine_s: float = 0.0, whole_ms: float = 1000.0
) -> Sent:
    """Spans of a request whose client is in one trace, and its engine in another: each sends its own a while later."""
    times = {"start_ms": 1e3 * at_s, "end_ms": 1e3 * at_s + whole_ms}
    client = call(trace=b"user" + number.to_bytes(12), **times)
    served = engine(parent="", trace=b"engn" + number.to_bytes(12), e2e_ms=whole_ms - 10, **times)
    ended_s = at_s + whole_ms / 1e3
    return [(ended_s + client_s, "users-app", client), (ended_s + engine_s, "vllm", served)]


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(
    requests=st.lists(
        st.tuples(st.floats(0, 60), st.floats(0, 4.9), st.floats(0, 4.9), st.floats(200, 20_000)),
        min_size=1,
        max_size=40,
    )
)
def test_whichever_half_comes_first_it_is_one_request(requests: list[tuple[float, float, float, float]]):
    """By its client's span; its engine's is counted apart, once, with exporters that are up to 5 s apart."""
    sent: list[tuple[float, str, Span]] = []
    for number, (at_s, client_s, engine_s, whole_ms) in enumerate(requests):
        sent += split(number, at_s=at_s, client_s=client_s, engine_s=engine_s, whole_ms=whole_ms)
    counts = counted(exports(sent))
    assert (len(requests), len(requests)) == (counts.requests, sum(counts.broken.values()))


def test_a_gateway_in_the_clients_trace_is_named_where_the_engine_is_in_another():
    """It, or what is behind it, does not pass the header on."""
    sent: list[tuple[float, str, Span]] = []
    for number in range(100):
        trace = b"user" + number.to_bytes(12)
        sent += split(number, at_s=float(number))
        sent.append((number + 2.0, "gw", span("POST", "g", "client", trace=trace, kind=SERVER, attributes=PATH)))
    counts = counted(exports(sent))
    assert {("gw", "not_passed_on"): 100} == counts.broken
    (why,) = counts.breaking
    assert "gw, or what is behind it, does not pass the header traceparent on" in why


def test_a_few_traces_that_break_raise_no_alarm():
    """Nine of ten are whole: spans are lost now and then."""
    sent: list[tuple[float, str, Span]] = []
    for number in range(200):
        client, served = (sent_span for _, _, sent_span in split(number, at_s=float(number)))
        if number % 10:
            served.trace_id, served.parent_span_id = client.trace_id, client.span_id
        sent += [(number + 1.0, "app", client), (number + 1.0, "vllm", served)]
    counts = counted(exports(sent))
    assert (200, 180, {("", "not_passed_on"): 20}, ()) == (
        counts.requests,
        counts.whole,
        counts.broken,
        counts.breaking,
    )


def through_gateway(number: int, *, at_s: float) -> Sent:
    """Spans of a request whose gateway begins a new trace, in which it says its first output."""
    (_, _, client), (_, _, served) = split(number, at_s=at_s)
    gate = call("gate", kind=SERVER, trace=served.trace_id, start_ms=1e3 * at_s + 2, end_ms=1e3 * at_s + 998)
    served.parent_span_id = gate.span_id
    served.start_time_unix_nano += 5_000_000
    served.end_time_unix_nano -= 5_000_000
    return [(at_s + 4, "users-app", client), (at_s + 1, "gw", gate), (at_s + 1, "vllm", served)]


def test_a_gateways_trace_is_broken_down_from_there_on():
    """Also where its client's is counted beside it; a break is what has both."""
    sent = [sent_span for number in range(20) for sent_span in through_gateway(number, at_s=float(number))]
    counts = counted(exports(sent))
    assert ({"trace": 20, "none": 20}, {("gw", "new_trace"): 20}) == (dict(counts.sources), counts.broken)
    alone = counted(exports([sent_span for sent_span in sent if sent_span[1] != "users-app"]), after_s=3.0)
    assert ({"trace": 20}, {}) == (dict(alone.sources), dict(alone.broken))


def test_what_a_gateway_answered_itself_is_a_request_of_its_own():
    """From its cache, beside others that it passed on: it has no engine's span, and is none of theirs."""
    sent = [
        sent_span
        for number in range(10)
        for sent_span in through_gateway(number, at_s=float(number))
        if sent_span[1] != "users-app"
    ]
    sent += [(3.0, "gw", call("gate", kind=SERVER, trace=bytes([number]) * 16)) for number in range(1, 6)]
    counts = counted(exports(sent))
    assert (15, {}) == (counts.requests, dict(counts.broken))


def test_a_half_that_is_sent_again_after_a_minute_is_no_other():
    """Nor after its first one has been forgotten; the others are counted as before."""
    records = exports([(1.0, "", call()), (75.0, "", call()), (150.0, "", call(trace=b"other" + bytes(11)))])
    assert 2 == counted(records, after_s=120.0).requests


@pytest.mark.parametrize("late_s", [4, 20, 40])
@pytest.mark.parametrize("is_client_late", [True, False])
def test_a_half_that_comes_late_in_the_same_trace(late_s: int, *, is_client_late: bool):
    """A client's makes it a request; an engine's, six seconds after its request was counted, is not used."""
    halves = [call(), engine()]
    late, early = halves if is_client_late else halves[::-1]
    records = exports([(1.0, "", early), (1.0 + late_s, "", late)])
    source = "trace" if is_client_late or late_s == 4 else "none"
    assert {source: 1} == counted(records).sources
    assert [source] == replayed(records).parts.source.tolist()


def test_a_request_of_two_engines_waits_for_both_once_they_are_known():
    """By the first request whose spans of both came. A machine that both name has one clock for what lies between."""
    traces = [bytes([number]) * 16 for number in (1, 2)]
    pods = [two_pods(80, trace=trace) for trace in traces]

    def sent(spans: Sequence[Span], at_s: float, pod: str) -> ExportRecord:
        return export(spans, at_s=at_s, instance=pod, machine="node")

    records = [
        *(
            export([call(trace=trace, first_ms=340.0)], at_s=1.0 + at_s)
            for trace, at_s in zip(traces, (0, 5), strict=True)
        ),
        sent(pods[0][:1], 0.9, "prefill"),
        sent(pods[0][1:], 0.95, "decode"),
        sent(pods[1][:1], 6.0, "prefill"),
        sent(pods[1][1:], 9.5, "decode"),
    ]
    parts = replayed(sorted(records, key=lambda record: record.received_ns)).parts
    assert [True, True] == parts.by_two_engines.tolist()
    assert [0.08, 0.08] == pytest.approx(parts.router_s.tolist())
    assert [0.34, 0.34] == pytest.approx(parts.ttft_s.tolist())


@pytest.mark.parametrize("decoding_s", [1, 20, 45])
def test_sglangs_decode_node_is_awaited_by_its_prefill_nodes_stages(decoding_s: int):
    """Its spans come when all has been generated: until then nothing but stages says that there is another node."""
    prefill = {"prefill_bootstrap": (0.0, 20.0), "prefill_waiting": (20.0, 30.0), "prefill_forward": (30.0, 130.0)}
    sent = {"prefill_transfer_kv_cache": (130.0, 150.0)}
    decode = {"decode_bootstrap": (0.0, 20.0), "decode_waiting": (150.0, 190.0), "fake_output": (190.0, 205.0)}
    lasts = {"decode_forward": (190.0, 205.0 + 1000 * decoding_s)}
    records = [
        export(sglang_node("prefill", 50, prefill | sent, time_to_first_token=150.0, e2e=150.0), instance="p"),
        export(
            sglang_node("decode", 50, decode | lasts, time_to_first_token=205.0, e2e=205.0 + 1000 * decoding_s),
            at_s=1.0 + decoding_s,
            instance="d",
        ),
        export([call(first_ms=260.0, start_ms=45, end_ms=310 + 1000 * decoding_s)], at_s=1.1 + decoding_s),
    ]
    result = replayed(records)
    parts = result.parts
    assert ({}, [True]) == (result.missing, parts.by_two_engines.tolist())
    known_s = {name: getattr(parts, f"{name}_s")[0] for name in ("queue", "prefill", "kv_transfer", "decode_queue")}
    assert {"queue": 0.01, "prefill": 0.1, "kv_transfer": 0.04, "decode_queue": 0.04} == pytest.approx(known_s)


@pytest.mark.parametrize("decoding_s", [1, 20, 200])
@pytest.mark.parametrize("has_calls", [False, True])
def test_a_router_that_calls_two_engines_is_of_one_request(decoding_s: int, *, has_calls: bool):
    """By a span each or by none, and however long the second engine generates, whose span comes at the end."""
    records, times = [], ("gen_ai.latency.e2e", "gen_ai.latency.time_in_model_decode")
    for number, lasting_s in enumerate((1, decoding_s, decoding_s), start=1):
        trace, at_s, end_ms = bytes([number]) * 16, 300.0 * number, 700.0 + 1000 * lasting_s
        prefill, decode = two_pods(80, trace=trace, parent="router")
        decode.end_time_unix_nano += lasting_s * S
        for attribute in decode.attributes:
            if attribute.key in times:
                attribute.value.double_value += lasting_s
        way: dict[str, str | float] = {"url.path": "/v1/completions"}
        router = [span("POST", "router", "client", 46, end_ms - 20, kind=SERVER, attributes=way, trace=trace)]
        if has_calls:
            router += [span("POST", "call 1", "router", 48, 182, attributes=way, trace=trace)]
            router += [span("POST", "call 2", "router", 258, end_ms - 40, attributes=way, trace=trace)]
            prefill.parent_span_id, decode.parent_span_id = (called.span_id for called in router[1:])
        client = call(first_ms=340.0, start_ms=40, end_ms=end_ms, trace=trace)
        sent = [("p", [prefill], 0.2), ("router", router[1:2], 0.3), ("d", [decode], 1.3 + lasting_s)]
        sent += [("router", [*router[:1], *router[2:]], 1.2 + lasting_s), ("app", [client], 1.1 + lasting_s)]
        for sent_span in (*router, prefill, decode, client):
            sent_span.start_time_unix_nano += round(at_s * S)
            sent_span.end_time_unix_nano += round(at_s * S)
        records += [
            export(spans, at_s=at_s + after_s, instance=name, service=name, machine="node")
            for name, spans, after_s in sent
            if spans
        ]
    result = replayed(sorted(records, key=lambda record: record.received_ns))
    assert {} == result.missing
    assert [0.08] * 3 == pytest.approx(result.parts.router_s.tolist())
    assert [0.1] * 3 == pytest.approx(result.parts.prefill_s.tolist())
    assert [0.04] * 3 == pytest.approx(result.parts.decode_queue_s.tolist())
    before_s = [gateway.request_s for passed in result.parts.gateways for gateway in passed]
    assert ([0.002] if has_calls else [float("nan")]) * 3 == pytest.approx(before_s, nan_ok=True)


@pytest.mark.parametrize("others", [("engine",), ("client",), ("client", "engine")], ids="-".join)
def test_a_gateways_spans_and_those_around_and_behind_it_are_one_request_whenever_they_come(others: Sequence[str]):
    """Also where one was given out before the next came: by itself, as it was then the outermost."""
    spans = {"gateway": gateway("gate", "client"), "client": call(), "engine": engine(parent="gate")}
    for order, gaps_s in product(permutations(("gateway", *others)), product((0, 4, 9, 20), repeat=len(others))):
        times_s = accumulate(gaps_s, initial=1.0)
        records = exports([(at_s, name, spans[name]) for at_s, name in zip(times_s, order, strict=True)])
        assert 1 == counted(records).requests, (order, gaps_s)
        assert 1 == len(replayed(records).requests), (order, gaps_s)
