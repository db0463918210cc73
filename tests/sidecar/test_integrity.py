"""Whether a run directory holds what its processes state, and nothing of another time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from run_directories import MANIFEST, Recorded, write
from sent_requests import planned
from sent_spans import call, export

from loadgen.records import RequestPart, WorkerStat, append_record
from recorded.directory import create, write_json, write_text
from recorded.events import Event
from rundir.frames import FrameLog
from scraper.hardware.records import HardwareAbsence
from scraper.perf_metrics import ReplyRecord
from scraper.series.log import FailureRecord
from scraper.spans.log import Counts, ExportRecord, SpanLog, StateRecord
from sidecar.run import open_run

STATED = [
    Event(at_ns=1, name="planned", data={"phase": "measure", "count": 2, "turns": 0}),
    Event(at_ns=1, name="phase_start", data={"phase": "measure"}),
    Event(at_ns=2, name="phase_end", data={"phase": "measure", "started": 2}),
    Event(at_ns=3, name="scraped", data={"log": "scrapes-0.log", "scrapes": 3, "unwritten": 0}),
]


@pytest.mark.parametrize(
    ("tokens", "waiting", "spans", "said"),
    [
        ([2, 3], [0, 1, 2], 2, []),
        ([2], [0, 1, 2], 2, ["of 2 planned requests in raw/plan-measure.log, 1 are there",
                             "of 2 requests that load workers sent, 1 are there"]),
        ([2, 3, 4], [0, 1, 2], 2, ["of 2 planned requests in raw/plan-measure.log, 3 are there",
                                   "of 2 requests that load workers sent, 3 are there",
                                   "1 more requests were sent than were planned"]),
        ([2, 3], [0, 1], 2, ["of 3 scrapes in raw/scrapes-0.log, 2 are there"]),
        ([2, 3], [0, 1, 2], 1, ["of 2 spans that were received, 1 are there"]),
    ],
)  # fmt: skip
def test_counts_that_must_agree_do(tmp_path: Path, tokens: list[int], waiting: list[int], spans: int, said: list[str]):
    """What the processes of a run state that they recorded, against logs that are whole in themselves."""
    path = tmp_path / "run"
    write(path, Recorded(tokens=tokens, waiting=waiting, stats=[], events=STATED))
    log = SpanLog(path / "raw" / "spans-0.log")
    log.append(StateRecord(at_ns=1, state="started", counts=Counts()))
    for number in range(spans):
        log.append(export([call(f"c{number}", first_ms=100.0)]))
    log.append(StateRecord(at_ns=2, state="ended", counts=Counts(exports=2, spans=2)))
    log.close()
    integrity = open_run(path).integrity
    assert (said, "damaged" if said else "whole") == (integrity.disagreements, integrity.state)
    assert [(2, len(tokens)), (2, len(tokens)), (2, spans), (3, len(waiting))] == [
        (count.stated, count.read) for count in integrity.counts
    ]
    assert 2 - len(tokens) == integrity.never_dispatched


def test_what_was_planned_and_not_sent_is_counted(tmp_path: Path):
    """It ended before; of a run that was killed nothing is stated that could disagree."""
    path = tmp_path / "run"
    write(path, Recorded(tokens=[2, 3], waiting=[], stats=[], events=[STATED[0]]))
    with FrameLog(path / "raw" / "plan-measure.log") as plan:
        append_record(plan, planned(2, 4))
    write_text(path / "raw" / "events.log", "")
    with FrameLog(path / "raw" / "events.log") as log:
        log.append(msgspec.msgpack.encode(Event(at_ns=1, name="planned", data={"phase": "measure", "count": 3})))
    integrity = open_run(path).integrity
    assert (1, []) == (integrity.never_dispatched, integrity.disagreements)
    write_json(path / "manifest.json", {"run_id": "r"})
    assert [] == open_run(path).integrity.counts


NOON = 1_800_000_000_000_000_000
DAY = 86_400_000_000_000


@pytest.mark.parametrize(
    ("log", "record"),
    [
        ("requests-0.log", RequestPart(index=2, last=True, dispatch_ns=NOON - 2 * DAY)),
        ("requests-0.log", RequestPart(index=2, last=True, end_ns=NOON + 2 * DAY)),
        ("requests-0.log", RequestPart(index=2, reads_ns=(NOON + 2 * DAY).to_bytes(8, "little"), packing=0)),
        ("requests-0.log", RequestPart(index=2, reads_ns=(NOON - 2 * DAY).to_bytes(8, "little"), packing=1)),
        ("requests-0.log", WorkerStat(worker=0, at_ns=0, cpu_ns=0)),
        (
            "scrapes-0.log",
            FailureRecord(url="u", tick_ns=1, request_ns=1, response_ns=2**62, status=0, error=""),
        ),
        ("spans-0.log", StateRecord(at_ns=NOON - 2 * DAY, state="ended", counts=Counts())),
        ("spans-0.log", ExportRecord(received_ns=-(2**63), via="grpc", packed=b"")),
        ("events.log", Event(at_ns=NOON + 2 * DAY, name="phase_end", data={"phase": "measure"})),
        ("hardware.log", HardwareAbsence(at_ns=1, source="rapl", reason="none")),
        ("timings-0.log", ReplyRecord(url="u", request_ns=NOON, response_ns=1, status=0, error="", packed=b"")),
    ],
)
def test_a_record_of_another_time_is_left_out(tmp_path: Path, log: str, record: msgspec.Struct):
    """A stamp a day before the run began or after it ended is none of it: a window to it would have no end."""
    path = create(tmp_path / "run")
    write_json(path / "manifest.json", {**MANIFEST, "started_ns": NOON, "ended_ns": NOON + 10**9})
    with FrameLog(path / "raw" / log) as written_log:
        written_log.append(msgspec.msgpack.encode(record))
    run = open_run(path)
    (damaged,) = run.integrity.logs
    assert (log, 1, "damaged") == (damaged.log, damaged.unreadable, damaged.state)
    assert "is not in the time of the run" in str(damaged.reason)
    assert (0, (), (), ()) == (len(run.requests), run.endpoints, run.events, run.hardware)
