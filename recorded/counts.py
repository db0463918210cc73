"""Comparison of the counts that a run's processes stated with the contents of its logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType, field

from recorded.integrity import Agreement

PLANNED, PHASE_END, SCRAPED = "planned", "phase_end", "scraped"  # events
SENT = "requests that load workers sent"
Events = Sequence[tuple[str, Mapping[str, Any]]]  # names and data


class Held(Struct, kw_only=True):
    """Counts of records in a run's logs.

    Planned requests (turns included) and scrapes are counted by log, spans over all logs.
    """

    planned: Counter[str] = field(default_factory=Counter)
    scrapes: Counter[str] = field(default_factory=Counter)
    spans: int = 0


def agreements(events: Events, held: Held, *, sent: int, received: int | None) -> Iterator[Agreement]:
    """Yield each count stated by a run's processes, with the count in its logs. `sent` requests are in the logs;
    `received` spans are the receivers' count, None if unknown.
    """
    for data in _of(events, PLANNED, "phase", "count"):
        log = f"plan-{data['phase']}.log"
        yield Agreement(what=f"planned requests in raw/{log}", stated=_planned(data), read=held.planned[log])
    ends = [*_of(events, PHASE_END)]
    if ends and all("started" in data for data in ends):  # older versions have not counted them
        yield Agreement(what=SENT, stated=sum(int(data["started"]) for data in ends), read=sent)
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
        if count.stated != count.read:
            yield f"of {count.stated:,} {count.what}, {count.read:,} are there"
    if unsent is not UNSET and unsent < 0:
        yield f"{-unsent:,} more requests were sent than were planned"
    if complete and unsent and not sent and all(count.what != SENT for count in counts):  # of an older version
        yield "requests were planned, and none is there"


def _planned(data: Mapping[str, Any]) -> int:
    return int(data["count"]) + int(data.get("turns", 0))


def _of(events: Events, name: str, *stated: str) -> Iterator[Mapping[str, Any]]:
    """Yield the data of the events with a name that have all these fields."""
    return (data for each, data in events if each == name and data.keys() >= {*stated})
