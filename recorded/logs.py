"""Logs of a run, read into tables while they grow or when they are whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import numpy as np

from sidelight.loadgen.records import PLAN_END, WorkerStat, decode_log, decode_planned
from sidelight.loadgen.requests.table.fold import RequestFold
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.directory import MANIFEST, RAW, read_manifest
from sidelight.recorded.errors import ConfigurationError
from sidelight.recorded.events import Event, decode_event
from sidelight.recorded.integrity import (
    Agreement,
    Events,
    Integrity,
    RecordCounts,
    Unreadable,
    agreements,
    disagreements,
    integrity,
    never_dispatched,
)
from sidelight.recorded.nodes import (
    ClockExchange,
    NodeClock,
    NodeTime,
    decode_clock,
    lost_shares,
    node_times,
    on_run_time,
)
from sidelight.recorded.run import Run
from sidelight.rundir.files import open_regular, require_directory
from sidelight.rundir.frames import LogTails
from sidelight.rundir.framing import GAP, UNREADABLE, LogEnd, is_format_1
from sidelight.scraper import perf_metrics
from sidelight.scraper.hardware import records as readings
from sidelight.scraper.series import table as series
from sidelight.scraper.series.log import FailureRecord, LogReader, ScrapeRow, SeriesLimit

if TYPE_CHECKING:
    from sidelight.scraper.spans.log import ReceiverCounts, ReceiverLife
    from sidelight.scraper.spans.received import ReceivedSpan

_FIRST_BYTES = 1 << 16  # of a log, which hold its first event

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """New records of a run's logs: ended requests, states of workers, scrapes, spans."""

    requests: RequestLog
    worker_stats: Sequence[WorkerStat]
    scrapes: Sequence[ScrapeRow | FailureRecord]
    spans: Sequence[ReceivedSpan]


class RunLogs:
    """Reader of a run's logs, growing or complete, that reads each record once.

    Owns the open files.

    A context manager. `requests` are those read so far. `unreadable` counts the records of each log that its writer
    has not written; they are passed over.
    """

    def __init__(self, path: Path, *, run_id: str, protocol: str, follow: bool = False, processes: int = 1) -> None:
        self.path = path
        self._held = RecordCounts()
        self.requests = RequestFold(run_id=run_id, protocol=protocol, follow=follow, processes=processes)
        self.unreadable: dict[str, Unreadable] = {}
        self._tails = LogTails(path / RAW)
        self._worker_stats: dict[Path, list[WorkerStat]] = {}
        self._scrapes: dict[Path, LogReader] = {}
        self._limit = SeriesLimit()
        self._series: dict[str, series.SeriesTable] = {}
        self._spans: _SpanTables | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tails.__exit__()

    @property
    def pages(self) -> Mapping[str, series.SeriesTable]:
        """Return the scrapes so far by endpoint."""
        return self._series

    def read(self, *, spans: bool, last: bool = False) -> News:
        """Return the records added since the last call; only with `follow`.

        Spans, which take long to import and to read, are read only with `spans`. With `last`, records behind a damaged
        end are read too: nothing more comes.
        """
        self._read_plans(last=last)
        return News(
            worker_stats=list(self._read("requests-*.log", self._take_request, last=last)),
            requests=self.requests.ended(),
            scrapes=list(self._read("scrapes-*.log", self._take_scrape, last=last)),
            spans=self._read_spans(last=last) if spans else (),
        )

    def run(self) -> Run:
        """Return the run up to the end of its logs. Raises ConfigurationError without a manifest."""
        manifest = read_manifest(self.path)
        self._read_plans(last=True)
        for _ in chain(
            self._read("requests-*.log", self._take_request, last=True),
            self._read("scrapes-*.log", self._take_scrape, last=True),
        ):
            pass
        self._read_spans(last=True)
        requests = self.requests.table()
        for log, error in self.requests.refused:
            self._refuse(log, error)
        hardware: tuple[readings.HardwareLogRecord, ...] = tuple(
            self._read("hardware*.log", lambda _, payload: readings.decode(payload), last=True)
        )
        events = tuple(self._read("events.log", self._take_event, last=True))
        timings = self._read("timings-*.log", lambda _, payload: perf_metrics.decode(payload), last=True)
        tables = (self._spans or _SpanTables()).fields()
        nodes = self._nodes()
        if nodes:
            scheduled = np.isin(requests.phase, list(self.requests.offsets_ns)) & (requests.turn == 0)
            requests = on_run_time(requests, nodes, scheduled)
        return Run(
            path=self.path,
            manifest=manifest,
            requests=requests,
            nodes=nodes,
            worker_stats=tuple(stat for _, stats in sorted(self._worker_stats.items()) for stat in stats),
            endpoints=tuple(table.view() for table in self._series.values()),
            hardware=hardware,
            events=events,
            timings=perf_metrics.timings(timings),
            **tables,
            offsets_ns=self.requests.offsets_ns,
            integrity=msgspec.structs.replace(
                self._integrity(
                    manifest, events, received=None if tables["receiver_deaths"] else tables["span_counts"]
                ),
                lost_shares=list(lost_shares(self.path, events, requests)) or msgspec.UNSET,
            ),
        )

    def _nodes(self) -> tuple[NodeTime, ...]:
        clocks: dict[str, list[NodeClock | ClockExchange]] = {}
        read = self._read("clocks-*.log", lambda path, payload: (path.name, decode_clock(payload)), last=True)
        for name, record in read:
            clocks.setdefault(name, []).append(record)
        return tuple(node_times(clocks))

    def _read(self, pattern: str, read: Callable[[Path, bytes], T | None], *, last: bool) -> Iterator[T]:
        for path, payload in self._tails.news(pattern, last=last):
            if payload is GAP and not pattern.startswith("scrapes"):  # elsewhere each record stands for itself
                continue
            try:
                record = read(path, payload)
            except UNREADABLE as error:
                self._refuse(path.name, error)
            else:
                if record is not None:
                    yield record

    def _refuse(self, log: str, error: Exception) -> None:
        self.unreadable.setdefault(log, Unreadable(reason=one_line(error))).count += 1

    def _read_spans(self, *, last: bool) -> list[ReceivedSpan]:
        self._spans = self._spans or _SpanTables()
        return [span for spans in self._read("spans-*.log", self._spans.take, last=last) for span in spans]

    def _read_plans(self, *, last: bool = False) -> None:
        for _ in self._read("plan-*.log", self._take_planned, last=last):
            pass

    def _integrity(
        self, manifest: Mapping[str, Any], events: Sequence[Event], *, received: ReceiverCounts | None
    ) -> Integrity:
        stated = manifest.get("logs")
        try:
            ends = None if stated is None else msgspec.convert(stated, dict[str, LogEnd | None])
        except msgspec.ValidationError as error:
            raise ConfigurationError("run.unreadable", f"{self.path / MANIFEST}: logs: {one_line(error)}") from error
        extents = {path.name: extent for path, extent in self._tails.extents.items()}
        counts, unsent = self._agreements(manifest, [(event.name, event.data) for event in events], received)
        return integrity(
            extents,
            ends,
            refused={path.name: reason for path, reason in self._tails.refused.items()},
            unreadable=self.unreadable,
            ended="status" in manifest and manifest["status"] != "crashed",
            counts=counts,
            never_dispatched=unsent,
            disagreements=list(
                disagreements(
                    counts,
                    unsent,
                    sent=sum(self.requests.sent.values()),
                    complete=manifest.get("status") == "complete",
                )
            ),
        )

    def _agreements(
        self, manifest: Mapping[str, Any], events: Events, received: ReceiverCounts | None
    ) -> tuple[list[Agreement], int | msgspec.UnsetType]:
        """Return the counts stated by a run that ended by itself, and its unsent requests.

        Unsent requests were planned and not sent.
        """
        if manifest.get("status") not in ("complete", "interrupted"):
            return [], msgspec.UNSET
        sent = sum(self.requests.sent.values())
        if self._spans is not None:
            self._held.spans = self._spans.spans
        stated = None if self._spans is None or received is None else received.spans
        return list(agreements(events, self._held, sent=sent, received=stated)), never_dispatched(events, sent=sent)

    def _take_event(self, _: Path, payload: bytes) -> Event:
        return decode_event(payload)

    def _take_planned(self, path: Path, payload: bytes) -> None:
        planned = decode_planned(payload)
        self.requests.plan(planned)
        if planned.index != PLAN_END:
            self._held.planned[path.name] += 1 + len(planned.turns)

    def _take_request(self, path: Path, payload: bytes) -> WorkerStat | None:
        record = decode_log(payload)
        if isinstance(record, WorkerStat):
            self._worker_stats.setdefault(path, []).append(record)
            return record
        # What a worker was sent stands in a plan by the time it is in the worker's log.
        if not self.requests.is_planned(record.index):
            self._read_plans()
        self.requests.add(record, path.name)
        return None

    def _take_scrape(self, path: Path, payload: bytes) -> ScrapeRow | FailureRecord | None:
        scrape = self._scrapes.setdefault(path, LogReader(self._limit)).take(payload)
        if scrape is not None:
            self._held.scrapes[path.name] += 1
            self._series.setdefault(scrape.url, series.SeriesTable(scrape.url)).append(scrape)
        return scrape


def one_line(error: Exception) -> str:
    """Return the message of an error in one line."""
    return " ".join(str(error).split()) or type(error).__name__


class _SpanTables:
    """Tables built from logs of spans. Created late: protobuf takes a tenth of a second to import."""

    def __init__(self) -> None:
        from sidelight.recorded.gateway_spans import GatewaySpans  # noqa: PLC0415
        from sidelight.scraper.spans import log  # noqa: PLC0415
        from sidelight.scraper.spans.requests import RequestSpans  # noqa: PLC0415

        self._log = log
        self.spans = 0
        self._lives: list[ReceiverLife] = []
        self._requests, self._gateways = RequestSpans(), GatewaySpans()

    def take(self, _: Path, payload: bytes) -> Sequence[ReceivedSpan]:
        """Add a record and return its spans. Raises ValueError for what no receiver has written."""
        record = self._log.decode(payload)
        self._log.follow(self._lives, record)
        if isinstance(record, self._log.StateRecord):
            return ()
        spans = list(record.spans())
        self.spans += len(spans)
        for span in spans:
            self._requests.add(span)
            self._gateways.add(span)
        return spans

    def fields(self) -> dict[str, Any]:
        """Return the fields of a Run that are read from the logs of spans."""
        counts, deaths = self._log.added_up(self._lives)
        return {
            "spans": self._requests.table(),
            "gateways": self._gateways.by_trace(),
            "choices": self._gateways.choices,
            "span_counts": counts,
            "receiver_deaths": deaths,
        }


def require_logs(path: Path) -> None:
    """Raise ConfigurationError for logs that cannot be read.

    They lie outside the run directory, are unreadable or of format 1.
    """
    try:
        require_directory(path / RAW)
        if (path / RAW).exists():
            next((path / RAW).iterdir(), None)  # a glob passes over what it may not read
    except OSError as error:
        raise ConfigurationError("run.unreadable", f"{path / RAW}: {error.strerror}") from error
    log = path / RAW / "events.log"
    with suppress(OSError), open_regular(log) as file:  # other faults are said where all logs are read
        if is_format_1(file.read(_FIRST_BYTES)):
            raise ConfigurationError(
                "run.old-format",
                f"{log}: a log of format 1, and only format 2 is read; report it with the sidelight that recorded it",
            )


def open_logs(path: Path, manifest: Mapping[str, Any], *, processes: int = 1) -> Run:
    """Return the run that the logs of a directory hold. Of many requests, several processes may read the replies."""
    protocol = str(manifest.get("config", {}).get("endpoint") or "chat")
    with RunLogs(path, run_id=str(manifest["run_id"]), protocol=protocol, processes=processes) as logs:
        return logs.run()
