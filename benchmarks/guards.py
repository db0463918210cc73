"""Measure what the receiver's guards cost of its CPU time: the same exports with and without them, by turns.

    python benchmarks/guards.py

Guards are what bounds senders: connections and heads, bodies in hand, turns and slices, memory, and the count of an
export's parts. Exports are logged as in a run. The least of many rounds is compared: other work beside it only adds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from receiver import export

from rundir.process import MemoryLimit
from scraper.spans.intake import looked
from scraper.spans.intake.admission import Readings, Turns
from scraper.spans.intake.connections import Connection, Connections
from scraper.spans.log import SpanLog
from scraper.spans.receiver import Receiver
from scraper.spans.spec import ReceiverSpec

SIZES = {10: 400, 500: 40, 5000: 5}  # spans of an export, and how many exports are sent at a time
MOST_MEMORY_BYTES = 1 << 40
SENDER = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
body = open(sys.argv[2], "rb").read()
for _ in range(int(sys.argv[3])):
    connection.request("POST", "/v1/traces", body, {"Content-Type": "application/x-protobuf"})
    reply = connection.getresponse()
    reply.read()
    assert reply.status == 200, reply.status
"""


class Unbounded:
    """A body in hand that is not counted."""

    def grow(self, size_bytes: int) -> None: ...
    def finish(self) -> None: ...
    def begin(self) -> None: ...


@asynccontextmanager
async def reading(_: Readings) -> AsyncIterator[Unbounded]:
    yield Unbounded()


async def at_once(_: Turns, steps: Iterator[object]) -> None:
    for _step in steps:
        pass


def connection_made(connection: Any, transport: Any) -> None:
    connection.begin()  # no head is waited for
    vars(connection)["_transport"] = transport
    vars(connection)["_behind"].connection_made(transport)


async def following(_: Connections, request: Any, handler: Any) -> Any:
    return await handler(request)


following.__middleware_version__ = 1  # type: ignore[attr-defined]  # as aiohttp marks one


@contextmanager
def without_guards() -> Iterator[None]:
    with (
        patch.object(looked, "checked", lambda *_: iter(())),
        patch.object(MemoryLimit, "is_reached", lambda _: False),
        patch.object(Readings, "reading", reading),
        patch.object(Turns, "of", lambda *_: nullcontext()),
        patch.object(Turns, "in_slices", at_once),
        patch.object(Connection, "connection_made", connection_made),
        patch.object(
            Connection, "data_received", lambda connection, data: vars(connection)["_behind"].data_received(data)
        ),
        patch.object(Connections, "following", following),
    ):
        yield


async def cpu_s(place: Path, body: Path, exports: int) -> float:
    """Return the CPU time that a receiver takes of each of so many exports."""
    spec = ReceiverSpec(
        grpc="", http="127.0.0.1:0", is_awaited=False, clock_offset_ns=time.time_ns() - time.monotonic_ns(),
        memory_bytes=MOST_MEMORY_BYTES,
    )  # fmt: skip
    log = SpanLog(str(place / f"spans-{time.monotonic_ns()}.log"), None)
    async with Receiver(spec, log=log, say=print) as receiver:
        for count in (max(1, exports // 10), exports):  # the first make it warm
            begin_s = time.process_time()
            arguments = str(receiver.http_port), str(body), str(count)
            sender = await asyncio.create_subprocess_exec(sys.executable, "-c", SENDER, *arguments)
            if await sender.wait():
                raise AssertionError("an export was refused")
            spent_s = time.process_time() - begin_s
    log.close()
    return spent_s / exports


def measured(rounds: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        for spans, exports in SIZES.items():
            body = place / f"{spans}.body"
            body.write_bytes(export(spans, empty=False))
            with_ms, without_ms = [], []
            for _ in range(rounds):
                with_ms.append(1e3 * asyncio.run(cpu_s(place, body, exports)))
                with without_guards():
                    without_ms.append(1e3 * asyncio.run(cpu_s(place, body, exports)))
            least, other = min(with_ms), min(without_ms)
            medians = statistics.median(with_ms) / statistics.median(without_ms) - 1
            yield (
                f"{spans} spans, {body.stat().st_size / 1e3:.0f} kB: {least:.3f} ms with guards, {other:.3f} without: "
                f"{100 * (least / other - 1):+.1f} % by the least of {rounds} rounds, {100 * medians:+.1f} % by the "
                "medians"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    for line in measured(parser.parse_args().rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
