"""Measure what the receiver's guards cost of its CPU time: the same exports with and without them, by turns.

    python benchmarks/guards.py

Guards are what bounds senders: connections and heads, bodies in hand, turns and slices, memory, and the count of an
export's parts. Exports are logged as in a run, on the loop that a receiver has. A receiver with guards and one without
stand in one process, and are sent a few exports by turns. Other work beside it only adds: the least is compared, and
the median of the turns' differences, each of which is of two neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast
from unittest.mock import patch

import grpc
import uvloop
from aiohttp import web
from receiver import export

from rundir.process import MemoryLimit
from scraper.spans import receiver as spans_receiver
from scraper.spans.intake import looked
from scraper.spans.intake.admission import Readings, Turns
from scraper.spans.intake.connections import Connection, Connections
from scraper.spans.log import SpanLog
from scraper.spans.receiver import Receiver
from scraper.spans.spec import ReceiverSpec

SIZES = {10: 40, 500: 4, 5000: 1}  # spans of an export, and how many exports are sent in a turn
WARM = 5  # turns before those that count
TURNS = 20  # in a round
MOST_MEMORY_BYTES = 1 << 40
OVER_HTTP = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
def send(body):
    connection.request("POST", "/v1/traces", body, {"Content-Type": "application/x-protobuf"})
    reply = connection.getresponse()
    reply.read()
    assert reply.status == 200, reply.status
"""
OVER_GRPC = """
import grpc, sys
channel = grpc.insecure_channel(f"127.0.0.1:{sys.argv[1]}")
send = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
"""
IN_TURNS = """
body = open(sys.argv[2], "rb").read()
for line in sys.stdin:
    for _ in range(int(line)):
        send(body)
    print(flush=True)
"""
SENDERS = {"http": OVER_HTTP + IN_TURNS, "grpc": OVER_GRPC + IN_TURNS}


class Unbounded:
    """A body in hand that is not counted."""

    def hold(self) -> None: ...
    def grow(self, size_bytes: int) -> None: ...
    def finish(self) -> None: ...
    def begin(self) -> None: ...


class Free:
    """A turn that is not taken."""

    def locked(self) -> bool:
        return False

    async def __aenter__(self) -> None: ...
    async def __aexit__(self, *_: object) -> None: ...


UNBOUNDED, FREE = nullcontext(Unbounded()), Free()


async def at_once(_: Turns, steps: Iterator[object]) -> None:
    for _step in steps:
        pass


def connection_made(connection: Any, transport: Any) -> None:
    behind = connection._behind  # noqa: SLF001  what would be there without it
    connection.begin()  # no head is waited for
    transport.set_protocol(behind)
    behind.connection_made(transport)


async def answered(_: Connections, request: web.BaseRequest, handler: Any) -> object:
    return await handler(request)


def unary(handler: Any) -> Any:
    """Let grpcio read a message before we are asked."""

    async def answer(body: bytes, context: Any) -> object:
        async def read() -> bytes:
            return body

        stated = context.invocation_metadata
        return await handler((), SimpleNamespace(read=read, invocation_metadata=stated, abort=context.abort))

    return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def without_guards() -> Iterator[None]:
    with (
        patch.object(looked, "checked", lambda *_: iter(())),
        patch.object(MemoryLimit, "is_reached", lambda _: False),
        patch.object(Readings, "reading", lambda _: UNBOUNDED),
        patch.object(Turns, "of", lambda *_: FREE),
        patch.object(Turns, "in_slices", at_once),
        patch.object(Connection, "connection_made", connection_made),
        patch.object(Connections, "following", answered),
        patch.object(grpc, "stream_unary_rpc_method_handler", unary),
        patch.object(spans_receiver, "_message", lambda context: context.read()),
    ):
        yield


class Receiving:
    """A receiver and who sends to it: an async context manager."""

    def __init__(self, place: Path, via: str, body: Path) -> None:
        self._via, self._body = via, body
        self._log = SpanLog(str(place / f"spans-{time.monotonic_ns()}.log"), None)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        here = {"grpc": "", "http": "", self._via: "127.0.0.1:0"}
        spec = ReceiverSpec(
            grpc=here["grpc"], http=here["http"], is_awaited=False, memory_bytes=MOST_MEMORY_BYTES,
            clock_offset_ns=time.time_ns() - time.monotonic_ns(),
        )  # fmt: skip
        self._stack.callback(self._log.close)
        receiver = await self._stack.enter_async_context(Receiver(spec, log=self._log, say=print))
        pipe = asyncio.subprocess.PIPE
        self._sender = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SENDERS[self._via], str(receiver.http_port or receiver.grpc_port), str(self._body)),
            stdin=pipe, stdout=pipe,
        )  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        cast("asyncio.StreamWriter", self._sender.stdin).close()
        await self._sender.wait()
        await self._stack.aclose()

    async def cpu_ms(self, exports: int) -> float:
        """Let so many exports be sent, and return the CPU time that this process takes of each."""
        begin_s = time.process_time()
        cast("asyncio.StreamWriter", self._sender.stdin).write(b"%d\n" % exports)
        if not await cast("asyncio.StreamReader", self._sender.stdout).readline():
            raise AssertionError("an export was refused")
        return (time.process_time() - begin_s) * 1e3 / exports


async def turns(place: Path, via: str, body: Path, exports: int, rounds: int) -> list[tuple[float, float]]:
    """Return what an export costs with guards and without, in each turn."""
    async with AsyncExitStack() as stack:
        guarded = await stack.enter_async_context(Receiving(place, via, body))
        await guarded.cpu_ms(1)
        with without_guards():
            bare = await stack.enter_async_context(Receiving(place, via, body))
            await bare.cpu_ms(1)
        taken = []
        for _ in range(WARM + rounds):
            with_ms = await guarded.cpu_ms(exports)
            with without_guards():
                taken.append((with_ms, await bare.cpu_ms(exports)))
    return taken[WARM:]


def measured(via: str, rounds: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        place = Path(scratch)
        for spans, exports in SIZES.items():
            body = place / f"{spans}.body"
            body.write_bytes(export(spans, empty=False))
            taken = runner.run(turns(place, via, body, exports, rounds * TURNS))
            least, other = (min(each) for each in zip(*taken, strict=True))
            half, bare = (statistics.median(each) for each in zip(*taken, strict=True))
            apart = statistics.median(first - second for first, second in taken)
            yield (
                f"{spans} spans, {body.stat().st_size / 1e3:.0f} kB over {via}: {least:.3f} ms with guards, "
                f"{other:.3f} without: {100 * (least / other - 1):+.1f} % by the least of {len(taken)} turns; "
                f"medians {half:.3f} and {bare:.3f}, apart by {1e3 * apart:+.1f} us, {100 * apart / bare:+.1f} %"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help=f"of {TURNS} turns")
    parser.add_argument("--via", choices=SENDERS, action="append")
    options = parser.parse_args()
    for via in options.via or SENDERS:
        for line in measured(via, options.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
