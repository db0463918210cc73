"""Events of a run as a whole, and their log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from sidelight.recorded.directory import RAW
from sidelight.rundir.frames import FrameLog
from sidelight.rundir.printable.masking import blanked

WATCHED = "watched"  # what a watch had counted at its end
ESTIMATED = "estimated"  # headroom and changes of a watched engine, as they were said then
CLOCK_LEFT = "clock_left"  # the wall clock was set by `moved_ns`, and stamps go on by the time before
WRITING = "prometheus_writing"  # a server is being sent the series up to then, and may get them
WRITTEN = "prometheus_written"  # up to when a server has the series of the run, sent while it went
SCRAPER_DIED, SCRAPER_RESTARTED = "scraper_died", "scraper_restarted"
RECEIVER_DIED, RECEIVER_RESTARTED = "receiver_died", "receiver_restarted"
WORKER_LOST = "worker_lost"  # its share of a phase is sent by no other
PLANNED, PHASE_START, PHASE_END, SCRAPED, NOTE = "planned", "phase_start", "phase_end", "scraped", "note"


class Event(msgspec.Struct, array_like=True, frozen=True):
    """Something that happened to the run as a whole: a phase began or ended, a note for the reader."""

    at_ns: int
    name: str
    data: dict[str, Any]


_decode_event = msgspec.msgpack.Decoder(Event).decode


def append_event(path: Path, event: Event) -> None:
    """Append an event of the run. Raises OSError as FrameLog.append does."""
    with FrameLog(path / RAW / "events.log") as log:
        log.append(blanked(msgspec.msgpack.encode(event)))


def decode_event(payload: bytes) -> Event:
    """Return the event of one payload of the event log. Raises msgspec.DecodeError."""
    return _decode_event(payload)
