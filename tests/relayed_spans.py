"""Spans of an engine as if it went by another clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import aiohttp
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import ReceiverSpec


@asynccontextmanager
async def relayed(address: str, ahead_ns: Callable[[int], int]) -> AsyncIterator[str]:
    """Take an engine's spans, and pass them on to an address over HTTP, each stamp moved by what `ahead_ns` gives."""
    host, _, port = address.rpartition(":")
    url = f"http://{host}:{int(port) + 1}/v1/traces"

    async def post(session: aiohttp.ClientSession, export: ExportTraceServiceRequest) -> None:
        for resource in export.resource_spans:
            for span in resource.scope_spans[0].spans:
                span.start_time_unix_nano += ahead_ns(span.start_time_unix_nano)
                span.end_time_unix_nano += ahead_ns(span.end_time_unix_nano)
        # Nothing listens yet when a run first asks for a token.
        with suppress(aiohttp.ClientConnectionError):
            headers = {"Content-Type": "application/x-protobuf"}
            await session.post(url, data=export.SerializeToString(), headers=headers)

    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as posts:
        spec = ReceiverSpec(grpc="127.0.0.1:0", http="")
        said: list[str] = []
        relay = Receiver(
            spec, log=None, say=said.append, deliver=lambda _, export: posts.create_task(post(session, export))
        )
        async with relay:
            yield f"http://127.0.0.1:{relay.grpc_port}"
