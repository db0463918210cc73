"""Plausible times of a run's records. Stamps over a day before its start or after its end are not of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from loadgen.records import RequestPart
from loadgen.transports.packing import PLAIN

# Of all records of all logs; other fields in ns are durations.
_STAMPS = {
    "at_ns", "tick_ns", "request_ns", "response_ns", "received_ns", "scheduled_ns", "dispatch_ns", "connected_ns",
    "submit_ns", "end_ns",
}  # fmt: skip
_UNKNOWN = -1
_DAY_NS = 86_400_000_000_000


class Span(NamedTuple):
    """A range of possible stamps, from the first to the last."""

    first_ns: int
    last_ns: int


ANY_TIME = Span(-(2**63), 2**63)


def time_of(manifest: Mapping[str, Any]) -> Span:
    """Return the possible time span of a run's stamps, from its manifest.

    A bound that the manifest does not give is open.
    """
    began_ns, ended_ns = manifest.get("started_ns"), manifest.get("ended_ns")
    return Span(
        began_ns - _DAY_NS if isinstance(began_ns, int) else ANY_TIME.first_ns,
        ended_ns + _DAY_NS if isinstance(ended_ns, int) else ANY_TIME.last_ns,
    )


def require_within(record: object, span: Span) -> None:
    """Raise ValueError for a record with a stamp outside a time span."""
    kind: Any = type(record)
    for name in _stamps_of(kind):
        stamp_ns = getattr(record, name)
        if stamp_ns != _UNKNOWN and not span.first_ns <= stamp_ns <= span.last_ns:
            raise ValueError(f"{name} {stamp_ns} is not in the time of the run")


def require_reads_within(part: RequestPart, span: Span) -> None:
    """Raise ValueError for a part that has reads stamped outside a time span."""
    if not part.reads_ns:
        return
    if part.packing == PLAIN:
        stamps_ns = np.frombuffer(part.reads_ns, np.int64)
        ends_ns = int(stamps_ns.min()), int(stamps_ns.max())
    else:  # the others lie behind the first, 4 s apart at most
        ends_ns = (int.from_bytes(part.reads_ns[:8], "little", signed=True),) * 2
    if not span.first_ns <= ends_ns[0] <= ends_ns[1] <= span.last_ns:
        raise ValueError(f"a read at {ends_ns[0]} is not in the time of the run")


@cache
def _stamps_of(kind: Any) -> tuple[str, ...]:
    names: Iterable[str] = getattr(kind, "__struct_fields__", getattr(kind, "__slots__", ()))
    return tuple(name for name in names if name in _STAMPS)
