"""What must hold after every schedule, whatever went wrong in it.

- each request whose outermost span was logged is counted once; each export that was taken is logged, none more often
  than it was sent, and nothing else is
- what is counted agrees with the logs: exports, spans, repeats, what was forwarded, dropped, or waits
- the parts of a TTFT sum to it, and are the true ones where spans state them
- each scrape that is counted is in a log as a page or as a failure, and each page that was served, but for the one in
  hand at a death; the time without a scraper is recorded
- a death costs a log the frame in hand at most; no task, connection or process is left, and nothing was a defect
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from faults.schedules.network import Weather
from faults.schedules.scrapes import scrape_faults
from faults.schedules.traffic import Request
from faults.schedules.watching import Played, Watched

from sidelight.correlator.parts import TTFT_PARTS
from sidelight.recorded.run import Run
from sidelight.rundir.frames import FrameTail, in_order
from sidelight.rundir.framing import Extent
from sidelight.scraper.spans.log import ExportRecord, StateRecord, decode
from sidelight.scraper.spans.received import OFF_CLOCK
from sidelight.sidecar.run import open_run

APART_S = 50.0  # between the spans of a request, which are then one
CALM = Weather()
SETTLED_S = 5.0  # within which what comes is of a request as it is counted
STATED_S = 1e-5  # by which times that spans state may be off: a gateway's is rounded to 0.01 ms


@dataclass(kw_only=True)
class Log:
    """One log of spans as it lies there."""

    path: Path
    extent: Extent
    records: list[ExportRecord | StateRecord]

    @property
    def exports(self) -> list[ExportRecord]:
        return [record for record in self.records if isinstance(record, ExportRecord)]


@dataclass(kw_only=True)
class Read:
    """The logs of spans of a watch, and of each part of a request when it was logged, s."""

    watch: Watched
    logs: list[Log]
    run: Run
    span_count: int = 0  # odd ones too
    spans: list[tuple[int, str]] = field(default_factory=list)
    firsts: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def exports(self) -> list[ExportRecord]:
        return [export for log in self.logs for export in log.exports]


def wrong_with(played: Played) -> str:
    """Return what is wrong, "" for nothing."""
    return next(_faults(played), "")


def _faults(played: Played) -> Iterator[str]:
    yield from _left_behind(played)
    parts = {export.data: export.parts for export in played.schedule.exports}
    reads = [_read(watch, parts) for watch in played.watches]
    for read in reads:
        yield from _logs(read, played)
    yield from _exports(played, reads)
    for read in reads:
        if read.watch.process.code == 0:
            yield from _counts(read)
            yield from _requests(read)
        yield from _breakdowns(read, {request.number: request for request in played.schedule.requests})
        yield from scrape_faults(read.run, read.watch, played)
    if played.schedule.forwards:
        yield from _forwarded(played, reads)


def _left_behind(played: Played) -> Iterator[str]:
    yield from (f"a defect: {text}" for text in played.trouble)
    yield from (f"a task is left: {text}" for text in played.left)
    for watch in played.watches:
        if watch.process.code not in (0, -9):
            yield f"the watch ended with {watch.process.code}: {watch.process.errors}"
    for receiver in played.receivers:
        if receiver.code not in (0, -9) and not (receiver.code == 1 and played.disk.failures):
            yield f"a receiver ended with {receiver.code}: {receiver.errors}"
        if any("Error" in text for text in receiver.errors):
            yield f"a receiver said: {receiver.errors}"
    for scraper in played.scrapers:
        if scraper.code not in (0, -9) or scraper.errors:
            yield f"a scraper ended with {scraper.code}: {scraper.errors}"


def _read(watch: Watched, parts: Mapping[bytes, Sequence[tuple[int, str]]]) -> Read:
    logs, run = [], open_run(watch.path)
    for path in in_order((watch.path / "raw").glob("spans-*.log")):
        with FrameTail(path) as tail:
            payloads = list(iter_payloads(tail))
            logs.append(Log(path=path, extent=tail.extent, records=[decode(payload) for payload in payloads]))
    read = Read(watch=watch, logs=logs, run=run)
    for export in read.exports:
        read.span_count += sum(1 for _ in export.spans())
        for number, side in parts[export.body()]:
            read.spans.append((number, side))
            read.firsts.setdefault(number, {}).setdefault(side, export.received_ns / 1e9)
    return read


def iter_payloads(tail: FrameTail) -> Iterator[bytes]:
    """Give the payloads of a log to its very end."""
    while payloads := tail.read_block() or tail.read_rest():
        yield from filter(None, payloads)


def _logs(read: Read, played: Played) -> Iterator[str]:
    """A receiver that was killed may leave a torn frame at the end of its log; one that ended states what it wrote."""
    none_was_killed = all(receiver.code == 0 for receiver in played.receivers)
    for log in read.logs:
        extent = log.extent
        if extent.lost_frames or extent.lost_bytes:
            yield f"{log.path.name} is damaged: {extent}"
        states = [record for record in log.records if isinstance(record, StateRecord)]
        is_ended = bool(states) and states[-1].state == "ended"
        if extent.torn_bytes and is_ended and none_was_killed:
            yield f"{log.path.name} is torn, though its receiver ended: {extent}"
        if is_ended and extent.end is None and none_was_killed and not played.disk.failures:
            yield f"{log.path.name} has no end, though its receiver ended"
    counted: Counter[str] = Counter()  # of a receiver, in all of its logs
    for log in read.logs:
        for record in log.records:
            if isinstance(record, ExportRecord):
                counted["exports"] += 1
                for span in record.spans():
                    counted["spans"] += 1
                    if span.fault:
                        counted["off_clock" if span.fault == OFF_CLOCK else "bad_spans"] += 1
                continue
            if record.state == "started":
                counted.clear()
            stated = {name: getattr(record.counts, name) for name in ("exports", "spans", "off_clock", "bad_spans")}
            if record.state != "continued" and stated != {name: counted[name] for name in stated}:
                yield f"{log.path.name}: {dict(counted)} are logged, {record.counts} are counted"


def _exports(played: Played, reads: Sequence[Read]) -> Iterator[str]:
    logged = Counter(export.body() for read in reads for export in read.exports)
    odd = [export for export in played.schedule.exports if not export.parts and export.data[0] == 0xFF]
    refused = sum(answer == "refused" for export in odd for _, answer in export.attempts)
    malformed = sum(record.counts.malformed for read in reads for record in _last_states(read))
    is_known = not any(receiver.code for receiver in played.receivers) and played.schedule.weather == CALM
    if is_known and malformed != refused and not played.disk.failures:
        yield f"{refused} exports were refused as malformed, {malformed} are counted"
    for export in played.schedule.exports:
        times = logged.pop(export.data, 0)
        most = sum(answer in ("taken", "") for _, answer in export.attempts)
        if not export.taken <= times <= most:
            yield f"export {export.number} is logged {times} times: {export.attempts}"
    if logged:
        yield f"{logged.total()} exports are logged that were not sent"


def _last_states(read: Read) -> list[StateRecord]:
    """Return the last state of each receiver."""
    states: list[StateRecord] = []
    for record in (record for log in read.logs for record in log.records if isinstance(record, StateRecord)):
        if record.state == "started":
            states.append(record)
        else:
            states[-1] = record
    return states


def _counts(read: Read) -> Iterator[str]:
    (view,) = read.watch.views
    watch = view.snapshot(restarts=0).watch
    assert watch is not None
    if watch.errors:
        yield f"{watch.errors} defects"
    counted, logged = (watch.receiver["exports"], watch.receiver["spans"]), (len(read.exports), read.span_count)
    if counted != logged:
        yield f"exports and spans: {counted} are counted, {logged} logged"
    repeated = len(read.spans) - len(set(read.spans))
    if watch.repeated != repeated:
        yield f"{repeated} spans came again, {watch.repeated} are counted"
    if watch.evicted or any(watch.sizes[name] for name in ("pending", "halves", "waiting")):
        yield f"evicted or left: {watch.evicted}, {watch.sizes}"


def _requests(read: Read) -> Iterator[str]:
    """Each is counted once by its outermost span; of those whose spans came far apart, each may be."""
    (view,) = read.watch.views
    least = sum(bool(sides.keys() & {"client", "gateway"}) for sides in read.firsts.values())
    most = least + len(_apart(read))
    counts = view.parts.requests
    if not least <= sum(counts.values()) <= most:
        yield f"{least} to {most} requests were logged, {dict(counts)} are counted"
    if sum(view.parts.missing.values()) < counts["none"]:
        yield f"{counts['none']} requests have no breakdown, but reasons are {dict(view.parts.missing)}"


def _apart(read: Read) -> set[int]:
    """Return the requests whose spans came far apart, so that each half may stand for itself."""
    return {number for number, sides in read.firsts.items() if max(sides.values()) - min(sides.values()) > APART_S}


def _breakdowns(read: Read, requests: Mapping[int, Request]) -> Iterator[str]:
    """Those of the report, which reads the logs again."""
    run = read.run
    assert run.watched is not None
    parts = run.watched.parts
    columns = {part.name: getattr(parts, f"{part.name}_s") for part in TTFT_PARTS}
    total_s = np.sum([np.nan_to_num(column) for column in columns.values()], axis=0)
    off = np.flatnonzero(parts.covered & (np.abs(total_s - parts.ttft_s) > 1e-9))
    if len(off):
        yield f"parts that do not sum to their TTFT: {total_s[off]}, {parts.ttft_s[off]}"
    numbers = [int(trace, 16) - 1 for trace in run.requests.trace_id]
    again = {number for number, count in Counter(numbers).items() if count > 1} - _apart(read)
    if again:
        yield f"requests that are in the report more than once: {sorted(again)}"
    for row, number in enumerate(numbers):
        sides = read.firsts[number].values()
        if (
            parts.source[row] == "trace"
            and max(sides) - min(sides) < SETTLED_S
            and len(sides) == len(requests[number].sides)
        ):
            true = requests[number]
            stated_s = {
                "queue": true.queue_ms, "prefill": true.prefill_ms, "network": true.network_ms,
                "gateway": true.gateway_ms, "other": true.frontend_ms,
            }  # fmt: skip
            for name, ms in stated_s.items():
                if not abs(np.nan_to_num(columns[name][row]) - ms / 1e3) <= STATED_S:
                    yield f"request {number}: {name} is {columns[name][row]}, in truth {ms / 1e3}"


def _forwarded(played: Played, reads: Sequence[Read]) -> Iterator[str]:
    """All that was logged was taken by the next collector, once unless an answer was lost, or is counted."""
    logged = Counter(export.body() for read in reads for export in read.exports)
    taken = Counter(played.collector.taken)
    counts = [read.run.span_counts for read in reads if read.run.span_counts is not None]
    names = ("forwarded", "forward_dropped", "forward_unknown")
    forwarded, dropped, unknown = (sum(getattr(each, name) for each in counts) for name in names)
    stated = f"{forwarded} are counted as forwarded, {dropped} as dropped, of {unknown} it is not known"
    again, weather = (taken - logged).total(), played.schedule.weather
    if again and not (weather.resets or weather.silences or weather.slow):
        yield f"{again} exports were forwarded again"
    arrived = (logged & taken).total()
    if not forwarded <= arrived + again or arrived > forwarded + dropped + unknown:
        yield f"{arrived} exports were taken, and {again} again: {stated}"
    if logged.total() != forwarded + dropped + unknown:
        yield f"{logged.total()} exports are logged, {stated}"
