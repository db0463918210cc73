"""Disks that are full, broken or slow to take: the n-th call of a process that writes into the run directory fails.

Whatever fails, a command ends with one line that says so and without a traceback; what it had written can be evaluated,
and where it ends as if nothing had been, nothing is lost. Of a report, the files that were there before stay whole.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import processes
from faults import crash, logs
from faults.cases import Case, Kind, Setting, Try
from faults.injected.sitecustomize import Fault, environment, install
from processes import QUIET, ended, start

LOAD = ("--rate", "40", "--requests", "10", "--warmup", "0", "--scrape-interval", "0.1", "--workers", "1")
# The calls that fail, each with what it fails with; and how a process is known among those of a command.
CALLS: dict[str, tuple[str, ...]] = {
    "write": ("ENOSPC", "EIO", "SHORT"),
    "open": ("EMFILE", "ENOSPC", "EACCES"),
    "fsync": ("EIO", "ENOSPC"),
    "rename": ("EIO", "ENOSPC"),
}
PROCESSES = {"conductor": "sidecar", "worker": "loadgen.worker", "scraper": "scraper.worker"}
ROWS = {
    **{f"report:{call}": 6 for call in CALLS},
    **{f"conductor:{call}": 1 for call in CALLS},
    "worker:write": 2,
    "worker:open": 1,
    "scraper:write": 1,
    "scraper:open": 1,
}
MOST_CALLS = {"report": 8, "conductor": 16, "worker": 24, "scraper": 24}


def fault_of(case: Case, run: Path) -> Fault:
    """Return the fault of a case: one number after another is one call after another."""
    who, _, call = case.row.partition(":")
    rng = case.random()
    return Fault(
        under=str(run),
        process=PROCESSES.get(who, ""),
        call=call,
        nth=1 + case.number % MOST_CALLS[who] if call == "write" else 1 + case.number % 6,
        error=rng.choice(CALLS[call]),
        lasting=rng.random() < 0.5,
    )


def reported(run: Path, fault: Fault) -> str:
    """Say what is wrong with a report that cannot write."""
    uninstall = install(fault)
    try:
        report = logs.report(run)
    finally:
        uninstall()
    failed = fault.marker.exists() and fault.error != "SHORT"
    if report.wrong:
        return report.wrong
    if report.code != (3 if failed else 0) or (failed and report.err.count("\n") != 1):
        return f"exit {report.code}: {report.err}"
    if "Where the TTFT went" not in report.out:
        return "what it knows is not printed"
    if drafts := [file.name for file in run.iterdir() if file.name.startswith(".")]:
        return f"drafts are left: {drafts}"
    json.loads((run / "summary.json").read_bytes())  # the old one or the new one, whole
    return ""


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    truth = setting.place / "truth.jsonl"
    base = logs.recorded("vllm_spans", setting.place)
    logs.report(base)
    with processes.engine("--truth", truth) as (url, _):

        def attempt(case: Case) -> str:
            run = setting.place / "case/run"
            shutil.rmtree(run.parent, ignore_errors=True)
            run.parent.mkdir()
            fault = fault_of(case, run)
            if case.row.startswith("report"):
                shutil.copytree(base, run)
                return reported(run, fault)
            since_ns = time.time_ns()
            lengths = ("--input-tokens", "16", "--output-tokens", "8")
            with start("run", url, *LOAD, *lengths, *QUIET, "--out", run, **environment(fault)) as process:
                left = ended(process, run)
            if "Traceback" in left.err + left.out or logs.DEFECT in left.err:
                return f"{fault}: a defect: {left.err}"
            if left.code not in (0, 3) or (left.code and not left.err.rpartition("sidelight: ")[2]):
                return f"{fault}: exit {left.code}: {left.err}"
            if not (run / "manifest.json").exists():
                return "" if left.code == 3 else f"{fault}: exit {left.code}, and no manifest"
            killed = crash.Killed(left=left, killed_ns=0 if left.code == 0 else since_ns, descendants=())
            codes = (0,) if left.code == 0 else (0, 2, 3)
            wrong = crash.evaluated(killed, crash.answers(truth, since_ns), is_cut=left.code != 0, codes=codes)
            return wrong and f"{fault}: {wrong}"

        yield attempt


DISK = Kind(name="disk", rows=ROWS, opened=opened)
