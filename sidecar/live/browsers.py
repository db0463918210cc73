"""Events of the live page for browsers while a run goes, from the live view."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from exporter.prometheus.events import EventStream
from loadgen.requests.table import RequestLog
from rundir.columns import Ints
from scraper.series.log import FailureRecord, ScrapeRow
from sidecar.progress.panel import View, panel_rows

if TYPE_CHECKING:
    from correlator.breakdown import Parts
    from exporter.html.live import LiveColumns


class Browsers:
    """Columns of a run's measured phase on their way to browsers.

    They are made once a request has ended: what they import, in the warm-up where there is one, would have kept it
    waiting.
    """

    def __init__(self, stream: EventStream, *, run_id: str, trace_url: str) -> None:
        self._stream, self._run_id, self._trace_url = stream, run_id, trace_url
        self._columns: LiveColumns | None = None

    def scraped(self, scrape: ScrapeRow | FailureRecord, gauges: Mapping[str, float]) -> None:
        """Add the values of an engine's page."""
        if self._columns is not None:
            self._columns.scraped(scrape, gauges)

    def take(
        self, ended: RequestLog, parts: Sequence[tuple[Ints, Parts]], *, in_flight: int, start_ns: int, now_ns: int
    ) -> None:
        """Add requests of the measured phase, and the parts of some by their index. The phase began at `start_ns`."""
        if self._columns is None:
            from exporter.html.live import LiveColumns  # noqa: PLC0415  as the class says

            self._columns = LiveColumns(self._run_id, start_ns, trace_url=self._trace_url)
        self._columns.ended(ended)
        self._columns.in_flight(in_flight, now_ns)
        for index, broken_down in parts:
            self._columns.counted(index, broken_down)

    def publish(self, view: Callable[[], View], now_ns: int) -> None:
        """Send new rows to browsers when they are due. While one is connected, it gets the terminal's panel too."""
        if not self._stream.is_due:
            return
        rows = b"" if self._columns is None else self._columns.rows()
        state = b""
        if self._stream.is_watched:
            from exporter.html.live import state_event  # noqa: PLC0415  as the class says

            facts = {} if self._columns is None else self._columns.facts(now_ns)
            lines = panel_rows(view())
            state = state_event(f"Sidelight run {self._run_id}", lines, facts, kept_s=self._stream.kept_s)
        self._stream.publish(rows, state)
