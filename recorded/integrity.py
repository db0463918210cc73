"""Integrity of a run directory's logs: their contents against the counts stated by their writers.

A run that ends lists its logs and their ends in the manifest. A writer that is killed leaves no end: it is then unknown
whether the file holds all that it had written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UnsetType

from sidelight.recorded.events import WORKER_LOST
from sidelight.recorded.nodes import LostShare
from sidelight.rundir.fields import NO_UNIT, UNSET, Count, Reason, doc
from sidelight.rundir.framing import Extent, LogEnd
from sidelight.rundir.printable.numbers import count_of

PLANNED, PHASE_END, SCRAPED = "planned", "phase_end", "scraped"  # events
SENT = "requests that load workers sent"
SENT_AT_LEAST = "requests that load workers sent, without those of lost ones"
Events = Sequence[tuple[str, Mapping[str, Any]]]  # names and data
State = Literal["whole", "unverified", "torn", "damaged"]
_WORST_LAST = ("whole", "unverified", "torn", "damaged")


class LogIntegrity(msgspec.Struct, frozen=True, kw_only=True):
    """Integrity of one log: its readable, missing and unreadable records."""

    log: Annotated[str, doc("Its file in raw/; of several directories, behind its own.")]
    state: Annotated[
        State,
        doc(
            "whole: all that its writer states it wrote; unverified: read without loss, but its writer stated "
            "nothing; torn: its writer was killed while it wrote; damaged: records are lost, or it is another "
            "file."
        ),
    ]
    frames: Annotated[Count, doc("Frames that were read.", "frames")]
    lost_frames: Annotated[Count, doc("Frames that are known to be missing.", "frames")]
    lost_bytes: Annotated[Count, doc("Bytes that belong to no whole frame, or are missing.", "bytes")]
    unreadable: Annotated[Count, doc("Records that were whole, but made no sense, and were left out.", "records")]
    reason: Annotated[Reason | msgspec.UnsetType, doc("Why it could not be read, or the first such record.")] = UNSET


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """A count that a process of the run stated, and that of its logs."""

    what: Annotated[str, doc("What is counted.")]
    stated: Annotated[int, doc("How many were recorded, as the process stated it.", NO_UNIT)]
    read: Annotated[Count, doc("How many the logs hold.", NO_UNIT)]


class Integrity(msgspec.Struct, frozen=True, kw_only=True):
    """Integrity of a run's logs, and thus completeness of the data behind its results."""

    state: Annotated[State, doc("That of the log that is worst off; damaged too where counts disagree.")]
    logs: Annotated[list[LogIntegrity], doc("The logs, by name.")]
    counts: Annotated[list[Agreement], doc("Counts of a run that ended by itself, which must agree.")] = []
    never_dispatched: Annotated[
        int | msgspec.UnsetType,
        doc("Requests planned and not sent, because the run ended before.", "requests"),
    ] = UNSET
    disagreements: Annotated[list[Reason], doc("Counts of the run that its logs contradict.")]
    lost_shares: Annotated[
        list[LostShare] | UnsetType, doc("Shares of load workers that were lost; absent without any.")
    ] = UNSET


def together(integrities: Mapping[str, Integrity]) -> Integrity:
    """Return the integrity of several directories, by their names, as one."""
    return Integrity(
        state=max((each.state for each in integrities.values()), key=_WORST_LAST.index),
        logs=[
            msgspec.structs.replace(log, log=f"{name}/{log.log}")
            for name, each in integrities.items()
            for log in each.logs
        ],
        disagreements=[f"{name}: {text}" for name, each in integrities.items() for text in each.disagreements],
    )


NOTHING_READ = Integrity(state="unverified", logs=[], disagreements=[])


class Unreadable(msgspec.Struct, kw_only=True):
    """Records of a log that its writer has not written: how many, and what was wrong with the first."""

    count: int = 0
    reason: str = ""


def integrity(
    extents: Mapping[str, Extent],
    stated: Mapping[str, LogEnd | None] | None,
    *,
    refused: Mapping[str, str],
    unreadable: Mapping[str, Unreadable],
    ended: bool,
    counts: list[Agreement],
    never_dispatched: int | msgspec.UnsetType,
    disagreements: list[str],
) -> Integrity:
    """Judge logs by name: how much was read of them against what their writers stated.

    `stated` is the manifest's list, None where it has none: the run was killed, or is of a version that wrote none.
    `refused` are files that were not opened. Of a run that `ended` by itself a torn log is a damaged one, but where the
    manifest says that its writer was killed.
    """
    names = sorted({*extents, *refused, *(stated or ())})
    logs = [
        _judged(
            name,
            extents.get(name),
            (stated or {}).get(name),
            reason=refused.get(name, "" if name in extents else "the file is missing"),
            unreadable=unreadable.get(name, Unreadable()),
            may_be_torn=not ended or (stated is not None and stated.get(name) is None),
        )
        for name in names
    ]
    states = [log.state for log in logs] or ["unverified"]
    worst = max(states, key=_WORST_LAST.index)
    return Integrity(
        state="damaged" if disagreements else worst,
        logs=logs,
        counts=counts,
        never_dispatched=never_dispatched,
        disagreements=disagreements,
    )


def _judged(
    name: str, extent: Extent | None, end: LogEnd | None, *, reason: str, unreadable: Unreadable, may_be_torn: bool
) -> LogIntegrity:
    extent = extent or Extent()
    end = end or extent.end
    lost_frames, lost_bytes = extent.lost_frames, extent.lost_bytes + extent.torn_bytes
    if end is not None:
        lost_frames = max(lost_frames, end.frames - extent.frames)
        lost_bytes = max(lost_bytes, end.bytes - extent.bytes)
    is_other = end is not None and not lost_frames and end.checksum != extent.checksum
    if is_other and not reason:
        reason = "not the records that were written"
    is_damaged = bool(reason or lost_frames or extent.lost_bytes or unreadable.count)
    state: State = "unverified" if end is None else "whole"
    if lost_bytes:
        state = "torn"
    if is_damaged or (lost_bytes and not may_be_torn):
        state = "damaged"
    return LogIntegrity(
        log=name,
        state=state,
        frames=extent.frames,
        lost_frames=lost_frames,
        lost_bytes=lost_bytes,
        unreadable=unreadable.count,
        reason=reason or unreadable.reason or UNSET,
    )


class RecordCounts(msgspec.Struct, kw_only=True):
    """Counts of records in a run's logs.

    Planned requests (turns included) and scrapes are counted by log, spans over all logs.
    """

    planned: Counter[str] = msgspec.field(default_factory=Counter)
    scrapes: Counter[str] = msgspec.field(default_factory=Counter)
    spans: int = 0


def agreements(events: Events, held: RecordCounts, *, sent: int, received: int | None) -> Iterator[Agreement]:
    """Yield each count stated by a run's processes, with the count in its logs. `sent` requests are in the logs;
    `received` spans are the receivers' count, None if unknown.
    """
    for data in _of(events, PLANNED, "phase", "count"):
        log = f"plan-{data['phase']}.log"
        yield Agreement(what=f"planned requests in raw/{log}", stated=_planned(data), read=held.planned[log])
    ends = [*_of(events, PHASE_END)]
    if ends and all("started" in data for data in ends):  # older versions have not counted them
        what = SENT_AT_LEAST if any(_of(events, WORKER_LOST)) else SENT
        yield Agreement(what=what, stated=sum(int(data["started"]) for data in ends), read=sent)
    if received is not None:
        yield Agreement(what="spans that were received", stated=received, read=held.spans)
    for data in _of(events, SCRAPED, "log", "scrapes"):
        log = str(data["log"])
        yield Agreement(what=f"scrapes in raw/{log}", stated=int(data["scrapes"]), read=held.scrapes[log])


def never_dispatched(events: Events, *, sent: int) -> int | UnsetType:
    """Return the number of requests planned but not sent, UNSET if the plan is unknown."""
    planned = [_planned(data) for data in _of(events, PLANNED, "phase", "count")]
    return sum(planned) - sent if planned else UNSET


def disagreements(counts: Sequence[Agreement], unsent: int | UnsetType, *, sent: int, complete: bool) -> Iterator[str]:
    """Yield messages about counts that disagree.

    Also about more requests sent than planned, and about a complete run that planned requests and sent none.
    """
    for count in counts:
        if count.read < count.stated or (count.read > count.stated and count.what != SENT_AT_LEAST):
            yield f"of {count.stated:,} {count.what}, {count.read:,} are there"
    if unsent is not UNSET and unsent < 0:
        yield f"{count_of(-unsent, 'request')} more sent than planned"
    if complete and unsent and not sent and not any(count.what.startswith(SENT) for count in counts):  # older versions
        yield "requests were planned, and none is there"


def _planned(data: Mapping[str, Any]) -> int:
    return int(data["count"]) + int(data.get("turns", 0))


def _of(events: Events, name: str, *stated: str) -> Iterator[Mapping[str, Any]]:
    """Yield the data of the events with a name that have all these fields."""
    return (data for each, data in events if each == name and data.keys() >= {*stated})
