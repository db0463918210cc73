"""Whether a run directory holds what its processes state, and nothing of another time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from run_directories import Recorded, write
from sent_requests import planned
from sent_spans import call, export

from sidelight.loadgen.records import append_record
from sidelight.recorded.directory import write_json, write_text
from sidelight.recorded.events import Event
from sidelight.rundir.frames import FrameLog
from sidelight.scraper.spans.log import ReceiverCounts, SpanLog, StateRecord
from sidelight.sidecar.run import open_run

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
                                   "1 request more sent than planned"]),
        ([2, 3], [0, 1], 2, ["of 3 scrapes in raw/scrapes-0.log, 2 are there"]),
        ([2, 3], [0, 1, 2], 1, ["of 2 spans that were received, 1 are there"]),
    ],
)  # fmt: skip
def test_counts_that_must_agree_do(tmp_path: Path, tokens: list[int], waiting: list[int], spans: int, said: list[str]):
    """What the processes of a run state that they recorded, against logs that are whole in themselves."""
    path = tmp_path / "run"
    write(path, Recorded(tokens=tokens, waiting=waiting, stats=[], events=STATED))
    log = SpanLog(path / "raw" / "spans-0.log")
    log.append(StateRecord(at_ns=1, state="started", counts=ReceiverCounts()))
    for number in range(spans):
        log.append(export([call(f"c{number}", first_ms=100.0)]))
    log.append(StateRecord(at_ns=2, state="ended", counts=ReceiverCounts(exports=2, spans=2)))
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
