"""Events for browsers on the live page of a run or a watch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from exporter.prometheus.events import EventStream

if TYPE_CHECKING:
    from exporter.document import Block
    from exporter.html.live import LiveColumns


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
            from exporter.html.live import LiveColumns  # noqa: PLC0415  as the class says

            self.columns = LiveColumns(self._run_id, start_ns, is_by_clock=is_by_clock, trace_url=self._trace_url)
        return self.columns

    def rows(self) -> bytes:
        """Return the event of the rows since the last one, b"" without any."""
        return b"" if self.columns is None else self.columns.rows()

    def events(self, panel_rows: Callable[[], Iterable[Block]], now_ns: int) -> tuple[bytes, bytes]:
        """Return the event of new rows and that of the state: the terminal's panel, while a browser is connected."""
        state = b""
        if self.stream.is_watched:
            from exporter.html.live import state_event  # noqa: PLC0415  as the class says

            facts = {} if self.columns is None else self.columns.facts(now_ns)
            state = state_event(self._title, panel_rows(), facts, kept_s=self.stream.kept_s)
        return self.rows(), state
