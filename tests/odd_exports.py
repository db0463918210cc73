"""Exports of one span of vLLM, with what is to be wrong about it, and sending them."""

from __future__ import annotations

import io
import ssl
from collections.abc import AsyncIterator, Iterable

import aiohttp
import grpc
from grpc import aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from waiting import BOUND_S

from sidelight.scraper.spans.log import ReceiverCounts, ReceiverLife, SpanLogRecord, added_up, follow
from sidelight.scraper.spans.spec import SIGNALS

PROTOBUF = "application/x-protobuf"


def odd_export(end_ns: int, *, attributes: int = 0, module: str = "", service: str = "", **changes: object) -> bytes:
    """One of so many attributes, from so named a sender, that ended then; `changes` are fields of the span."""
    request = ExportTraceServiceRequest()
    sent = request.resource_spans.add()
    if service:
        sent.resource.attributes.add(key="service.name").value.string_value = service
    scope = sent.scope_spans.add()
    scope.scope.name = "vllm.tracing.otel"
    whole = {"trace_id": b"t" * 16, "span_id": b"s" * 8, "name": "llm_request", "end_time_unix_nano": end_ns}
    span = scope.spans.add(**{**whole, "start_time_unix_nano": end_ns - 1, **changes})  # type: ignore[arg-type]
    if module:
        span.attributes.add(key="module").value.string_value = module
    for number in range(attributes):
        span.attributes.add(key=str(number)).value.int_value = number
    return request.SerializeToString()


async def over_http(
    port: int,
    body: bytes | AsyncIterator[bytes],
    *,
    signal: str = "traces",
    tls: ssl.SSLContext | None = None,
    **headers: str,
) -> tuple[int, bytes]:
    """Post an export; `_` stands for `-` in a header's name."""
    sent = {"Content-Type": PROTOBUF, **{name.replace("_", "-"): value for name, value in headers.items()}}
    data = io.BytesIO(body) if isinstance(body, bytes) else body
    url = f"http{'s' * (tls is not None)}://127.0.0.1:{port}/v1/{signal}"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, data=data, headers=sent, ssl=tls or True) as response,
    ):
        return response.status, await response.read()


async def over_grpc(
    port: int,
    body: bytes,
    compression: grpc.Compression = grpc.Compression.NoCompression,
    *,
    signal: str = "traces",
) -> bytes:
    """Call with an export, of any size, over a connection of its own."""
    options = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        reply: bytes = await channel.unary_unary(SIGNALS[signal])(body, compression=compression, timeout=BOUND_S)
        return reply


def counted(records: Iterable[SpanLogRecord]) -> tuple[ReceiverCounts | None, int]:
    """Add up what the receivers of a log counted, and how many of them died."""
    lives: list[ReceiverLife] = []
    for record in records:
        follow(lives, record)
    return added_up(lives)
