"""The modules through which a value passes from a run's logs to the results, by the calls of recorded runs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from sidelight.correlator.opening import open_run
from sidelight.exporter import tables
from sidelight.exporter.evaluation.evaluate import evaluate
from sidelight.exporter.evaluation.server import server_of
from sidelight.exporter.evaluation.times import correlated
from sidelight.recorded.logs import RunLogs

GOLDEN = Path(__file__).parent / "golden"
# Called for an empty table of requests where a log of another kind is read.
OF_REQUESTS = {f"loadgen.requests.table.{name}" for name in ("fold", "log", "plans", "readers", "rows", "stored")}
PACKAGES = {"rundir", "loadgen", "scraper", "recorded", "correlator", "exporter", "sidecar"}


@contextmanager
def noting_modules(names: set[str]) -> Iterator[None]:
    """Add the modules of ours whose functions are called in the context."""

    def note(frame: FrameType, event: str, _: object) -> None:
        name = str(frame.f_globals.get("__name__", "")).removeprefix("sidelight.")
        if event == "call" and name.partition(".")[0] in PACKAGES:
            names.add(name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def with_logs(folder: Path, recording: str, *logs: str) -> Path:
    """Copy a recorded run with these logs alone."""
    (folder / "raw").mkdir()
    for log in logs:
        for file in (GOLDEN / recording / "raw").glob(log):
            shutil.copy(file, folder / "raw")
    return folder


def read(path: Path, *, spans: bool = False) -> set[str]:
    """Return the modules that read these logs."""
    names = set[str]()
    with RunLogs(path, run_id="", protocol="chat") as logs, noting_modules(names):
        logs.read(spans=spans, last=True)
        logs.requests.table()
        for page in logs.pages.values():
            page.view()
    return names


def test_a_chunk_passes_25_modules_from_its_log_to_the_table_of_requests(tmp_path: Path):
    """None of the sidecar and of the scraper is among them."""
    names = read(with_logs(tmp_path, "vllm_plain", "requests-*", "plan-*"))
    evaluated = evaluate(open_run(GOLDEN / "vllm_plain"))
    with noting_modules(names), (tmp_path / "requests.parquet").open("wb") as file:
        tables.write_requests(evaluated.run.requests, evaluated.parts, evaluated.reuse.requests, (), file)
    assert {"loadgen", "rundir", "recorded", "correlator", "exporter"} == {name.partition(".")[0] for name in names}
    assert len(names) <= 25


def test_a_counter_passes_30_modules_from_its_log_to_the_summary(tmp_path: Path):
    """Six of them estimate percentiles of histograms."""
    names = read(with_logs(tmp_path, "vllm_plain", "scrapes-*"))
    evaluated = evaluate(open_run(GOLDEN / "vllm_plain"))
    with noting_modules(names):
        server_of(evaluated.run, evaluated.window, evaluated.slice_ns, [""])
    assert 6 == sum(name.startswith("scraper.quantiles.") for name in names)
    assert len(names - OF_REQUESTS) <= 30


@pytest.mark.parametrize(("estimated", "most"), [(False, 34), (True, 41)])
def test_a_span_passes_34_modules_from_its_log_to_the_breakdown(tmp_path: Path, *, estimated: bool, most: int):
    """Seven more estimate the times of requests that have no span."""
    names = read(with_logs(tmp_path, "vllm_spans", "spans-*"), spans=True)
    run = open_run(GOLDEN / "vllm_spans")
    with noting_modules(names):
        correlated(run)
    counted = {name for name in names - OF_REQUESTS if estimated or not name.startswith("correlator.estimate.")}
    assert len(counted) <= most
