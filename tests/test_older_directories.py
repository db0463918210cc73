"""Directories that earlier commits recorded are read, and those of a later format refused in a line that says so."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from codes import raises

from sidelight.methodology.execution.record import open_study
from sidelight.recorded.directory import MANIFEST
from sidelight.sidecar.report.derive import derive

OLDER = Path(__file__).parent / "data/older"
# Requests, and their mean TTFT and prefill time in ms as the commit that recorded them had them.
RECORDED = {
    "run-4c26594e": (8, 18.441782, 16.8100211),
    "run-0bb54161": (8, 19.0586207, 17.0284034),
    "run-ae63ee32": (8, 21.5452996, 19.6493204),
    "watch-4c26594e": (6, 16.7261528, 14.8414605),
    "watch-ae63ee32": (6, 21.3975502, 16.0746945),
}


def test_every_older_directory_is_read():
    """A missing row would be a test that never fails."""
    assert sorted(RECORDED) == sorted(path.name.partition(".")[0] for path in OLDER.iterdir())


@pytest.mark.parametrize("name", RECORDED)
def test_an_older_directory_derives_to_what_it_said(name: str, tmp_path: Path):
    """Whole and complete; the client's times and the engine's are the same, whatever was learnt to estimate since."""
    with tarfile.open(OLDER / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    summary = derive(tmp_path).summary
    assert ("complete", "whole") == (summary.status, summary.integrity.state)
    prefill, ttft = summary.correlation.breakdown.prefill_ms, summary.client.ttft_ms
    assert prefill is not None
    assert ttft is not None
    assert RECORDED[name] == (summary.client.requests.ok, pytest.approx(ttft.mean), pytest.approx(prefill.mean))


def test_a_directory_of_a_later_format_is_refused(tmp_path: Path):
    """A run's and a study's; a later second number only adds, and is read."""
    for version, name in ((json.dumps("2.0"), MANIFEST), ("2", "study.json")):
        (tmp_path / name).write_text(f'{{"run_id": "r", "schema_version": {version}}}')
    with raises("run.newer-format"):
        derive(tmp_path)
    with raises("run.newer-format"):
        open_study(tmp_path)
