"""Streams that are answered well beside hostile ones, and whether a run says of each what is true.

Half of them are answered by the simulated engine, which writes the truth of each request. It stamps a request when it
comes to read it, which on a busy machine is later than it came; so the other half is answered by a server whose truth
is the kernel's: of these the error of each TTFT is known to some microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import processes
from faults import crash
from faults.hostile import LAST, STREAM, chunk
from faults.servers import PAUSE, Asked, serving
from processes import ANSWER, DRIP, MODELS

TOKENS = 40
_ID = re.compile(rb"(?i)\r\nx-request-id: *([^\r]+)")
# A stated error is one of 99 values of 100.
LEAST_WITHIN = 0.98


@dataclass(frozen=True, slots=True, kw_only=True)
class Honest:
    """Two servers that answer well, and what they know.

    sent_ns  by request: when it came, and right before and right behind the sending of its first token
    """

    urls: tuple[str, str]
    truth: Path
    sent_ns: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def wrong(self, rows: Sequence[Mapping[str, Any]], stated_ms: float) -> str:
        """Say what a run's rows of these streams have otherwise; `stated_ms` is the error that it states of a TTFT."""
        failed = [row for row in rows if row["status"] != "ok"]
        if failed:
            return f"{len(failed)} of {len(rows)} failed: {failed[0]['status']} {failed[0]['error']}"
        known = {record["request_id"]: record for record in crash.answers(self.truth, 0)}
        simulated = [row for row in rows if row["request_id"] not in self.sent_ns]
        false = [row for row in simulated if not crash.agrees(row, known.get(row["request_id"]))]
        if false:
            return f"{len(false)} of {len(simulated)} are not what the engine did: {false[0]}"
        return self._late([row for row in rows if row["request_id"] in self.sent_ns], stated_ms)

    def _late(self, rows: Sequence[Mapping[str, Any]], stated_ms: float) -> str:
        errors_ms = []
        for row in rows:
            arrived_ns, before_ns, behind_ns = self.sent_ns[row["request_id"]]
            ttft_ns = row["first_token_ns"] - row["submit_ns"]
            errors_ms.append(max(before_ns - arrived_ns - ttft_ns, ttft_ns - (behind_ns - arrived_ns), 0) / 1e6)
        within = sum(error_ms <= stated_ms for error_ms in errors_ms) / len(rows)
        if within >= LEAST_WITHIN:
            return ""
        return f"{within:.0%} of the TTFTs are within {stated_ms:.2f} ms, the largest error is {max(errors_ms):.2f} ms"


def _answer(asked: Asked) -> Sequence[bytes]:
    if asked.path.endswith("/models"):
        return (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + MODELS,)
    if not asked.path.endswith("/completions"):
        return (b"HTTP/1.1 404 N\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",)
    return (PAUSE, STREAM + chunk(DRIP), *((PAUSE, chunk(DRIP)) * TOKENS), chunk(ANSWER) + LAST)


@contextmanager
def answering(place: Path) -> Iterator[Honest]:
    """Run the two servers."""
    truth, sent_ns = place / "truth.jsonl", dict[str, tuple[int, int, int]]()

    def note(asked: Asked, before_ns: int, behind_ns: int) -> None:
        if stated := _ID.search(asked.head):
            sent_ns[stated[1].decode()] = (asked.arrived_ns, before_ns, behind_ns)

    engine = processes.engine("--truth", truth, "--model", "scripted", "--max-num-seqs", "64")
    with engine as (url, _), serving(_answer, noted=note) as timed_url:
        yield Honest(urls=(url, timed_url), truth=truth, sent_ns=sent_ns)
