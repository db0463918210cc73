"""The run directory: the single source of truth of a run, and the only reader of its raw logs.

A manifest says what was asked, with what and when; everything measured stands in append-only logs under `raw/`. A run
whose manifest has no end was cut short, and is read all the same up to the tear.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from loadgen.records import RequestPart, WorkerStat, read_log, read_plan
from loadgen.requests.table import RequestLog, assemble
from rundir.frames import FrameLog, read_frames
from scraper import perf_metrics
from scraper.hardware import records as readings
from scraper.series import log as scrape_log
from scraper.series import table as series
from scraper.series.log import FailureRecord, Row
from sidecar.errors import CannotWrite, ConfigurationError

if TYPE_CHECKING:
    from scraper.spans.log import Counts
    from scraper.spans.requests import EngineSpans

MANIFEST = "manifest.json"
RAW = "raw"


class Event(msgspec.Struct, array_like=True, frozen=True):
    """Something that happened to the run as a whole: a phase began or ended, a note for the reader."""

    at_ns: int
    name: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One stretch of a run; `end_ns` is None when the run was cut short within it."""

    name: str
    start_ns: int
    end_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The logs of a run directory as columnar tables.

    `timings` are what `/perf_metrics` of TensorRT-LLM told of requests. `gateway_first_s` has seconds from a gateway's
    start of a request to its first output, by trace id in hex. `span_counts` is what the receivers of spans have
    counted, all together, None where none was; `receiver_deaths` are those that ended without a word, and whose counts
    since their start are lost but for the spans in the log.
    """

    path: Path
    manifest: Mapping[str, Any]
    requests: RequestLog
    worker_stats: tuple[WorkerStat, ...]
    endpoints: tuple[series.EndpointSeries, ...]
    spans: EngineSpans
    gateway_first_s: Mapping[str, float] = field(default_factory=dict)
    timings: perf_metrics.Timings = field(default_factory=perf_metrics.none)
    hardware: tuple[readings.HardwareLogRecord, ...] = ()
    events: tuple[Event, ...]
    span_counts: Counts | None = None
    receiver_deaths: int = 0

    @property
    def status(self) -> str:
        """Return `complete`, `interrupted` or, where nobody wrote an end, `crashed`."""
        return str(self.manifest.get("status") or "crashed")

    @property
    def phases(self) -> tuple[Phase, ...]:
        ends = {event.data["phase"]: event.at_ns for event in self.events if event.name == "phase_end"}
        return tuple(
            Phase(name=event.data["phase"], start_ns=event.at_ns, end_ns=ends.get(event.data["phase"]))
            for event in self.events
            if event.name == "phase_start"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(event.data["text"] for event in self.events if event.name == "note")


def require_free(path: Path | None) -> None:
    """Raise ConfigurationError if something is where a new run directory shall be; None is a new name, always free."""
    if path is not None and path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "holds another run" if (path / MANIFEST).exists() or (path / RAW).exists() else "is not empty"
        raise ConfigurationError(f"--out {path}: {what}; choose a new one, results are never mixed or overwritten")


def create(path: Path) -> Path:
    """Make a new run directory with its `raw/`. Raises ConfigurationError as `require_free` does, CannotWrite."""
    require_free(path)
    try:
        (path / RAW).mkdir(parents=True)
    except OSError as error:
        raise CannotWrite(f"--out {path}: {error.strerror}") from error
    return path


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place and move it there, so that no reader ever sees half of it."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        write(draft)
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CannotWrite(f"{path}: {error.strerror}") from error


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write strict JSON (no NaN), keys in the order given."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    write_whole(path, lambda draft: draft.write_text(text + "\n", encoding="utf-8"))


def append_event(path: Path, event: Event) -> None:
    """Append an event of the run. Raises OSError as FrameLog.append does."""
    with FrameLog(path / RAW / "events.log") as log:
        log.append(msgspec.msgpack.encode(event))


def open_run(path: Path) -> Run:
    """Read a run directory, whole or cut short. Raises ConfigurationError if it is none."""
    manifest = _manifest(path)
    requests, stats = _requests(path, manifest)
    return Run(
        path=path,
        manifest=manifest,
        requests=requests,
        worker_stats=stats,
        endpoints=series.build(_scrapes(path)),
        hardware=tuple(readings.decode(frame) for name in _logs(path, "hardware.log") for frame in read_frames(name)),
        events=tuple(_events(path)),
        timings=perf_metrics.timings(_replies(path)),
        **_spans(path),
    )


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: no {MANIFEST} here; give the --out of a run") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path / MANIFEST}: cannot be read: {error}") from error
    if not isinstance(manifest, dict) or "run_id" not in manifest:
        raise ConfigurationError(f"{path / MANIFEST}: not the manifest of a run; give the --out of a run")
    return manifest


def read_requests(path: Path) -> RequestLog:
    """Read what a run's workers have logged so far. Raises ConfigurationError as `open_run` does."""
    return _requests(path, _manifest(path))[0]


def last_answered(path: Path, most: int) -> tuple[list[int], int]:
    """Return which requests were answered last so far, oldest first, and when the first of all was; -1 for none.

    They are `most` of those that ended with status 200 and no error.
    """
    parts = (part for name in _logs(path, "requests-*.log") for part in read_log(name) if isinstance(part, RequestPart))
    ended = sorted((part.end_ns, part.index) for part in parts if part.last and part.status == 200 and not part.error)
    return [index for _, index in ended[-most:]], ended[0][0] if ended else -1


def _requests(path: Path, manifest: Mapping[str, Any]) -> tuple[RequestLog, tuple[WorkerStat, ...]]:
    """Read the workers' logs in one pass: a request is parsed when it is whole, so its bytes are not kept."""
    stats: list[WorkerStat] = []

    def parts() -> Iterator[RequestPart]:
        for name in _logs(path, "requests-*.log"):
            for record in read_log(name):
                if isinstance(record, RequestPart):
                    yield record
                else:
                    stats.append(record)

    planned = (record for name in _logs(path, "plan-*.log") for record in read_plan(name))
    protocol = str(manifest.get("config", {}).get("endpoint") or "chat")
    return assemble(planned, parts(), run_id=str(manifest["run_id"]), protocol=protocol), tuple(stats)


def _logs(path: Path, pattern: str) -> list[Path]:
    return sorted((path / RAW).glob(pattern))


def _scrapes(path: Path) -> Iterator[Row | FailureRecord]:
    for name in _logs(path, "scrapes-*.log"):
        yield from scrape_log.read_log(name)


def _replies(path: Path) -> Iterator[perf_metrics.ReplyRecord]:
    for name in _logs(path, "timings-*.log"):
        yield from perf_metrics.read_log(name)


def _spans(path: Path) -> dict[str, Any]:
    """Return the fields of a Run that are read from the logs of spans, in one pass: an export is parsed once."""
    # Protobuf takes a tenth of a second to import, and a run's start has no use for it.
    from correlator.live.client_spans import GatewaySpans  # noqa: PLC0415
    from scraper.spans import log as span_log  # noqa: PLC0415
    from scraper.spans.requests import RequestSpans  # noqa: PLC0415

    states: list[span_log.StateRecord] = []
    requests, gateways = RequestSpans(), GatewaySpans()
    for name in _logs(path, "spans-*.log"):
        for record in span_log.read_log(name):
            if isinstance(record, span_log.StateRecord):
                states.append(record)
                continue
            for span in record.spans():
                requests.add(span)
                gateways.add(span)
    counts, deaths = span_log.last_counts(states) if states else (None, 0)
    return {
        "spans": requests.table(),
        "gateway_first_s": gateways.first_output_s(),
        "span_counts": counts,
        "receiver_deaths": deaths,
    }


def _events(path: Path) -> Iterator[Event]:
    decoder = msgspec.msgpack.Decoder(Event)
    name = path / RAW / "events.log"
    if name.exists():
        for frame in read_frames(name):
            yield decoder.decode(frame)
