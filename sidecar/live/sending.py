"""`--prometheus-write` during a run or a watch: its live page every few seconds. A task of the conductor sends it, for
which nothing else waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rundir.access import masked
from sidecar.options.spans import RemoteWriteOptions, write_access
from sidecar.progress.reporter import Progress

if TYPE_CHECKING:
    from exporter.prometheus.snapshot import Snapshot

FLUSH_S = 2.0


@asynccontextmanager
async def sending(
    url: str,
    options: RemoteWriteOptions,
    snapshot: Callable[[], tuple[int, Snapshot] | None],
    *,
    progress: Progress,
    on_sending: Callable[[int], object] = lambda _: None,
    on_taken: Callable[[int, int, int], object] = lambda *_: None,
    flush: bool = False,
) -> AsyncIterator[None]:
    """Send the snapshots of `snapshot` every STEP_S while the context is open. `snapshot` returns one with its moment.
    Data that a server does not take are reported once; `on_sending` and `on_taken` are those of LiveWriter. With
    `flush`, where no report sends the rest, a last snapshot goes at the end, and lost data cause a warning.
    """

    from exporter.prometheus.remote_write import STEP_S, LiveWriter  # noqa: PLC0415  few want it

    def offer() -> None:
        if (now := snapshot()) is not None:
            writer.offer(*now)

    async def offer_on() -> None:
        while True:
            await asyncio.sleep(STEP_S)
            offer()

    writer = LiveWriter(
        url,
        write_access(options),
        say=lambda text: progress.stage(f"--prometheus-write {masked(url)} {text}"),
        on_sending=on_sending,
        on_taken=on_taken,
    )
    async with writer:
        offering = asyncio.create_task(offer_on())
        try:
            yield
            if flush:
                offer()
                await writer.sent(FLUSH_S)
                if writer.lost:
                    text = f"{writer.lost:,} samples were dropped while it did not take them"
                    progress.warn(f"--prometheus-write {masked(url)}: {text}")
        finally:
            offering.cancel()
