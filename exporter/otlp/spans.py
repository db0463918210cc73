"""A run as OTLP spans: one of the client for each request, by OpenTelemetry's GenAI conventions, its phases below it.

Each client's span bears the ids that were sent as traceparent, so the engine's own span, which the engine sends, nests
under it. Attributes: docs/reference/otlp.md. Where phases lie is left to `phases`, sending to `send`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.parts import DECODE, GATEWAY_AT_MOST, INNER_PARTS, SEND, TTFT_PARTS
from sidelight.exporter.otlp.phases import phases
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.records import span_id
from sidelight.loadgen.requests.table.log import NO_ERRORS, RequestLog

SPANS_AT_ONCE = 512  # what OpenTelemetry's batch processors send at once (OTEL_BSP_MAX_EXPORT_BATCH_SIZE)
# A server may answer an error with a page.
TEXT_CHARS = 300

_PARTS = (SEND, *TTFT_PARTS, DECODE, *INNER_PARTS, GATEWAY_AT_MOST)
_TIMES = ("ttft", *(part.name for part in _PARTS), "error")
# What a request's clock has seen of it, for the end of one that had none.
_STAMPS = ("dispatch_ns", "submit_ns", "first_read_ns", "last_output_ns", "last_token_ns")
_PORTS = {"http": 80, "ws": 80, "https": 443, "wss": 443}

Value = str | bool | int | float | Sequence[str] | None


@dataclass(frozen=True, kw_only=True)
class SpanSource:
    """Source of spans: all requests of a run and, in the same order, their parts.

    protocol   a name in PROTOCOLS
    provider   the engine's name; "" takes the protocol's
    version    ours
    """

    run_id: str
    version: str
    model: str
    protocol: str
    provider: str
    requests: RequestLog
    parts: Parts

    @cached_property
    def resource(self) -> Resource:
        """Return the resource of Sidelight, with nothing of the environment."""
        return Resource({"service.name": "sidelight", "service.version": self.version, "sidelight.run_id": self.run_id})

    @cached_property
    def scope(self) -> InstrumentationScope:
        return InstrumentationScope(name="sidelight", version=self.version)


def exports(source: SpanSource, *, at_once: int = SPANS_AT_ONCE) -> Iterator[list[ReadableSpan]]:
    """Yield a run's spans in batches of `at_once` spans at most; a request's are together."""
    batch: list[ReadableSpan] = []
    for place in range(len(source.requests)):
        new = spans(source, place)
        if batch and len(batch) + len(new) > at_once:
            yield batch
            batch = []
        batch.extend(new)
    if batch:
        yield batch


def spans(source: SpanSource, place: int) -> list[ReadableSpan]:
    """Return the spans of the request at a place: the client's, then one for each phase that is known and took time."""
    requests = source.requests
    index, trace = int(requests.index[place]), int(requests.trace_id[place], 16)
    context = _context(trace, bytes.fromhex(span_id(source.run_id, index)))
    client = ReadableSpan(
        context=context,
        name=f"{_operation(source.protocol)} {source.model}".strip(),
        kind=SpanKind.CLIENT,
        start_time=int(requests.dispatch_ns[place]),
        end_time=_end_ns(requests, place),
        attributes=known({**_conventional(source, place), **_ours(source, place)}),
        events=[
            Event(name, timestamp=int(at_ns))
            for name in ("first_token", "last_token")
            if (at_ns := getattr(requests, f"{name}_ns")[place]) >= 0
        ],
        status=_status(requests, place),
        resource=source.resource,
        instrumentation_scope=source.scope,
    )
    below = [
        ReadableSpan(
            context=_context(
                trace,
                blake2b(f"{source.run_id}/{index}/{phase.name}".encode(), digest_size=8, person=b"span").digest(),
            ),
            parent=context,
            name=phase.name,
            start_time=phase.start_ns,
            end_time=phase.end_ns,
            attributes={"sidelight.source": phase.source, "sidelight.placed": phase.placed},
            resource=source.resource,
            instrumentation_scope=source.scope,
        )
        for phase in phases(requests, source.parts, place)
        if phase.end_ns > phase.start_ns
    ]
    return [client, *below]


def _context(trace_id: int, span: bytes) -> SpanContext:
    return SpanContext(trace_id, int.from_bytes(span), is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _conventional(source: SpanSource, place: int) -> dict[str, Value]:
    requests = source.requests
    protocol = PROTOCOLS[source.protocol]
    chunk_ms = float(requests.first_output_ns[place] - requests.submit_ns[place]) / 1e6
    return {
        **operation_of(source, requests.endpoint_url[place]),
        "gen_ai.request.max_tokens": _count(requests.max_tokens[place]),
        "gen_ai.request.stream": protocol.streams,
        "gen_ai.conversation.id": f"{source.run_id}-{requests.session[place]}"
        if requests.session[place] >= 0
        else None,
        "gen_ai.response.id": requests.response_id[place],
        "gen_ai.response.finish_reasons": [reason] if (reason := requests.finish_reason[place]) else None,
        "gen_ai.response.time_to_first_chunk": chunk_ms / 1e3 if requests.first_output_ns[place] >= 0 else None,
        "gen_ai.usage.input_tokens": _count(requests.input_tokens[place]),
        "gen_ai.usage.output_tokens": counted_output(requests, place),
        "gen_ai.usage.cache_read.input_tokens": _count(requests.cached_tokens[place]),
        "gen_ai.usage.reasoning.output_tokens": _count(requests.reasoning_tokens[place]),
        # Over WebSocket and gRPC there is no HTTP status; ours stands for one.
        "http.response.status_code": _status_code(requests, place) if protocol.transport == "http" else None,
        "error.type": error_type(requests, place),
    }


def operation_of(source: SpanSource, endpoint_url: str) -> dict[str, Value]:
    """Return the attributes common to an operation's spans and metrics: its name, its provider and model, and its
    server.
    """
    url = urlsplit(endpoint_url)
    return {
        "gen_ai.operation.name": _operation(source.protocol),
        "gen_ai.provider.name": source.provider or PROTOCOLS[source.protocol].provider,
        "gen_ai.request.model": source.model,
        "server.address": url.hostname,
        "server.port": url.port or _PORTS.get(url.scheme),
    }


def _ours(source: SpanSource, place: int) -> dict[str, Value]:
    requests, parts = source.requests, source.parts
    late_ns = requests.dispatch_ns[place] - requests.scheduled_ns[place] - requests.held_ns[place]
    return {
        **{f"sidelight.{name}_ms": _number(1e3 * getattr(parts, f"{name}_s")[place]) for name in _TIMES},
        **{f"sidelight.{name}": getattr(parts, name)[place] for name in ("source", "quality", "merged", "reason")},
        "sidelight.engine_span_id": parts.engine_span_id[place],
        "sidelight.dispatch_delay_ms": float(late_ns) / 1e6 if requests.scheduled_ns[place] >= 0 else None,
        "sidelight.request_id": requests.request_id[place],
        "sidelight.phase": requests.phase[place],
        "sidelight.workload_class": requests.workload_class[place],
        "sidelight.turn": int(requests.turn[place]) if requests.session[place] >= 0 else None,
        "sidelight.status": requests.status[place],
        "sidelight.error": _short(requests.error[place]),
    }


def _operation(protocol: str) -> str:
    # https://github.com/open-telemetry/semantic-conventions-genai, docs/gen-ai: by what is sent, text or messages
    return "chat" if PROTOCOLS[protocol].templated else "text_completion"


def _end_ns(requests: RequestLog, place: int) -> int:
    """Return the end of a request; for one that did not end, its last time stamp."""
    end_ns = int(requests.end_ns[place])
    return end_ns if end_ns >= 0 else max(int(getattr(requests, name)[place]) for name in _STAMPS)


def _status(requests: RequestLog, place: int) -> Status:
    """Return the status of a request; conventions leave that of one that went well unset."""
    if requests.status[place] in NO_ERRORS:
        return Status()
    return Status(StatusCode.ERROR, _short(requests.error[place]) or requests.status[place])


def error_type(requests: RequestLog, place: int) -> str | None:
    """Return the HTTP status if that is the error, else the kind of our error. The kind is the text before its first
    colon; None if the request succeeded.
    """
    status, code = requests.status[place], _status_code(requests, place)
    if status in NO_ERRORS:
        return None
    if code is not None and code >= 400:
        return str(code)
    return requests.error[place].partition(":")[0] or str(status)


def _status_code(requests: RequestLog, place: int) -> int | None:
    return int(requests.http_status[place]) or None


def counted_output(requests: RequestLog, place: int) -> int | None:
    """Return the output tokens counted by the server; None for an estimate."""
    return _count(requests.output_tokens[place]) if requests.output_tokens_source[place] == "usage" else None


def _count(value: int) -> int | None:
    return int(value) if value >= 0 else None


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _short(text: str) -> str:
    return text if len(text) <= TEXT_CHARS else f"{text[: TEXT_CHARS - 3]}..."


def known(values: Mapping[str, Value]) -> dict[str, Any]:
    """Return the attributes that have a value."""
    return {name: value for name, value in values.items() if value is not None and value != ""}
