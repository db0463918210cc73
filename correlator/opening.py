"""A run directory as a `Run`: that of a run or a scrape as it was recorded, that of a watch with the requests that its
spans speak of; and the directories of all shards of a watch as one.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields, replace
from itertools import dropwhile, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidelight.recorded.directory import RAW, read_manifest
from sidelight.recorded.errors import ConfigurationError
from sidelight.recorded.events import NOTE, PHASE_END, PHASE_START, RECEIVER_DIED, Event, decode_event
from sidelight.recorded.failures import ErrorCount
from sidelight.recorded.integrity import together
from sidelight.recorded.logs import RunLogs, open_logs, require_logs
from sidelight.recorded.run import Run
from sidelight.rundir.files import NotRegular
from sidelight.rundir.frames import number_of, read_frames
from sidelight.rundir.framing import UNREADABLE
from sidelight.rundir.printable.text import first_of
from sidelight.scraper.series.log import FailureRecord, LogReader, ScrapeRow
from sidelight.scraper.series.table import SeriesTable

if TYPE_CHECKING:
    from sidelight.correlator.replay import Replayed
    from sidelight.scraper.spans.log import ReceiverLife, SpanLogRecord
    from sidelight.scraper.spans.received import ReceivedSpan

SPANS, SCRAPES = "spans-*.log", "scrapes-*.log"
_CLOCK_SET = "clock_set"  # event of builds that went on in the same directory
_WINDOW_NS = 60_000_000_000  # pages so long before a request's end are what it is estimated from


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRun(Run):
    """The logs of a watch, with the requests that its spans speak of; `spans` is empty.

    `shards` are the watches that this one was made of, in their order, with the same requests.
    """

    watched: Replayed
    shards: tuple[WatchRun, ...] = ()

    @property
    def shard(self) -> str:
        """Return the shard as K/N; "" for a watch that is alone."""
        return str(self.manifest["config"].get("shard") or "")


def open_run(path: Path, *, span_bytes: int | None = None, processes: int = 1) -> Run:
    """Return a recorded run, whole or cut short; of a watch a WatchRun. Raises ConfigurationError if there is none.

    Of a watch only the last `span_bytes` of the logs of spans are evaluated, and the pages since then; None: all.
    `processes` read the replies of a run of many requests.
    """
    manifest = read_manifest(path)
    require_logs(path)
    if not manifest.get("config", {}).get("keep"):  # a watch's alone
        return open_logs(path, manifest, processes=processes)
    with _WatchLogs(path, manifest, span_bytes=span_bytes) as logs:
        return logs.run()


def open_shards(paths: Sequence[Path], out: Path) -> WatchRun:
    """Return the watches of all shards as one, with `out` as its directory.

    Their spans are replayed in the order in which they came, whichever they came to. Raises ConfigurationError where
    the directories are not those of all shards of a watch, each once.
    """
    recorded = [(path, read_manifest(path)) for path in paths]
    require_all_shards(recorded)
    with ExitStack() as stack:
        logs = [stack.enter_context(_WatchLogs(path, manifest, span_bytes=None)) for path, manifest in recorded]
        for shard in logs:
            require_logs(shard.path)
            shard.read(spans=False, last=True)
        watched = _replayed(logs, last=True)
        shards = [shard.run(watched) for shard in logs]
    return _as_one(sorted(shards, key=lambda shard: int(shard.shard.partition("/")[0])), out)


def require_all_shards(recorded: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    """Raise ConfigurationError unless these are all shards of a watch, each once."""
    paths: dict[str, Path] = {}
    usual = ""
    for path, manifest in recorded:
        shard = str(manifest.get("config", {}).get("shard") or "")
        if not re.fullmatch(r"\d{1,4}/\d{1,4}", shard):
            raise ConfigurationError(
                "shards.none", f"{path}: not the directory of a `sidelight watch --shard K/N`; report it by itself"
            )
        if shard in paths:
            raise ConfigurationError(
                "shards.twice",
                f"{paths[shard]} and {path} are both of shard {shard}; give one directory of each shard, all of the "
                "same time",
            )
        kind = f"{shard.partition('/')[2]} shards, recorded by Sidelight {manifest['tool']['version']}"
        usual = usual or kind
        if kind != usual:
            raise ConfigurationError(
                "shards.different",
                f"{recorded[0][0]} is one of {usual}, {path} one of {kind}; give the shards of one watch, or report "
                "each by itself",
            )
        paths[shard] = path
    total = int(usual.partition(" ")[0])
    if missing := [shard for number in range(total) if (shard := f"{number}/{total}") not in paths]:
        raise ConfigurationError(
            "shards.missing",
            f"the directory of shard {first_of(missing)} is missing; give those of all {total}, or report each by "
            "itself",
        )


def _as_one(shards: Sequence[WatchRun], out: Path) -> WatchRun:
    """Return shards as one watch: it began with the first, and has ended when all have."""
    from sidelight.scraper.spans.log import summed  # noqa: PLC0415  protobuf takes a tenth of a second to import

    manifests = [shard.manifest for shard in shards]
    counts = [shard.span_counts for shard in shards if shard.span_counts is not None]
    begun = min(manifests, key=lambda manifest: int(manifest["started_ns"]))
    about = {name: value for name, value in begun.items() if name not in ("status", "ended_at", "ended_ns", "reason")}
    if all(shard.status == "complete" for shard in shards):
        about |= {"status": "complete", "ended_at": max(str(manifest["ended_at"]) for manifest in manifests)}
    about["run_id"] = f"{manifests[0]['run_id']}+{len(shards) - 1}"
    about["metrics_targets"] = [page for manifest in manifests for page in manifest.get("metrics_targets", ())]
    about["config"] = {
        **begun["config"],
        "out": str(out),
        "metrics": [page["url"] for page in about["metrics_targets"]],
        "shard": f"0/{len(shards)} to {len(shards) - 1}/{len(shards)}",
    }
    return replace(
        shards[0],
        path=out,
        manifest=about,
        endpoints=tuple(endpoint for shard in shards for endpoint in shard.endpoints),
        events=tuple(_events_of(shards)),
        span_counts=summed(counts) if counts else None,
        receiver_deaths=sum(shard.receiver_deaths for shard in shards),
        integrity=together({str(shard.path): shard.integrity for shard in shards}),
        shards=tuple(shards),
    )


def _events_of(shards: Sequence[WatchRun]) -> Iterator[Event]:
    """Yield the shards' first start, their notes, and their last end if all ended."""
    events = sorted(
        ((event, shard.shard) for shard in shards for event in shard.events), key=lambda pair: pair[0].at_ns
    )
    starts, ends = ([event for event, _ in events if event.name == name] for name in (PHASE_START, PHASE_END))
    yield from starts[:1]
    for event, shard in events:
        if event.name == NOTE:
            yield Event(at_ns=event.at_ns, name=NOTE, data={"text": f"shard {shard}: {event.data['text']}"})
    yield from ends[-1:] if len(ends) == len(shards) else ()


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
        self.is_shard = manifest["config"].get("shard") is not None
        self.deaths_ns = [event.at_ns for event in events if event.name == RECEIVER_DIED]
        logs = sorted(raw.glob(SPANS))
        self._ahead = 0 if span_bytes is None else max(0, sum(log.stat().st_size for log in logs) - span_bytes)
        self.is_shortened = self._ahead > 0 or (bool(logs) and number_of(logs[0]) > 0)
        self._since_ns = _first_ns(logs, self._ahead) - _WINDOW_NS if self._ahead else 0
        self._watched: Replayed | None = None
        self._lives: list[ReceiverLife] = []

    @property
    def first_ns(self) -> int:
        """Return the arrival time of the oldest export in the logs; 0 if missing."""
        return _first_ns(sorted((self.path / RAW).glob(SPANS)), 0)

    def run(self, watched: Replayed | None = None) -> WatchRun:
        """Return the watch up to the end of its logs.

        Its requests are those replayed elsewhere, or made of its spans. Raises ConfigurationError without a manifest.
        """
        from sidelight.scraper.spans.log import added_up  # noqa: PLC0415  protobuf takes a tenth of a second to import

        self._watched = watched
        run = super().run()
        if self._watched is None:
            raise AssertionError("spans are read with all other logs")
        logs = {field.name: getattr(run, field.name) for field in fields(run)}
        counts, deaths = added_up(self._lives)
        logs |= {"requests": self._watched.requests, "span_counts": counts, "receiver_deaths": deaths}
        return WatchRun(**logs, watched=self._watched)

    def records(self, *, last: bool) -> Iterator[SpanLogRecord]:
        """Yield the exports and the states of receivers that were not read yet."""
        return self._read(SPANS, self._take_record, last=last)

    def _read_spans(self, *, last: bool) -> list[ReceivedSpan]:
        """Make requests of the spans, with the pages that were read before; none are returned."""
        self._watched = self._watched or _replayed([self], last=last)
        return []

    def _take_record(self, _: Path, payload: bytes) -> SpanLogRecord | None:
        from sidelight.scraper.spans.log import StateRecord, decode, follow  # noqa: PLC0415  as above

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


def _replayed(watches: Sequence[_WatchLogs], *, last: bool) -> Replayed:
    """Make requests of the spans of one watch, or of all shards of one.

    What was kept of a time by some shards only is left out: the sums of that time would be of a part of the requests.
    """
    from sidelight.correlator.replay import Replay  # noqa: PLC0415  as above
    from sidelight.scraper.spans.log import StateRecord  # noqa: PLC0415

    def at_ns(came: tuple[SpanLogRecord, int]) -> int:
        return came[0].at_ns if isinstance(came[0], StateRecord) else came[0].received_ns

    guard = ErrorCount("a request is left out of the report").guard
    is_shard = len(watches) == 1 and watches[0].is_shard
    replay = Replay(
        # One shard sees too few of an engine's requests for estimates.
        [table.view() for watch in watches for table in watch.pages.values() if not is_shard],
        sorted(died_ns for watch in watches for died_ns in watch.deaths_ns),
        guard,
        shortened=any(watch.is_shortened for watch in watches),
        shards=len(watches),
        is_shard=is_shard,
    )
    since_ns = max((watch.first_ns for watch in watches if watch.is_shortened and len(watches) > 1), default=0)
    records = heapq.merge(
        *(zip(watch.records(last=last), repeat(shard)) for shard, watch in enumerate(watches)), key=at_ns
    )
    for record, shard in dropwhile(lambda came: at_ns(came) < since_ns, records):
        with guard():
            replay.take(record, shard)
    return replay.replayed()


def _events(log: Path) -> Iterator[Event]:
    for payload in _payloads(log):
        with suppress(*UNREADABLE):  # which is counted where all logs are read
            yield decode_event(payload)


def _first_ns(logs: Sequence[Path], ahead: int) -> int:
    """Return the arrival time of the first export beyond `ahead` bytes; 0 if missing."""
    from sidelight.scraper.spans.log import ExportRecord, decode  # noqa: PLC0415  as above

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
