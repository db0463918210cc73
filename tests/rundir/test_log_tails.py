"""Logs in several files are read as one, and what was read is deleted when it is beyond its limits."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from sidelight.rundir.frames import FrameLog, LogTails, next_number

DAY_S = 86_400.0
OLD_NS = round(DAY_S * 1e9)


def write(path: Path, *payloads: bytes) -> None:
    with closing(FrameLog(path)) as log:
        log.append(*payloads)


def test_what_is_new_is_given_once_and_in_order(tmp_path: Path):
    """Across files, also of one that begins while another is read."""
    with LogTails(tmp_path) as tails:
        write(tmp_path / "a-01.log", b"1", b"2")
        assert [b"1", b"2"] == [payload for _, payload in tails.news("a-*.log")]
        write(tmp_path / "a-01.log", b"3")
        write(tmp_path / "a-02.log", b"4")
        write(tmp_path / "b-01.log", b"other")
        assert [b"3", b"4"] == [payload for _, payload in tails.news("a-*.log")]
        assert [] == list(tails.news("a-*.log"))


def test_files_are_read_in_the_order_of_their_numbers(tmp_path: Path):
    """The eleventh after the third, however its name sorts; one without a number is the first."""
    names = ["a.log", "a-1.log", "a-2.log", "a-10.log", "a-b-1.log"]
    for name in reversed(names):
        write(tmp_path / name, name.encode())
    with LogTails(tmp_path) as tails:
        assert names == [payload.decode() for _, payload in tails.news("a*.log")]


def test_a_torn_file_does_not_hold_up_the_next(tmp_path: Path):
    """Its process was killed while it wrote; the next one writes elsewhere."""
    write(tmp_path / "a-01.log", b"1", b"torn")
    with (tmp_path / "a-01.log").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) - 40)
    write(tmp_path / "a-02.log", b"2")
    with LogTails(tmp_path) as tails:
        assert [b"1", b"2"] == [payload for _, payload in tails.news("a-*.log")]


def test_a_file_is_open_until_all_of_it_was_read(tmp_path: Path):
    """What was read of it stays known; what comes later is not looked for."""
    log = FrameLog(tmp_path / "a-1.log")
    log.append(b"1")
    with LogTails(tmp_path) as tails:
        assert [b"1"] == [payload for _, payload in tails.news("a-*.log")]
        log.append(b"2")
        assert [b"2"] == [payload for _, payload in tails.news("a-*.log", last=True)]
        assert [2] == [extent.frames for extent in tails.extents.values()]
        log.append(b"3")
        assert [] == list(tails.news("a-*.log"))
    log.close()


def test_old_files_are_deleted_but_the_newest_and_the_unread(tmp_path: Path):
    """By when they were written to last, and the clock that is given: that of the machine may have been set."""
    for number in range(4):
        write(tmp_path / f"a-{number}.log", b"x")
        os.utime(tmp_path / f"a-{number}.log", (0, 0))
    with LogTails(tmp_path) as tails:
        tails.prune(["a-*.log"], now_ns=OLD_NS + 1, keep_s=DAY_S, keep_bytes=10**9)
        assert 4 == len(list(tmp_path.iterdir()))
        list(tails.news("a-*.log", in_turn=True))
        tails.prune(["a-*.log"], now_ns=OLD_NS - 1, keep_s=DAY_S, keep_bytes=10**9)
        assert 4 == len(list(tmp_path.iterdir()))
        tails.prune(["a-*.log"], now_ns=OLD_NS + 1, keep_s=DAY_S, keep_bytes=10**9)
        assert ["a-3.log"] == [path.name for path in tmp_path.iterdir()]


def test_the_oldest_files_are_deleted_beyond_so_many_bytes(tmp_path: Path):
    """Of all patterns together."""
    for number in range(6):
        for name in ("a", "b"):
            write(tmp_path / f"{name}-{number}.log", b"x" * 952)
            os.utime(tmp_path / f"{name}-{number}.log", (10**9 + number, 10**9 + number))
    with LogTails(tmp_path) as tails:
        for pattern in ("a-*.log", "b-*.log"):
            list(tails.news(pattern, in_turn=True))
        tails.prune(["a-*.log", "b-*.log"], now_ns=2 * 10**18, keep_s=1e12, keep_bytes=5000)
        left = sorted(path.name for path in tmp_path.iterdir())
    assert 5 == len(left)
    assert {"a-5.log", "b-5.log"} <= set(left)


def test_files_are_numbered_on_from_those_that_are_there(tmp_path: Path):
    """A process that was killed left a file whose end may be torn."""
    assert 0 == next_number(tmp_path, "a-*.log")
    write(tmp_path / "a-000007.log", b"x")
    assert 8 == next_number(tmp_path, "a-*.log")


def test_what_others_delete_is_forgotten(tmp_path: Path):
    """So that a file which comes again under its name is new; what was read of another pattern stays read."""
    for number in range(3):
        write(tmp_path / f"a-{number}.log", b"a%d" % number)
        write(tmp_path / f"b-{number}.log", b"b%d" % number)
    with LogTails(tmp_path) as tails:
        for name in ("a", "b"):
            list(tails.news(f"{name}-*.log", in_turn=True))
        for name in ("a", "b"):
            (tmp_path / f"{name}-0.log").unlink()
        assert [] == list(tails.news("a-*.log", in_turn=True))
        write(tmp_path / "a-0.log", b"again")
        write(tmp_path / "b-0.log", b"unseen")
        assert [b"again"] == [payload for _, payload in tails.news("a-*.log", in_turn=True)]
        assert [] == list(tails.news("b-*.log", in_turn=True))


def test_what_it_deletes_is_forgotten(tmp_path: Path):
    """Likewise."""
    for number in range(2):
        write(tmp_path / f"a-{number}.log", b"x")
        os.utime(tmp_path / f"a-{number}.log", (0, 0))
    with LogTails(tmp_path) as tails:
        list(tails.news("a-*.log", in_turn=True))
        tails.prune(["a-*.log"], now_ns=OLD_NS + 1, keep_s=DAY_S, keep_bytes=10**9)
        write(tmp_path / "a-0.log", b"again")
        assert [b"again"] == [payload for _, payload in tails.news("a-*.log", in_turn=True)]
