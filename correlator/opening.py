"""A run directory as a `Run`: that of a run or a scrape as it was recorded, that of a watch with the requests that its
spans speak of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recorded.directory import RAW, read_manifest
from recorded.errors import ConfigurationError
from recorded.events import RECEIVER_DIED, Event, decode_event
from recorded.failures import ErrorCount
from recorded.logs import UNREADABLE, RunLogs, open_logs, require_logs
from recorded.run import Run
from rundir.files import NotRegular
from rundir.frames import number_of, read_frames
from scraper.series.log import FailureRecord, LogReader, ScrapeRow
from scraper.series.table import SeriesTable

if TYPE_CHECKING:
    from correlator.replay import Replayed
    from scraper.spans.log import ReceiverLife, SpanLogRecord
    from scraper.spans.received import ReceivedSpan

SPANS, SCRAPES = "spans-*.log", "scrapes-*.log"
_CLOCK_SET = "clock_set"  # event of builds that went on in the same directory
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
    """Reads the logs of a watch, also while it goes on: spans as requests."""

    def __init__(self, path: Path, manifest: Mapping[str, Any], *, span_bytes: int | None) -> None:
        raw = path / RAW
        events = [event for log in raw.glob("events.log") for event in _events(log)]
        if any(event.name == _CLOCK_SET for event in events):
            raise ConfigurationError(
                "run.clock-set",
                f"{path}: the clock was set while this watch went on, and its stamps are by several clocks; report it "
                "with the build that recorded it",
            )
        super().__init__(path, run_id=str(manifest["run_id"]), protocol="chat")
        self._is_shard = manifest["config"].get("shard") is not None
        self._deaths_ns = [event.at_ns for event in events if event.name == RECEIVER_DIED]
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

        # A shard sees too few of an engine's requests for estimates.
        pages = [] if self._is_shard else [table.view() for table in self._series.values()]
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

    def _take_record(self, _: Path, payload: bytes) -> SpanLogRecord | None:
        from scraper.spans.log import StateRecord, decode, follow  # noqa: PLC0415  as above

        self._ahead -= len(payload)
        record = decode(payload)
        follow(self._lives, record)
        return record if isinstance(record, StateRecord) or self._ahead < 0 else None

    def _take_scrape(self, path: Path, payload: bytes) -> ScrapeRow | FailureRecord | None:
        scrape = self._scrapes.setdefault(path, LogReader(self._limit)).take(payload)
        if scrape is None or scrape.response_ns < self._since_ns:
            return None
        self._series.setdefault(scrape.url, SeriesTable(scrape.url)).append(scrape)
        return scrape


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
