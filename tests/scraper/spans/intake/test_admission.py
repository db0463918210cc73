"""What a receiver has in hand: who sends slowly, much or at a bad moment is asked to come again, and others are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from grpc import aio
from odd_exports import PROTOBUF, odd_export, over_grpc, over_http
from waiting import BOUND_S

from scraper.spans import receiver as receivers
from scraper.spans.export import Refusal
from scraper.spans.intake import admission
from scraper.spans.intake.admission import Readings, Turns
from scraper.spans.log import Counts, SpanLog
from scraper.spans.receiver import Receiver
from scraper.spans.spec import MOST_CONNECTIONS, SIGNALS, ReceiverSpec

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
    monkeypatch.setattr(admission, "PATIENCE_S", BOUND_S)
    monkeypatch.setattr(admission, "WHOLE_S", BOUND_S)


async def begun(stack: AsyncExitStack, port: int, sent: bytes, size: int) -> asyncio.StreamReader:
    """Begin to send a body of a size; its receiver reads it by now."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.close)
    head = f"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: {PROTOBUF}\r\nContent-Length: {size}\r\n"
    writer.write(head.encode() + b"Expect: 100-continue\r\n\r\n")
    assert b"HTTP/1.1 100 Continue\r\n\r\n" == await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), BOUND_S)
    writer.write(sent)
    return reader


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
        await until(lambda: receiver.counts().turned_away == receiver.counts().cut_connections)
        cut = slow + 1 - MOST_CONNECTIONS
        assert receiver.counts() == Counts(exports=exports, spans=exports, turned_away=cut, cut_connections=cut)


@pytest.mark.usefixtures("patient")
async def test_calls_without_a_message_keep_no_export_waiting_either(tmp_path: Path):
    """Over gRPC as many may stand open as are read at once; the oldest of more is asked to come again."""
    calls = receivers._CALLS + 10
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    async with receiving(tmp_path) as receiver, AsyncExitStack() as stack:
        slow = []
        for _ in range(calls):
            channel = aio.insecure_channel(f"127.0.0.1:{receiver.grpc_port}", options=options)
            slow.append((await stack.enter_async_context(channel)).stream_unary(SIGNALS["traces"])())
        ends = [asyncio.ensure_future(call.code()) for call in slow]
        assert [grpc.StatusCode.UNAVAILABLE] * 10 == await first_of(ends, 10)
        assert b"" == await over_grpc(receiver.grpc_port, odd_export(NOW_NS))
        assert [grpc.StatusCode.UNAVAILABLE] * 11 == await first_of(ends, 11)
        assert receiver.counts() == Counts(exports=1, spans=1, turned_away=11)
        for call in slow:
            call.cancel()
        await asyncio.gather(*ends)


async def test_a_body_has_to_come_at_a_least_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Long before it would be whole; its sender may come again."""
    monkeypatch.setattr(admission, "PATIENCE_S", 0.05)
    monkeypatch.setattr(admission, "WHOLE_S", BOUND_S)
    async with receiving(tmp_path) as receiver, AsyncExitStack() as stack:
        reader = await begun(stack, receiver.http_port, b"half", 100)
        assert b"HTTP/1.1 503 Service Unavailable\r\n" == await asyncio.wait_for(reader.readline(), BOUND_S)
        monkeypatch.undo()
        assert 200 == (await over_http(receiver.http_port, odd_export(NOW_NS)))[0]
        assert receiver.counts() == Counts(exports=1, spans=1, turned_away=1)


@pytest.mark.usefixtures("patient")
async def test_the_oldest_body_gives_way_where_too_many_bytes_are_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One that stalls with much of it sent keeps no room from those that come whole."""
    monkeypatch.setattr(receivers, "_HTTP_BYTES", 1_000_000)
    large = odd_export(NOW_NS, service="x" * 600_000)
    async with receiving(tmp_path) as receiver, AsyncExitStack() as stack:
        reader = await begun(stack, receiver.http_port, large[:500_000], len(large))
        await until(lambda: receiver._http._bytes >= 500_000)
        assert 200 == (await over_http(receiver.http_port, large))[0]
        assert b"HTTP/1.1 503 Service Unavailable\r\n" == await asyncio.wait_for(reader.readline(), BOUND_S)
        assert receiver.counts() == Counts(exports=1, spans=1, turned_away=1)
        assert 0 == receiver._http._bytes


async def sent(readings: Readings, size_bytes: int) -> None:
    """Have a body of a size in hand."""
    async with readings.reading() as reading:
        reading.hold()
        reading.grow(size_bytes)


async def test_whole_bodies_do_not_give_way():
    """They are waiting for their turn: one more than fits is refused instead."""
    readings = Readings(most=10, most_bytes=100)
    async with readings.reading() as first:
        first.hold()
        first.grow(80)
        first.finish()
        with pytest.raises(Refusal, match="too much is sent at once"):
            await sent(readings, 40)
        await sent(readings, 20)


async def ended(readings: Readings, *, whole: bool, size_bytes: int = 0) -> tuple[float, str]:
    """Return how long a body stays in hand of which no more comes, or no turn, and why it is refused."""
    begin_s = asyncio.get_running_loop().time()
    with pytest.raises(Refusal) as refused:
        await waited_for(readings, whole=whole, size_bytes=size_bytes)
    return asyncio.get_running_loop().time() - begin_s, refused.value.text


async def waited_for(readings: Readings, *, whole: bool, size_bytes: int) -> None:
    """Have a body in hand until it is refused."""
    async with readings.reading() as reading:
        reading.hold()
        reading.grow(size_bytes)
        if whole:
            reading.finish()
        await asyncio.Event().wait()


@pytest.mark.looptime
async def test_each_body_ends_at_its_own_time():
    """One timer looks for all of them: also for one that is over before those that began before it."""
    readings = Readings(most=10, most_bytes=100_000)
    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(ended(readings, whole=True))
        await asyncio.sleep(1)
        slow = [group.create_task(ended(readings, whole=False, size_bytes=sent)) for sent in (3000, 0, 30_000)]
    assert pytest.approx((10, 8, 5, 10), abs=0.05) == [each.result()[0] for each in (waiting, *slow)]
    assert "no turn within 10 s" in waiting.result()[1]
    assert all("less than 1 kB/s" in each.result()[1] for each in slow)
    assert 0 == readings._bytes


@pytest.mark.looptime
async def test_a_turn_that_has_come_has_no_end():
    """What is computed of an export is bounded by its size; and a task that is cancelled from elsewhere stays so."""
    readings = Readings(most=10, most_bytes=100_000)

    async def take() -> None:
        async with readings.reading() as reading:
            reading.hold()
            reading.finish()
            reading.begin()
            await asyncio.sleep(60)

    await take()
    taking = asyncio.create_task(take())
    await asyncio.sleep(30)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert not readings.are_any_read


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
            await over_grpc(receiver.grpc_port, odd_export(NOW_NS))
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
        assert receiver.counts() == Counts(no_memory=2)


async def test_exports_are_looked_through_in_slices_by_turns(monkeypatch: pytest.MonkeyPatch):
    """Between two slices the loop does other things; no export waits for the end of another."""
    monkeypatch.setattr(admission, "SLICE_S", 0.0)
    turns, order = Turns(), []

    def steps(name: str) -> Iterator[None]:
        for _ in range(3):
            order.append(name)
            yield

    async with asyncio.TaskGroup() as group:
        group.create_task(turns.in_slices(steps("a")))
        group.create_task(turns.in_slices(steps("b")))
        for _ in range(3):
            order.append("scrape")
            await asyncio.sleep(0)
    assert ["a", "b"] * 3 == [name for name in order if name != "scrape"]
    assert len(order) - 1 > max(index for index, name in enumerate(order) if name == "scrape")


async def test_large_exports_do_not_keep_small_ones_waiting():
    """Each kind has turns of its own."""
    turns = Turns()
    async with AsyncExitStack() as stack:
        while not turns.of(1_000_000).locked():
            await stack.enter_async_context(turns.of(1_000_000))
        assert not turns.of(1000).locked()
