"""Directories that earlier commits recorded are read, and those of a later format refused in a line that says so."""

from __future__ import annotations

import csv
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from codes import raises

from sidelight.methodology.execution.derive import derive_study
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
# Of each step of a study: requests, TTFT p50 in ms, and completed requests/s, as that commit's `tables/sweep.csv` has
# them.
STUDIES = {
    "study-ae63ee32": [(29, 7.52539, 7.602991335649205), (19, 7.242488, 4.699262932474681)],
}


def test_every_older_directory_is_read():
    """A missing row would be a test that never fails."""
    assert sorted([*RECORDED, *STUDIES]) == sorted(path.name.partition(".")[0] for path in OLDER.iterdir())


def unpack(name: str, path: Path) -> None:
    safe: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # none in Debian 12's Python
    with tarfile.open(OLDER / f"{name}.tar.xz") as archive:
        archive.extractall(path, **safe)  # noqa: S202  ours


@pytest.mark.parametrize("name", RECORDED)
def test_an_older_directory_derives_to_what_it_said(name: str, tmp_path: Path):
    """Whole and complete; the client's times and the engine's are the same, whatever was learnt to estimate since."""
    unpack(name, tmp_path)
    summary = derive(tmp_path).summary
    assert ("complete", "whole") == (summary.status, summary.integrity.state)
    prefill, ttft = summary.correlation.breakdown.prefill_ms, summary.client.ttft_ms
    assert prefill is not None
    assert ttft is not None
    assert RECORDED[name] == (summary.client.requests.ok, pytest.approx(ttft.mean), pytest.approx(prefill.mean))


@pytest.mark.parametrize("name", STUDIES)
def test_an_older_study_derives_to_what_it_said(name: str, tmp_path: Path):
    """Its steps count with the same numbers, and it has the verdict that its commit did not know."""
    unpack(name, tmp_path)
    derived = derive_study(tmp_path)
    rows = csv.DictReader((tmp_path / "tables/sweep.csv").read_text(encoding="utf-8").splitlines())
    steps = [tuple(float(row[name]) for name in ("ok", "ttft_p50_ms", "completed_requests_per_s")) for row in rows]
    assert STUDIES[name] == [pytest.approx(row) for row in steps]
    assert ("complete", "no_limit", "") == (derived.result.status, derived.result.verdict.state, derived.damage)


def test_a_directory_of_a_later_format_is_refused(tmp_path: Path):
    """A run's and a study's; a later second number only adds, and is read."""
    for version, name in ((json.dumps("2.0"), MANIFEST), ("2", "study.json")):
        (tmp_path / name).write_text(f'{{"run_id": "r", "schema_version": {version}}}')
    with raises("run.newer-format"):
        derive(tmp_path)
    with raises("run.newer-format"):
        open_study(tmp_path)
