"""Clocks of nodes against the conductor's: exchanges of stamps, offsets, and their bounds.

The conductor stamps, a node answers with its own stamp, the conductor stamps again: whatever the two ways took, the
node's stamp lies between, so that half of the round trip bounds the error of the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from loadgen.requests.table.log import STAMPS, RequestLog
from rundir.columns import Ints, with_columns

LOG = "clocks-{}.log"  # by the node's number
EDGE = 60  # exchanges before the load, and as many after it


class NodeClock(msgspec.Struct, array_like=True, frozen=True, tag="node"):
    """A node, at the head of its exchanges.

    Its workers, and the time of the run minus its clock, as their stamps have it.
    """

    node: str
    workers: tuple[int, ...]
    offset_ns: int


class ClockExchange(msgspec.Struct, array_like=True, frozen=True, tag="exchange"):
    """Two stamps in the time of the run, with the node's own between them."""

    asked_ns: int
    node_ns: int
    answered_ns: int

    @property
    def error_ns(self) -> int:
        """Return the bound on the error of `offset_ns`."""
        return (self.answered_ns - self.asked_ns + 1) // 2

    @property
    def offset_ns(self) -> int:
        """Return the time of the run minus the node's clock."""
        return (self.asked_ns + self.answered_ns) // 2 - self.node_ns


decode_clock = msgspec.msgpack.Decoder(NodeClock | ClockExchange).decode
encode_clock = msgspec.msgpack.Encoder().encode


def tightest(exchanges: Sequence[ClockExchange]) -> ClockExchange:
    """Return the exchange with the least bound."""
    return min(exchanges, key=lambda exchange: exchange.error_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockLine:
    """The offset of a node's clock over a run: a line between two moments, level beyond them.

    `error_ns` bounds its error: that of its ends, and how far exchanges between contradict it.
    """

    at_ns: tuple[int, int]
    offset_ns: tuple[int, int]
    error_ns: int

    def offsets_ns(self, stamps_ns: Ints) -> Ints:
        """Return the offset at each moment."""
        first, last = self.offset_ns
        return first + np.rint(np.interp(stamps_ns, self.at_ns, (0, last - first))).astype(np.int64)


def clock_line(exchanges: Sequence[ClockExchange]) -> ClockLine:
    """Return the line between the tightest exchanges of the beginning and of the end; of one alone it is level."""
    ends = tightest(exchanges[:EDGE]), tightest(exchanges[EDGE:][-EDGE:] or exchanges)
    line = ClockLine(
        at_ns=(ends[0].asked_ns, max(ends[1].asked_ns, ends[0].asked_ns + 1)),
        offset_ns=(ends[0].offset_ns, ends[1].offset_ns),
        error_ns=max(end.error_ns for end in ends),
    )
    asked_ns, node_ns, answered_ns = np.array([msgspec.structs.astuple(each) for each in exchanges], np.int64).T
    middle_ns = (asked_ns + answered_ns) // 2
    beyond_ns = np.abs(middle_ns - node_ns - line.offsets_ns(middle_ns)) - (answered_ns - asked_ns + 1) // 2
    return replace(line, error_ns=line.error_ns + max(0, int(beyond_ns.max())))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTime:
    """The clock of a node over a run, and the workers with stamps by it."""

    clock: NodeClock
    line: ClockLine


def node_times(logs: Mapping[str, Sequence[NodeClock | ClockExchange]]) -> Iterator[NodeTime]:
    """Yield the clock of each node, by the records of their logs."""
    for _, records in sorted(logs.items()):
        exchanges = [record for record in records if isinstance(record, ClockExchange)]
        for clock in records:
            if isinstance(clock, NodeClock) and exchanges:
                yield NodeTime(clock=clock, line=clock_line(exchanges))


def clock_errors_ns(requests: RequestLog, nodes: Sequence[NodeTime]) -> Ints:
    """Return the bound on the error of each request's stamps [n]; 0 where they are by the conductor's clock."""
    errors_ns = np.zeros(len(requests), np.int64)
    for node in nodes:
        errors_ns[np.isin(requests.worker, node.clock.workers)] = node.line.error_ns
    return errors_ns


def on_run_time(requests: RequestLog, nodes: Sequence[NodeTime], scheduled: Ints) -> RequestLog:
    """Return requests with their stamps corrected by the drift of their node's clock.

    All stamps of a request by the same, so that durations within it stay. `scheduled` are the rows whose scheduled time
    is the plan's, which no clock has stamped.
    """
    moved_ns = np.zeros(len(requests), np.int64)
    for node in nodes:
        rows = np.isin(requests.worker, node.clock.workers)
        moved_ns[rows] = node.line.offsets_ns(requests.dispatch_ns[rows]) - node.clock.offset_ns
    if not moved_ns.any():
        return requests
    columns = {name: _moved(getattr(requests, name), moved_ns) for name in STAMPS}
    columns["scheduled_ns"][scheduled] = requests.scheduled_ns[scheduled]
    columns["chunk_ns"] = requests.chunk_ns + np.repeat(moved_ns, np.diff(requests.chunk_start))
    return with_columns(requests, columns)


def _moved(stamps_ns: Ints, by_ns: Ints) -> Ints:
    return np.where(stamps_ns >= 0, stamps_ns + by_ns, stamps_ns)
