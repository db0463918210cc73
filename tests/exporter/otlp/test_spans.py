"""A run as spans: ids as they were sent, names and attributes by the conventions, phases where they were."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import request_log
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from sidelight.correlator.breakdown import Parts
from sidelight.exporter.otlp import spans as otlp
from sidelight.exporter.otlp.spans import TEXT_CHARS, SpanSource
from sidelight.loadgen.records import span_id, trace_id, traceparent
from sidelight.scraper.spans.received import fault

MS = 1_000_000
RUN = "20261121-120000-abcdef"
# Sent at 110 ms, at the engine at 112, first token there at 168, here at 170, and the first that is not blank at 175.
REQUEST = {
    "scheduled": 99,
    "dispatch": 100,
    "connected": 105,
    "submit": 110,
    "first_output_ns": 170 * MS,
    "first_token_ns": 175 * MS,
    "last": 290,
    "end": 300,
    "endpoint_url": "http://engine.test:8000/v1/chat/completions",
    "input": 7,
    "output": 5,
    "max_tokens": 9,
    "cached_tokens": 4,
    "reasoning_tokens": 2,
    "response_id": "chatcmpl-1",
    "request_id": "sl-1-000000",
    "finish_reason": "length",
    "phase": "measure",
    "class": "chat",
}
TRACED = {
    "source": "trace",
    "quality": "exact",
    "engine_span_id": "00000000000000e1",
    "ttft_ms": 65.0,
    "network_ms": 4.0,
    "request_network_ms": 2.0,
    "response_network_ms": 2.0,
    "engine_frontend_ms": 6.0,
    "queue_ms": 20.0,
    "prefill_ms": 30.0,
    "blank_output_ms": 5.0,
    "other_ms": 11.0,
    "decode_ms": 120.0,
    "error_ms": 0.0,
    "arrival_ns": 112 * MS,
    "engine_first_token_ns": 168 * MS,
}
BLANK = ("blank output", 170, 175, "client", "client's stamps")


def parts_of(*rows: dict[str, Any]) -> Parts:
    """Parts by what is known of each request, times in ms; a row without a source has none."""
    columns: dict[str, Any] = {}
    for column in fields(Parts):
        default, kind = {"Floats": (np.nan, np.float64), "Ints": (-1, np.int64)}.get(
            str(column.type), ("none" if column.name.endswith("source") else "", np.object_)
        )
        name = f"{column.name[:-2]}_ms" if kind is np.float64 else column.name
        values = np.array([row.get(name, default) for row in rows], dtype=kind)
        columns[column.name] = values / 1e3 if kind is np.float64 else values
    return Parts(**columns)


def source_of(*rows: tuple[dict[str, Any], dict[str, Any]], protocol: str = "chat", provider: str = "") -> SpanSource:
    """A run's requests and their parts."""
    ids = [{"trace_id": trace_id(RUN, index), **row} for index, (row, _) in enumerate(rows)]
    return SpanSource(
        run_id=RUN,
        version="1.2.3",
        model="m",
        protocol=protocol,
        provider=provider,
        requests=request_log(*ids),
        parts=parts_of(*(parts for _, parts in rows)),
    )


def spans(source: SpanSource, place: int) -> list[Span]:
    """The spans of a request as they are sent."""
    (resource,) = encode_spans(otlp.spans(source, place)).resource_spans
    return list(resource.scope_spans[0].spans)


def exports(source: SpanSource) -> list[ExportTraceServiceRequest]:
    """The exports of a run as they are sent."""
    return [encode_spans(batch) for batch in otlp.exports(source)]


def plain(attributes: Any) -> dict[str, Any]:
    """Attributes as plain values."""

    def value(attribute: KeyValue) -> Any:
        kind = attribute.value.WhichOneof("value")
        if kind == "array_value":
            return [item.string_value for item in attribute.value.array_value.values]
        return getattr(attribute.value, str(kind))

    return {attribute.key: value(attribute) for attribute in attributes}


def laid(request_spans: list[Span]) -> list[tuple[str, float, float, str, str]]:
    """Child spans as name, begin, end (ms), source and whose stamps."""
    return [
        (
            span.name,
            span.start_time_unix_nano / MS,
            span.end_time_unix_nano / MS,
            plain(span.attributes)["sidelight.source"],
            plain(span.attributes)["sidelight.placed"],
        )
        for span in request_spans[1:]
    ]


def test_the_clients_span_bears_the_ids_that_were_sent():
    """So that the engine's span, whose parent is what traceparent said, nests under it; the phases are its children."""
    client, *below = spans(source_of((REQUEST, TRACED)), 0)
    _, sent_trace, sent_span, _ = traceparent(RUN, 0).split("-")
    assert (sent_trace, sent_span) == (client.trace_id.hex(), client.span_id.hex())
    assert b"" == client.parent_span_id
    assert {(client.trace_id, client.span_id)} == {(span.trace_id, span.parent_span_id) for span in below}
    assert len(below) + 1 == len({span.span_id for span in (client, *below)})


def test_the_clients_span_follows_the_conventions():
    """Its name, kind, times, and every attribute that is known; usage is the server's count."""
    client = spans(source_of((REQUEST, TRACED), provider="vllm"), 0)[0]
    assert ("chat m", Span.SPAN_KIND_CLIENT) == (client.name, client.kind)
    assert (100 * MS, 300 * MS) == (client.start_time_unix_nano, client.end_time_unix_nano)
    assert Status.STATUS_CODE_UNSET == client.status.code
    assert [("first_token", 175 * MS), ("last_token", 290 * MS)] == [
        (event.name, event.time_unix_nano) for event in client.events
    ]
    known = plain(client.attributes)
    assert {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "m",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.response.time_to_first_chunk": 0.06,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.usage.reasoning.output_tokens": 2,
        "server.address": "engine.test",
        "server.port": 8000,
        "http.response.status_code": 200,
    } == {name: value for name, value in known.items() if not name.startswith("sidelight.")}
    assert {
        "sidelight.ttft_ms": 65.0,
        "sidelight.network_ms": 4.0,
        "sidelight.queue_ms": 20.0,
        "sidelight.prefill_ms": 30.0,
        "sidelight.error_ms": 0.0,
        "sidelight.source": "trace",
        "sidelight.quality": "exact",
        "sidelight.engine_span_id": "00000000000000e1",
        "sidelight.dispatch_delay_ms": 1.0,
        "sidelight.request_id": "sl-1-000000",
        "sidelight.phase": "measure",
        "sidelight.workload_class": "chat",
        "sidelight.status": "ok",
    }.items() <= known.items()


@pytest.mark.parametrize(
    ("protocol", "name", "provider"),
    [
        ("chat", "chat m", "openai"),
        ("responses", "chat m", "openai"),
        ("messages", "chat m", "anthropic"),
        ("completions", "text_completion m", "openai"),
        ("tgi", "text_completion m", "tgi"),
        ("ollama", "chat m", "ollama"),
    ],
)
def test_the_operation_is_what_was_asked_for(protocol: str, name: str, provider: str):
    """Messages are a chat, a prompt is a completion; who answers is the protocol's, where no engine is known."""
    client = spans(source_of((REQUEST, {}), protocol=protocol), 0)[0]
    assert (name, provider) == (client.name, plain(client.attributes)["gen_ai.provider.name"])


def test_joined_phases_are_where_the_engine_says():
    """By its stamps, moved by the clocks' offset; together with the client's they fill TTFT without gap or overlap."""
    assert [
        ("send", 100, 110, "client", "client's stamps"),
        ("to the engine", 110, 112, "trace", "engine's stamps"),
        ("engine frontend", 112, 118, "trace", "engine's stamps"),
        ("queue", 118, 138, "trace", "engine's stamps"),
        ("prefill", 138, 168, "trace", "engine's stamps"),
        ("from the engine", 168, 170, "trace", "engine's stamps"),
        ("decode", 168, 288, "trace", "engine's stamps"),
        BLANK,
    ] == laid(spans(source_of((REQUEST, TRACED)), 0))


def test_the_wait_for_a_scheduler_is_a_phase_before_the_queue():
    """Where the engine states it; the front end is then shorter by as much."""
    row = {**TRACED, "engine_frontend_ms": 2.0, "scheduler_intake_ms": 4.0}
    assert [
        ("engine frontend", 112, 114, "trace", "engine's stamps"),
        ("scheduler intake", 114, 118, "trace", "engine's stamps"),
        ("queue", 118, 138, "trace", "engine's stamps"),
    ] == laid(spans(source_of((REQUEST, row)), 0))[2:5]


def test_phases_without_stamps_follow_each_other():
    """The two ways outside the engine are then one span; an estimate says that it is one."""
    unknown = {
        "request_network_ms": np.nan,
        "response_network_ms": np.nan,
        "arrival_ns": -1,
        "engine_first_token_ns": -1,
    }
    request_spans = spans(
        source_of((REQUEST, {**TRACED, **unknown, "source": "histogram", "error_ms": 1.5, "quality": "tight"})), 0
    )
    assert [
        ("send", 100, 110, "client", "client's stamps"),
        ("outside the engine", 110, 114, "histogram", "in order"),
        ("engine frontend", 114, 120, "histogram", "in order"),
        ("queue", 120, 140, "histogram", "in order"),
        ("prefill", 140, 170, "histogram", "in order"),
        ("decode", 170, 290, "histogram", "in order"),
        BLANK,
    ] == laid(request_spans)
    attributes = plain(request_spans[0].attributes)
    assert ("histogram", "tight", 1.5) == tuple(
        attributes[f"sidelight.{name}"] for name in ("source", "quality", "error_ms")
    )


def test_decoding_that_only_the_client_measured_is_by_its_stamps():
    """From the first token that is not blank: the engine's own time of it is not known."""
    row = {**TRACED, "decode_source": "client", "decode_ms": 115.0}
    shown = laid(spans(source_of((REQUEST, row)), 0))
    assert ("decode", 175, 290, "client", "client's stamps") == shown[-1]
    assert 1 == sum(name == "decode" for name, *_ in shown)


@pytest.mark.parametrize("source", ["trace", "response"])
def test_parts_that_are_not_separated_are_one_phase_with_their_names(source: str):
    """Also where stamps contradict: those are not used, and the parts follow each other from the submission."""
    unsaid = dict.fromkeys(("network_ms", "request_network_ms", "response_network_ms", "engine_frontend_ms"), np.nan)
    if source == "response":
        unsaid |= {"decode_ms": np.nan, "arrival_ns": -1, "engine_first_token_ns": -1}
    merged = "network and engine frontend"
    assert [
        ("send", 100, 110, "client", "client's stamps"),
        (merged, 110, 120, source, "in order"),
        ("queue", 120, 140, source, "in order"),
        ("prefill", 140, 170, source, "in order"),
        *([("decode", 170, 290, source, "in order")] if source == "trace" else []),
        BLANK,
    ] == laid(
        spans(source_of((REQUEST, {**TRACED, **unsaid, "source": source, "merged": merged, "other_ms": 15.0})), 0)
    )


def test_what_is_unknown_has_neither_phase_nor_attribute():
    """Without a source only the client's own stamps are left, and the reason."""
    client, *below = spans(source_of((REQUEST, {"reason": "no spans came"})), 0)
    assert ["send", "blank output"] == [span.name for span in below]
    known = plain(client.attributes)
    assert "no spans came" == known["sidelight.reason"]
    assert [] == [name for name in known if name.endswith("_ms") and name != "sidelight.dispatch_delay_ms"]


def test_a_phase_that_took_no_time_has_no_span():
    """The client's span says 0 of it."""
    client, *below = spans(source_of((REQUEST, {**TRACED, "queue_ms": 0.0, "engine_frontend_ms": 26.0})), 0)
    assert "queue" not in [span.name for span in below]
    assert 0.0 == plain(client.attributes)["sidelight.queue_ms"]


def test_a_reply_in_one_piece_shows_the_engines_times():
    """It has no first token here, so nothing of the way out."""
    request = {**REQUEST, "first_output_ns": -1, "first_token_ns": -1, "last": -1}
    whole = {
        name: value for name, value in TRACED.items() if name not in ("ttft_ms", "network_ms", "response_network_ms")
    }
    assert [
        ("send", 100, 110, "client", "client's stamps"),
        ("to the engine", 110, 112, "trace", "engine's stamps"),
        ("engine frontend", 112, 118, "trace", "engine's stamps"),
        ("queue", 118, 138, "trace", "engine's stamps"),
        ("prefill", 138, 168, "trace", "engine's stamps"),
        ("decode", 168, 288, "trace", "engine's stamps"),
    ] == laid(spans(source_of((request, whole)), 0))


UNSENT = {"connected": -1, "submit": -1, "first": -1, "last": -1, "http_status": 0}


@pytest.mark.parametrize(
    ("row", "kind", "message", "end_ms"),
    [
        ({"status": "failed", "http_status": 500, "error": "http: boom"}, "500", "http: boom", 300),
        ({"status": "refused", "http_status": 429, "error": ""}, "429", "refused", 300),
        ({"status": "failed", "error": "reset: by peer"}, "reset", "reset: by peer", 300),
        ({"status": "cancelled", "error": "cancelled: drained"}, "cancelled", "cancelled: drained", 300),
        (
            {"status": "failed", "error": f"timeout: {'x' * 999}"},
            "timeout",
            f"timeout: {'x' * (TEXT_CHARS - 12)}...",
            300,
        ),
        ({"status": "in_flight", "end": -1}, "in_flight", "in_flight", 290),
        (
            {**UNSENT, "status": "failed", "error": "connect: Connection refused"},
            "connect",
            "connect: Connection refused",
            300,
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_request_that_failed_says_so(row: dict[str, Any], kind: str, message: str, end_ms: int):
    """Its type is HTTP's status, else the kind of our error; one that never ended ends where it was last seen."""
    request = {**REQUEST, **{name: -1 for name in ("first_output_ns", "first_token_ns") if "submit" in row}, **row}
    request_spans = spans(source_of((request, {})), 0)
    assert (Status.STATUS_CODE_ERROR, message) == (request_spans[0].status.code, request_spans[0].status.message)
    assert kind == plain(request_spans[0].attributes)["error.type"]
    assert end_ms * MS == request_spans[0].end_time_unix_nano
    assert "submit" not in row or [request_spans[0]] == request_spans


def test_an_export_has_512_spans_at_most_and_keeps_a_request_together():
    """With the resource that they are of; all of a run's requests are in it, once."""
    run = source_of(*[(REQUEST, TRACED)] * 100)
    batches = exports(run)
    of_scope = [export.resource_spans[0].scope_spans[0] for export in batches]
    assert [9 * 56, 9 * 44] == [len(scope.spans) for scope in of_scope]
    clients = [[span for span in scope.spans if not span.parent_span_id] for scope in of_scope]
    assert [span_id(RUN, index) for index in range(100)] == [span.span_id.hex() for some in clients for span in some]
    for scope, client_spans in zip(of_scope, clients, strict=True):
        assert {span.span_id for span in client_spans} == {
            span.parent_span_id for span in scope.spans if span.parent_span_id
        }
    assert {"service.name": "sidelight", "service.version": "1.2.3", "sidelight.run_id": RUN} == plain(
        batches[0].resource_spans[0].resource.attributes
    )
    assert ("sidelight", "1.2.3") == (of_scope[0].scope.name, of_scope[0].scope.version)


def test_a_run_without_requests_exports_nothing():
    """Not even an empty export."""
    assert [] == exports(source_of())


def test_the_same_run_exports_the_same_bytes():
    """A collector that is sent a run twice has it once."""
    first, again = (
        [export.SerializeToString(deterministic=True) for export in exports(source_of((REQUEST, TRACED)))]
        for _ in range(2)
    )
    assert first == again


durations = st.floats(0, 1e5)


@given(st.lists(durations, min_size=7, max_size=7), st.booleans(), st.booleans())
def test_phases_fill_ttft_and_break_no_rule(ms: list[float], is_stamped: bool, is_merged: bool):
    """Whatever they are: each begins where the one before it ended, from submission to first token, to 10 ns."""
    request_network, response_network, frontend, queue, prefill, blank, decode = ms
    output_ns = 110 * MS + round((request_network + frontend + queue + prefill + response_network) * MS)
    token_ns = output_ns + round(blank * MS)
    parts = {
        **{name: value for name, value in TRACED.items() if is_stamped or not name.endswith("_ns")},
        "ttft_ms": (token_ns - 110 * MS) / MS,
        "request_network_ms": request_network if is_stamped else np.nan,
        "response_network_ms": response_network if is_stamped else np.nan,
        "network_ms": request_network + response_network,
        "engine_frontend_ms": frontend,
        "queue_ms": queue,
        "prefill_ms": prefill,
        "blank_output_ms": blank,
        "other_ms": frontend + blank,
        "decode_ms": decode,
    }
    if is_stamped:
        parts["engine_first_token_ns"] = 110 * MS + round((request_network + frontend + queue + prefill) * MS)
    elif is_merged:
        unsaid = {"network_ms": np.nan, "engine_frontend_ms": np.nan, "merged": "network and engine frontend"}
        parts |= {**unsaid, "other_ms": request_network + response_network + frontend + blank}
    request = {**REQUEST, "first_output_ns": output_ns, "first_token_ns": token_ns, "last": -1, "end": 1e6}
    request_spans = spans(source_of((request, parts)), 0)
    assert [] == [span.name for span in request_spans if fault(span, span.end_time_unix_nano)]
    at_ns = 110 * MS
    for span in request_spans[2:]:
        if span.name != "decode":
            assert span.start_time_unix_nano == pytest.approx(at_ns, abs=10, rel=0)
            at_ns = span.end_time_unix_nano
    assert at_ns == pytest.approx(token_ns, abs=10, rel=0)
