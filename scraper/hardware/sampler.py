"""Power, utilisation and temperature at 1 Hz: which sources this machine has, and the task that samples them.

It runs in the scraping process, on clock-aligned ticks like the scrapes. Reads happen in threads, so that a slow
driver delays no scrape. What is absent is recorded once, with the reason.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from sidelight.rundir.frames import FrameLog, PatientLog, Unwritten
from sidelight.rundir.stats import Missing
from sidelight.scraper.hardware.nvml import open_nvml
from sidelight.scraper.hardware.powermetrics import open_powermetrics
from sidelight.scraper.hardware.rapl import open_rapl
from sidelight.scraper.hardware.records import (
    INTERVAL_S,
    HardwareAbsence,
    HardwareLogRecord,
    HardwareRecord,
    SourceLostError,
    encode,
)

Append = Callable[[HardwareLogRecord], object]


class HardwareSource(Protocol):
    """Something that can be asked for readings, from one thread at a time.

    `read` raises SourceLostError when it has nothing to say any more. One that `paces_itself` waits in `read` until
    there is something, a fraction of a second at most; the others are asked at each tick.
    """

    source: str
    paces_itself: bool

    def read(self, clock_offset_ns: int) -> tuple[HardwareRecord, ...]: ...
    def close(self) -> None: ...


def open_sources() -> tuple[tuple[HardwareSource, ...], dict[str, Missing]]:
    """Open this machine's sources, and return them with the reasons of absent ones.

    The reasons are by source. `sample` closes what is opened.

    May take a second where a driver has to be started: call it in a thread.
    """
    opened: dict[str, HardwareSource | Missing] = {
        "nvml": open_nvml(),
        "rapl": open_rapl(),
        "powermetrics": open_powermetrics(),
    }
    sources = tuple(source for source in opened.values() if not isinstance(source, Missing))
    return sources, {name: source for name, source in opened.items() if isinstance(source, Missing)}


async def record(
    path: str | os.PathLike[str],
    *,
    clock_offset_ns: int,
    stopping: asyncio.Event,
    unwritten: Unwritten,
) -> None:
    """Sample this machine's hardware into a hardware log until `stopping` is set.

    `unwritten` counts the readings that cannot be written. Raises OSError where there can be no such log.
    """
    with FrameLog(path) as log:

        def append(record: HardwareLogRecord) -> None:
            log.append(encode(record))

        sources, absent = await asyncio.to_thread(open_sources)
        await sample(
            sources,
            PatientLog(append, unwritten).append,
            clock_offset_ns=clock_offset_ns,
            stopping=stopping,
            absent=absent,
        )


async def sample(
    sources: Sequence[HardwareSource],
    append: Append,
    *,
    clock_offset_ns: int,
    stopping: asyncio.Event,
    interval_s: float = INTERVAL_S,
    absent: Mapping[str, Missing] | None = None,
) -> None:
    """Record absent sources, then every source's readings until `stopping` is set.

    One reading at once, one a tick, one at the end. Closes the sources.

    A source that fails is recorded as absent from then on; the others go on. Ends at once without a source.
    Raises what `append` raises, in an exception group.
    """
    try:
        for name, missing in (absent or {}).items():
            append(HardwareAbsence(at_ns=time.monotonic_ns() + clock_offset_ns, source=name, reason=missing.reason))
        async with asyncio.TaskGroup() as group:
            for source in sources:
                group.create_task(_sample(source, append, clock_offset_ns, stopping, round(interval_s * 1e9)))
    finally:
        for source in sources:
            await asyncio.to_thread(source.close)


async def _sample(
    source: HardwareSource, append: Append, clock_offset_ns: int, stopping: asyncio.Event, interval_ns: int
) -> None:
    due_ns = 0
    while True:
        # Once more after the last tick, so that the end of what was measured lies between two readings.
        last = stopping.is_set()
        try:
            records = await asyncio.to_thread(source.read, clock_offset_ns)
        except SourceLostError as lost:
            at_ns = time.monotonic_ns() + clock_offset_ns
            append(HardwareAbsence(at_ns=at_ns, source=source.source, reason=str(lost)))
            return
        for record in records:
            append(record)
        if last:
            return
        if not source.paces_itself:
            now_ns = time.monotonic_ns() + clock_offset_ns
            due_ns = (max(now_ns, due_ns) // interval_ns + 1) * interval_ns
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), (due_ns - now_ns) / 1e9)
