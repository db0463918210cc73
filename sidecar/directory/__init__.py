"""The run directory: the single source of truth of a run, and its raw logs as tables.

A manifest says what was asked, with what and when; everything measured stands in append-only logs under `raw/`. A run
whose manifest has no end was cut short, and is read all the same up to the tear.
"""

from __future__ import annotations

import json
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shutil import disk_usage
from typing import IO, TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from loadgen.records import PLAN_END, WorkerStat, decode_log, decode_planned
from loadgen.requests.table import RequestFold, RequestLog
from rundir.files import read_regular, replace_file, sync
from rundir.frames import FrameLog, LogTails, log_end
from rundir.framing import GAP, LogEnd
from rundir.integrity import NOTHING_READ, Agreement, Integrity, Unreadable, integrity
from rundir.printable import printable_json
from rundir.printable.masking import blanked, without_secrets, without_secrets_all
from scraper import perf_metrics
from scraper.hardware import records as readings
from scraper.series import table as series
from scraper.series.log import FailureRecord, LogReader, Row, SeriesLimit
from sidecar.directory.counts import Events, Held, agreements, disagreements, never_dispatched
from sidecar.directory.stamps import ANY_TIME, Span, require_reads_within, require_within
from sidecar.errors import CannotWrite, ConfigurationError, unusable_place

if TYPE_CHECKING:
    from correlator.gateways import GatewaySpan
    from correlator.replay import Replayed
    from scraper.spans.log import Counts, StateRecord
    from scraper.spans.received import ReceivedSpan
    from scraper.spans.requests import EngineSpans

MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 2 * 1024 * 1024
RAW = "raw"
MOST_LOGS = 10_000  # of a run: a watch keeps some thirty, and one more for each time that a process died
MOST_EVENTS = 20_000  # of a run: it has a dozen, and a watch two more for each death of a process
MOST_PHASES = 100  # that are looked at: a run has two
MOST_ID = 200  # characters of a run's id
SCRAPES = "scrapes-{}.log"  # by how many scrapers died before
WATCHED = "watched"  # an event: what a watch had counted at its end
CLOCK_SET = "clock_set"  # an event: logs from the number `first_log` on are by a wall clock that was set by `moved_ns`
CLOCK_LEFT = "clock_left"  # an event: the wall clock was set by `moved_ns`, and stamps go on by the time before
WRITING = "prometheus_writing"  # an event: a server is being sent the series up to then, and may get them
WRITTEN = "prometheus_written"  # an event: up to when a server has the series of the run, sent while it went
SCRAPER_DIED, SCRAPER_RESTARTED = "scraper_died", "scraper_restarted"  # events
RECEIVER_DIED, RECEIVER_RESTARTED = "receiver_died", "receiver_restarted"  # events; of older runs, with the scraper
# What reading a record raises that its writer has not written.
UNREADABLE = (ValueError, LookupError, ArithmeticError, TypeError, AttributeError, RecursionError, zlib.error)
LOGS = "*.log"
SCARCE_BYTES = 256 * 10**6  # free, before anything is recorded

T = TypeVar("T")


class Event(msgspec.Struct, array_like=True, frozen=True):
    """Something that happened to the run as a whole: a phase began or ended, a note for the reader."""

    at_ns: int
    name: str
    data: dict[str, Any]


_decode_event = msgspec.msgpack.Decoder(Event).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One stretch of a run; `end_ns` is None when the run was cut short within it."""

    name: str
    start_ns: int
    end_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The logs of a run directory as columnar tables.

    `timings` are the times of requests that `/perf_metrics` of TensorRT-LLM states. `gateways` are those that
    requests passed, outermost first, by trace id in hex. `span_counts` is what the receivers of spans
    have counted, all together, None where none was; `receiver_deaths` are those that ended without a record, and
    their counts since they started are lost, but for the spans in the log. `offsets_ns` are when requests were to be
    sent, from the start of their phase, of phases with a schedule.

    Of a `watch`, `requests` are by the clients' spans, with `watched` beside them, and `spans` is empty. Where the wall
    clock was set meanwhile, all stamps are by the last time.
    """

    path: Path
    manifest: Mapping[str, Any]
    requests: RequestLog
    worker_stats: tuple[WorkerStat, ...]
    endpoints: tuple[series.EndpointSeries, ...]
    spans: EngineSpans
    gateways: Mapping[str, tuple[GatewaySpan, ...]] = field(default_factory=dict)
    timings: perf_metrics.Timings = field(default_factory=perf_metrics.none)
    hardware: tuple[readings.HardwareLogRecord, ...] = ()
    events: tuple[Event, ...]
    span_counts: Counts | None = None
    receiver_deaths: int = 0
    integrity: Integrity = NOTHING_READ
    watched: Replayed | None = None
    offsets_ns: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def scheduled_by(self, phase: str, at_ns: int | None = None) -> int | None:
        """Return how many requests of a phase were to be sent by a moment, or by its end; None without a schedule."""
        offsets_ns = self.offsets_ns.get(phase)
        began = next((each for each in self.phases if each.name == phase), None)
        if offsets_ns is None or began is None:
            return None
        ends_ns = [end_ns for end_ns in (at_ns, began.end_ns) if end_ns is not None]
        return bisect_right(offsets_ns, min(ends_ns) - began.start_ns) if ends_ns else len(offsets_ns)

    @property
    def status(self) -> str:
        """Return `complete`, `interrupted` or, where no end was written, `crashed`."""
        return str(self.manifest.get("status") or "crashed")

    @property
    def phases(self) -> tuple[Phase, ...]:
        ends = {event.data["phase"]: event.at_ns for event in self.events if event.name == "phase_end"}
        starts = [event for event in self.events if event.name == "phase_start"]
        return tuple(
            Phase(name=event.data["phase"], start_ns=event.at_ns, end_ns=ends.get(event.data["phase"]))
            for event in starts[:MOST_PHASES]
        )

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(event.data["text"] for event in self.events if event.name == "note")


def require_free(path: Path | None) -> None:
    """Raise ConfigurationError if something is where a new run directory shall be; None is a new name, always free."""
    if path is not None and path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "holds another run" if (path / MANIFEST).exists() or (path / RAW).exists() else "is not empty"
        raise ConfigurationError(f"--out {path}: {what}; choose a new one, results are never mixed or overwritten")


def create(path: Path, *, world_readable: bool = False) -> Path:
    """Make a new run directory with its `raw/`, for its owner alone: it holds prompts and replies.

    A directory that is there already stays readable for whom it is; its `raw/` does not. Raises ConfigurationError as
    `require_free` does and where there can be no directory; CannotWrite where the disk is full.
    """
    require_free(path)
    mode = 0o755 if world_readable else 0o700
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        (path / RAW).mkdir(mode=mode)
        sync(path.parent)
    except OSError as error:
        raise unusable_place("--out", path, error) from error
    return path


def scarce(path: Path) -> str:
    """Return what is to be said of a disk that has little room for what is recorded there; empty where it has."""
    try:
        free = disk_usage(path).free
    except OSError:
        return ""
    if free >= SCARCE_BYTES:
        return ""
    return (
        f"only {free / 1e6:,.0f} MB are free on the disk of {path}: where it is full, a load ends with what was "
        "recorded up to then, and a watch loses what it cannot write; make room, or give another --out"
    )


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file as `replace_file` does. Raises CannotWrite."""
    try:
        replace_file(path, write)
    except OSError as error:
        raise CannotWrite(f"{path}: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, without secrets. Raises CannotWrite."""
    write_whole(path, lambda file: file.write(without_secrets(text).encode()))


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write strict JSON (no NaN), keys in the order given."""
    write_text(path, json_text(data))


def json_text(data: Mapping[str, Any]) -> str:
    """Return strict JSON as it is written into a run directory: without secrets, and nothing in it moves a cursor."""
    return printable_json(json.dumps(without_secrets_all(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def append_event(path: Path, event: Event) -> None:
    """Append an event of the run. Raises OSError as FrameLog.append does."""
    with FrameLog(path / RAW / "events.log") as log:
        log.append(blanked(msgspec.msgpack.encode(event)))


def on_last_clock(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return what happened to a run by one clock, where the wall clock was set meanwhile."""
    moved: list[Event] = []
    moved_ns = 0
    for event in reversed(events):
        moved.append(msgspec.structs.replace(event, at_ns=event.at_ns + moved_ns))
        moved_ns += int(event.data["moved_ns"]) if event.name == CLOCK_SET else 0
    return tuple(reversed(moved))


def decode_event(payload: bytes) -> Event:
    """Return what one payload of the log of events says. Raises msgspec.DecodeError."""
    return _decode_event(payload)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a run directory. Raises ConfigurationError if it is none."""
    try:
        text = read_regular(path / MANIFEST, most_bytes=MOST_MANIFEST_BYTES)
        manifest = json.loads(text, parse_constant=_refuse_constant)
    except FileNotFoundError:
        what = f"no {MANIFEST} here" if path.is_dir() else "there is no such directory"
        raise ConfigurationError(f"{path}: {what}; give the directory of a run (its --out)") from None
    except OSError as error:
        raise ConfigurationError(f"{path / MANIFEST}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path / MANIFEST}: cannot be read: {error}") from error
    if not isinstance(manifest, dict) or "run_id" not in manifest:
        raise ConfigurationError(
            f"{path / MANIFEST}: not the manifest of a run; give the directory of a run (its --out)"
        )
    if len(str(manifest["run_id"])) > MOST_ID:  # it stands on every line of some files
        raise ConfigurationError(f"{path / MANIFEST}: run_id is longer than {MOST_ID} characters")
    return manifest


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What the logs of a run have gained: requests that ended, states of workers, scrapes, spans."""

    requests: RequestLog
    worker_stats: Sequence[WorkerStat]
    scrapes: Sequence[Row | FailureRecord]
    spans: Sequence[ReceivedSpan]


class RunLogs:
    """Reads the logs of a run, each record once, while they grow or when they are whole; owns the open files.

    A context manager. `requests` are those read so far. `unreadable` counts the records of each log that its writer
    has not written, or that are stamped with another time than it can have been; they are passed over.
    """

    def __init__(self, path: Path, *, run_id: str, protocol: str, within: Span = ANY_TIME) -> None:
        self.path = path
        self._within, self._held, self._events = within, Held(), 0
        self.requests = RequestFold(run_id=run_id, protocol=protocol)
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
        """Read what is new; spans, which take long to import and to read, only where they are wanted. With `last`,
        what is behind a damaged end, too: nothing more comes.
        """
        self._read_plans(last=last)
        return News(
            worker_stats=list(self._read("requests-*.log", self._take_request, last=last)),
            requests=self.requests.ended(),
            scrapes=list(self._read("scrapes-*.log", self._take_scrape, last=last)),
            spans=self._read_spans(last=last) if spans else (),
        )

    def run(self) -> Run:
        """Return the run as far as its logs go by now. Raises ConfigurationError where it has no manifest."""
        manifest = read_manifest(self.path)
        self.read(spans=True, last=True)
        hardware: tuple[readings.HardwareLogRecord, ...] = tuple(
            self._read("hardware*.log", lambda _, payload: self._timely(readings.decode(payload)), last=True)
        )
        events = tuple(self._read("events.log", self._take_event, last=True))
        timings = self._read("timings-*.log", lambda _, payload: self._timely(perf_metrics.decode(payload)), last=True)
        tables = (self._spans or _SpanTables(self.path / RAW, self._within)).fields()
        return Run(
            path=self.path,
            manifest=manifest,
            requests=self.requests.table(),
            worker_stats=tuple(stat for _, stats in sorted(self._worker_stats.items()) for stat in stats),
            endpoints=tuple(table.view() for table in self._series.values()),
            hardware=hardware,
            events=on_last_clock(events),
            timings=perf_metrics.timings(timings),
            **tables,
            offsets_ns=self.requests.offsets_ns,
            integrity=self._integrity(
                manifest, events, received=None if tables["receiver_deaths"] else tables["span_counts"]
            ),
        )

    def _read(self, pattern: str, read: Callable[[Path, bytes], T | None], *, last: bool) -> Iterator[T]:
        for path, payload in self._tails.news(pattern, last=last):
            if payload is GAP and not pattern.startswith("scrapes"):  # elsewhere each record stands for itself
                continue
            try:
                record = read(path, payload)
            except UNREADABLE as error:
                unreadable = self.unreadable.setdefault(path.name, Unreadable(reason=one_line(error)))
                unreadable.count += 1
            else:
                if record is not None:
                    yield record

    def _read_spans(self, *, last: bool) -> list[ReceivedSpan]:
        self._spans = self._spans or _SpanTables(self.path / RAW, self._within)
        return [span for spans in self._read("spans-*.log", self._spans.take, last=last) for span in spans]

    def _read_plans(self, *, last: bool = False) -> None:
        for _ in self._read("plan-*.log", self._take_planned, last=last):
            pass

    def _timely(self, record: T) -> T:
        """Return a record. Raises ValueError for one that is stamped with another time than the run's."""
        require_within(record, self._within)
        return record

    def _integrity(self, manifest: Mapping[str, Any], events: Sequence[Event], *, received: Counts | None) -> Integrity:
        stated = manifest.get("logs")
        try:
            ends = None if stated is None else msgspec.convert(stated, dict[str, LogEnd | None])
        except msgspec.ValidationError as error:
            raise ConfigurationError(f"{self.path / MANIFEST}: logs: {one_line(error)}") from error
        require_few_logs(f"{self.path / MANIFEST}: logs", ends or ())
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
        self, manifest: Mapping[str, Any], events: Events, received: Counts | None
    ) -> tuple[list[Agreement], int | msgspec.UnsetType]:
        """Return the counts that a run which ended by itself stated, and how many planned requests it has not sent."""
        if manifest.get("status") not in ("complete", "interrupted"):
            return [], msgspec.UNSET
        sent = sum(self.requests.sent.values())
        if self._spans is not None:
            self._held.spans = self._spans.spans
        stated = None if self._spans is None or received is None else received.spans
        return list(agreements(events, self._held, sent=sent, received=stated)), never_dispatched(events, sent=sent)

    def _take_event(self, _: Path, payload: bytes) -> Event:
        """Return an event. Raises ValueError for one of more than a run has: all of them are read again and again."""
        self._events += 1
        if self._events > MOST_EVENTS:
            raise ValueError(f"more than {MOST_EVENTS:,} events")
        return self._timely(_decode_event(payload))

    def _take_planned(self, path: Path, payload: bytes) -> None:
        planned = decode_planned(payload)
        self.requests.plan(planned)
        if planned.index != PLAN_END:
            self._held.planned[path.name] += 1 + len(planned.turns)

    def _take_request(self, path: Path, payload: bytes) -> WorkerStat | None:
        record = self._timely(decode_log(payload))
        if isinstance(record, WorkerStat):
            self._worker_stats.setdefault(path, []).append(record)
            return record
        require_reads_within(record, self._within)
        # What a worker was sent stands in a plan by the time it is in the worker's log.
        if not self.requests.is_planned(record.index):
            self._read_plans()
        self.requests.add(record)
        return None

    def _take_scrape(self, path: Path, payload: bytes) -> Row | FailureRecord | None:
        scrape = self._timely(self._scrapes.setdefault(path, LogReader(self._limit)).take(payload))
        if scrape is not None:
            self._held.scrapes[path.name] += 1
            self._series.setdefault(scrape.url, series.SeriesTable(scrape.url)).append(scrape)
        return scrape


def one_line(error: Exception) -> str:
    """Return what an error says, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def require_few_logs(where: str, logs: Sized) -> None:
    """Raise ConfigurationError where there are more logs than a run writes."""
    if len(logs) > MOST_LOGS:
        raise ConfigurationError(f"{where}: {len(logs):,} logs, and a run has at most {MOST_LOGS:,}")


def log_ends(path: Path) -> dict[str, LogEnd | None]:
    """Return how the logs of a run directory ended, by name; None of one whose writer was killed."""
    ends: dict[str, LogEnd | None] = {}
    for log in sorted((path / RAW).glob(LOGS)):
        with suppress(OSError):  # no plain file is none of ours
            ends[log.name] = log_end(log)
    return ends


class _SpanTables:
    """What is filled from logs of spans. Made late: protobuf takes a tenth of a second to import."""

    def __init__(self, raw: Path, within: Span) -> None:
        from correlator.live.gateways import GatewaySpans  # noqa: PLC0415
        from scraper.spans import log  # noqa: PLC0415
        from scraper.spans.requests import RequestSpans  # noqa: PLC0415

        self._log, self._within, self._raw = log, within, raw
        self.spans = 0
        self._states: list[StateRecord] = []
        self._requests, self._gateways = RequestSpans(), GatewaySpans()

    def take(self, _: Path, payload: bytes) -> Sequence[ReceivedSpan]:
        """Add a record and return its spans. Raises ValueError for what no receiver has written."""
        record = self._log.decode(payload)
        require_within(record, self._within)
        if isinstance(record, self._log.StateRecord):
            self._states.append(record)
            return ()
        spans = list(record.spans())
        self.spans += len(spans)
        for span in spans:
            self._requests.add(span)
            self._gateways.add(span)
        return spans

    def fields(self) -> dict[str, Any]:
        """Return the fields of a Run that are read from the logs of spans."""
        from scraper.spans.backlog import final_counts  # noqa: PLC0415

        counts, deaths = final_counts(self._raw, self._states)
        return {
            "spans": self._requests.table(),
            "gateways": self._gateways.by_trace(),
            "span_counts": counts,
            "receiver_deaths": deaths,
        }
