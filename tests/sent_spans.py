"""Spans as clients, gateways and engines send them, for tests of what is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from sidelight.scraper.spans.log import ExportRecord, packed

S = 10**9
MS = 10**6
NOON = 1_700_000_000 * S
TRACE = b"t" * 16
CLIENT, SERVER, INTERNAL = Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_SERVER, Span.SPAN_KIND_INTERNAL
SCOPES = {
    "llm_request": "vllm.tracing.otel",
    "ingress": "envoy",
    "any.mesh/*": "envoy",
    "router engine egress": "envoy",
    "self": "litellm",
}


def span(
    name: str,
    span_id: str,
    parent: str = "",
    start_ms: float = 0.0,
    end_ms: float = 1000.0,
    *,
    kind: Span.SpanKind = CLIENT,
    attributes: Mapping[str, str | float] | None = None,
    trace: bytes = TRACE,
    clock_ms: float = 0.0,
    failed: bool = False,
) -> Span:
    """Return a span; ids are texts of up to 8 letters, times are ms after NOON by a clock that is off by `clock_ms`."""
    sent = Span(
        trace_id=trace,
        span_id=identity(span_id),
        parent_span_id=identity(parent) if parent else b"",
        name=name,
        kind=kind,
        start_time_unix_nano=NOON + round((start_ms + clock_ms) * MS),
        end_time_unix_nano=NOON + round((end_ms + clock_ms) * MS),
        status=Status(code=Status.STATUS_CODE_ERROR) if failed else None,
    )
    for key, value in (attributes or {}).items():
        attribute = sent.attributes.add(key=key).value
        if isinstance(value, str):
            attribute.string_value = value
        else:
            attribute.double_value = value
    return sent


def identity(letters: str) -> bytes:
    """Return a span's id."""
    return letters.encode().rjust(8, b".")


def call(span_id: str = "client", parent: str = "", *, first_ms: float | None = 300.0, **changes: object) -> Span:
    """Return a client's span of one call of a model."""
    attributes = {"gen_ai.operation.name": "chat"}
    first = {} if first_ms is None else {"gen_ai.response.time_to_first_chunk": first_ms / 1e3}
    return span("chat model", span_id, parent, attributes={**attributes, **first}, **changes)  # type: ignore[arg-type]


def gateway(span_id: str, parent: str = "", *, first_ms: float | None = None, **changes: object) -> Span:
    """Return the span of a gateway that the catalogue knows: Dynamo's frontend, as it was recorded."""
    attributes = {"method": "POST", "uri": "/v1/chat/completions", "version": "HTTP/1.1", "x_request_id": span_id}
    first = {} if first_ms is None else {"ttft_ms": f"{first_ms:.2f}"}
    return span("http-request", span_id, parent, kind=INTERNAL, attributes={**attributes, **first}, **changes)  # type: ignore[arg-type]


def engine(
    span_id: str = "engine",
    parent: str = "client",
    *,
    queue_ms: float = 50.0,
    prefill_ms: float = 100.0,
    decode_ms: float = 500.0,
    ttft_ms: float = 200.0,
    e2e_ms: float = 710.0,
    stated: Mapping[str, str | float] | None = None,
    **changes: object,
) -> Span:
    """Return the span of a request by vLLM, with what else it states."""
    times = {
        "time_in_queue": queue_ms,
        "time_in_model_prefill": prefill_ms,
        "time_in_model_decode": decode_ms,
        "time_to_first_token": ttft_ms,
        "e2e": e2e_ms,
    }
    attributes = {f"gen_ai.latency.{key}": ms / 1e3 for key, ms in times.items()} | dict(stated or {})
    whole = {"start_ms": 50.0, "end_ms": 50.0 + e2e_ms, **changes}
    return span("llm_request", span_id, parent, kind=SERVER, attributes=attributes, **whole)  # type: ignore[arg-type]


def two_pods(
    between_ms: float = 80.0, *, clock_ms: float = 0.0, trace: bytes = TRACE, parent: str = "client"
) -> tuple[Span, Span]:
    """Return the spans of a prefill pod and a decode pod of vLLM that shared a request, whose id is its trace's.

    The one has it from 50 to 180 ms (queue 20, prefill 100), the other after `between_ms` more, its clock off by
    `clock_ms`: queue 40, first step 15, first token 60 ms after it has it.
    """
    shared: dict[str, str | float] = {"gen_ai.request.id": f"cmpl-{trace.hex()}-0", "gen_ai.usage.prompt_tokens": 512}
    prefill = {**shared, "gen_ai.usage.completion_tokens": 1, "gen_ai.request.max_tokens": 1}
    decode = {**shared, "gen_ai.usage.completion_tokens": 16, "gen_ai.request.max_tokens": 16}
    return (
        engine(
            "prefill", parent, queue_ms=20, prefill_ms=100, decode_ms=0, ttft_ms=128, e2e_ms=128, end_ms=180,
            trace=trace, stated=prefill,
        ),
        engine(
            "decode", parent, queue_ms=40, prefill_ms=15, decode_ms=300, ttft_ms=60, e2e_ms=360,
            start_ms=180 + between_ms, end_ms=541 + between_ms, clock_ms=clock_ms, trace=trace, stated=decode,
        ),
    )  # fmt: skip


def sglang_node(
    role: str, begin_ms: float, stages: Mapping[str, tuple[float, float]], *, trace: bytes = TRACE, **stated: float
) -> list[Span]:
    """Return an SGLang node's span of a request and its stages, in ms after it had the request."""
    attributes: dict[str, str | float] = {"module": "sglang::request", "gen_ai.request.id": f"rid-{role}"}
    attributes |= {f"gen_ai.latency.{name}": value / 1e3 for name, value in stated.items()}
    last_ms = max(end_ms for _, end_ms in stages.values())
    end_ms = begin_ms + last_ms
    return [
        span("Req", role, "client", begin_ms, end_ms, kind=SERVER, attributes=attributes, trace=trace),
        *(
            span(name, f"{role[0]}{place}", role, begin_ms + begin, begin_ms + end, kind=INTERNAL, trace=trace)
            for place, (name, (begin, end)) in enumerate(stages.items())
        ),
    ]


def export(
    spans: Iterable[Span], *, at_s: float = 1.0, instance: str = "", service: str = "", machine: str = ""
) -> ExportRecord:
    """Return an export that came so many seconds after NOON."""
    return packed(NOON + round(at_s * S), "grpc", body(spans, instance=instance, service=service, machine=machine))


def body(spans: Iterable[Span], *, instance: str = "", service: str = "", machine: str = "") -> bytes:
    """Return the bytes of an export, by a sender that names itself, its service and its machine, or does not."""
    request = ExportTraceServiceRequest()
    scopes = request.resource_spans.add()
    if instance:
        scopes.resource.attributes.add(key="service.instance.id").value.string_value = instance
    if machine:
        scopes.resource.attributes.add(key="host.name").value.string_value = machine
    if service:
        scopes.resource.attributes.add(key="service.name").value.string_value = service
    for sent in spans:
        scope = scopes.scope_spans.add()
        scope.scope.name = SCOPES.get(sent.name, "test")
        scope.spans.append(sent)
    return request.SerializeToString()
