"""The spans of an engine's requests, sent to a collector by OTLP over gRPC in the form of the engine that is simulated.

A span is sent of each request that finished, under the `traceparent` that it came with, unless that says that it is not
sampled; a request without one begins a trace of its own. Nothing is sent of one that was aborted. As from an exporter
in batches, they come up to EXPORT_EVERY_S late; a batch that was not taken is sent again, and what is too old dropped.
What the spans tell of a request's times are the very differences of its true stamps.

Imported only where it is chosen, because grpcio is heavy.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any, Self

# Read on import; else each failed connection is written to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from grpc import aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from simulator.engine.history import RequestRecord
from simulator.settings import SimulatorSettings

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
EXPORT_EVERY_S = 1.0
END_WITHIN_S = 1.0
ATTEMPT_S = 5.0
KEPT_RECORDS = 2048
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_SCOPES = {"vllm": "vllm.tracing.otel", "sglang": "sglang", "trtllm": "tensorrt_llm"}

Value = str | int | float


class SpanExporter:
    """Owns the connection to a collector, and what is still to be sent there; an async context manager."""

    def __init__(self, target: str, settings: SimulatorSettings) -> None:
        """`target` is HOST:PORT."""
        self._target, self._settings = target, settings
        self._records: deque[RequestRecord] = deque(maxlen=KEPT_RECORDS)
        self._said = False
        self._ending = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._channel = aio.insecure_channel(self._target, options=[("grpc.use_local_subchannel_pool", 1)])
        self._export: Any = self._channel.unary_unary(EXPORT)
        self._sending = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send what is left, within END_WITHIN_S."""
        self._ending.set()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._sending, END_WITHIN_S)
        await self._channel.close()

    def add(self, record: RequestRecord) -> None:
        self._records.append(record)

    async def _run(self) -> None:
        while not self._ending.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), EXPORT_EVERY_S)
            await self._flush()
        await self._flush()  # the end may have come while the last batch was under way

    async def _flush(self) -> None:
        batch = tuple(self._records)
        request = export(batch, self._settings)
        if request.resource_spans:
            try:
                await self._export(request.SerializeToString(), timeout=ATTEMPT_S)
            except aio.AioRpcError as error:
                if not self._said:
                    reason = " ".join((error.details() or "").split())[:200]
                    sys.stderr.write(f"simulator: spans do not reach {self._target}: {error.code().name}: {reason}\n")
                self._said = True
                return
        for record in batch:
            if self._records and self._records[0] is record:  # the oldest may have been dropped meanwhile
                self._records.popleft()


def export(records: tuple[RequestRecord, ...], settings: SimulatorSettings) -> ExportTraceServiceRequest:
    """Return the export of some requests that finished; an empty one where none of them is sampled."""
    form = {"vllm": _vllm, "sglang": _sglang, "trtllm": _trtllm}[settings.engine]
    scope = ScopeSpans()
    scope.scope.name = _SCOPES[settings.engine]
    for record in records:
        if (context := _context(record)) is not None:
            scope.spans.extend(form(record, *context))
    request = ExportTraceServiceRequest()
    if scope.spans:
        resource = request.resource_spans.add()
        _describe(resource.resource, {"service.name": f"{settings.engine}-simulator"})
        resource.scope_spans.append(scope)
    return request


def _context(record: RequestRecord) -> tuple[bytes, bytes] | None:
    """Return the ids of the trace and of the parent span (none in a trace of our own); None if it is not sampled."""
    match = _TRACEPARENT.fullmatch(record.traceparent)
    if match is None:
        return _id(record, "trace", 16), b""
    return (bytes.fromhex(match[1]), bytes.fromhex(match[2])) if int(match[3], 16) & _SAMPLED else None


def _vllm(record: RequestRecord, trace_id: bytes, parent_id: bytes) -> Iterator[Span]:
    """Give one span. Its queue begins where the engine core takes the request in, its TTFT with the arrival."""
    attributes: dict[str, Value] = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.n": 1,
        "gen_ai.latency.time_in_queue": record.queue_s,
        "gen_ai.latency.time_in_model_prefill": record.prefill_s,
        "gen_ai.latency.time_in_model_decode": record.decode_s,
        "gen_ai.latency.time_in_model_inference": record.inference_s,
    }
    yield _span(record, "llm_request", trace_id, parent_id, attributes | _usual(record))


def _trtllm(record: RequestRecord, trace_id: bytes, parent_id: bytes) -> Iterator[Span]:
    """Give one span, without prefill and decode; its queue begins with the arrival, its id is a number of its own."""
    attributes: dict[str, Value] = {
        "gen_ai.request.id": int.from_bytes(_id(record, "number", 4)),
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.latency.time_in_queue": record.wait_s,
    }
    yield _span(record, "llm_request", trace_id, parent_id, attributes | _usual(record))


def _sglang(record: RequestRecord, trace_id: bytes, parent_id: bytes) -> Iterator[Span]:
    """Give the request's span, the scheduler's under it, and under that its stages.

    The prefill attribute includes the queue; the stages separate the two.
    """
    attributes: dict[str, Value] = {
        "module": "sglang::request",
        "gen_ai.request.id": record.request_id,
        "gen_ai.latency.time_in_model_prefill": (record.first_token_ns - record.queued_ns) / 1e9,
        "gen_ai.latency.time_in_model_decode": record.decode_s,
    }
    root = _span(record, f" Req {record.request_id[:8]}", trace_id, parent_id, attributes | _usual(record))
    thread = _span(record, "scheduler [TP 0]", trace_id, root.span_id, {})
    yield from (root, thread)
    for name, start_ns, end_ns in (
        ("prefill_waiting", record.queued_ns, record.scheduled_ns),
        ("prefill_forward", record.scheduled_ns, record.first_token_ns),
    ):
        stage = _span(record, name, trace_id, thread.span_id, {})
        stage.start_time_unix_nano, stage.end_time_unix_nano = start_ns, end_ns
        yield stage


def _usual(record: RequestRecord) -> dict[str, Value]:
    return {
        "gen_ai.latency.time_to_first_token": record.ttft_s,
        "gen_ai.latency.e2e": record.e2e_s,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
    }


def _span(record: RequestRecord, name: str, trace_id: bytes, parent_id: bytes, attributes: Mapping[str, Value]) -> Span:
    """Return a span from the request's arrival to its end."""
    span = Span(
        name=name,
        trace_id=trace_id,
        span_id=_id(record, name, 8),
        parent_span_id=parent_id,
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=record.arrival_ns,
        end_time_unix_nano=record.finished_ns,
    )
    _describe(span, attributes)
    return span


def _describe(described: Any, attributes: Mapping[str, Value]) -> None:
    for key, value in attributes.items():
        kind = {str: "string_value", int: "int_value", float: "double_value"}[type(value)]
        setattr(described.attributes.add(key=key).value, kind, value)


def _id(record: RequestRecord, what: str, size: int) -> bytes:
    """Return an id that is the same whenever it is made again."""
    text = f"{record.request_id}/{record.arrival_ns}/{what}"
    return blake2b(text.encode(), digest_size=size).digest()
