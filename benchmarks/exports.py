"""Measure the CPU time that a receiver takes of an export, over either wire.

    python benchmarks/exports.py

Exports are logged as in a run, on the loop that a receiver has. Other work beside it only adds: the least of the rounds
is given, and their median.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self, cast

import uvloop
from receiver import export

from sidelight.scraper.spans.log import SpanLog
from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import ReceiverSpec

SIZES = {10: 40, 500: 4, 5000: 1}  # spans of an export, and how many exports are sent in a round
WARM = 5  # rounds before those that count
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


async def costs(place: Path, via: str, body: Path, exports: int, rounds: int) -> list[float]:
    """Return the CPU time of an export in each round, ms."""
    async with Receiving(place, via, body) as receiving:
        return [await receiving.cpu_ms(exports) for _ in range(WARM + rounds)][WARM:]


def measured(via: str, rounds: int) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as scratch, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        place = Path(scratch)
        for spans, exports in SIZES.items():
            body = place / f"{spans}.body"
            body.write_bytes(export(spans, empty=False))
            taken = runner.run(costs(place, via, body, exports, rounds))
            yield (
                f"{spans} spans, {body.stat().st_size / 1e3:.0f} kB over {via}: {min(taken):.3f} ms, the least of "
                f"{rounds} rounds; median {statistics.median(taken):.3f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--via", choices=SENDERS, action="append")
    options = parser.parse_args()
    for via in options.via or SENDERS:
        for line in measured(via, options.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
