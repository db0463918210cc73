"""What a span is, asked once."""

from __future__ import annotations

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import INTERNAL, SCOPES, call, engine, gateway, span

from scraper.spans.received import classify


@pytest.mark.parametrize(
    ("span", "role", "name"),
    [
        (engine(), "request", "vllm"),
        (gateway("g"), "gateway", "dynamo"),
        (span("prefill_forward", "s", kind=INTERNAL), "stage", ""),
        (call(), "call", ""),
        (span("POST", "c", attributes={"url.path": "/v1/chat/completions"}), "call", ""),
        (span("POST", "c", kind=INTERNAL, attributes={"url.path": "/v1/chat/completions"}), "other", ""),
        (span("GET", "c", attributes={"url.path": "/health"}), "other", ""),
    ],
    ids=["engine", "gateway", "stage", "client", "client by path", "internal", "other"],
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
