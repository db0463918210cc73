"""Reading of the span logs of a watch, and the counts of its receivers."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from sidelight.rundir.frames import LogTails
from sidelight.rundir.framing import GAP
from sidelight.scraper.spans.log import ExportRecord, ReceiverCounts, ReceiverLife, StateRecord, decode, follow

SPANS = "spans-*.log"


class Exports:
    """Reader of the exports that receivers logged, and the counts of all receivers.

    Where more have come than are read in `read_s`, it `is_behind`: the rest is read by the next calls. `read_to_s` is
    the moment, by the monotonic clock, up to which all was read.
    """

    def __init__(self, tails: LogTails, guard: Callable[[], AbstractContextManager[None]], *, read_s: float) -> None:
        self._tails, self._guard, self._read_s = tails, guard, read_s
        self._rest: Iterator[tuple[Path, bytes]] = iter(())  # of the logs as they were
        self._last_ns = 0  # when the export came that was read last
        self.read_to_s = time.monotonic()
        self.is_behind = False
        self._received = {"exports": 0, "spans": 0}
        self._before, self._lives = Counter[str](), list[ReceiverLife]()  # receivers that ended, and the last one

    def read(self, now_ns: int, take: Callable[[ExportRecord], int], *, all_of_it: bool = False) -> int:
        """Read the remaining exports of the last call and, if time permits, new ones; `take` returns their spans.

        Returns the time up to which exports are known.
        """
        begun_s, is_anew = time.monotonic(), not self.is_behind
        until_s = math.inf if all_of_it else begun_s + self._read_s
        while True:
            if is_anew:
                self._rest = self._tails.news(SPANS, in_turn=True)
            for _, payload in self._rest:
                if payload is GAP:
                    continue
                with self._guard():
                    self._take(payload, take)
                if time.monotonic() > until_s:
                    self.is_behind = True
                    self.read_to_s = begun_s - max(0, now_ns - self._last_ns) / 1e9
                    return min(now_ns, self._last_ns)
            if is_anew:
                break
            is_anew = True
        self.is_behind, self.read_to_s = False, begun_s
        return now_ns

    def counts(self) -> dict[str, int]:
        """Return the counts of all receivers: exports and spans as logged, the rest as last reported."""
        last = Counter(msgspec.structs.asdict(self._lives[-1].state.counts)) if self._lives else Counter[str]()
        return {**dict.fromkeys(ReceiverCounts.__struct_fields__, 0), **(self._before + last), **self._received}

    def queue(self) -> dict[str, int]:
        """Return the queue for the next collector; empty without one."""
        if not self._lives or not self._lives[-1].state.queue.limit_bytes:
            return {}
        queue = self._lives[-1].state.queue
        return {"exports": queue.exports, "bytes": queue.size_bytes, "limit_bytes": queue.limit_bytes}

    def _take(self, payload: bytes, take: Callable[[ExportRecord], int]) -> None:
        record = decode(payload)
        self._last_ns = record.received_ns if isinstance(record, ExportRecord) else record.at_ns
        follow(self._lives, record)
        if len(self._lives) > 1:
            self._before += Counter(msgspec.structs.asdict(self._lives.pop(0).counts()))
        if not isinstance(record, StateRecord):
            self._received["exports"] += 1
            self._received["spans"] += take(record)
