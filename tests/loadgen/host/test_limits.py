from __future__ import annotations

from pathlib import Path

import pytest

from sidelight.loadgen.host import limits as descriptors


def test_a_load_that_fits_is_no_shortage():
    """A few connections are to be had everywhere."""
    assert descriptors.shortage(10) is None


def test_more_connections_than_open_files_are_a_warning_with_the_cure():
    """One line: how many are needed, how many may be had, what helps."""
    limit = descriptors.descriptor_limit()
    said = descriptors.shortage(limit + 1)
    assert said is not None
    assert said.startswith(f"{limit + 1} connections at once need {limit + 33} open files in a load worker")
    assert f"its limit is {limit}" in said
    assert "\n" not in said


def test_workers_share_the_connections():
    """Each has descriptors of its own."""
    half = descriptors.descriptor_limit() // 2
    assert f" need {half * 2 + 2 + 32} open files" in str(descriptors.shortage(half * 4 + 3, workers=2))


def test_more_connections_than_ports_are_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ports are counted for each address; a machine with an unknown range gets no warning."""
    port_range = tmp_path / "range"
    port_range.write_text("32768\t32777\n")
    monkeypatch.setattr(descriptors, "_PORT_RANGE", port_range)
    assert descriptors.port_count() == 10
    assert "this machine has 10" in str(descriptors.shortage(11))
    assert descriptors.shortage(11, targets=2) is None
    monkeypatch.setattr(descriptors, "_PORT_RANGE", tmp_path / "none")
    assert descriptors.port_count() is None
    assert descriptors.shortage(11) is None


def test_fewer_open_files_than_a_worker_has_without_connections_are_a_warning(monkeypatch: pytest.MonkeyPatch):
    """No duration can be said after which they are used up: it would be below zero."""
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: 24)
    said = descriptors.outlasting(6.0)
    assert said == (
        "a load worker has up to 32 files open beside its connections, and its limit is 24: requests may fail; "
        "raise it (ulimit -Hn)"
    )
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: 64)
    assert "replies that take longer than 5.3 s use up this machine's open files" in str(descriptors.outlasting(6.0))
