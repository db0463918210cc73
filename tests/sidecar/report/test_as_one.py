"""The report of all shards of a watch as one: what one watch would have reported that all spans had reached."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from codes import raises
from jsonschema import Draft202012Validator
from processes import Ended
from sent_spans import NOON, S, call, engine, export
from watch_directories import begin

from sidelight.correlator.opening import open_shards
from sidelight.exporter.evaluation.evaluate import evaluate
from sidelight.exporter.summary.result import schema
from sidelight.recorded.directory import MANIFEST, RAW, read_manifest, write_json
from sidelight.recorded.events import Event, append_event
from sidelight.scraper.spans.log import ExportRecord, ReceiverCounts, SpanLog, StateRecord
from sidelight.sidecar.report.derive import derive, derive_as_one

SECONDS = 40
COUNTED = {
    "by_trace": 30,
    "estimated": 0,
    "without_breakdown": 10,
    "missing": {"no_engine_span": 10},
    "ok": 40,
    "failed": 0,
    "spans": 70,
    "receiver_restarts": 0,
}


def pair(second: int) -> tuple[ExportRecord, ExportRecord]:
    """Return the exports of the client and of the engine of one second's request; its queue grows by 1 ms a second."""
    about = {"trace": (second + 1).to_bytes(16), "clock_ms": 1e3 * second}
    client = export([call(**about)], at_s=second + 1)
    return client, export([engine(queue_ms=50.0 + second, prefill_ms=80.0, **about)], at_s=second + 1)


def watched(path: Path, exports: Iterable[ExportRecord], shard: str | None = None, number: int = 0) -> Path:
    """Make the directory of a watch that received exports, and has ended."""
    begin(path)
    with_shard = read_manifest(path)
    with_shard["config"] |= {"shard": shard, "metrics": []}
    with_shard["run_id"] = path.name
    write_json(path / MANIFEST, with_shard)
    log = SpanLog(path / RAW / f"spans-{number:06d}.log")
    log.append(StateRecord(at_ns=NOON, state="started", counts=ReceiverCounts()))
    for record in exports:
        log.append(record)
    log.close()
    return path


def ended(path: Path) -> Path:
    """End a watch that counted what COUNTED says."""
    append_event(path, Event(at_ns=NOON + SECONDS * S, name="phase_end", data={"phase": "measure"}))
    append_event(path, Event(at_ns=NOON + SECONDS * S, name="watched", data=COUNTED))
    write_json(path / MANIFEST, read_manifest(path) | {"status": "complete", "ended_at": "2023-11-14T22:14:00.000Z"})
    return path


def shards(path: Path, of: Callable[[int, int], int], total: int = 2) -> list[Path]:
    """Make the directories of shards: `of` says which one a second's export of a side (0: client) reaches."""
    sent: list[list[ExportRecord]] = [[] for _ in range(total)]
    for second in range(SECONDS):
        for side, record in enumerate(pair(second)):
            sent[of(second, side)].append(record)
    return [watched(path / f"w{number}", records, f"{number}/{total}") for number, records in enumerate(sent)]


def by_trace(second: int, _: int) -> int:
    return second % 2


def by_side(second: int, side: int) -> int:
    return (second + side) % 2


@pytest.mark.parametrize("routed", [by_trace, by_side], ids=["by trace", "every trace in two shards"])
def test_it_is_the_report_of_one_watch_that_received_all(routed: Callable[[int, int], int], tmp_path: Path):
    """The same requests and the same parts, also of traces whose spans came to several shards."""
    alone = derive(watched(tmp_path / "alone", (record for second in range(SECONDS) for record in pair(second))))
    as_one = derive_as_one(shards(tmp_path, routed), tmp_path / "out")
    assert (alone.summary.client, alone.summary.window) == (as_one.summary.client, as_one.summary.window)
    assert alone.summary.correlation.breakdown == as_one.summary.correlation.breakdown
    assert alone.summary.correlation.slowest == as_one.summary.correlation.slowest
    assert SECONDS == as_one.summary.correlation.breakdown.queue_ms.count


def test_what_some_shards_no_longer_have_is_left_out(tmp_path: Path):
    """One of two had deleted its first twenty seconds: of these, the rest would be half of the requests."""
    sent = [record for second in range(0, SECONDS, 2) for record in pair(second)]
    later = [record for second in range(21, SECONDS, 2) for record in pair(second)]
    paths = [watched(tmp_path / "w0", sent, "0/2"), watched(tmp_path / "w1", later, "1/2", number=3)]
    summary = derive_as_one(paths, tmp_path / "out").summary
    assert summary.watch
    assert (20 - 1, True) == (summary.client.requests.sent, summary.watch.shortened)
    assert NOON + 22 * S == summary.window.start_ns


def test_the_shards_and_their_sum_stand_in_every_format(tmp_path: Path):
    """Those that have ended state what they counted; a note says whose it is."""
    paths = [ended(path) for path in shards(tmp_path, by_trace)]
    append_event(paths[1], Event(at_ns=NOON, name="note", data={"text": "the receiver runs again"}))
    out = tmp_path / "out"
    summary = derive_as_one(paths, out, ("text", "html", "markdown")).summary
    assert summary.watch
    assert summary.watch.shards
    assert ["0/2", "1/2"] == [shard.shard for shard in summary.watch.shards]
    assert summary.watch.since_start
    assert (60, {"no_engine_span": 20}) == (summary.watch.since_start.by_trace, summary.watch.since_start.missing)
    for name in ("report.txt", "report.html", "report.md"):
        text = (out / name).read_text()
        assert "Requests of each shard" in text, name
        assert "hard 1/2: the receiver runs again" in text.replace("\\", ""), name
    assert "shards 0/2 to 1/2" in (out / "report.txt").read_text()
    assert not list(Draft202012Validator(schema()).iter_errors(json.loads((out / "summary.json").read_text())))


def test_a_shard_that_goes_on_has_no_counts(tmp_path: Path):
    """Nor has the sum: it is not known, and the whole has not ended."""
    first, second = shards(tmp_path, by_trace)
    summary = derive_as_one([ended(first), second], tmp_path / "out").summary
    assert summary.watch
    assert summary.watch.shards
    assert [False, True] == [shard.since_start is None for shard in summary.watch.shards]
    assert (None, "crashed", None) == (summary.watch.since_start, summary.status, summary.ended_at)
    assert "not ended" in (tmp_path / "out/report.txt").read_text()


def test_beyond_the_bound_it_says_what_is_left_out(tmp_path: Path):
    """Counts of these are in the table of shards alone."""
    run = open_shards(shards(tmp_path, by_trace), tmp_path / "out")
    dropping = replace(run, watched=replace(run.watched, dropped=1234))
    assert any("1,234 older ones are left out" in text for text in evaluate(dropping).summary.warnings)


def test_damage_names_the_directory(tmp_path: Path):
    """There are as many logs of a name as shards, and the directories may have one name on each machine."""
    paths = [watched(tmp_path / f"m{number}/w", pair(number), f"{number}/2") for number in range(2)]
    log = paths[1] / RAW / "spans-000000.log"
    log.write_bytes(log.read_bytes()[:400] + b"?" + log.read_bytes()[401:])
    summary = derive_as_one(paths, tmp_path / "out").summary
    assert "m1/w/raw/spans-000000.log" in " ".join(summary.warnings)
    assert 4 == len(summary.integrity.logs)


def odd(tmp_path: Path, names: Sequence[str]) -> list[Path]:
    """Make directories of an odd fleet, by what each is: a shard, a version behind it; `watch` has no shard."""
    paths = []
    for number, name in enumerate(names):
        shard, _, version = name.partition(" ")
        path = watched(tmp_path / f"d{number}", [], None if shard == "watch" else shard)
        manifest = read_manifest(path)
        write_json(path / MANIFEST, manifest | {"tool": {"name": "sidelight", "version": version or "0"}})
        paths.append(path)
    return paths


@pytest.mark.parametrize(
    ("names", "code", "says"),
    [
        (("0/2", "watch"), "shards.none", "d1: not the directory"),
        (("0/2", "1/2", "0/2"), "shards.twice", "d0 and .*d2 are both of shard 0/2"),
        (("0/2", "1/3"), "shards.different", "d0 is one of 2 shards.*d1 one of 3"),
        (("0/4", "2/4"), "shards.missing", "of shard 1/4, 3/4 is missing"),
        (("0/2 0.1.0", "1/2 0.2.0"), "shards.different", "by Sidelight 0.1.0.*0.2.0"),
        (("a/b",), "shards.none", "d0"),
    ],
    ids=lambda value: "-".join(value).replace("/", "of") if isinstance(value, tuple) else None,
)
def test_directories_that_are_not_all_shards_of_a_watch_are_named(
    names: Sequence[str], code: str, says: str, tmp_path: Path
):
    """Each with what to give in their place; nothing is written."""
    with raises(code, says=says):
        derive_as_one(odd(tmp_path, names), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_directory_given_twice_is_one_shard_twice(tmp_path: Path):
    """Also where all others are there."""
    first, second = shards(tmp_path, by_trace)
    with raises("shards.twice"):
        derive_as_one([first, second, first], tmp_path / "out")


def test_a_run_is_not_overwritten(tmp_path: Path):
    """The report of one shard stays as it was."""
    paths = shards(tmp_path, by_trace)
    with raises("out.in-use"):
        derive_as_one(paths, paths[0])


def test_the_command_writes_beside_the_shards(sidelight: Callable[..., Ended], tmp_path: Path):
    """And prints the report, or the summary alone."""
    paths = shards(tmp_path, by_trace)
    printed = sidelight("report", *paths, "--as-one", "--output", tmp_path / "out")
    assert (0, "") == (printed.code, printed.err)
    assert "40 requests, all ok" in printed.out
    assert f"Written to {tmp_path / 'out'}" in printed.out
    stated = sidelight("report", *paths, "--as-one", "--json", "--output", tmp_path / "out")
    assert 40 == msgspec.json.decode(stated.out)["client"]["requests"]["sent"]
    assert not any((path / "summary.json").exists() for path in paths)
