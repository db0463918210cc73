"""The run directory: what is written is what is read, up to wherever a log was torn."""

from __future__ import annotations

import errno
import os
import stat
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import msgspec
import pytest
from codes import raises
from hypothesis import given, settings
from hypothesis import strategies as st
from run_directories import MANIFEST, Recorded, write
from sent_requests import parts
from sent_spans import TRACE, call, engine, export, gateway

from sidelight.loadgen.records import PlannedRequest, RequestPart, WorkerStat, append_record
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.directory import RAW, create, require_free, scarce, write_json, write_text, write_whole
from sidelight.recorded.errors import ConfigurationError, unusable_place
from sidelight.recorded.events import Event
from sidelight.recorded.run import Phase
from sidelight.rundir.frames import FrameLog
from sidelight.rundir.framing import MOST_INFLATED_BYTES
from sidelight.scraper.perf_metrics import TimingLog
from sidelight.scraper.series.log import LayoutRecord, RowRecord
from sidelight.scraper.spans.log import ExportRecord, ReceiverCounts, SpanLog, StateRecord
from sidelight.scraper.targets.scrape import Scrape
from sidelight.sidecar.report.derive import derive
from sidelight.sidecar.run import open_run
from sidelight.sidecar.run.phases import last_answered

stamps = st.integers(1, 2**62)
events = st.builds(
    Event,
    at_ns=stamps,
    name=st.sampled_from(["phase_start", "note", "planned"]),
    data=st.dictionaries(st.text(max_size=5), st.text(max_size=20) | st.integers(0, 2**60) | st.none(), max_size=3),
)
stats = st.builds(
    WorkerStat,
    worker=st.integers(0, 3),
    at_ns=stamps,
    cpu_ns=stamps,
    loop_delay_ns=stamps,
    in_flight=st.integers(0, 99),
    started=st.integers(0, 9999),
)


recorded = st.builds(
    Recorded,
    tokens=st.lists(st.integers(1, 6), max_size=4),
    waiting=st.lists(st.integers(0, 50), max_size=4),
    stats=st.lists(stats, max_size=4),
    events=st.lists(events, max_size=4),
)


@contextmanager
def written(what: Recorded) -> Iterator[tuple[Path, dict[str, list[int]]]]:
    """Give a run directory for as long as the block lasts; hypothesis wants a new one each time."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run"
        yield path, write(path, what)


def rows(log: RequestLog) -> list[tuple[Any, ...]]:
    """Return what identifies each request and how it ended."""
    names = ("index", "phase", "status", "submit_ns", "first_token_ns", "last_token_ns", "end_ns", "output_tokens")
    return list(zip(*(getattr(log, name).tolist() for name in names), strict=True))


def expected_row(index: int, tokens: int) -> tuple[Any, ...]:
    """Return the row of a request of `parts`."""
    began_ns = 1_000_000_000 * (index + 1)
    first_ns, last_ns = began_ns + 1000, began_ns + 1000 * tokens
    return (index, "measure", "ok", began_ns + 3, first_ns, last_ns, began_ns + 1000 * (tokens + 3), tokens)


@settings(max_examples=60)
@given(recorded)
def test_what_was_written_is_what_is_read(what: Recorded):
    """Every record of every log, in its order, through the writers that a run uses."""
    with written(what) as (path, _):
        run = open_run(path)
    assert MANIFEST == run.manifest
    assert tuple(what.events) == run.events
    assert tuple(what.stats) == run.worker_stats
    assert [expected_row(index, tokens) for index, tokens in enumerate(what.tokens)] == rows(run.requests)
    assert [17] * len(what.tokens) == run.requests.declared_input_tokens.tolist()
    assert ([what.waiting] if what.waiting else []) == [endpoint.values[:, 0].tolist() for endpoint in run.endpoints]


def check_prefix(path: Path, what: Recorded, whole: dict[str, int]) -> None:
    """Assert that a run reads as the first `whole[name]` records of each log."""
    run = open_run(path)
    assert tuple(what.events[: whole.get("events.log", 0)]) == run.events
    logged = whole.get("requests-0.log", 0)
    assert tuple(what.stats[:logged]) == run.worker_stats
    seen = whole.get("scrapes-0.log", 0)
    assert what.waiting[:seen] == [row for endpoint in run.endpoints for row in endpoint.values[:, 0].tolist()]
    left = max(0, logged - len(what.stats))
    plan = whole.get("plan-measure.log", 0)
    for index, tokens in enumerate(what.tokens):
        request_frames = min(left, tokens + 3)
        left -= request_frames
        row = [request for request in rows(run.requests) if request[0] == index]
        if request_frames == tokens + 3:
            known = expected_row(index, tokens)
            assert [known if index < plan else (index, "", *known[2:])] == row
        else:
            assert ["in_flight"] * (request_frames > 0) == [request[2] for request in row]


@settings(max_examples=60)
@given(recorded, st.data())
def test_torn_logs_read_up_to_the_tear(what: Recorded, data: st.DataObject):
    """Wherever each log is cut, every record before that is there, and nothing else.

    A request whose last part is behind the tear is in flight, one whose plan is keeps what its own parts hold.
    """
    with written(what) as (path, sizes):
        whole = {}
        for name, ends in sizes.items():
            at = data.draw(st.integers(0, ends[-1]), label=name)
            whole[name] = sum(end <= at for end in ends)
            os.truncate(path / "raw" / name, at)
        check_prefix(path, what, whole)


@settings(max_examples=60)
@given(recorded, st.data())
def test_a_changed_byte_costs_no_other_record_and_is_said(what: Recorded, data: st.DataObject):
    """Of each log the records that it did not hit are there; no scrape has another value than it had."""
    with written(what) as (path, sizes):
        hit = {}
        for name, ends in sizes.items():
            at = data.draw(st.integers(0, ends[-1] - 1), label=name)
            hit[name] = sum(end <= at for end in ends)
            raw = bytearray((path / "raw" / name).read_bytes())
            raw[at] ^= data.draw(st.integers(1, 255))
            (path / "raw" / name).write_bytes(raw)
        run = open_run(path)
    assert sorted(hit) == [log.log for log in run.integrity.logs if log.state == "damaged"]
    assert ("damaged" if hit else "unverified") == run.integrity.state
    assert without(what.events, hit.get("events.log")) == list(run.events)
    assert without(what.stats, hit.get("requests-0.log")) == list(run.worker_stats)
    seen = [row for endpoint in run.endpoints if endpoint.series for row in endpoint.values[:, 0].tolist()]
    assert seen == what.waiting[: len(seen)]
    assert len(seen) == hit.get("scrapes-0.log", 0)  # each row builds on the one before
    first = len(what.stats)
    for index, tokens in enumerate(what.tokens):
        is_hit = first <= hit["requests-0.log"] < first + tokens + 3
        request_rows = [row for row in rows(run.requests) if row[0] == index]
        if is_hit:
            assert {"in_flight"} >= {row[2] for row in request_rows}
        elif hit["plan-measure.log"] != index:
            assert [expected_row(index, tokens)] == request_rows
        first += tokens + 3


def without(items: list[Any], place: int | None) -> list[Any]:
    """Return a list but for the item at a place."""
    return [item for number, item in enumerate(items) if number != place]


def test_without_an_end_a_run_has_crashed(tmp_path: Path):
    """No status was written, so the process was killed."""
    write(tmp_path / "run", Recorded(tokens=[2], waiting=[1], stats=[], events=[]))
    assert "complete" == open_run(tmp_path / "run").status
    write_json(tmp_path / "run" / "manifest.json", {"run_id": "r"})
    assert "crashed" == open_run(tmp_path / "run").status


def test_a_run_that_only_began_can_be_read(tmp_path: Path):
    """A manifest and no log at all: no requests, no scrapes, nothing happened."""
    write_json(create(tmp_path / "run") / "manifest.json", {"run_id": "r"})
    run = open_run(tmp_path / "run")
    assert (0, (), (), (), ()) == (len(run.requests), run.endpoints, run.events, run.worker_stats, run.phases)


def test_what_receivers_counted_is_added_up(tmp_path: Path):
    """Over all that ran; one without final counts died. Where none ran there are no counts."""
    write_json(create(tmp_path / "run") / "manifest.json", {"run_id": "r"})
    assert (None, 0) == (open_run(tmp_path / "run").span_counts, open_run(tmp_path / "run").receiver_deaths)
    log = SpanLog(tmp_path / "run/raw/spans-0.log")
    for state, counts in (
        ("started", ReceiverCounts()),
        ("settled", ReceiverCounts(exports=1, spans=5)),
        ("started", ReceiverCounts()),
        ("ended", ReceiverCounts(exports=2, spans=3, malformed=4)),
    ):
        log.append(StateRecord(at_ns=1, state=state, counts=counts))
    log.close()
    run = open_run(tmp_path / "run")
    assert (ReceiverCounts(exports=3, spans=8, malformed=4), 1) == (run.span_counts, run.receiver_deaths)
    assert 0 == len(run.spans)


def test_an_export_of_spans_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Spans of engines and of gateways are read in one pass."""
    write_json(create(tmp_path / "run") / "manifest.json", {"run_id": "r"})
    log = SpanLog(tmp_path / "run/raw/spans-0.log")
    for sent in ([gateway("g", first_ms=250.0), engine(parent="g")], [call("c", first_ms=100.0, trace=b"u" * 16)]):
        log.append(export(sent))
    log.close()
    unpacked = []
    whole = ExportRecord.body
    monkeypatch.setattr(ExportRecord, "body", lambda record: unpacked.append(record) or whole(record))
    run = open_run(tmp_path / "run")
    assert (1, {TRACE.hex(): 0.25, (b"u" * 16).hex(): 0.1}) == (
        len(run.spans),
        {trace: spans[0].first_s for trace, spans in run.gateways.items()},
    )
    assert 2 == len(unpacked)


def test_records_of_requests_are_read(tmp_path: Path):
    """From the log of their replies, up to the tear; without one nothing was asked."""
    write_json(create(tmp_path / "run") / "manifest.json", {"run_id": "r"})
    assert (0, {}) == (len(open_run(tmp_path / "run").timings), open_run(tmp_path / "run").timings.clocks)
    times = {"arrival_time": 1.0, "first_scheduled_time": 2.0, "first_token_time": 3.0, "last_token_time": 4.0}
    log = TimingLog(tmp_path / "run/raw/timings-0.log")
    for path, answer in (
        ("steady_clock_offset", {"receive_ts": 5.0, "transmit_ts": 5.0}),
        ("perf_metrics", [{"perf_metrics": {"timing_metrics": times}}]),
        ("perf_metrics", [{}]),
    ):
        body = msgspec.json.encode(answer)
        url = f"http://e/{path}"
        log.append(Scrape(url=url, tick_ns=0, request_ns=9 * 10**9, response_ns=9 * 10**9, status=200, body=body))
    log.close()
    whole = open_run(tmp_path / "run").timings
    assert ([5 * 10**9], 1) == (whole.arrival_ns.tolist(), sum(whole.refused.values()))
    raw = tmp_path / "run/raw/timings-0.log"
    raw.write_bytes(raw.read_bytes()[:-40])
    assert (1, {}) == (len(open_run(tmp_path / "run").timings), open_run(tmp_path / "run").timings.refused)


def test_the_last_answered_are_those_that_ended_last(tmp_path: Path):
    """Oldest first, and when the first of all ended; what failed, or has not ended, was not answered."""
    write(tmp_path / "run", Recorded(tokens=[1, 2, 3, 4], waiting=[], stats=[], events=[]))
    ends_ns = [parts(index, tokens)[-1].end_ns for index, tokens in enumerate((1, 2, 3, 4))]
    assert ([2, 3], ends_ns[0]) == last_answered(open_run(tmp_path / "run").requests, 2)
    log = FrameLog(tmp_path / "run/raw/requests-1.log")
    for index, changes in ((4, {"status": 503}), (5, {"error": "reset: by peer"}), (6, {"last": False})):
        append_record(log, msgspec.structs.replace(parts(index, 1)[-1], **changes))
    log.close()
    assert ([1, 2, 3], ends_ns[0]) == last_answered(open_run(tmp_path / "run").requests, 3)
    write_json(create(tmp_path / "empty") / "manifest.json", {"run_id": "r"})
    assert ([], -1) == last_answered(open_run(tmp_path / "empty").requests, 3)


def test_events_give_phases_and_notes(tmp_path: Path):
    """A phase without an end is the one in which the run was cut short."""
    events = [
        Event(at_ns=1, name="phase_start", data={"phase": "warmup"}),
        Event(at_ns=2, name="note", data={"text": "first"}),
        Event(at_ns=3, name="phase_end", data={"phase": "warmup"}),
        Event(at_ns=4, name="phase_start", data={"phase": "measure"}),
        Event(at_ns=5, name="note", data={"text": "second"}),
    ]
    write(tmp_path / "run", Recorded(tokens=[], waiting=[], stats=[], events=events))
    run = open_run(tmp_path / "run")
    assert (
        Phase(name="warmup", start_ns=1, end_ns=3),
        Phase(name="measure", start_ns=4, end_ns=None),
    ) == run.phases
    assert ("first", "second") == run.notes


@pytest.mark.parametrize(
    ("name", "said"),
    [("manifest.json", "holds another run"), ("raw/plan.log", "holds another run"), ("notes.txt", "is not empty")],
)
def test_a_directory_in_use_is_refused(tmp_path: Path, name: str, said: str):
    """Results are never mixed: whether it is a run or something else, it is left as it was."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    for refuse in (require_free, create):
        with pytest.raises(ConfigurationError, match=f"--out {tmp_path}: {said}"):
            refuse(tmp_path)
    assert ["mine"] == [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]


def test_a_free_place_is_new_or_empty(tmp_path: Path):
    """Parents are made too; None is a name that will be new."""
    require_free(None)
    require_free(tmp_path)
    assert tmp_path / "a" / "b" == create(tmp_path / "a" / "b")
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "a" / "b", tmp_path / "a" / "b" / "raw")]
    assert [0o700, 0o700] == modes  # prompts and replies are the owner's
    assert ["raw"] == [path.name for path in (tmp_path / "a" / "b").iterdir()]


@pytest.mark.parametrize("modes", [[0o700, 0o600], [0o755, 0o644]])
def test_files_are_for_those_who_may_read_the_directory(tmp_path: Path, modes: list[int]):
    """Its owner alone, unless others were allowed to: logs and derived files alike."""
    path = create(tmp_path / "run")
    for folder in (path, path / "raw"):
        folder.chmod(modes[0])
    with FrameLog(path / "raw" / "events.log"):
        pass
    write_text(path / "report.txt", "")
    places = [[path, path / "raw"], [path / "report.txt", path / "raw" / "events.log"]]
    assert [{mode} for mode in modes] == [{stat.S_IMODE(each.stat().st_mode) for each in kind} for kind in places]


def test_a_disk_with_little_room_is_said_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What happens when it is full, and what to do; nothing of one with room."""
    assert "" == scarce(tmp_path)
    monkeypatch.setattr("sidelight.recorded.directory.disk_usage", lambda _: SimpleNamespace(free=255_000_000))
    assert scarce(tmp_path).startswith("only 255 MB are free on the disk of")


@pytest.mark.parametrize(("number", "code"), [(errno.EACCES, 2), (errno.EROFS, 2), (errno.ENOSPC, 3), (errno.EIO, 3)])
def test_a_path_is_the_users_and_a_disk_the_machines(tmp_path: Path, number: int, code: int):
    """A read-only place is bad usage, a full disk is not."""
    assert code == unusable_place("--out", tmp_path, OSError(number, "no")).exit_code


def test_a_place_that_cannot_be_made_is_one_line(tmp_path: Path):
    """Below a file there is no room for a directory."""
    (tmp_path / "file").write_text("")
    with raises("out.unusable"):
        create(tmp_path / "file" / "run")
    with raises("out.in-use"):
        create(tmp_path / "file")


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path):
    """While it is being written, and when that fails, the old one stands; no draft stays behind."""
    path = tmp_path / "summary.json"
    path.write_text("old")

    def fail(draft: IO[bytes]) -> None:
        draft.write(b"ne")
        assert "old" == path.read_text()
        raise OSError(28, "No space left on device")

    with raises("disk.unwritable"):
        write_whole(path, fail)
    assert [("summary.json", "old")] == [(file.name, file.read_text()) for file in tmp_path.iterdir()]
    write_whole(path, lambda draft: draft.write(b"new"))
    assert [("summary.json", "new")] == [(file.name, file.read_text()) for file in tmp_path.iterdir()]


def test_links_and_pipes_in_a_directory_are_neither_followed_nor_waited_for(tmp_path: Path):
    """A link at a file's place, or where a draft was once written, costs the file it leads to nothing."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    path = tmp_path / "run"
    write(path, Recorded(tokens=[2], waiting=[1], stats=[], events=[]))
    for name in ("summary.json", ".summary.json.draft", "report.txt", ".report.txt.draft"):
        (path / name).symlink_to(victim)
    for name in ("summary.json", "report.txt"):
        write_whole(path / name, lambda draft: draft.write(b"ours"))
        assert (False, "ours", "mine") == ((path / name).is_symlink(), (path / name).read_text(), victim.read_text())


@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_what_is_no_plain_file_is_not_read(tmp_path: Path, kind: str):
    """A link may lead to any file of ours or to /dev/zero, and a FIFO has no end. Of a log that is said as damage."""
    path = tmp_path / "run"
    write(path, Recorded(tokens=[2], waiting=[1], stats=[], events=[]))
    reason = "is a link, and links are not followed" if kind == "link" else "is not a regular file"

    def replace_by_none(name: str) -> None:
        (path / name).rename(tmp_path / Path(name).name)
        if kind == "link":
            (path / name).symlink_to(tmp_path / Path(name).name)
        else:
            os.mkfifo(path / name)

    replace_by_none("raw/requests-0.log")
    run = open_run(path)
    assert {"requests-0.log": reason} == {log.log: log.reason for log in run.integrity.logs if log.state == "damaged"}
    assert 0 == len(run.requests)
    replace_by_none("manifest.json")
    with pytest.raises(ConfigurationError, match=rf"manifest\.json: {reason}"):
        open_run(path)


def test_logs_of_another_place_are_not_read(tmp_path: Path):
    """A link at the place of raw/ leads to files of ours, which a report would show."""
    write(tmp_path / "mine", Recorded(tokens=[2], waiting=[1], stats=[], events=[]))
    path = tmp_path / "theirs"
    path.mkdir()
    write_json(path / "manifest.json", MANIFEST)
    (path / "raw").symlink_to(tmp_path / "mine" / "raw")
    with raises("run.unreadable"):
        open_run(path)


BOMB = zlib.compress(bytes(MOST_INFLATED_BYTES + 1), 1)
STAMPS = {"tick_ns": 1, "request_ns": 1, "response_ns": 2}


@pytest.mark.parametrize(
    ("log", "records", "reason"),
    [
        ("requests-0.log", [b"no record"], "Expected"),
        ("requests-0.log", [RequestPart(index=2**63, last=True)], "out of bounds"),
        ("requests-0.log", [RequestPart(index=1, last=True, end_ns=2**63 - 1)], "out of bounds"),
        ("requests-0.log", [RequestPart(index=1, last=True, held_ns=2**63)], "out of bounds"),
        ("plan-measure.log", [PlannedRequest(index=1, session=2**63)], "out of bounds"),
        ("requests-0.log", [RequestPart(index=1, last=True, packing=9)], "packed in way 9"),
        ("requests-0.log", [RequestPart(index=1, last=True, body=BOMB)], "unpacks to more than"),
        ("scrapes-0.log", [RowRecord(layout=7, delta=b"", **STAMPS)], "7"),
        ("scrapes-0.log", [LayoutRecord(id=0, url="http://x", series=b"xx")], "cannot be unpacked"),
        ("scrapes-0.log", [LayoutRecord(id=0, url="http://x", series=BOMB)], "unpacks to more than"),
        ("spans-0.log", [ExportRecord(received_ns=1, via="grpc", packed=zlib.compress(b"\xff" * 3))], "not an export"),
        ("spans-0.log", [ExportRecord(received_ns=1, via="grpc", packed=BOMB)], "unpacks to more than"),
        ("events.log", [b"\x93\x01\xa1x\xa1y"], "Expected"),
        ("hardware.log", [b"\x90"], "Expected"),
        ("timings-0.log", [b"\xc1"], "MessagePack"),
    ],
)
def test_a_record_that_no_process_writes_is_left_out(
    tmp_path: Path, log: str, records: list[bytes | msgspec.Struct], reason: str
):
    """Whatever has the right checksum: it is counted, the reason is that of the first, and the rest is read."""
    path = tmp_path / "run"
    write(path, Recorded(tokens=[2], waiting=[3], stats=[], events=[]))
    with FrameLog(path / "raw" / log) as frame_log:
        frame_log.append(
            *(record if isinstance(record, bytes) else msgspec.msgpack.encode(record) for record in records)
        )
    run = open_run(path)
    (damaged,) = [entry for entry in run.integrity.logs if entry.state == "damaged"]
    assert (log, len(records)) == (damaged.log, damaged.unreadable)
    assert isinstance(damaged.reason, str)
    assert reason in damaged.reason
    assert (["ok"], 1) == (run.requests.status.tolist(), len(run.endpoints))


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        ('{"run_id": "r", "config": {}}', "holds what is never written there"),
        ('{"run_id": "r", "config": []}', "holds what is never written there"),
        ('{"run_id": "r", "config": {"endpoint": "zzz"}}', "holds what is never written there"),
        ('{"run_id": "r", "config": {"slice_duration": NaN}}', "NaN is no JSON"),
        ('{"run_id": "r", "logs": {"a.log": {}}}', "logs: Object missing required field"),
        ("[" * 200_000, "cannot be read: "),
        ("\0", "cannot be read"),
        ("[]", "not the manifest of a run"),
    ],
)
def test_a_manifest_that_no_run_writes_is_one_line(tmp_path: Path, manifest: str, reason: str):
    """Exit 2 with the file and the cure, not a defect of ours."""
    path = create(tmp_path / "run")
    (path / "manifest.json").write_text(manifest)
    with pytest.raises(ConfigurationError, match=reason) as error:
        derive(path)
    assert "manifest.json" in str(error.value)


def test_a_directory_of_format_1_is_refused(tmp_path: Path):
    """As one that cannot be read, not as one whose every record is damaged."""
    path = create(tmp_path / "run")
    write_json(path / "manifest.json", {"run_id": "r", "config": {}})
    event = msgspec.msgpack.encode(Event(at_ns=1, name="note", data={"text": "x"}))
    (path / RAW / "events.log").write_bytes(struct.pack("<II", len(event), zlib.crc32(event)) + event)
    with raises("run.old-format"):
        derive(path)
    assert ["manifest.json", RAW] == sorted(file.name for file in path.iterdir())


def test_json_is_strict(tmp_path: Path):
    """Keys stay in their order and letters as they are; what JSON cannot say is an error, not NaN."""
    write_json(tmp_path / "a.json", {"b": 1, "a": "ü"})
    assert '{\n  "b": 1,\n  "a": "ü"\n}\n' == (tmp_path / "a.json").read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "b.json", {"a": float("nan")})
    assert ["a.json"] == [file.name for file in tmp_path.iterdir()]
