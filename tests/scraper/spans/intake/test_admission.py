"""What a receiver has in hand: who sends slowly, much or at a bad moment is asked to come again, and others are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import odd_exports
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from grpc import aio
from grpc_frames import calling
from odd_exports import PROTOBUF, odd_export, over_http
from waiting import BOUND_S

from sidelight.rundir.process import MemoryLimit
from sidelight.scraper.spans.intake import admission, over_grpc
from sidelight.scraper.spans.log import ReceiverCounts, SpanLog
from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import MOST_CONNECTIONS, SIGNALS, ReceiverSpec

NOW_NS = 10**18


@asynccontextmanager
async def receiving(path: Path, **spec: object) -> AsyncIterator[Receiver]:
    log = SpanLog(path / "spans.log")
    whole = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0", "clock_offset_ns": NOW_NS - time.monotonic_ns(), **spec}
    try:
        async with Receiver(ReceiverSpec(**whole), log=log, say=print) as receiver:  # type: ignore[arg-type]
            yield receiver
    finally:
        log.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No body takes too long."""
    monkeypatch.setattr(admission, "WHOLE_S", BOUND_S)


async def begun(
    stack: AsyncExitStack, port: int, sent: bytes, size: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begin to send a body of a size; its receiver reads it by now."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    head = f"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: {PROTOBUF}\r\nContent-Length: {size}\r\n"
    writer.write(head.encode() + b"Expect: 100-continue\r\n\r\n")
    assert b"HTTP/1.1 100 Continue\r\n\r\n" == await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), BOUND_S)
    writer.write(sent)
    return reader, writer


async def until(condition: Callable[[], bool]) -> None:
    """Let others go on until something is so."""
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0)


async def first_of(ends: Sequence[asyncio.Future[grpc.StatusCode]], count: int) -> list[grpc.StatusCode]:
    """Wait until so many calls have ended, and return how those that have did."""
    async with asyncio.timeout(BOUND_S):
        while sum(end.done() for end in ends) < count:
            await asyncio.wait([end for end in ends if not end.done()], return_when=asyncio.FIRST_COMPLETED)
    return [end.result() for end in ends if end.done()]


@pytest.mark.usefixtures("patient")
async def test_slow_bodies_keep_no_export_waiting(tmp_path: Path):
    """More of them than there are connections: each that gives way is counted, and every export comes through."""
    exports = 20
    async with receiving(tmp_path) as receiver, AsyncExitStack() as stack, aiohttp.ClientSession() as session:
        headers = {"Content-Type": PROTOBUF}
        url = f"http://127.0.0.1:{receiver.http_port}/v1/traces"
        slow = 0
        for _ in range(exports):
            for _ in range(20):
                await begun(stack, receiver.http_port, b"ab", 100_000)
                slow += 1
            async with session.post(url, data=odd_export(NOW_NS), headers=headers) as response:
                assert 200 == response.status
        await until(lambda: receiver.counts().incomplete == receiver.counts().cut_connections)
        cut = slow + 1 - MOST_CONNECTIONS
        assert receiver.counts() == ReceiverCounts(exports=exports, spans=exports, incomplete=cut, cut_connections=cut)


@pytest.mark.usefixtures("patient")
async def test_calls_without_a_message_keep_no_export_waiting_either(tmp_path: Path):
    """Over gRPC as many may stand open as are read at once; the oldest of more is asked to come again."""
    calls = over_grpc._MOST_CALLS + 10
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    async with receiving(tmp_path) as receiver, AsyncExitStack() as stack:
        slow = []
        for _ in range(calls):
            channel = aio.insecure_channel(f"127.0.0.1:{receiver.grpc_port}", options=options)
            slow.append((await stack.enter_async_context(channel)).stream_unary(SIGNALS["traces"])())
        ends = [asyncio.ensure_future(call.code()) for call in slow]
        assert [grpc.StatusCode.UNAVAILABLE] * 10 == await first_of(ends, 10)
        assert b"" == await odd_exports.over_grpc(receiver.grpc_port, odd_export(NOW_NS))
        assert [grpc.StatusCode.UNAVAILABLE] * 11 == await first_of(ends, 11)
        assert receiver.counts() == ReceiverCounts(exports=1, spans=1, turned_away=11)
        for call in slow:
            call.cancel()
        await asyncio.gather(*ends)


async def test_an_export_has_to_be_whole_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Over both wires its sender may come again."""
    monkeypatch.setattr(admission, "WHOLE_S", 0.05)
    async with receiving(tmp_path) as receiver, AsyncExitStack() as stack, calling(receiver.grpc_port) as call:
        call.begin(100_000, b"half")
        assert grpc.StatusCode.UNAVAILABLE.value[0] == await call.status()
        reader, _ = await begun(stack, receiver.http_port, b"half", 100)
        assert b"HTTP/1.1 503 Service Unavailable\r\n" == await asyncio.wait_for(reader.readline(), BOUND_S)
        monkeypatch.undo()
        assert 200 == (await over_http(receiver.http_port, odd_export(NOW_NS)))[0]
        assert receiver.counts() == ReceiverCounts(exports=1, spans=1, turned_away=2)


@pytest.mark.usefixtures("patient")
async def test_a_body_is_read_no_further_beyond_the_limit_of_memory(tmp_path: Path):
    """Slow ones, of which each is within its limit, would hold as much as there is."""
    async with receiving(tmp_path) as receiver, AsyncExitStack() as stack:
        reader, writer = await begun(stack, receiver.http_port, b"", 100)
        receiver._admission._memory = MemoryLimit(1)
        writer.write(b"half")
        assert b"HTTP/1.1 503 Service Unavailable\r\n" == await asyncio.wait_for(reader.readline(), BOUND_S)
        assert receiver.counts() == ReceiverCounts(no_memory=1)


async def test_beyond_the_limit_of_memory_exports_are_asked_to_come_again(tmp_path: Path):
    """Over both wires as OTLP has it, with the time after which to do so; each is counted."""
    async with receiving(tmp_path, memory_bytes=1_000_000) as receiver:
        url = f"http://127.0.0.1:{receiver.http_port}/v1/traces"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, data=odd_export(NOW_NS), headers={"Content-Type": PROTOBUF}) as response,
        ):
            assert (503, "1") == (response.status, response.headers["Retry-After"])
            assert b"more than 1 MB of memory are in use" in await response.read()
        with pytest.raises(aio.AioRpcError) as refused:
            await odd_exports.over_grpc(receiver.grpc_port, odd_export(NOW_NS))
        assert grpc.StatusCode.RESOURCE_EXHAUSTED == refused.value.code()
        ((name, status),) = [
            (name, value) for name, value in refused.value.trailing_metadata() or () if name.endswith("-bin")
        ]
        assert "grpc-status-details-bin" == name
        assert isinstance(status, bytes)
        assert status.startswith(bytes([8, grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]]))
        detail = Any.FromString(status[status.index(b"\x1a") + 2 :])
        assert detail.type_url.endswith("/google.rpc.RetryInfo")
        assert 1 == Duration.FromString(detail.value[2:]).seconds
        assert receiver.counts() == ReceiverCounts(no_memory=2)
