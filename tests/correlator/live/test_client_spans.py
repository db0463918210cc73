"""What spans of clients and gateways hold, by the conventions and by what instrumentations send."""

from __future__ import annotations

import math

import pytest
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import CLIENT, INTERNAL, MS, NOON, SERVER, call, gateway, span

from sidelight.recorded.client_spans import ClientSpan, client_span, request_log
from sidelight.scraper.spans.received import received


def read(sent: Span, scope: str = "") -> ClientSpan:
    return client_span(received(sent, scope, NOON, Resource()))


@pytest.mark.parametrize(
    ("attributes", "expected_s"),
    [
        ({"gen_ai.response.time_to_first_chunk": 0.25}, 0.25),
        ({"gen_ai.server.time_to_first_token": 0.25}, 0.25),
        ({"gen_ai.server.time_to_first_token": 250.0}, math.nan),
        ({"gen_ai.response.time_to_first_chunk": -1.0}, math.nan),
        ({"gen_ai.response.time_to_first_chunk": math.inf}, math.nan),
        ({"gen_ai.response.time_to_first_chunk": "soon"}, math.nan),
        ({}, math.nan),
    ],
)
def test_the_first_output_is_read_in_seconds(attributes: dict[str, str | float], expected_s: float):
    """By the convention's attribute, or a metric's name used as one; what is longer than the span is not one."""
    sent = span("chat", "a", attributes=attributes)
    assert expected_s == pytest.approx(read(sent).first_s, nan_ok=True)
    for key in attributes:  # twice, with another value
        sent.attributes.add(key=key).value.double_value = 0.125
    assert bool(attributes) <= math.isnan(read(sent).first_s)


@pytest.mark.parametrize("name", ["First Token Stream Event", "llm.content.completion.chunk", "ai.stream.firstChunk"])
def test_the_first_output_is_marked_by_an_event(name: str):
    """The first of them, where libraries mark each chunk; another event says nothing of it."""
    call = span("chat", "a")
    for after_ms, event in ((50, "sent"), (400, name), (200, name)):
        call.events.add(name=event, time_unix_nano=NOON + after_ms * MS)
    assert 0.2 == pytest.approx(read(call).first_s)


@pytest.mark.parametrize("kind", [INTERNAL, CLIENT])
def test_envoy_ai_gateway_s_call_of_a_model_is_not_a_client_s(kind: Span.SpanKind.ValueType):
    """It is the gateway's own, whatever its kind; its event comes with the end, and says nothing of a first output."""
    sent = span("chat m", "a", kind=kind, attributes={"gen_ai.operation.name": "chat"})
    sent.events.add(name="First Token Stream Event", time_unix_nano=sent.end_time_unix_nano)
    shown = read(sent, "envoyproxy/ai-gateway")
    assert ("envoy_ai_gateway", True, True) == (shown.gateway, shown.serves, math.isnan(shown.first_s))


def test_agentgateway_s_policies_are_not_its_call():
    """It sends a CLIENT span of each call that it makes; one is of the next server."""
    for outbound, name in (("Primary", "agentgateway"), ("Policy", "")):
        sent = span("Llm", "a", kind=CLIENT, attributes={"agentgateway.outbound.kind": outbound})
        shown = read(sent, "agentgateway")
        assert (name, False) == (shown.gateway, shown.serves)
    assert read(span("POST /v1/*", "a", kind=SERVER), "agentgateway").gateway == "agentgateway"


@pytest.mark.parametrize(
    ("attributes", "is_call"),
    [
        ({"gen_ai.operation.name": "chat"}, True),
        ({"gen_ai.operation.name": "text_completion"}, True),
        ({"gen_ai.operation.name": "invoke_agent"}, False),
        ({"gen_ai.operation.name": "execute_tool", "url.path": "/v1/chat/completions"}, False),
        ({"url.full": "http://gateway.test/v1/chat/completions?x=1"}, True),
        ({"http.target": "/v1/completions"}, True),
        ({"url.path": "/ask"}, False),
        ({"url.full": "http://[::1/"}, False),
        ({}, False),
    ],
)
def test_a_call_of_a_model_says_so(attributes: dict[str, str | float], is_call: bool):
    """By its operation, else by its path; a workflow around calls is not a call."""
    assert is_call == read(span("x", "a", attributes=attributes)).is_call


def test_only_clients_and_servers_wait():
    """Whatever an internal span says of itself."""
    inside = read(span("chat", "a", kind=INTERNAL, attributes={"gen_ai.operation.name": "chat"}))
    assert (False, False) == (inside.encloses, inside.is_call)
    assert read(span("x", "a", kind=SERVER)).encloses


def test_a_known_gateway_s_span_is_a_call():
    """It need not say so."""
    assert read(gateway("g")).is_call
    assert read(gateway("g")).serves


def test_tokens_and_the_called_server_are_read():
    """-1 and nothing where they are absent or impossible."""
    attributes = {
        "gen_ai.usage.input_tokens": 12.0,
        "gen_ai.usage.output_tokens": 7.0,
        "server.address": "10.0.0.1",
        "server.port": 8000.0,
    }
    call = read(span("chat", "a", attributes=attributes))
    assert (12, 7, -1, "http://10.0.0.1:8000") == (
        call.input_tokens,
        call.output_tokens,
        call.cached_tokens,
        call.server,
    )
    odd = read(span("chat", "a", attributes={**attributes, "gen_ai.usage.input_tokens": -3.0, "server.port": 1e9}))
    assert (-1, "") == (odd.input_tokens, odd.server)


def test_tokens_are_read_by_earlier_names_too():
    """The convention's present name counts where both are stated; reasoning is a part of the output."""
    old = {"gen_ai.usage.prompt_tokens": 9.0, "gen_ai.usage.completion_tokens": 5.0}
    both = old | {"gen_ai.usage.input_tokens": 12.0, "gen_ai.usage.reasoning.output_tokens": 3.0}
    calls = [read(span("chat", "a", attributes=attributes)) for attributes in (old, both)]
    assert [(9, 5, -1), (12, 5, 3)] == [(c.input_tokens, c.output_tokens, c.reasoning_tokens) for c in calls]
    assert [-1, 3] == request_log(calls, [b"a" * 16, b"b" * 16]).reasoning_tokens.tolist()


def test_an_error_is_read():
    """By the span's status, or by the attribute of errors."""
    failed = [call(failed=True), span("chat", "a", attributes={"error.type": "timeout"}), call()]
    assert [True, True, False] == [read(failed_call).failed for failed_call in failed]
