"""Disks that are full, broken or slow to take: the n-th call of a process that writes into the run directory fails, for
every n up to the last; and disks of 64 kB to 2 MB.

Whatever fails, a command ends with one line that says so and without a traceback; what it had written can be evaluated,
and where it ends as if nothing had been, nothing is lost. Of a report, the files that were there before stay whole.
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import processes
from faults import bases, crash, logs
from faults.cases import Case, Kind, NotReachedError, Setting, Try
from faults.injected.sitecustomize import Fault, environment, install
from processes import QUIET, Ended, ended, start

from sidelight.sidecar.cli.measuring import free_pair

LOAD = ("--rate", "40", "--requests", "10", "--warmup", "0", "--scrape-interval", "0.1", "--workers", "1")
# The calls that fail, each with what it fails with; and the modules of the processes of a command.
CALLS: dict[str, tuple[str, ...]] = {
    "write": ("ENOSPC", "EIO", "SHORT"),
    "open": ("EMFILE", "ENOSPC", "EACCES"),
    "fsync": ("EIO", "ENOSPC"),
    "rename": ("EIO", "ENOSPC"),
}
PROCESSES = {
    "conductor": "sidelight",
    "worker": "sidelight.loadgen.worker",
    "scraper": "sidelight.scraper.worker",
    "receiver": "sidelight.scraper.worker.spans",
}
ROWS = {
    **{f"report:{call}": 2 for call in CALLS},
    **{f"conductor:{call}": 1 for call in CALLS},
    "worker:write": 1,
    "worker:open": 1,
    "scraper:write": 1,
    "scraper:open": 1,
    "receiver:write": 1,
    "receiver:open": 0,
    "tmpfs": 0,  # which only root may mount
}
LEAST_BYTES, MOST_BYTES = 64 << 10, 2 << 20
# More calls than a run of ten requests has, on a slow machine too.
MOST_CALLS = {
    **dict.fromkeys(ROWS, 16),
    "report:write": 24,
    "conductor:write": 64,
    "conductor:fsync": 64,
    "conductor:open": 24,
    "worker:write": 80,
    "worker:open": 4,
    "scraper:write": 96,
    "scraper:open": 6,
    "receiver:open": 4,
}
SIZES = {row: MOST_CALLS[row] * 2 * len(CALLS[row.partition(":")[2]]) for row in ROWS if row != "tmpfs"}
_UNSAVED = {"EACCES": 2}  # the user's place, not the machine's disk
MARGIN = 8  # calls that a run may have more than another one
STRIDE = 0.382  # of all faults of a row: those that follow each other lie far apart


def fault_of(case: Case, run: Path) -> Fault:
    """Return the fault of a case: as many numbers in a row as a row has faults are all of them."""
    who, _, call = case.row.partition(":")
    ways = [(error, lasting) for error in CALLS[call] for lasting in (False, True)]
    size = SIZES[case.row]
    stride = next(step for step in range(round(STRIDE * size), size) if math.gcd(step, size) == 1)
    nth, way = divmod((case.number + 1) * stride % size, len(ways))
    error, lasting = ways[way]
    process = PROCESSES.get(who, "")
    return Fault(under=str(run), process=process, call=call, nth=1 + nth, error=error, lasting=lasting)


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
    if report.code != (_UNSAVED.get(fault.error, 3) if failed else 0) or (failed and report.err.count("\n") != 1):
        return f"exit {report.code}: {report.err}"
    if "Where the TTFT went" not in report.out:
        return "what it knows is not printed"
    if drafts := [file.name for file in run.iterdir() if file.name.startswith(".")]:
        return f"drafts are left: {drafts}"
    json.loads((run / "summary.json").read_bytes())  # the old one or the new one, whole
    return ""


@contextmanager
def small_disk(path: Path, size: int) -> Iterator[None]:
    """Mount a disk in memory of so many bytes."""
    path.mkdir()
    subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["/bin/umount", path], check=True)


def loaded(url: str, run: Path, variables: Mapping[str, str], *options: str) -> Ended:
    """Run a load."""
    lengths = ("--input-tokens", "16", "--output-tokens", "8")
    with start("run", url, *LOAD, *lengths, *QUIET, *options, "--out", run, **variables) as process:
        return ended(process, run)


def wrong_run(left: Ended, truth: Path, since_ns: int, *, may_fail_again: bool = False) -> str:
    """Say what is wrong with a run one of whose processes cannot write; `may_fail_again`: nor may its report."""
    if "Traceback" in left.err + left.out or logs.DEFECT in left.err:
        return f"a defect: {left.err}"
    if left.code not in (0, 3) or (left.code and not left.err.rpartition("sidelight: ")[2]):
        return f"exit {left.code}: {left.err}"
    if not (left.path / "manifest.json").exists():
        return "" if left.code == 3 else f"exit {left.code}, and no manifest"
    killed = crash.Killed(left=left, killed_ns=0 if left.code == 0 else since_ns, descendants=())
    codes = (0,) if left.code == 0 and not may_fail_again else (0, 2, 3)
    return crash.evaluated(killed, crash.answers(truth, since_ns), is_cut=left.code != 0, codes=codes)


def wrong_spans(left: Ended) -> str:
    """Say what is wrong with the breakdown of a run whose receiver cannot write: what is lost is said, in a warning."""
    lost = [row for row in left.requests() if row["breakdown_source"] != "trace"]
    said = [warning for warning in left.summary["warnings"] if "span" in warning]
    if any("switch tracing on" in warning for warning in said):
        return "of an engine that sends spans it is said that its tracing is off"
    return f"{len(lost)} requests have no spans, and nothing says so" if lost and not left.code and not said else ""


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    truth, traced_truth = setting.place / "truth.jsonl", setting.place / "traced-truth.jsonl"
    base = bases.recorded("vllm_spans", setting.place)
    logs.report(base)
    last: dict[str, int] = {}  # by row, a number of calls that is surely not exceeded
    spans_to = free_pair()
    with (
        processes.engine("--truth", truth) as (url, _),
        processes.engine("--truth", traced_truth, "--otlp-endpoint", f"http://{spans_to}") as (traced_url, _),
    ):

        def attempt(case: Case) -> str:
            run = setting.place / "case/run"
            shutil.rmtree(run.parent, ignore_errors=True)
            run.parent.mkdir()
            since_ns = time.time_ns()
            if case.row == "tmpfs":
                size = round(LEAST_BYTES * (MOST_BYTES / LEAST_BYTES) ** case.random().random())
                with small_disk(run.parent / "disk", size):
                    left = loaded(url, run.parent / "disk/run", {})
                    wrong = wrong_run(left, truth, since_ns, may_fail_again=True)
                if not wrong and os.strerror(errno.ENOSPC) not in left.err:
                    raise NotReachedError
                return wrong and f"{size} bytes: {wrong}"
            fault = fault_of(case, run)
            if fault.nth > last.get(case.row, fault.nth):
                raise NotReachedError
            if case.row.startswith("report"):
                shutil.copytree(base, run)
                wrong = reported(run, fault)
            elif case.row.startswith("receiver"):
                left = loaded(traced_url, run, environment(fault), "--otlp-listen", spans_to)
                wrong = wrong_run(left, traced_truth, since_ns) or wrong_spans(left)
            else:
                wrong = wrong_run(loaded(url, run, environment(fault)), truth, since_ns)
            if not fault.marker.exists():
                last[case.row] = min(last.get(case.row, fault.nth + MARGIN), fault.nth + MARGIN)
                if not wrong:
                    raise NotReachedError
            elif fault.nth == MOST_CALLS[case.row]:
                wrong = wrong or "a command has more calls than are tried"
            return wrong and f"{fault}: {wrong}"

        yield attempt


DISK = Kind(name="disk", rows=ROWS, opened=opened, sizes=SIZES)
