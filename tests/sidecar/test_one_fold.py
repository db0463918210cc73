"""What was read while a run went and what is read of its directory afterwards are the same, to the byte."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from golden_files import FORMATS, GOLDEN, MANIFEST, RAW, names

from rundir.clock import anchor
from sidecar.live.view import LiveRun
from sidecar.report.derive import derive, derive_run

LOOKS = 23  # at the growing logs; few frames end where one of that many pieces does


def files(run: Path) -> Mapping[str, bytes]:
    """Return the derived files of a run directory."""
    return {path.name: path.read_bytes() for path in run.iterdir() if path.name not in (MANIFEST, RAW)}


@pytest.mark.parametrize("name", names())
def test_a_run_read_as_it_went_is_reported_as_one_read_afterwards(name: str, tmp_path: Path):
    """Every derived file of every format, with the breakdown of the live page reading along from the start."""
    manifest = json.loads((GOLDEN / name / MANIFEST).read_text(encoding="utf-8"))
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    shutil.copytree(GOLDEN / name, whole, ignore=shutil.ignore_patterns("expected"))
    derive(whole, FORMATS.split(","))
    (grown / RAW).mkdir(parents=True)
    shutil.copy(GOLDEN / name / MANIFEST, grown)
    logs = {path.name: path.read_bytes() for path in (GOLDEN / name / RAW).iterdir()}
    protocol = manifest["config"].get("endpoint", "chat")
    with LiveRun(
        grown, run_id=manifest["run_id"], clock=anchor(), planned_s=None, stale_s=9.0, protocol=protocol
    ) as live:
        for look in range(LOOKS):
            live.snapshot()
            for log, data in logs.items():
                step = len(data) if log.startswith("plan-") else -(-len(data) // LOOKS)
                with (grown / RAW / log).open("ab") as file:
                    file.write(data[look * step : (look + 1) * step])
            live.poll()
        assert 0 == live.errors
        run = live.logs.run()
    derive_run(run, FORMATS.split(","))
    assert files(whole) == files(grown)
