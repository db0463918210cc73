"""What a span is, asked once."""

from __future__ import annotations

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import INTERNAL, SCOPES, SERVER, call, engine, gateway, span

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
