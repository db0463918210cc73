"""What a span is, asked once."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import INTERNAL, NOON, SCOPES, SERVER, TRACE, body, call, engine, gateway, sglang_node, span
from waiting import BOUND_S

from sidelight.scraper.spans.intake.scan import AwaitedTraces, scan
from sidelight.scraper.spans.received import classify

ENVOYS = {"guid:x-request-id": "4", "http.url": "http://h/v1/chat/completions"}


@pytest.mark.parametrize(
    ("span", "role", "name"),
    [
        (engine(), "request", "vllm"),
        (gateway("g"), "gateway", "dynamo"),
        (span("ingress", "g", kind=SERVER, attributes=ENVOYS), "gateway", "envoy"),
        (span("any.mesh/*", "g", attributes={**ENVOYS, "istio.mesh_id": "m"}), "gateway", "istio"),
        (span("router engine egress", "g"), "gateway_call", "envoy"),
        (span("http_request", "g", kind=INTERNAL, attributes={"module": "smg"}), "gateway", "sglang_router"),
        (span("prefill_forward", "s", kind=INTERNAL), "stage", ""),
        (call(), "call", ""),
        (span("POST", "c", attributes={"url.path": "/v1/chat/completions"}), "call", ""),
        (span("POST", "c", kind=INTERNAL, attributes={"url.path": "/v1/chat/completions"}), "other", ""),
        (span("GET", "c", attributes={"url.path": "/health"}), "other", ""),
    ],
    ids=[
        "engine",
        "dynamo",
        "envoy",
        "istio",
        "envoy's call",
        "sglang-router",
        "stage",
        "client",
        "client by path",
        "internal",
        "other",
    ],
)
def test_what_a_span_is(span: Span, role: str, name: str):
    """An engine's request or a gateway's by its catalogue, a stage by its name, a client's call by what it says."""
    kind = classify(span, SCOPES.get(span.name, "test"))
    assert (role, name) == (kind.role, kind.engine)


def test_a_span_that_suffices_for_its_request():
    """vLLM's does; where times lie between stages, the request waits for the last stage of the prefill."""
    assert classify(engine(), SCOPES["llm_request"]).tells_all
    assert not classify(gateway("g"), "test").tells_all
    assert classify(span("prefill_forward", "s"), "").ends_prefill


@pytest.mark.parametrize(
    ("attributes", "is_call"),
    [
        ({"method": "POST", "uri": "/v1/chat/completions"}, True),
        ({"method": "GET", "uri": "/v1/models"}, False),
        ({"x_request_id": "1"}, True),
    ],
)
def test_a_known_gateway_s_span_is_a_call_unless_its_path_is_another(attributes: dict[str, str], *, is_call: bool):
    """Its kind need not be that of a server."""
    assert is_call == classify(span("http-request", "g", kind=INTERNAL, attributes=attributes), "test").is_call


@pytest.mark.parametrize("last", ["root of the decode node", "its first output", "prefill node"])
async def test_a_run_waits_for_the_stages_of_both_engines_that_shared_a_request(last: str):
    """SGLang's nodes, of which either may come first: its root, and its last stage before the first token."""
    awaited, came = AwaitedTraces(), [
        ("prefill node", sglang_node("prefill", 50, {"prefill_bootstrap": (0, 20), "prefill_forward": (30, 130)}), "p"),
        ("its first output", sglang_node("decode", 50, {"decode_bootstrap": (0, 9), "fake_output": (90, 99)})[1:], "s"),
        ("root of the decode node", sglang_node("decode", 50, {"decode_bootstrap": (0, 20)})[:1], "d"),
    ]  # fmt: skip
    *before, end = sorted(came, key=lambda each: each[0] == last)
    settling = asyncio.create_task(awaited.settle(60, [TRACE]))
    for _, spans, instance in before:
        awaited.note(scan(body(spans, instance=instance), NOON, is_awaited=True))
        await asyncio.sleep(0)
    assert not settling.done()
    awaited.note(scan(body(end[1], instance=end[2]), NOON, is_awaited=True))
    async with asyncio.timeout(BOUND_S):
        assert 0 == await settling
