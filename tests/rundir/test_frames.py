from __future__ import annotations

import errno
import os
import tempfile
import tracemalloc
import zlib
from contextlib import nullcontext, suppress
from itertools import accumulate
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen import records
from sidelight.rundir import frames, framing

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


def _read(raw: bytes, *, pieces: int = 7) -> tuple[list[bytes], framing.Extent]:
    """Return the payloads of a log that came in pieces, and how much of it was read."""
    unframer = framing.Unframer()
    read = [payload for begin in range(0, len(raw), pieces) for payload in unframer.feed(raw[begin : begin + pieces])]
    read += unframer.finish()
    return [payload for payload in read if payload is not framing.GAP], unframer.extent


@given(payloads)
def test_a_closed_log_says_what_it_held(written: list[bytes]):
    """How many frames, their bytes, and a checksum of all; a reader that read as much finds the same."""
    read, extent = _read(_written(written))
    assert written == read
    assert framing.LogEnd(frames=extent.frames, bytes=extent.bytes, checksum=extent.checksum) == extent.end
    assert (len(written), 0, 0, 0) == (extent.frames, extent.lost_frames, extent.lost_bytes, extent.torn_bytes)


@given(payloads, st.data())
def test_any_prefix_of_a_log_reads_up_to_the_tear(written: list[bytes], data: st.DataObject):
    """However a log is cut, the whole frames before the cut are read and nothing else; what is left over is counted."""
    raw = _written(written)
    cut = data.draw(st.integers(0, len(raw)))
    read, extent = _read(raw[:cut])
    assert written[: len(read)] == read
    assert len(read) == len(written) or sum(16 + len(payload) for payload in written[: len(read) + 1]) > cut
    assert (extent.end is None, 0) == (cut < len(raw), extent.lost_bytes)
    assert extent.end is not None or cut == extent.bytes + extent.torn_bytes


@given(payloads.filter(bool), st.data())
def test_a_changed_byte_costs_its_frame_and_no_other(written: list[bytes], data: st.DataObject):
    """What is behind it is read; where it is not the end that is damaged, the missing frame is known by its number."""
    raw = bytearray(_written(written))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    read, extent = _read(bytes(raw), pieces=data.draw(st.integers(1, 50)))
    ends = list(accumulate(16 + len(payload) for payload in written))
    hit = sum(end <= at for end in ends)
    assert [payload for place, payload in enumerate(written) if place != hit] == read
    assert (int(hit < len(written)), hit == len(written)) == (extent.lost_frames, extent.end is None)
    assert extent.lost_bytes + extent.torn_bytes > 0


@given(payloads.filter(lambda written: len(written) > 1), st.data())
def test_frames_that_are_gone_or_come_again_are_noticed(written: list[bytes], data: st.DataObject):
    """Though each that is there is whole."""
    raw = _written(written)
    ends = [0, *accumulate(16 + len(payload) for payload in written)]
    place = data.draw(st.integers(0, len(written) - 1))
    frame = raw[ends[place] : ends[place + 1]]
    read, extent = _read(raw[: ends[place]] + raw[ends[place + 1] :])
    assert (1, written[:place] + written[place + 1 :]) == (extent.lost_frames, read)
    read, extent = _read(raw[: ends[place]] + frame + raw[ends[place] :])
    assert (written, len(frame)) == (read, extent.lost_bytes)


@given(st.binary(max_size=400))
def test_any_bytes_are_read_to_their_end(raw: bytes):
    """Magic words in the middle of nowhere included; every byte is accounted for."""
    for data in (raw, raw.replace(b"\0", b"\xf5SLr"), b"\xf5SLr" + raw, b"\xf5SLe" * 9 + raw):
        extent = _read(data)[1]
        assert len(data) == extent.bytes + extent.lost_bytes + extent.torn_bytes + 32 * (extent.end is not None)


def test_a_log_that_is_opened_again_goes_on(tmp_path: Path):
    """Its frames are numbered on, and its new end counts all of them; so behind a tear."""
    path = tmp_path / "log"
    for number in range(5):
        with frames.FrameLog(path) as log:
            log.append(b"%d" % number)
    assert ([b"0", b"1", b"2", b"3", b"4"], 5) == (list(frames.read_frames(path)), frames.log_end(path).frames)  # type: ignore[union-attr]
    path.write_bytes(path.read_bytes()[:-40])  # the last frame and its end
    assert frames.log_end(path) is None
    with frames.FrameLog(path) as log:
        log.append(b"5")
    read, extent = _read(path.read_bytes())
    assert [b"0", b"1", b"2", b"3", b"5"] == read
    assert extent.lost_bytes > 0
    assert extent.end == frames.log_end(path)


def test_a_record_that_no_reader_would_take_is_not_written(tmp_path: Path):
    """Empty ones mark gaps, and a length beyond 64 MiB is damage."""
    with frames.FrameLog(tmp_path / "log") as log:
        for payload in (b"", bytes(framing.MOST_BYTES + 1)):
            with pytest.raises(ValueError, match="a record of"):
                log.append(payload)
        log.append(b"x")
    assert [b"x"] == list(frames.read_frames(tmp_path / "log"))


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
        remaining = [record for record in written if getattr(record, "index", 0) != records.PLAN_END]
        assert remaining == list(read(tmp_path / name))


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
        out.write(raw[:25])
        assert tail.read_new() == [b"one"]
        out.write(raw[25:500_000])
        assert tail.read_new() == []
        out.write(raw[500_000:])
        assert tail.read_new() == [b"x" * 700_000, b"three"]
        assert tail.read_new() == []


def test_a_log_that_cannot_be_written_says_so():
    """A full disk is an OSError, not silence."""
    with frames.FrameLog("/dev/full") as frame_log, pytest.raises(OSError, match="No space left"):
        frame_log.append(b"payload")


class Disk:
    """Takes the place of `os.write`: a disk with so much room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self._write = os.write

    def __call__(self, fd: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(fd, bytes(data[: self.room]))
        self.room -= written
        return written


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5), st.data())
def test_what_does_not_fit_is_taken_back_and_the_log_goes_on(written: list[bytes], data: st.DataObject):
    """Wherever a disk is full, the log is whole without the record that did not fit, and so it is to a reader who
    followed it and has seen half of that.
    """
    disk = Disk(data.draw(st.integers(0, len(_written(written)) - 1)))
    fitting: list[bytes] = []
    seen: list[bytes] = []
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        path = Path(directory) / "log"
        with frames.FrameLog(path) as log, frames.FrameTail(path) as tail:
            take_back = os.ftruncate
            patch.setattr(os, "write", disk)
            patch.setattr(os, "ftruncate", lambda *where: (seen.extend(tail.read_block()), take_back(*where)))
            for payload in written:
                with suppress(OSError):
                    log.append(payload)
                    fitting.append(payload)
                seen += tail.read_block()
            disk.room = 1000
            log.append(b"last")
            seen += tail.read_block() + tail.read_rest()
        assert [*fitting, b"last"] == seen == list(frames.read_frames(path, gaps=True))
        end = frames.log_end(path)
        assert end is not None
        assert (len(seen), 0, 0) == (end.frames, tail.extent.lost_frames, tail.extent.lost_bytes)


def test_a_patient_log_counts_what_did_not_fit_and_goes_on():
    """All patient logs of a process together say that the disk is full, and once that it is not."""
    said: list[tuple[str, int]] = []
    unwritten = frames.Unwritten(lambda event, *, count, **_: said.append((event, count)))
    fits = iter([True, False, False, True, True])
    written: list[int] = []

    def append(record: int) -> str:
        if not next(fits):
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(record)
        return "odd" if record % 2 else ""

    first, second = frames.PatientLog(append, unwritten), frames.PatientLog(append, unwritten)
    assert ["odd", "", "", "", "odd"] == [
        log.append(n) for n, log in enumerate([first, second, first, second, first], 1)
    ]
    assert ([1, 4, 5], 2, 1, 2) == (written, first.written, second.written, unwritten.count)
    assert [("unwritten", 1), ("written", 2)] == said


def test_a_file_of_terabytes_of_nothing_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A hole costs nothing to make. What is behind so much is lost, and counted."""
    monkeypatch.setattr(framing, "_MOST_VAIN_BYTES", 1 << 20)
    path = tmp_path / "log"
    path.write_bytes(_written([b"one"])[:20] + bytes(9))
    os.truncate(path, 2**40)
    with frames.FrameTail(path) as tail:
        read = tail.read_block() + tail.read_block() + tail.read_rest()
        assert [b"one"] == [payload for payload in read if payload is not framing.GAP]
        assert 2**40 == tail.extent.bytes + tail.extent.lost_bytes + tail.extent.torn_bytes


def test_ids_are_functions_of_run_and_index():
    """Ids are the same whenever they are derived, differ between requests and runs, and have the W3C lengths."""
    assert records.trace_id("run", 1) == records.trace_id("run", 1)
    ids = {make(run, index) for make in (records.request_id, records.trace_id) for run in "ab" for index in range(50)}
    assert len(ids) == 200
    version, trace, span, flags = records.traceparent("run", 1).split("-")
    assert ("00", 32, 16, "01") == (version, len(trace), len(span), flags)
    assert (trace, span) == (records.trace_id("run", 1), records.span_id("run", 1))


def test_what_unpacks_to_too_much_is_not_held_twice():
    """Its size is known before it is put together, and so is that of what is as large as it may be."""
    most_bytes = 16 << 20
    for size, reason in ((4 * most_bytes, "unpacks to more than"), (most_bytes, "")):
        packed = zlib.compress(bytes(size))
        tracemalloc.start()
        with pytest.raises(ValueError, match=reason) if reason else nullcontext():
            assert size == len(framing.inflate(packed, most_bytes))
        held_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert held_bytes < (1.5 if reason else 2.5) * most_bytes


def test_what_is_cut_off_or_not_packed_is_said_to_be():
    packed = zlib.compress(os.urandom(3 << 20))
    assert 3 << 20 == len(framing.inflate(packed))
    with pytest.raises(ValueError, match="it is cut off"):
        framing.inflate(packed[:-1])
    with pytest.raises(ValueError, match="cannot be unpacked: Error -3"):
        framing.inflate(b"not packed")
