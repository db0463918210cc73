"""Senders that leave, and messages that gRPC does not show: each export that does not come whole is counted, once."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import socket
import struct
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_frames import END_STREAM, RESET, SETTINGS, calling
from odd_exports import PROTOBUF, odd_export, over_grpc, over_http
from waiting import BOUND_S

from sidelight.scraper.spans.intake import over_grpc as calls
from sidelight.scraper.spans.log import ReceiverCounts, SpanLog, StateRecord, read_log
from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import LIMIT_BYTES, ReceiverSpec

MB = 1 << 20
MAX_CONCURRENT_STREAMS = 3  # of SETTINGS, RFC 9113
MESSAGE_BYTES = 60_000
NOW_NS = 10**18
CANCEL = (8).to_bytes(4, "big")
HEAD = f"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: {PROTOBUF}\r\nExpect: 100-continue\r\n".encode()
_CODES = grpc.StatusCode
INVALID_ARGUMENT, RESOURCE_EXHAUSTED, INTERNAL, UNAVAILABLE = (
    code.value[0] for code in (_CODES.INVALID_ARGUMENT, _CODES.RESOURCE_EXHAUSTED, _CODES.INTERNAL, _CODES.UNAVAILABLE)
)
CANCELLED = _CODES.CANCELLED.value[0]


@asynccontextmanager
async def receiving(path: Path) -> AsyncIterator[Receiver]:
    log = SpanLog(path / "spans.log")
    spec = ReceiverSpec(grpc="127.0.0.1:0", http="127.0.0.1:0", clock_offset_ns=NOW_NS - time.monotonic_ns())
    try:
        async with Receiver(spec, log=log, say=print) as receiver:
            yield receiver
    finally:
        log.close()


async def counted(receiver: Receiver, **counts: int) -> None:
    """Wait until a receiver has counted that; it must count no more for what was sent before."""
    async with asyncio.timeout(BOUND_S):
        while receiver.counts() == ReceiverCounts():  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0.001)
    assert 200 == (await over_http(receiver.http_port, odd_export(NOW_NS)))[0]
    await over_grpc(receiver.grpc_port, odd_export(NOW_NS))
    assert receiver.counts() == ReceiverCounts(exports=2, spans=2, **counts)


async def read_by_grpc() -> None:
    """Wait until a message is read of a call."""
    async with asyncio.timeout(BOUND_S):
        while not any(getattr(task.get_coro(), "__name__", "") == "read" for task in asyncio.all_tasks()):  # noqa: ASYNC110  nothing tells of it
            await asyncio.sleep(0)


class Mallinfo(ctypes.Structure):
    """As mallinfo(3) has it."""

    _fields_ = (("sizes", ctypes.c_size_t * 10),)


def allocated_bytes() -> int:
    """Return how much of this process's memory is in use, not by Python alone."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    return int(mallinfo().sizes[7])  # uordblks


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("sent", [b"", b"\x0a" * 1000], ids=["nothing", "a part"])
async def test_a_sender_that_leaves_in_the_middle_of_a_message_is_counted(tmp_path: Path, how: str, sent: bytes):
    """Over gRPC: not as one that sent too much, of which nothing is known."""
    async with receiving(tmp_path) as receiver, calling(receiver.grpc_port) as call:
        call.begin(MB, sent)
        await read_by_grpc()
        if how == "close":
            call.leave()
        else:
            call.send(RESET, CANCEL)
        await counted(receiver, incomplete=1)


@pytest.mark.parametrize("is_begun", [True, False])
async def test_a_call_that_ends_without_a_whole_message_is_refused(tmp_path: Path, is_begun: bool):
    """It was answered as if all of it were taken."""
    async with receiving(tmp_path) as receiver, calling(receiver.grpc_port) as call:
        if is_begun:
            call.begin(MB, b"\x0a" * 1000, flags=END_STREAM)
        else:
            call.send(0, flags=END_STREAM)
        assert INVALID_ARGUMENT == await call.status()
        await counted(receiver, incomplete=1)


@pytest.mark.parametrize(
    ("size", "kind"), [(LIMIT_BYTES + 1, "too_large"), (2 * LIMIT_BYTES, "too_large"), (40 * MB, "incomplete")]
)
async def test_a_message_beyond_the_limit_is_counted_as_what_is_known_of_it(tmp_path: Path, size: int, kind: str):
    """One far beyond it is refused by gRPC before it is read, and its sender is given the reason all the same."""
    async with receiving(tmp_path) as receiver:
        with pytest.raises(aio.AioRpcError) as refused:
            await over_grpc(receiver.grpc_port, bytes(size))
        assert grpc.StatusCode.RESOURCE_EXHAUSTED == refused.value.code()
        await counted(receiver, **{kind: 1})


@pytest.mark.parametrize("window", [31, 15], ids=["gzip", "deflate"])
async def test_a_bomb_over_grpc_is_inflated_up_to_the_limit(tmp_path: Path, window: int):
    """By us: not every version of gRPC's library has a bound."""
    packer = zlib.compressobj(9, zlib.DEFLATED, window)
    bomb = b"".join([*(packer.compress(bytes(MB)) for _ in range(60)), packer.flush()])
    async with receiving(tmp_path) as receiver:
        name = "gzip" if window > 15 else "deflate"
        async with calling(receiver.grpc_port, headers=[("grpc-encoding", name)]) as call:
            call.begin(len(bomb), bomb, packed=True, flags=END_STREAM)
            assert RESOURCE_EXHAUSTED == await call.status()
        await counted(receiver, too_large=1)


@pytest.mark.parametrize("window", [31, 15], ids=["gzip", "deflate"])
@pytest.mark.parametrize("damage", ["cut off", "garbage"])
async def test_what_is_packed_badly_is_malformed(tmp_path: Path, window: int, damage: str):
    """As over HTTP."""
    packer = zlib.compressobj(6, zlib.DEFLATED, window)
    whole = packer.compress(odd_export(NOW_NS)) + packer.flush()
    body = whole[:-9] if damage == "cut off" else whole[:2] + b"\xff" * 30
    headers = [("grpc-encoding", "gzip" if window > 15 else "deflate")]
    async with receiving(tmp_path) as receiver, calling(receiver.grpc_port, headers=headers) as call:
        call.begin(len(body), body, packed=True, flags=END_STREAM)
        assert INVALID_ARGUMENT == await call.status()
        await counted(receiver, malformed=1)


@pytest.mark.parametrize("packing", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_exports_packed_by_either_are_taken(tmp_path: Path, packing: grpc.Compression):
    """gRPC offers both to its clients."""
    async with receiving(tmp_path) as receiver:
        assert b"" == await over_grpc(receiver.grpc_port, odd_export(NOW_NS), packing)
        assert receiver.counts() == ReceiverCounts(exports=1, spans=1)


async def test_another_encoding_is_refused_by_grpc(tmp_path: Path):
    """It says so to the sender; to us it is an export that did not come."""
    async with receiving(tmp_path) as receiver:
        async with calling(receiver.grpc_port, headers=[("grpc-encoding", "snappy")]) as call:
            call.begin(9, b"\xff\x06\x00\x00sNaPp", packed=True, flags=END_STREAM)
            assert INTERNAL == await call.status()
        await counted(receiver, incomplete=1)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="only glibc tells what of its memory is in use")
async def test_a_message_that_is_whole_when_it_gives_way_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Such messages stayed for ever, until every export was refused for want of memory."""
    monkeypatch.setattr(calls, "_MOST_CALLS", 0)
    async with receiving(tmp_path) as receiver:

        async def let_give_way(times: int) -> None:
            for _ in range(times):
                async with calling(receiver.grpc_port) as call:
                    call.begin(MESSAGE_BYTES, bytes(MESSAGE_BYTES))
                    call.wait_until_read()  # by gRPC; our loop does not know yet
                    assert UNAVAILABLE == await call.status()

        await let_give_way(20)
        before = allocated_bytes()
        await let_give_way(100)
        assert allocated_bytes() - before < 20 * MESSAGE_BYTES
        assert receiver.counts() == ReceiverCounts(turned_away=120)


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize(
    "framing",
    [b"Content-Length: 100000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Length: 5\r\n\r\n"],
    ids=["length", "chunked", "nearly whole"],
)
async def test_a_sender_that_leaves_in_the_middle_of_a_body_is_counted(tmp_path: Path, how: str, framing: bytes):
    """Over HTTP, however its body is framed."""
    async with receiving(tmp_path) as receiver:
        _, writer = await begun(receiver.http_port, framing)
        writer.write(b"4\r\nab" if b"chunked" in framing else b"abcd")
        leave(writer, how)
        await counted(receiver, incomplete=1)


async def test_a_sender_that_leaves_before_its_turn_is_counted(tmp_path: Path):
    """Its export is whole, and dropped: as one that gives up has not been answered, it may send it again."""
    body = odd_export(NOW_NS, service="x" * 20_000)
    async with receiving(tmp_path) as receiver:
        async with AsyncExitStack() as turns:
            while not receiver._large.locked():
                await turns.enter_async_context(receiver._large)
            _, writer = await begun(receiver.http_port, b"Content-Length: %d\r\n\r\n" % len(body))
            writer.write(body)
            async with asyncio.timeout(BOUND_S):
                while not receiver._large._waiters:  # noqa: ASYNC110  nothing tells of it
                    await asyncio.sleep(0)
            leave(writer, "close")
            async with asyncio.timeout(BOUND_S):
                while not receiver.counts().incomplete:  # noqa: ASYNC110  as above
                    await asyncio.sleep(0.001)
        await counted(receiver, incomplete=1)


@pytest.mark.parametrize("has_http", [False, True])
async def test_what_is_in_hand_when_a_receiver_ends_is_turned_away(tmp_path: Path, has_http: bool):
    """Its sender did not leave."""
    async with AsyncExitStack() as calls:
        async with receiving(tmp_path) as receiver:
            call = await calls.enter_async_context(calling(receiver.grpc_port))
            call.begin(MB, b"\x0a" * 1000)
            await read_by_grpc()
            if has_http:
                _, writer = await begun(receiver.http_port, b"Content-Length: 9\r\n\r\n")
                calls.callback(writer.close)
        ended = list(read_log(tmp_path / "spans.log"))[-1]
    assert isinstance(ended, StateRecord)
    assert ended.counts == receiver.counts() == ReceiverCounts(turned_away=1 + has_http)


async def begun(port: int, framing: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begin to send a body; its receiver reads it by now."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(HEAD + framing)
    assert b"HTTP/1.1 100 Continue\r\n\r\n" == await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), BOUND_S)
    return reader, writer


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    """Close a connection, or break it off."""
    if how == "reset":
        taken = writer.get_extra_info("socket")
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


async def test_a_connection_has_a_bounded_number_of_calls(tmp_path: Path):
    """Their metadata takes memory before any of them is read, up to 4 kB for a byte on the wire."""
    async with receiving(tmp_path) as receiver, calling(receiver.grpc_port) as call, asyncio.timeout(BOUND_S):
        head = await call.reader.readexactly(9)
        assert head[3] == SETTINGS
        settings = dict(struct.iter_unpack(">HI", await call.reader.readexactly(int.from_bytes(head[:3], "big"))))
        assert 32 == settings.get(MAX_CONCURRENT_STREAMS)


async def test_a_call_that_waited_too_long_for_the_loop_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else an export waits for each call of a flood before it, until its sender gives up."""
    monkeypatch.setattr(calls, "_MOST_WAIT_S", 0)
    async with receiving(tmp_path) as receiver, calling(receiver.grpc_port, others=2) as call:
        call.wait_until_read()  # by gRPC; our loop asked for one call at most
        time.sleep(0.01)  # noqa: ASYNC251  the loop is held, until gRPC's clock of milliseconds has moved
        assert CANCELLED == await call.status()
