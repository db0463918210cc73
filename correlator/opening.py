"""A run directory as a `Run`: that of a run or a scrape as it was recorded, that of a watch with the requests that its
spans speak of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from recorded.directory import RAW, read_manifest
from recorded.events import CLOCK_SET, Event, decode_event, on_last_clock
from recorded.failures import ErrorCount
from recorded.logs import MOST_EVENTS, UNREADABLE, RunLogs, open_logs, require_logs
from recorded.run import Run
from recorded.stamps import time_of
from rundir.files import NotRegular
from rundir.frames import number_of, read_frames
from scraper.series.log import FailureRecord, LogReader, Row
from scraper.series.table import SeriesTable

if TYPE_CHECKING:
    from correlator.replay import Replayed
    from scraper.spans.log import ReceiverLife, SpanLogRecord
    from scraper.spans.received import ReceivedSpan

SPANS, SCRAPES = "spans-*.log", "scrapes-*.log"
_WINDOW_NS = 60_000_000_000  # pages so long before a request's end are what it is estimated from


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRun(Run):
    """The logs of a watch, with the requests that its spans speak of; `spans` is empty."""

    watched: Replayed


def open_run(path: Path, *, span_bytes: int | None = None) -> Run:
    """Return a recorded run, whole or cut short; of a watch a WatchRun. Raises ConfigurationError if there is none.

    Of a watch only the last `span_bytes` of the logs of spans are evaluated, and the pages since then; None: all.
    """
    manifest = read_manifest(path)
    require_logs(path)
    if not manifest.get("config", {}).get("keep"):  # a watch's alone
        return open_logs(path, manifest)
    with _WatchLogs(path, manifest, span_bytes=span_bytes) as logs:
        return logs.run()


class _WatchLogs(RunLogs):
    """Reads the logs of a watch, also while it goes on: spans as requests, and all by the last clock."""

    def __init__(self, path: Path, manifest: Mapping[str, Any], *, span_bytes: int | None) -> None:
        raw = path / RAW
        events = [event for log in raw.glob("events.log") for event in islice(_events(log), MOST_EVENTS)]
        self._clock_steps = [event.data for event in events if event.name == CLOCK_SET]
        moved_ns = sum(abs(int(step["moved_ns"])) for step in self._clock_steps)
        within = time_of(manifest, moved_ns=moved_ns)
        super().__init__(path, run_id=str(manifest["run_id"]), protocol="chat", within=within)
        self._deaths_ns = [event.at_ns for event in on_last_clock(events) if event.name == "receiver_died"]
        logs = sorted(raw.glob(SPANS))
        self._ahead = 0 if span_bytes is None else max(0, sum(log.stat().st_size for log in logs) - span_bytes)
        self._is_shortened = self._ahead > 0 or (bool(logs) and number_of(logs[0]) > 0)
        self._since_ns = _first_ns(logs, self._ahead) - _WINDOW_NS if self._ahead else 0
        self._watched: dict[str, Any] = {}
        self._lives: list[ReceiverLife] = []

    def run(self) -> WatchRun:
        """Return the watch as far as its logs go by now. Raises ConfigurationError where it has no manifest."""
        run = super().run()
        logs = {field.name: getattr(run, field.name) for field in fields(run)}
        return WatchRun(**{**logs, **self._watched})

    def _read_spans(self, *, last: bool) -> list[ReceivedSpan]:
        """Make requests of the spans, with the pages that were read before; none are returned."""
        from correlator.replay import Replay  # noqa: PLC0415  protobuf takes a tenth of a second to import
        from scraper.spans.log import added_up  # noqa: PLC0415

        pages = [table.view() for table in self._series.values()]
        guard = ErrorCount("a request is left out of the report").guard
        replay = Replay(pages, self._deaths_ns, guard, shortened=self._is_shortened)
        records: Iterator[SpanLogRecord] = self._read(SPANS, self._take_record, last=last)
        for record in records:
            with guard():
                replay.take(record)
        watched = replay.replayed()
        counts, deaths = added_up(self._lives)
        self._watched = {
            "requests": watched.requests,
            "watched": watched,
            "span_counts": counts,
            "receiver_deaths": deaths,
        }
        return []

    def _take_record(self, path: Path, payload: bytes) -> SpanLogRecord | None:
        from scraper.spans.log import MovedExport, StateRecord, decode, follow  # noqa: PLC0415  as above

        self._ahead -= len(payload)
        record, moved_ns = self._timely(decode(payload)), self._moved_ns(path)
        follow(self._lives, record)
        if isinstance(record, StateRecord):
            return msgspec.structs.replace(record, at_ns=record.at_ns + moved_ns)
        if self._ahead >= 0:
            return None
        if not moved_ns:
            return record
        return MovedExport(
            received_ns=record.received_ns + moved_ns, via=record.via, packed=record.packed, moved_ns=moved_ns
        )

    def _take_scrape(self, path: Path, payload: bytes) -> Row | FailureRecord | None:
        scrape = self._timely(self._scrapes.setdefault(path, LogReader(self._limit)).take(payload))
        if scrape is None or scrape.response_ns < self._since_ns:
            return None
        moved_ns = self._moved_ns(path)
        stamps = {name: getattr(scrape, name) + moved_ns for name in ("tick_ns", "request_ns", "response_ns")}
        scrape = replace(scrape, **stamps) if isinstance(scrape, Row) else msgspec.structs.replace(scrape, **stamps)
        self._series.setdefault(scrape.url, SeriesTable(scrape.url)).append(scrape)
        return scrape

    def _moved_ns(self, log: Path) -> int:
        """Return the ns to add to a log's stamps for later steps of the clock."""
        return sum(int(step["moved_ns"]) for step in self._clock_steps if number_of(log) < step["first_log"])


def _events(log: Path) -> Iterator[Event]:
    for payload in _payloads(log):
        with suppress(*UNREADABLE):  # which is counted where all logs are read
            yield decode_event(payload)


def _first_ns(logs: Sequence[Path], ahead: int) -> int:
    """Return the arrival time of the first export beyond `ahead` bytes; 0 if missing."""
    from scraper.spans.log import ExportRecord, decode  # noqa: PLC0415  as above

    for log in logs:
        for payload in _payloads(log):
            ahead -= len(payload)
            with suppress(*UNREADABLE):  # as above
                if ahead < 0 and isinstance(record := decode(payload), ExportRecord):
                    return record.received_ns
    return 0


def _payloads(log: Path) -> Iterator[bytes]:
    """Give the payloads of a log; none of a link or a device, which is said where all logs are read."""
    with suppress(NotRegular):
        yield from read_frames(log)
