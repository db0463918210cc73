"""The process that receives spans: `python -m sidelight.scraper.worker.spans`, obeying JSON lines on standard input.

The first line is a `SpanSpec`. It says `listening`, with the ports, and `ready`. Of the commands that follow
(`scraper.commands`), `settle` waits for the spans of requests and is answered by `settled`, with what was received in
all; `exit` or the end of input ends it. What was wrong with spans is a line on standard error.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from contextlib import closing, suppress

import msgspec
import uvloop

from sidelight.rundir.child import commands, say
from sidelight.rundir.process import limit_growth
from sidelight.scraper.commands import Exit, SettleSpans, SpanCommand, SpanSpec
from sidelight.scraper.spans.log import SpanLog
from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import SETTLE_S, forward_parts, host_and_port
from sidelight.scraper.worker.process import main

_decode_command = msgspec.json.Decoder(SpanCommand).decode


async def run(spec: SpanSpec, lines: asyncio.StreamReader) -> None:
    """Receive spans until `exit` is read."""
    with closing(SpanLog(spec.out, spec.rotation)) as log:
        async with Receiver(spec.receiver, log=log, say=_say_to_people) as receiver:
            gc.collect()
            gc.freeze()  # else what is collected for want of memory walks through all modules, for 20 ms
            # Beyond it an export is refused, or the process ends, and another is started: senders try again.
            limit_growth(spec.receiver.memory_bytes)
            say("listening", grpc_port=receiver.grpc_port, http_port=receiver.http_port)
            say("ready")
            async for command in commands(lines, _decode_command):
                if isinstance(command, Exit):
                    return
                missing = await _settle(receiver, command)
                say("settled", **msgspec.structs.asdict(receiver.counts()), missing=missing)


async def _settle(receiver: Receiver, wanted: SettleSpans) -> int:
    """Wait for the spans of requests; return of how many none came."""
    missing = len(wanted.trace_ids)
    if missing and not receiver.counts().spans and wanted.first_span_s:
        missing = await receiver.settle(wanted.first_span_s, wanted.trace_ids)
    if missing and receiver.counts().spans:
        missing = await receiver.settle(SETTLE_S, wanted.trace_ids)
    return missing


def _say_to_people(text: str) -> None:
    """Write a line to standard error, and ignore errors. It is a file of the same disk as the log, and may be full."""
    with suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _check(line: bytes) -> SpanSpec:
    spec = msgspec.json.decode(line, type=SpanSpec)
    for address in filter(None, (spec.receiver.grpc, spec.receiver.http)):
        host_and_port(address)
    if spec.receiver.forward:
        forward_parts(spec.receiver.forward)
    return spec


if __name__ == "__main__":
    sys.exit(main(_check, run, uvloop.new_event_loop))
