"""Logs that go on for days are several files, each of which can be read without the others."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from odd_exports import counted

from sidelight.rundir.frames import FrameLog, Rotation, following, read_frames
from sidelight.scraper.series.log import LogReader, ScrapeLog, ScrapeRow
from sidelight.scraper.spans.log import (
    ExportRecord,
    ReceiverCounts,
    SpanLog,
    SpanLogRecord,
    StateRecord,
    decode,
    packed,
)
from sidelight.scraper.targets.scrape import Scrape

SMALL = Rotation(most_bytes=400, most_s=1e9)


def scraped(second: int) -> Scrape:
    return Scrape(
        url="http://engine.test/metrics",
        tick_ns=second,
        request_ns=second,
        response_ns=second,
        content_type="text/plain",
        body=f"# TYPE a gauge\na {second}\nb 1\n".encode(),
    )


def files(path: Path) -> list[Path]:
    return sorted(path.glob("*.log"))


def span_records(paths: list[Path]) -> list[SpanLogRecord]:
    return [decode(payload) for path in paths for payload in read_frames(path)]


@pytest.mark.parametrize(("name", "after"), [("spans-000009.log", "spans-000010.log"), ("a-b-9.log", "a-b-10.log")])
def test_files_are_numbered_on(name: str, after: str):
    """As wide as before, so that their names sort as they were written."""
    assert Path(after) == following(Path(name))


def test_a_log_goes_on_in_another_file_when_one_is_large(tmp_path: Path):
    """Or old; without limits it never does."""
    for limits, expected in ((SMALL, 3), (Rotation(most_bytes=10**9, most_s=0.0), 6), (None, 1)):
        path = tmp_path / str(expected)
        path.mkdir()
        with closing(FrameLog(path / "x-0000.log", limits)) as log:
            for _ in range(5):
                log.rotate()
                log.append(b"x" * 200)
        assert expected == len(files(path))


def test_each_file_of_scrapes_can_be_read_alone(tmp_path: Path):
    """Though rows are written as what changed since the row before."""
    with closing(ScrapeLog(tmp_path / "scrapes-000000.log", SMALL)) as log:
        for second in range(1, 60):
            log.append(scraped(second))
    seconds = []
    assert len(files(tmp_path)) > 3
    for path in files(tmp_path):
        reader = LogReader()
        for payload in read_frames(path):
            row = reader.take(payload)
            if isinstance(row, ScrapeRow):
                assert [row.tick_ns, 1] == row.values.tolist()
                seconds.append(row.tick_ns)
    assert list(range(1, 60)) == seconds


def test_counts_are_those_of_the_receivers_whichever_files_are_left(tmp_path: Path):
    """A file begins with what was counted when it began; a receiver that goes on in it is the same one."""
    with closing(SpanLog(tmp_path / "spans-000000.log", SMALL)) as log:
        log.append(StateRecord(at_ns=1, state="started", counts=ReceiverCounts()))
        for number in range(1, 40):
            log.append(packed(number, "grpc", bytes([number]) * 50))
            log.append(StateRecord(at_ns=number, state="counted", counts=ReceiverCounts(exports=number)))
        log.append(StateRecord(at_ns=99, state="ended", counts=ReceiverCounts(exports=39)))
    paths = files(tmp_path)
    assert len(paths) > 3
    assert (ReceiverCounts(exports=39), 0) == counted(span_records(paths))
    assert (ReceiverCounts(exports=39), 0) == counted(span_records(paths[2:]))
    exports = [record.received_ns for record in span_records(paths) if isinstance(record, ExportRecord)]
    assert list(range(1, 40)) == exports
