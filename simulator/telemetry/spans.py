"""Exporter of the engine's request spans, by OTLP over gRPC.

They have the form of the engine that is simulated.

A span is sent of each request that finished, under the `traceparent` that it came with, unless that says that it is not
sampled; a request without one begins a trace of its own, SGLang's with an id of 64 bits. Nothing is sent of one that
was aborted, but of SGLang, where an abort is an end like others. As from an exporter in batches, they come up to
EXPORT_EVERY_S late; a batch that was not taken is sent again, and what is too old dropped. What the spans tell of a
request's times are the very differences of its true stamps.

Imported only where it is chosen, because grpcio is heavy.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Self

# Read on import; else each failed connection is written to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

from grpc import aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from sidelight.simulator.engine.history import RequestRecord
from sidelight.simulator.settings import SimulatorSettings
from sidelight.simulator.telemetry import sglang_spans
from sidelight.simulator.telemetry.otlp import Value, describe, identity, latencies, span

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
EXPORT_EVERY_S = 1.0
END_WITHIN_S = 1.0
ATTEMPT_S = 5.0
KEPT_RECORDS = 2048
MOST_STEPS = 8192  # about 1 MB of spans; gRPC takes 4 MB a message unless configured otherwise
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_SCOPES = {"vllm": "vllm.tracing.otel", "sglang": sglang_spans.SCOPE, "trtllm": "tensorrt_llm"}
#: What the resource says; SGLang's has no name of a simulator.
_SERVICES = {"vllm": "vllm-simulator", "sglang": "sglang", "trtllm": "trtllm-simulator"}


class SpanExporter:
    """Exporter of spans to a collector, with a queue; an async context manager.

    Owns the connection.
    """

    def __init__(self, target: str, settings: SimulatorSettings) -> None:
        """`target` is HOST:PORT."""
        self._target, self._settings = target, settings
        self._records: deque[RequestRecord] = deque(maxlen=KEPT_RECORDS)
        self._said = False
        self._ending = asyncio.Event()

    async def __aenter__(self) -> Self:
        # A collector that comes late gets what was kept before its run has ended.
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.enable_http_proxy", 0),
        ]
        self._channel = aio.insecure_channel(self._target, options=options)
        self._export: Any = self._channel.unary_unary(EXPORT)
        self._sending = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        """Send the remaining spans, within END_WITHIN_S."""
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
        for batch in _batches(tuple(self._records)):
            request = export(batch, self._settings)
            if request.resource_spans:
                try:
                    await self._export(request.SerializeToString(), timeout=ATTEMPT_S)
                except aio.AioRpcError as error:
                    if not self._said:
                        reason = " ".join((error.details() or "").split())[:200]
                        problem = f"{error.code().name}: {reason}"
                        sys.stderr.write(f"simulator: spans do not reach {self._target}: {problem}\n")
                    self._said = True
                    return
            for record in batch:
                if self._records and self._records[0] is record:  # the oldest may have been dropped meanwhile
                    self._records.popleft()


def _batches(records: tuple[RequestRecord, ...]) -> Iterator[tuple[RequestRecord, ...]]:
    """Yield records in order, in batches with spans that fit one message to a collector."""
    batch: list[RequestRecord] = []
    steps = 0
    for record in records:
        if batch and steps + len(record.steps) > MOST_STEPS:
            yield tuple(batch)
            batch, steps = [], 0
        batch.append(record)
        steps += len(record.steps)
    if batch:
        yield tuple(batch)


def export(records: tuple[RequestRecord, ...], settings: SimulatorSettings) -> ExportTraceServiceRequest:
    """Return the export of some requests that finished; an empty one where none of them is sampled.

    Each process that sent spans, by its service.instance.id, is a resource of its own.
    """
    scopes: dict[str, ScopeSpans] = {}
    for record in records:
        if (context := _context(record, settings.engine)) is not None:
            for instance, each in _spans(record, *context, settings):
                scopes.setdefault(instance, ScopeSpans()).spans.append(each)
    request = ExportTraceServiceRequest()
    for instance, scope in scopes.items():
        scope.scope.name = _SCOPES[settings.engine]
        resource = request.resource_spans.add()
        named = {"service.instance.id": instance} if instance else {}
        if settings.engine_settings.kv_role:
            named["host.name"] = socket.gethostname()  # what says that two engines have one clock
        describe(resource.resource, {"service.name": _SERVICES[settings.engine], **named, **_stated_attributes()})
        resource.scope_spans.append(scope)
    return request


def _stated_attributes() -> dict[str, str]:
    """Return the attributes of the resource that the environment states, as OpenTelemetry's SDK has them."""
    pairs = (pair.partition("=") for pair in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    return {name.strip(): value.strip() for name, is_pair, value in pairs if is_pair}


def _context(record: RequestRecord, engine: str) -> tuple[bytes, bytes] | None:
    """Return the ids of the trace and the parent span, None if not sampled.

    A trace of our own has no parent.
    """
    match = _TRACEPARENT.fullmatch(record.traceparent)
    if match is None:
        size = 8 if engine == "sglang" else 16
        return identity(record, "trace", size).rjust(16, b"\0"), b""
    return (bytes.fromhex(match[1]), bytes.fromhex(match[2])) if int(match[3], 16) & _SAMPLED else None


def _spans(
    record: RequestRecord, trace_id: bytes, parent_id: bytes, settings: SimulatorSettings
) -> Iterator[tuple[str, Span]]:
    """Yield the spans of a request, each with its process's service.instance.id, empty for none."""
    if settings.engine == "sglang":
        yield from sglang_spans.spans_of(record, trace_id, parent_id, settings.model, settings.engine_settings.kv_role)
    else:
        attributes = (_vllm if settings.engine == "vllm" else _trtllm)(record)
        role = settings.engine_settings.kv_role
        instance = f"{role}-{os.getpid()}" if role else ""  # two engines have two clocks
        yield instance, span(record, "llm_request", trace_id, parent_id, attributes | latencies(record))


def _vllm(record: RequestRecord) -> dict[str, Value]:
    """Return the attributes of vLLM's span. Its queue begins where the engine core takes the request in, its TTFT with
    the arrival.
    """
    return {
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.n": 1,
        "gen_ai.latency.time_in_queue": record.queue_s,
        "gen_ai.latency.time_in_model_prefill": record.prefill_s,
        "gen_ai.latency.time_in_model_decode": record.decode_s,
        "gen_ai.latency.time_in_model_inference": record.inference_s,
    }


def _trtllm(record: RequestRecord) -> dict[str, Value]:
    """Return the attributes of TensorRT-LLM's span, without prefill and decode; its queue begins with the arrival, its
    id is a number of its own.
    """
    return {
        "gen_ai.request.id": int.from_bytes(identity(record, "number", 4)),
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.latency.time_in_queue": record.wait_s,
    }
