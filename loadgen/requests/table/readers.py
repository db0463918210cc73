"""Readers of requests that have ended: one, or one in each of several processes."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_context, parent_process

import msgspec

from sidelight.loadgen.protocols.reading.batch import read_whole
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.records import PlannedRequest, RequestPart
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.loadgen.requests.table.rows import RequestRow, columns, row_of
from sidelight.rundir.framing import UNREADABLE

# Whole replies are read together: at most this number of them, sooner where their bodies have this many bytes.
_REPLIES, _REPLY_BYTES = 256, 2 * 1024 * 1024
TABLE_ROWS = 1024
# Of requests that one process reads in a row.
TASK_REQUESTS, _TASK_BYTES = 2048, 8 * 1024 * 1024
# Tasks that each process has before it: the one that it reads, and the next.
_TASKS = 2


class EndedRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A request with all its parts; `sent_bytes` is its body's length, -1 for unknown."""

    parts: list[RequestPart]
    planned: PlannedRequest
    sent_bytes: int


class RequestReader:
    """Reader of requests in this process: replies in batches, rows laid out as tables."""

    def __init__(self, protocol: str, run_id: str) -> None:
        self._protocol, self._run_id = PROTOCOLS[protocol], run_id
        self._rows: list[RequestRow] = []
        self._waiting_bytes = 0  # of replies that are still to be read
        self._tables: list[RequestLog] = []

    def add(self, ended: EndedRequest) -> None:
        """Read a request. Raises ValueError for what no worker has written, as `reply.unpack` does."""
        row = row_of(ended.parts, ended.planned, ended.sent_bytes, self._protocol, may_wait=True)
        if row is None:
            return
        self._rows.append(row)
        self._waiting_bytes += row.received_bytes if row.whole is not None else 0
        if len(self._rows) % _REPLIES == 0 or self._waiting_bytes > _REPLY_BYTES:
            self._read_together()
        if len(self._rows) == TABLE_ROWS:
            self._lay_out()

    def tables(self) -> list[RequestLog]:
        """Return the requests since the last call."""
        self._lay_out()
        tables, self._tables = self._tables, []
        return tables

    def _read_together(self) -> None:
        """Read the replies that wait to be read with others."""
        waiting = [(row, row.whole) for row in self._rows if row.whole is not None]
        if waiting:
            replies = read_whole(self._protocol.form, [whole for _, whole in waiting])
            for (row, _), reply in zip(waiting, replies, strict=True):
                row.reply, row.whole = reply, None
        self._waiting_bytes = 0

    def _lay_out(self) -> None:
        self._read_together()
        if self._rows:
            self._tables.append(columns(self._rows, self._run_id))
            self._rows = []


_Result = tuple[list[RequestLog], list[tuple[int, Exception]]]  # tables, and errors by places of requests


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    requests: bytes
    origins: list[str]
    future: Future[_Result] | None


class ReaderProcesses:
    """Readers of requests in processes of their own, which it owns. Tables come back in the order of the requests.

    Where a process is killed, as for want of memory, what it had not read is read here.
    """

    def __init__(self, processes: int, protocol: str, run_id: str) -> None:
        self._protocol, self._run_id = protocol, run_id
        self._most_tasks = _TASKS * processes
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"), _end_with_parent)
        self._tasks: deque[_Task] = deque()
        self._next: list[EndedRequest] = []
        self._origins: list[str] = []
        self._bytes = 0
        self._tables: list[RequestLog] = []
        self.refused: list[tuple[str, Exception]] = []  # origins of requests that no worker has written

    def add(self, ended: EndedRequest, origin: str) -> None:
        """Have a request read. Waits while there is enough to do."""
        self._next.append(ended)
        self._origins.append(origin)
        self._bytes += sum(len(part.body) for part in ended.parts)
        if len(self._next) == TASK_REQUESTS or self._bytes > _TASK_BYTES:
            self._hand_on()
            while len(self._tasks) > self._most_tasks:
                self._take_first()

    def tables(self, *, last: bool = False) -> list[RequestLog]:
        """Return the tables since the last call. With `last`, wait for all, and end the processes."""
        if last:
            self._hand_on()
            while self._tasks:
                self._take_first()
            self._pool.shutdown()
        tables, self._tables = self._tables, []
        return tables

    def _hand_on(self) -> None:
        if self._next:
            requests = msgspec.msgpack.encode(self._next)
            future = None
            with suppress(BrokenProcessPool):
                future = self._pool.submit(_read, self._protocol, self._run_id, requests)
            self._tasks.append(_Task(requests=requests, origins=self._origins, future=future))
            self._next, self._origins, self._bytes = [], [], 0

    def _take_first(self) -> None:
        task = self._tasks.popleft()
        tables, refused = self._result(task)
        self._tables += tables
        self.refused += [(task.origins[place], error) for place, error in refused]

    def _result(self, task: _Task) -> _Result:
        if task.future is not None:
            with suppress(BrokenProcessPool):
                return task.future.result()
        return _read(self._protocol, self._run_id, task.requests)


def _read(protocol: str, run_id: str, requests: bytes) -> _Result:
    reader, refused = RequestReader(protocol, run_id), list[tuple[int, Exception]]()
    for place, ended in enumerate(msgspec.msgpack.decode(requests, type=list[EndedRequest])):
        try:
            reader.add(ended)
        except UNREADABLE as error:
            refused.append((place, error))
    return reader.tables(), refused


def _end_with_parent() -> None:
    """Let this process end when its parent does, however that ends, and not before: a terminal's Ctrl-C is for both."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_leave_after, args=(parent.sentinel,), daemon=True).start()


def _leave_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
