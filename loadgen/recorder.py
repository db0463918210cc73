"""The worker's log: what has happened to each request is on disk less than a second later."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
import zlib
from array import array
from dataclasses import dataclass
from typing import Self

from loadgen.clock import Clock, wait_until
from loadgen.frames import append_record, open_log
from loadgen.records import RequestPart, WorkerStat
from loadgen.transport import Exchange

# Two rounds may pass before a request's turn comes: what it had received 0.8 s ago is on disk.
FLUSH_NS = 400_000_000
STAT_NS = 200_000_000
TURN_NS = 10_000_000


@dataclass(slots=True, eq=False)
class _Open:
    """A request in flight and how much of it the log has."""

    url: str
    exchange: Exchange
    seq: int = 0
    told: tuple[int, int] | None = None


class Recorder:
    """Appends parts and stats to one log; owns its file.

    `in_flight` and `started` are the queue's statistics.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Clock, *, worker: int) -> None:
        self._fd = open_log(path)
        self._clock = clock
        self._worker = worker
        self._open: dict[int, _Open] = {}
        self.started = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def in_flight(self) -> int:
        """Requests begun and not finished."""
        return len(self._open)

    def begin(self, exchange: Exchange, url: str) -> None:
        """A request is under way; from now on the flush looks after it."""
        self._open[exchange.index] = _Open(url, exchange)
        self.started += 1

    def finish(self, exchange: Exchange) -> None:
        """Write a request's last part."""
        self._write(self._open.pop(exchange.index), last=True)

    async def flush_forever(self) -> None:
        """Write what is new of each request in flight, round after round.

        They take turns in small groups, because compressing all at once would hold up the stamps of every one.
        """
        while True:
            turn = list(self._open)
            share = math.ceil(len(turn) * TURN_NS / FLUSH_NS)
            began_ns = self._clock.now_ns()
            while turn:
                await asyncio.sleep(TURN_NS / 1e9)
                for index in turn[-share:]:
                    record = self._open.get(index)
                    if record is not None and self._has_news(record):
                        self._write(record, last=False)
                del turn[-share:]
            left_ns = began_ns + FLUSH_NS - self._clock.now_ns()
            await asyncio.sleep(max(left_ns, TURN_NS) / 1e9)

    async def stat_forever(self) -> None:
        """Write the worker's CPU time and its timer's lateness five times a second."""
        due_ns = self._clock.now_ns()
        while True:
            due_ns = max(due_ns + STAT_NS, self._clock.now_ns())
            await wait_until(self._clock, due_ns)
            self.stat(self._clock.now_ns() - due_ns)

    def stat(self, loop_delay_ns: int) -> None:
        """Write one WorkerStat."""
        stat = WorkerStat(
            worker=self._worker,
            at_ns=self._clock.now_ns(),
            cpu_ns=time.process_time_ns(),
            loop_delay_ns=loop_delay_ns,
            in_flight=self.in_flight,
            started=self.started,
        )
        append_record(self._fd, stat)

    @staticmethod
    def _has_news(record: _Open) -> bool:
        exchange = record.exchange
        return bool(exchange.reads_ns) or record.told != (exchange.connected_ns, exchange.submit_ns)

    def _write(self, record: _Open, *, last: bool) -> None:
        exchange = record.exchange
        part = RequestPart(
            index=exchange.index,
            seq=record.seq,
            last=last,
            worker=self._worker,
            url=record.url,
            scheduled_ns=exchange.scheduled_ns,
            dispatch_ns=exchange.dispatch_ns,
            connected_ns=exchange.connected_ns,
            submit_ns=exchange.submit_ns,
            reused=exchange.reused,
            status=exchange.status,
            head=exchange.head,
            reads_ns=_little_endian(exchange.reads_ns),
            read_ends=_little_endian(exchange.read_ends),
            body=zlib.compress(exchange.body, 1) if exchange.body else b"",
            end_ns=exchange.end_ns if last else -1,
            error=exchange.error,
        )
        append_record(self._fd, part)
        record.seq += 1
        record.told = (exchange.connected_ns, exchange.submit_ns)
        exchange.head = b""
        exchange.body_bytes += len(exchange.body)
        # New ones rather than cleared: a cleared bytearray keeps its size for as long as the request lives.
        exchange.body, exchange.reads_ns, exchange.read_ends = bytearray(), array("q"), array("q")


def _little_endian(stamps: array[int]) -> bytes:
    if sys.byteorder == "big":
        stamps = array("q", stamps)
        stamps.byteswap()
    return stamps.tobytes()
