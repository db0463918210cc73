from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import records
from rundir import frames

PLANNED = records.PlannedRequest(
    index=3, phase="measure", workload_class="x", path="/v1/chat/completions", body=b"{}", input_tokens=5, offset_ns=11
)
PART = records.RequestPart(
    index=3,
    last=True,
    worker=1,
    url="http://h/",
    submit_ns=4,
    reused=True,
    status=200,
    reads_ns=b"12345678",
    error="x: y",
)
STAT = records.WorkerStat(worker=1, at_ns=2, cpu_ns=3, loop_delay_ns=4, in_flight=5, started=6)

payloads = st.lists(st.binary(min_size=1, max_size=300), max_size=6)


def _written(written: list[bytes]) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        frame_log = frames.FrameLog(path)
        for payload in written:
            frame_log.append(payload)
        frame_log.close()
        return path.read_bytes()


@given(payloads, st.data())
def test_any_prefix_of_a_log_reads_up_to_the_tear(written: list[bytes], data: st.DataObject):
    """However a log is cut, the whole frames before the cut are read and nothing else."""
    raw = _written(written)
    cut = data.draw(st.integers(0, len(raw)))
    read, end = frames.split_frames(raw[:cut])
    assert written[: len(read)] == read
    assert end == sum(8 + len(payload) for payload in read)
    assert len(read) == len(written) or end + 8 + len(written[len(read)]) > cut


@given(payloads.filter(bool), st.data())
def test_a_changed_byte_ends_the_reading_before_its_frame(written: list[bytes], data: st.DataObject):
    """No frame from the damaged one on is given out."""
    raw = bytearray(_written(written))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    read, end = frames.split_frames(raw)
    assert written[: len(read)] == read
    assert end <= at


def test_records_come_back_as_they_were_written(tmp_path: Path):
    """Writing then reading is the identity, for each kind of record."""
    for name, read, written in (
        ("plan", records.read_plan, [PLANNED, records.plan_end("measure")]),
        ("requests", records.read_log, [PART, STAT, PART]),
    ):
        frame_log = frames.FrameLog(tmp_path / name)
        for record in written:
            records.append_record(frame_log, record)
        frame_log.close()
        kept = [record for record in written if getattr(record, "index", 0) != records.PLAN_END]
        assert kept == list(read(tmp_path / name))


def test_a_block_of_zeros_is_a_tear(tmp_path: Path):
    """Space that a crash left unwritten is not a row of empty frames."""
    path = tmp_path / "log"
    path.write_bytes(_written([b"one"]) + bytes(64))
    assert list(frames.read_frames(path)) == [b"one"]


def test_a_tail_sees_a_log_grow(tmp_path: Path):
    """New whole frames are given once, in order, also when one is longer than a read or comes in two writes."""
    raw = _written([b"one", b"x" * 700_000, b"three"])
    path = tmp_path / "log"
    path.touch()
    with frames.FrameTail(path) as tail, path.open("ab", buffering=0) as out:
        assert tail.read_new() == []
        out.write(raw[:15])
        assert tail.read_new() == [b"one"]
        out.write(raw[15:500_000])
        assert tail.read_new() == []
        out.write(raw[500_000:])
        assert tail.read_new() == [b"x" * 700_000, b"three"]
        assert tail.read_new() == []


def test_a_log_that_cannot_be_written_says_so():
    """A full disk is an OSError, not silence."""
    with frames.FrameLog("/dev/full") as frame_log, pytest.raises(OSError, match="No space left"):
        frame_log.append(b"payload")


def test_ids_are_functions_of_run_and_index():
    """Ids are the same whenever they are derived, differ between requests and runs, and have the W3C lengths."""
    assert records.trace_id("run", 1) == records.trace_id("run", 1)
    ids = {make(run, index) for make in (records.request_id, records.trace_id) for run in "ab" for index in range(50)}
    assert len(ids) == 200
    version, trace, span, flags = records.traceparent("run", 1).split("-")
    assert ("00", 32, 16, "01") == (version, len(trace), len(span), flags)
    assert (trace, span) == (records.trace_id("run", 1), records.span_id("run", 1))
