"""Nodes of a run: their clocks against the conductor's, and the shares of the load that were lost with them.

The conductor stamps, a node answers with its own stamp, the conductor stamps again: whatever the two ways took, the
node's stamp lies between, so that half of the round trip bounds the error of the middle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from sidelight.loadgen.driver import is_share
from sidelight.loadgen.records import PlannedRequest, read_plan
from sidelight.loadgen.requests.table.log import STAMPS, RequestLog
from sidelight.recorded.directory import RAW
from sidelight.recorded.events import PHASE_START, WORKER_LOST, Event
from sidelight.rundir.columns import Ints, with_columns
from sidelight.rundir.fields import NO_UNIT, Count, Reason, doc
from sidelight.rundir.framing import UNREADABLE

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


class LostShare(msgspec.Struct, frozen=True, kw_only=True):
    """The share of a load worker that was lost with its node: requests of the phase that no other has sent."""

    worker: Annotated[int, doc("Its number.", NO_UNIT)]
    reason: Annotated[Reason, doc("How it was lost.")]
    phase: Annotated[str, doc("The phase of the load.")]
    noticed_s: Annotated[float, doc("When that was noticed, from the start of the phase.", "s")]
    last_s: Annotated[float | None, doc("Its last recorded stamp, from there; null: none.", "s")]
    planned: Annotated[Count, doc("Its share, the sum of the next four.", "requests")]
    recorded: Annotated[Count, doc("Recorded to their end.", "requests")]
    in_part: Annotated[Count, doc("Recorded in part.", "requests")]
    due: Annotated[Count, doc("Due before the loss was noticed, and not recorded.", "requests")]
    unsent: Annotated[Count, doc("Never sent.", "requests")]
    per_s_before: Annotated[float | None, doc("Rate of all submissions up to its last stamp.", "requests/s")]
    per_s_after: Annotated[float | None, doc("Rate of all submissions after it.", "requests/s")]


class _WorkerLost(msgspec.Struct, frozen=True, kw_only=True):
    """The data of the event of a lost worker."""

    phase: str
    worker: int
    workers: int
    seats: int | None
    reason: str


def _planned_share(path: Path, lost: _WorkerLost) -> Iterator[PlannedRequest]:
    """Yield the planned requests of a lost worker. Raises what UNREADABLE lists, and OSError."""
    plans = {plan.name: plan for plan in (path / RAW).glob("plan-*.log")}
    return (
        each
        for each in read_plan(plans[f"plan-{lost.phase}.log"])
        if is_share(each, workers=lost.workers, worker=lost.worker, seats=lost.seats)
    )


def lost_shares(path: Path, events: Sequence[Event], requests: RequestLog) -> Iterator[LostShare]:
    """Yield the shares of lost load workers, from a run directory's plans and its requests."""
    starts_ns = {str(event.data.get("phase")): event.at_ns for event in events if event.name == PHASE_START}
    for event in (each for each in events if each.name == WORKER_LOST):
        try:
            lost = msgspec.convert(event.data, _WorkerLost)
            start_ns, planned = starts_ns[lost.phase], list(_planned_share(path, lost))
        except (*UNREADABLE, OSError):  # no conductor has written it
            continue
        phase, worker = lost.phase, lost.worker
        rows = (requests.phase == phase) & (requests.worker == worker)
        sent = set(requests.index[rows].tolist())
        recorded = int((requests.end_ns[rows] >= 0).sum())
        last_ns = int(max(requests.end_ns[rows].max(), requests.dispatch_ns[rows].max())) if sent else -1
        due = sum(0 <= each.offset_ns < event.at_ns - start_ns and each.index not in sent for each in planned)
        whole = sum(1 + len(each.turns) for each in planned)
        submitted_ns = requests.dispatch_ns[requests.phase == phase]
        ended_ns, lost_ns = int(submitted_ns.max(initial=0)), max(last_ns, start_ns)
        before = int((submitted_ns <= lost_ns).sum())
        yield LostShare(
            worker=worker,
            reason=lost.reason,
            phase=phase,
            noticed_s=(event.at_ns - start_ns) / 1e9,
            last_s=(last_ns - start_ns) / 1e9 if sent else None,
            planned=whole,
            recorded=recorded,
            in_part=len(sent) - recorded,
            due=due,
            unsent=whole - len(sent) - due,
            per_s_before=before / (lost_ns - start_ns) * 1e9 if lost_ns > start_ns else None,
            per_s_after=(len(submitted_ns) - before) / (ended_ns - lost_ns) * 1e9 if ended_ns > lost_ns else None,
        )
