"""A run through a gateway that sends spans: its part of each wait is told apart from the network's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from processes import Ended, engine, sidelight
from sent_spans import body

from sidecar.cli import free_pair

HELD_S = 0.03
LOAD = ("--rate", "10", "--duration", "2", "--warmup", "0", "--listen", "off", "--quiet")


@asynccontextmanager
async def gateway(upstream: str, collector: str) -> AsyncIterator[str]:
    """Holds each request for HELD_S, passes it on as its own child, and sends a span of it by OTLP over HTTP."""
    async with aiohttp.ClientSession() as session:

        async def passed(request: web.Request) -> web.StreamResponse:
            _, trace, parent, flags = (request.headers.get("traceparent") or "00-00-00-00").split("-")
            own = f"{int(parent, 16) ^ 1:016x}"
            headers = {"traceparent": f"00-{trace}-{own}-{flags}", "Content-Type": "application/json"}
            begun_ns, first_ns = time.time_ns(), 0
            if request.method == "POST":
                await asyncio.sleep(HELD_S)
            data = await request.read()
            async with session.request(request.method, upstream + request.path, data=data, headers=headers) as found:
                reply = web.StreamResponse(status=found.status, headers={"Content-Type": found.content_type})
                await reply.prepare(request)
                async for chunk in found.content.iter_any():
                    if not first_ns and b'"content":"' in chunk:
                        first_ns = time.time_ns()
                    await reply.write(chunk)
            if first_ns:
                span = Span(
                    trace_id=bytes.fromhex(trace),
                    span_id=bytes.fromhex(own),
                    parent_span_id=bytes.fromhex(parent),
                    name="chat sim",
                    kind=Span.SPAN_KIND_SERVER,
                    start_time_unix_nano=begun_ns,
                    end_time_unix_nano=time.time_ns(),
                )
                span.attributes.add(key="gen_ai.operation.name").value.string_value = "chat"
                told = span.attributes.add(key="gen_ai.response.time_to_first_chunk")
                told.value.double_value = (first_ns - begun_ns) / 1e9
                protobuf = {"Content-Type": "application/x-protobuf"}
                # Nobody listens yet when the run first asks for a token.
                with suppress(aiohttp.ClientConnectionError):
                    await session.post(f"{collector}/v1/traces", data=body([span]), headers=protobuf)
            return reply

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", passed)
        async with TestServer(app) as server:
            yield f"http://127.0.0.1:{server.port}"


async def test_what_a_gateway_holds_up_is_the_gateways(tmp_path: Path):
    """At least the time for which it held each request, and nothing of it is left in the network's part."""
    address = free_pair()
    host, _, port = address.rpartition(":")
    collector = f"http://{host}:{int(port) + 1}"
    with engine("--otlp-endpoint", f"http://{address}") as (url, _):
        async with gateway(url, collector) as entrance:
            given = ("--url", entrance, "--metrics", f"{url}/metrics", "--otlp-listen", address)
            out = ("--out", tmp_path / "run")
            done: Ended = await asyncio.to_thread(sidelight, "run", *given, *LOAD, *out, path=tmp_path / "run")
    assert 0 == done.code, done.err
    rows = done.requests()
    assert len(rows) > 5
    assert {"trace"} == {row["breakdown_source"] for row in rows}
    assert min(row["gateway_ms"] for row in rows) >= 1e3 * HELD_S
    for row in rows:
        parts = [row[f"{part}_ms"] for part in ("network", "gateway", "queue", "prefill", "other")]
        assert pytest.approx(row["ttft_ms"], abs=1e-6) == sum(parts)
        assert row["request_network_ms"] is None
    part = done.summary["correlation"]["breakdown"]["gateway_ms"]
    assert (len(rows), "trace") == (part["count"], part["source"])
    assert " gateway " in (done.path / "report.txt").read_text()
