"""Users of a gateway beside production: each streams a chat and sends a span of it, as an instrumented client does."""

from __future__ import annotations

import asyncio
import random
import time

import aiohttp
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import body

PROTOBUF = {"Content-Type": "application/x-protobuf"}


async def use(gateway: str, key: str, collector: str, *, users: int, rate_per_s: float) -> list[float]:
    """Let users ask a gateway, Poisson arrivals; return the TTFT of each, s.

    Raises aiohttp.ClientError where one is refused.
    """
    rng = random.Random(1)
    async with aiohttp.ClientSession(raise_for_status=True) as session, asyncio.TaskGroup() as group:
        tasks = []
        for _ in range(users):
            tasks.append(group.create_task(_ask(session, gateway, key, collector, rng.randbytes(24))))
            await asyncio.sleep(rng.expovariate(rate_per_s))
    return [task.result() for task in tasks]


async def _ask(session: aiohttp.ClientSession, gateway: str, key: str, collector: str, ids: bytes) -> float:
    """Stream one chat; return the time to its first content, s."""
    trace_id, span_id = ids[:16], ids[16:]
    headers = {"Authorization": f"Bearer {key}", "traceparent": f"00-{trace_id.hex()}-{span_id.hex()}-01"}
    chat = {"role": "user", "content": f"{span_id.hex()} {'word ' * 60}"}
    asked = {"model": "sim-llama", "stream": True, "max_tokens": 16, "messages": [chat]}
    begin_ns, first_ns, response_id = time.time_ns(), 0, b""
    async with session.post(f"{gateway}/v1/chat/completions", json=asked, headers=headers) as reply:
        async for line in reply.content:
            response_id = response_id or line.replace(b" ", b"").partition(b'"id":"')[2].partition(b'"')[0]
            if not first_ns and b'"content":"' in line.replace(b'": "', b'":"').replace(b'"content":""', b""):
                first_ns = time.time_ns()
    span = Span(trace_id=trace_id, span_id=span_id, name="chat sim-llama", kind=Span.SPAN_KIND_CLIENT)
    span.start_time_unix_nano, span.end_time_unix_nano = begin_ns, time.time_ns()
    span.attributes.add(key="gen_ai.operation.name").value.string_value = "chat"
    span.attributes.add(key="gen_ai.response.id").value.string_value = response_id.decode()
    ttft_s = (first_ns - begin_ns) / 1e9
    span.attributes.add(key="gen_ai.response.time_to_first_chunk").value.double_value = ttft_s
    await session.post(f"{collector}/v1/traces", data=body([span], service="users"), headers=PROTOBUF)
    return ttft_s
