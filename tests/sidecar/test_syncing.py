"""Logs that are brought to the disk while others write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from processes import until

from sidelight.recorded import syncing
from sidelight.recorded.syncing import LogSync


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was synced, in order."""
    names: list[str] = []
    whole = syncing.sync

    def sync(path: Path) -> None:
        whole(path)
        names.append(path.name)

    monkeypatch.setattr(syncing, "sync", sync)
    return names


def test_what_was_written_since_the_last_time_is_synced(tmp_path: Path, synced: list[str]):
    """A new log with its directory; what did not change, and other files, are left alone."""
    raw = tmp_path / "raw"
    raw.mkdir()
    sync = LogSync(raw)
    for name in ("a.log", "b.log", "worker-0.stderr"):
        (raw / name).write_bytes(b"1")
    (raw / "link.log").symlink_to("a.log")
    sync.sync()
    assert ["a.log", "b.log", "raw"] == [*sorted(synced[:2]), *synced[2:]]
    synced.clear()
    with (raw / "b.log").open("ab") as log:
        log.write(b"2")
    sync.sync()
    (raw / "a.log").unlink()
    sync.sync()
    assert ["b.log"] == synced


def test_logs_are_synced_while_the_block_lasts_and_at_its_end(
    tmp_path: Path, synced: list[str], monkeypatch: pytest.MonkeyPatch
):
    """By a thread, since a disk may take its time."""
    monkeypatch.setattr(syncing, "EVERY_S", 0.01)
    (tmp_path / "a.log").write_bytes(b"1")
    with LogSync(tmp_path):
        until(lambda: "a.log" in synced, "the first log to be synced")
        (tmp_path / "last.log").write_bytes(b"1")
    assert "last.log" in synced


def test_a_disk_that_cannot_be_synced_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """And does not end the run."""

    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(syncing, "sync", fail)
    (tmp_path / "a.log").write_bytes(b"1")
    sync = LogSync(tmp_path)
    sync.sync()
    sync.sync()
    (said,) = caplog.messages
    assert "a.log: cannot be synced to its disk (Input/output error)" in said
