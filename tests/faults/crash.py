"""kill -9 of what a run consists of, at any moment of it and between any two writes, against the truth of the simulated
engine.

Whatever the engine had answered a second before the kill is in the report as answered, with its tokens, and nothing
stands there that the engine denies; every process is gone, and with them their ports. A run whose scraper and receiver
are killed goes on to its end.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
from faults import logs
from faults.cases import Case, Kind, NotReachedError, Setting, Try
from faults.injected.sitecustomize import DEADLY, Fault, environment
from processes import QUIET, Ended, alive, child_processes, children, ended, start, until

LOST_NS = 1_000_000_000
LOAD = ("--rate", "30", "--duration", "2", "--warmup", "0", "--scrape-interval", "0.1")
LENGTHS = ("--input-tokens", "32", "--output-tokens", "16")
RECEIVING = ("--otlp-listen", "127.0.0.1:0")
MOST_ANSWERS = 60
CHILDREN = ("sidelight.loadgen.worker", "sidelight.scraper.worker", "sidelight.scraper.worker.spans")
# A process that dies at its n-th call: its module, and about how many calls of each kind it does in such a run.
AT_CALL: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "conductor": ("sidelight", {"write": 70, "fsync": 35, "rename": 9, "open": 15}),
    "worker": ("sidelight.loadgen.worker", {"write": 75, "open": 2}),
    "scraper": ("sidelight.scraper.worker", {"write": 40, "open": 3}),
    "receiver": ("sidelight.scraper.worker.spans", {"write": 4, "open": 2}),
}
WRITE_SHARE = 0.5  # of these deaths
# Who is killed: the conductor, and the children that run these modules. How the command then ends; with 0 where
# a worker had nothing more to do, or was gone: then nothing may be lost at all.
VICTIMS: Mapping[str, tuple[bool, tuple[str, ...], tuple[int, ...]]] = {
    "conductor": (True, (), (-signal.SIGKILL,)),
    "worker": (False, ("sidelight.loadgen.worker",), (0, 3)),
    "scraper": (False, ("sidelight.scraper.worker",), (0,)),
    "receiver": (False, ("sidelight.scraper.worker.spans",), (0,)),
    "children": (False, CHILDREN, (0, 3)),
    "everything": (True, CHILDREN, (-signal.SIGKILL,)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """A run some of whose processes got SIGKILL, and when; 0 if they had ended."""

    left: Ended
    killed_ns: int
    descendants: Sequence[int]


def answers(truth: Path, since_ns: int, start: int = 0) -> list[dict[str, Any]]:
    """Return what the engine knows of the requests that came since then and have ended; whole lines only.

    `start` is how long its file was by then, which grows with each case.
    """
    with truth.open("rb") as file:
        file.seek(start)
        text = file.read()
    records = map(json.loads, text[: text.rfind(b"\n") + 1].splitlines())
    return [record for record in records if record["arrival_ns"] >= since_ns]


def size_of(truth: Path) -> int:
    return truth.stat().st_size if truth.exists() else 0


def killed(url: str, truth: Path, path: Path, who: str, rng: random.Random) -> Killed:
    """Start a run and kill a part of it, after so many answers and a moment, or in its first second."""
    conductor, names, _ = VICTIMS[who]
    count, delay_s = rng.choice((0, rng.randrange(1, MOST_ANSWERS))), rng.uniform(0.0, 0.6)
    began_ns, start_bytes = time.time_ns(), size_of(truth)
    with start(*command(url, path, rng, who)) as run:
        until(lambda: run.poll() is not None or len(answers(truth, began_ns, start_bytes)) >= count, f"{count} answers")
        time.sleep(delay_s)  # the moment that is drawn, not a wait for something
        until(lambda: run.poll() is not None or conductor or bool(_named(run, names)), "a process that is to be killed")
        descendants = [] if run.poll() is not None else list(children(run.pid))
        victims = [] if run.poll() is not None else [*([run.pid] if conductor else []), *_named(run, names)]
        killed_ns = time.time_ns() if any(map(alive, victims)) else 0
        for victim in victims:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        left = ended(run, path)
    return Killed(left=left, killed_ns=killed_ns, descendants=descendants)


def command(url: str, path: Path, rng: random.Random, who: str) -> list[str | Path]:
    """Return the command of a run, of one worker or two, with spans or without, as far as its victim needs none."""
    spans = rng.choice(((), RECEIVING))
    spans = RECEIVING if who == "receiver" else spans
    options = ("--workers", rng.choice(("1", "2")), "--seed", str(rng.randrange(1000)))
    return ["run", url, *LOAD, *LENGTHS, *QUIET, *spans, *options, "--out", path]


def killed_at_call(url: str, path: Path, who: str, rng: random.Random) -> Killed:
    """Run a load, one of whose processes dies before its n-th write, sync or rename, or in the middle of a write."""
    process, calls = AT_CALL[who]
    call = "write" if rng.random() < WRITE_SHARE else rng.choice([name for name in calls if name != "write"])
    fault = Fault(
        under=str(path),
        process=process,
        call=call,
        nth=round(calls[call] ** rng.random()),
        error=rng.choice(DEADLY),
        lasting=False,
    )
    fault.marker.unlink(missing_ok=True)
    with start(*command(url, path, rng, who), **environment(fault)) as run:
        descendants: list[int] = []
        while run.poll() is None and not fault.marker.exists():
            with suppress(FileNotFoundError, ProcessLookupError):
                descendants = list(children(run.pid)) or descendants
            time.sleep(0.01)  # looks again, and waits for nothing else
        left = ended(run, path)
    killed_ns = fault.marker.stat().st_mtime_ns if fault.marker.exists() else 0
    return Killed(left=left, killed_ns=killed_ns, descendants=descendants)


def _named(run: subprocess.Popen[str], modules: Sequence[str]) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):  # a child that has just ended
        return child_processes(run.pid, *modules)
    return []


def wrong_rows(run: Killed, truth: Sequence[Mapping[str, Any]], *, is_cut: bool, within_ns: int = 0) -> str:
    """Say what requests.parquet lacks or has otherwise than the engine; `is_cut`: what came late may be missing.

    No stamp of ours may lie before its cause by more than `within_ns`.
    """
    rows = {row["request_id"]: row for row in run.left.requests()}
    known = {record["request_id"]: record for record in truth}
    until_ns = run.killed_ns - LOST_NS if is_cut else 2**63
    # The one request before the load, which finds out whether the engine answers, stands in no log.
    load = sorted(truth, key=lambda record: int(record["arrival_ns"]))[1:]
    due = [record["request_id"] for record in load if record["finished_ns"] < until_ns]
    lost = [key for key in due if key not in rows or rows[key]["status"] != "ok"]
    answered = [row for row in rows.values() if row["status"] == "ok"]
    false = [row for row in answered if not agrees(row, known.get(row["request_id"]), within_ns)]
    if lost:
        return f"{len(lost)} of {len(due)} answers are lost, {lost[0]} among them"
    return f"{len(false)} of {len(answered)} rows are not what the engine did: {false[0]}" if false else ""


def agrees(row: Mapping[str, Any], record: Mapping[str, Any] | None, within_ns: int = 0) -> bool:
    if record is None or record["finish_reason"] == "abort" or row["output_tokens"] != record["tokens"]:
        return False
    causes = (row["submit_ns"], record["first_token_ns"], record["finished_ns"])
    effects = (record["arrival_ns"], row["first_token_ns"], row["end_ns"])
    return all(cause <= effect + within_ns for cause, effect in zip(causes, effects, strict=True))


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    truth = setting.place / "truth.jsonl"
    with processes.engine("--max-num-seqs", "6", "--truth", truth) as (url, _):

        def attempt(case: Case) -> str:
            path = setting.place / "run"
            shutil.rmtree(path, ignore_errors=True)
            since = time.time_ns(), size_of(truth)
            who, _, at_call = case.row.partition(":")
            if at_call:
                run = killed_at_call(url, path, who, case.random())
            else:
                run = killed(url, truth, path, who, case.random())
            until(lambda: not any(map(alive, run.descendants)), "the processes of the run to end")
            if "Traceback" in run.left.err + run.left.out or logs.DEFECT in run.left.err:
                return f"a defect: {run.left.err}"
            codes = VICTIMS[who][2] if run.killed_ns else (0,)
            if who in ("scraper", "receiver") and len(answers(truth, *since)) <= 1:
                codes = (0, 3)  # it died before it was ready: that answer is of the request before the load
            if run.left.code not in codes and path.exists():
                return f"exit {run.left.code}: {run.left.err.strip()}"
            is_cut = run.killed_ns > 0 and run.left.code != 0
            wrong = evaluated(run, answers(truth, *since), is_cut=is_cut)
            if not wrong and not (run.killed_ns and path.exists()):
                raise NotReachedError
            return wrong

        yield attempt


def evaluated(run: Killed, truth: Sequence[Mapping[str, Any]], *, is_cut: bool, codes: Sequence[int] = (0,)) -> str:
    """Say what is wrong with the report of a run that was hurt; of none that had not begun, nothing."""
    path = run.left.path
    if not (path / "manifest.json").exists():
        return ""
    report = logs.report(path)
    if report.wrong or report.code not in codes:
        return report.wrong or f"the report ends with {report.code}: {report.err}"
    if not (path / "requests.parquet").exists():
        return "" if report.code else "no requests.parquet"
    drafts = [file.name for file in path.iterdir() if file.name.startswith(".")]
    if drafts and run.left.code >= 0:
        return f"drafts are left: {drafts}"
    return wrong_rows(run, truth, is_cut=is_cut)


CRASHES = Kind(
    name="crash",
    rows={
        **dict.fromkeys(VICTIMS, 1),
        **{f"{who}:call": 1 for who in AT_CALL},
    },
    opened=opened,
)
