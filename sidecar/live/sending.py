"""Sending of the live page of a run or a watch: events for browsers, and remote write in its own task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from sidelight.rundir.access import masked
from sidelight.rundir.printable.numbers import count_of
from sidelight.sidecar.options.spans import RemoteWriteOptions, write_access
from sidelight.sidecar.progress.reporter import Progress

if TYPE_CHECKING:
    from sidelight.exporter.document import Block
    from sidelight.exporter.html.live import LiveColumns
    from sidelight.exporter.prometheus.events import EventStream
    from sidelight.exporter.prometheus.snapshot import Snapshot

FLUSH_S = 2.0


class Browsers:
    """Columns of a run or a watch on their way to browsers.

    A run makes them once a request has ended: what they import, in the warm-up where there is one, would have kept it
    waiting.
    """

    def __init__(self, stream: EventStream, title: str, *, run_id: str, trace_url: str = "") -> None:
        self.stream, self._title, self._run_id, self._trace_url = stream, title, run_id, trace_url
        self.columns: LiveColumns | None = None

    def begin(self, start_ns: int, *, is_by_clock: bool = False) -> LiveColumns:
        """Return the columns; they begin at `start_ns` where there are none yet."""
        if self.columns is None:
            from sidelight.exporter.html.live import LiveColumns  # noqa: PLC0415  as the class says

            self.columns = LiveColumns(self._run_id, start_ns, is_by_clock=is_by_clock, trace_url=self._trace_url)
        return self.columns

    def rows(self) -> bytes:
        """Return the event of the rows since the last one, b"" without any."""
        return b"" if self.columns is None else self.columns.rows()

    def events(self, panel_rows: Callable[[], Iterable[Block]], now_ns: int) -> tuple[bytes, bytes]:
        """Return the event of new rows and that of the state: the terminal's panel, while a browser is connected."""
        state = b""
        if self.stream.is_watched:
            from sidelight.exporter.html.live import state_event  # noqa: PLC0415  as the class says

            facts = {} if self.columns is None else self.columns.facts(now_ns)
            state = state_event(self._title, panel_rows(), facts, kept_s=self.stream.kept_s)
        return self.rows(), state


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

    from sidelight.exporter.prometheus.remote_write import STEP_S, LiveWriter  # noqa: PLC0415  few want it

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
                    text = f"{count_of(writer.lost, 'sample')} dropped while it took none"
                    progress.warn(f"--prometheus-write {masked(url)}: {text}")
        finally:
            offering.cancel()
