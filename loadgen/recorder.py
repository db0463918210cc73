"""The worker's log: what has happened to each request is on disk less than a second later."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

from sidelight.loadgen.records import RequestPart, WorkerStat, append_record
from sidelight.loadgen.timer import Alarm, wait_until
from sidelight.loadgen.transports.lateness import PauseCounter, ReceiveStamps
from sidelight.loadgen.transports.packing import NOTHING, Packed, pack
from sidelight.loadgen.transports.transport import Exchange
from sidelight.rundir.clock import AnchoredClock
from sidelight.rundir.frames import FrameLog
from sidelight.rundir.printable.masking import blanked, without_secrets
from sidelight.rundir.process import resident_bytes

# A request in flight is written so long after it was written last, or half as long again when many are due at once.
FLUSH_NS = 600_000_000
TURN_NS = 50_000_000
STAT_NS = 200_000_000
# Requests tend to end together, and the next ones are to leave at once: last parts wait for a quieter moment.
_MAX_ENDED = 512
_ENDED_AT_ONCE = 2

# Reads a reply from status, head, body, stamps and ends of reads, and encodes what a report needs of it.
Read = Callable[[int, bytes, bytes | bytearray, "array[int]", "array[int]"], bytes]


@dataclass(slots=True, eq=False)
class _Open:
    """A request in flight, with its logging progress."""

    url: str
    exchange: Exchange
    looked_ns: int
    seq: int = 0
    logged: tuple[int, int] | None = None


class Recorder:
    """Appends parts and stats to one log; owns its file.

    `in_flight` and `started` are the queue's statistics. `read` reads a reply when it has ended, which is then
    logged in place of its bytes, with their hash.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        clock: AnchoredClock,
        *,
        worker: int,
        stamps: ReceiveStamps,
        pauses: PauseCounter,
        read: Read | None = None,
    ) -> None:
        self._log = FrameLog(path)
        self._read = read
        self._clock = clock
        self._worker = worker
        self._stamps, self._pauses = stamps, pauses
        # The next record is first; one that was written goes to the end.
        self._open: dict[int, _Open] = {}
        self._ended: deque[_Open] = deque()
        self.started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Where writing fails here it has failed, and was reported, before.
        with contextlib.suppress(OSError):
            self.settle()
        self._log.close()

    @property
    def in_flight(self) -> int:
        """Return the number of requests that have begun and not finished."""
        return len(self._open)

    def begin(self, exchange: Exchange, url: str) -> None:
        """Begin a request: from now on the flush writes what it does."""
        record = self._open[exchange.index] = _Open(url, exchange, self._clock.now_ns())
        if self._read is None:
            exchange.flush = partial(self._write, record, last=False)
        self.started += 1

    def finish(self, exchange: Exchange) -> None:
        """Finish a request: write its last part soon, or at once when many others wait for that.

        At once as well where a session's next turn needs what came back.
        """
        record = self._open.pop(exchange.index)
        if exchange.kept_body is None and len(self._ended) < _MAX_ENDED:
            self._ended.append(record)
        else:
            self._write(record, last=True)

    def settle(self) -> None:
        """Write the last parts that are still to be written."""
        while self._ended:
            self._write(self._ended.popleft(), last=True)

    async def flush_forever(self) -> None:
        """Write the new data of the requests in flight, a few requests at a time. Each has its turn.

        Compressing all at once would hold up every stamp that is ours and every submission that is due.
        """
        while True:
            await asyncio.sleep(TURN_NS / 1e9)
            while self._ended:
                for _ in range(min(len(self._ended), _ENDED_AT_ONCE)):
                    self._write(self._ended.popleft(), last=True)
                await asyncio.sleep(0)
            now_ns = self._clock.now_ns()
            for _ in range(math.ceil(2 * len(self._open) * TURN_NS / FLUSH_NS)):
                index, record = next(iter(self._open.items()), (-1, None))
                if record is None or now_ns - record.looked_ns < FLUSH_NS:
                    break
                self._open[index] = self._open.pop(index)
                record.looked_ns = now_ns
                record.exchange.catch_up()
                if self._has_news(record):
                    self._write(record, last=False)
                    await asyncio.sleep(0)

    async def stat_forever(self, alarm: Alarm | None = None) -> None:
        """Write the worker's CPU time and its timer's lateness five times a second."""
        due_ns = self._clock.now_ns()
        while True:
            due_ns = max(due_ns + STAT_NS, self._clock.now_ns())
            await wait_until(self._clock, due_ns, alarm)
            self.stat(self._clock.now_ns() - due_ns)

    def stat(self, loop_delay_ns: int) -> None:
        """Write one WorkerStat."""
        stamps, pauses = self._stamps, self._pauses
        stat = WorkerStat(
            worker=self._worker,
            at_ns=self._clock.now_ns(),
            cpu_ns=time.process_time_ns(),
            loop_delay_ns=loop_delay_ns,
            in_flight=self.in_flight,
            started=self.started,
            read_late_counts=tuple(stamps.counts) if stamps.seen else (),
            read_late_max_ns=stamps.max_ns if stamps.seen else -1,
            gc_pause_max_ns=pauses.max_ns,
            gc_pause_total_ns=pauses.total_ns,
            rss_bytes=resident_bytes(),
            kernel_stamps=stamps.seen,
        )
        append_record(self._log, stat)

    def _has_news(self, record: _Open) -> bool:
        exchange = record.exchange
        return (bool(exchange.reads_ns) and self._read is None) or record.logged != (
            exchange.connected_ns,
            exchange.submit_ns,
        )

    def _write(self, record: _Open, *, last: bool) -> None:
        exchange = record.exchange
        is_held = self._read is not None and not last
        packed, reply, sha256 = (NOTHING, b"", "") if is_held else self._packed(exchange)
        part = RequestPart(
            index=exchange.index,
            seq=record.seq,
            last=last,
            worker=self._worker,
            url=record.url,
            scheduled_ns=exchange.scheduled_ns,
            dispatch_ns=exchange.dispatch_ns,
            held_ns=exchange.held_ns,
            connected_ns=exchange.connected_ns,
            submit_ns=exchange.submit_ns,
            reused=exchange.reused,
            retried=exchange.retried,
            status=exchange.status,
            head=blanked(exchange.head),
            reads_ns=packed.reads_ns,
            read_ends=packed.read_ends,
            body=packed.body,
            end_ns=exchange.end_ns if last else -1,
            error=without_secrets(exchange.error),
            packing=packed.packing,
            sha256=sha256,
            reply=reply,
        )
        append_record(self._log, part)
        record.seq += 1
        record.logged = (exchange.connected_ns, exchange.submit_ns)
        if is_held:
            exchange.kept_head, exchange.head = exchange.kept_head or exchange.head, b""
            return
        if exchange.kept_body is not None:
            before = len(exchange.kept_body)
            exchange.kept_ends.extend(before + end for end in exchange.read_ends)
            exchange.kept_body += exchange.body
            exchange.kept_head = exchange.kept_head or exchange.head
        exchange.head = b""
        exchange.body_bytes += len(exchange.body)
        # New ones rather than cleared: a cleared bytearray keeps its size for as long as the request lives.
        exchange.body, exchange.reads_ns, exchange.read_ends = bytearray(), array("q"), array("q")

    def _packed(self, exchange: Exchange) -> tuple[Packed, bytes, str]:
        """Return the reads to log; where texts are not logged, also what was read of the reply, and the body's hash."""
        body, reads_ns, read_ends = blanked(exchange.body), exchange.reads_ns, exchange.read_ends
        if self._read is None:
            return pack(reads_ns, read_ends, body), b"", ""
        head = blanked(exchange.kept_head or exchange.head)
        reply = self._read(exchange.status, head, body, reads_ns, read_ends)
        return pack(reads_ns, read_ends, b""), reply, hashlib.sha256(exchange.body).hexdigest()
