"""Directories that damage is done to: of runs, of a watch, and of studies, as their processes leave them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
from golden_files import copied
from watch_directories import whole

from sidelight.methodology.execution import record, runner
from sidelight.methodology.execution.data import step_data
from sidelight.methodology.options import StudyOptions
from sidelight.methodology.procedures import PROCEDURES
from sidelight.methodology.study.model import Parameters, StepData, StudySettings
from sidelight.recorded.directory import LOGS, MANIFEST, RAW, log_ends, write_json
from sidelight.rundir.frames import FrameLog, read_frames
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.progress.reporter import Progress

RUNS = ("vllm_spans", "two_engines", "sglang_trtllm")
STEPS = ("vllm_plain", "two_engines")  # whose load can be trusted


def rewrite(log: Path, payloads: list[bytes]) -> None:
    """Write a log anew, numbers, checksums and end."""
    log.unlink(missing_ok=True)
    with FrameLog(log) as new:
        new.append(*payloads)


def state(path: Path) -> None:
    """Let each manifest state the ends that the logs beside it have now."""
    for manifest in path.rglob(MANIFEST):
        ends = {name: end and msgspec.structs.asdict(end) for name, end in log_ends(manifest.parent).items()}
        write_json(manifest, json.loads(manifest.read_text()) | {"logs": ends})


def recorded(name: str, into: Path) -> Path:
    """Copy a recorded run, its logs as they are written today: closed, and their ends in the manifest."""
    run = copied(name, into)
    for log in (run / RAW).glob(LOGS):
        if log.stat().st_size:
            rewrite(log, list(read_frames(log)))
    state(run)
    return run


def watch(into: Path) -> Path:
    """Make the directory of a watch that ended."""
    return whole(into / "watch")


def study(into: Path, url: str, runs: list[Path], *, test: str) -> Path:
    """Conduct a study of a server, whose steps are copies of recorded runs in turn."""
    if test == "ttft":
        parameters, variants = Parameters(load=0.7, requests=24, capacity=5.7), ()
    else:
        parameters, variants = Parameters(pairs=1, rate=4.0, duration=6.0), ("A", "B")
    asked = StudySettings(test=test, scale="short", parameters=parameters, seed=1, variants=variants)
    options = StudyOptions(url=(url,), scrape_interval=0.01, scale="short", requests=24, capacity=5.7)
    begun = record.create(into / test, record.new(options, asked, ["sidelight", "test", test], {}))
    how = copying(runs)(
        procedure=PROCEDURES[test],
        options=dict.fromkeys(variants or ("",), RunOptions(url=(url,), scrape_interval=0.01)),
        variants={},
        command=[],
        progress=Progress("quiet"),
    )
    _, error, _ = runner.conduct(begun, how)
    if error is not None:
        raise error
    return begun.path


def copying(runs: list[Path]) -> Callable[..., runner.Conduct]:
    """Return what makes a study's conduct whose steps are copies of recorded runs in turn, and wait for nothing."""
    left = list(runs)

    def measure(options: RunOptions, *_: object) -> StepData:
        left.append(left.pop(0))
        return step_data(Path(shutil.copytree(left[-1], options.out or Path())))

    return partial(runner.Conduct, measure=measure, ready_s=0.0)
