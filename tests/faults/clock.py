"""A wall clock that is set or slewed while a run or a watch goes on, and processes that stand still meanwhile.

- No request is lost, and none has a stamp before its cause, by the truth of the simulated engine; the parts of a TTFT
  are the engine's. Kernels slew the wall clock and the monotonic clock alike; where one alone is, by 5 %, stamps are
  within a millisecond.
- A step is an event and a warning. Spans are joined, or it is said why not; no sender is blamed for a step of ours.
- Requests of a load generator that stood still are not trusted. It stands still for 30 s by night, and for 2 in the
  quick part: no time-out of a run's own processes lies between.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import processes
from faults import crash, logs
from faults.cases import Case, Kind, NotReachedError, Setting, Try
from faults.injected.wall_clock import WallClock, inherited
from processes import QUIET, Ended, child_processes, ended, start, until
from relayed_spans import relayed
from sent_spans import MS
from test_watch import Watch, now_ms, request, watching  # that of the tests of `watch`

from sidelight.recorded.events import CLOCK_LEFT
from sidelight.recorded.run import Run
from sidelight.sidecar.cli.measuring import free_pair
from sidelight.sidecar.run import open_run

STEPS = {"+1s": 1.0, "-1s": -1.0, "+1h": 3600.0, "-1h": -3600.0}
SLEWS = {"500ppm": 500e-6, "5%": 0.05}
VICTIMS = {
    "stop-conductor": "",
    "stop-worker": "sidelight.loadgen.worker",
    "stop-scraper": "sidelight.scraper.worker",
    "stop-receiver": "sidelight.scraper.worker.spans",
}
LOAD = ("--rate", "30", "--duration", "3", "--warmup", "0", "--scrape-interval", "0.1", "--workers", "1")
LENGTHS = ("--input-tokens", "32", "--output-tokens", "16")
BEFORE = 20  # answers, or requests of a watch, before the clock is set
STAMPS_NS, SLEWED_NS = 100_000, 1_000_000  # two stamps are right to within as much
PARTS_MS = 0.01
STOPPED_S, LONG_STOPPED_S = 2.0, 30.0
FAR_S = 600.0  # spans are refused that are stamped by a clock so far from ours
SET = "the clock of this machine was set"
BLAME = "set it right on that machine"
WATCHED = {"ttft_ms": 300.0, "queue_ms": 50.0, "prefill_ms": 100.0}  # test_watch.request


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """What is done to a run: its clock is set by so much, and since when, or a process stands still.

    is_here   whether the engine's or the clients' spans are stamped by that clock as well
    """

    step_s: float = 0.0
    slew: float = 0.0
    victim: str | None = None
    stopped_s: float = 0.0
    is_here: bool = False

    @property
    def is_far(self) -> bool:
        """Whether spans of this machine are refused from then on, in a run."""
        return self.is_here and abs(self.step_s) > FAR_S


def moved(case: Case, stopped_s: float) -> Moved:
    """Return what is done in a case."""
    what = case.row.partition(":")[2]
    return Moved(
        step_s=STEPS.get(what, 0.0),
        slew=SLEWS.get(what, 0.0),
        victim=VICTIMS.get(what),
        stopped_s=stopped_s,
        is_here=case.number % 2 == 0,
    )


def stop(victim: int, seconds: float) -> None:
    """Let a process stand still."""
    os.kill(victim, signal.SIGSTOP)
    time.sleep(seconds)  # the fault, not a wait for something
    with suppress(ProcessLookupError):  # of a run that was over: it does not wait for long
        os.kill(victim, signal.SIGCONT)


# A run


def done(run: subprocess.Popen[str], change: Moved, clock: WallClock) -> None:
    """Do to a run what is to be done in its middle."""
    if change.victim is None:
        clock.move(by_s=change.step_s, slew=change.slew)
        return
    victims = child_processes(run.pid, change.victim) if change.victim else [run.pid]
    stop(victims[0], change.stopped_s)


async def run(place: Path, change: Moved) -> str:
    """Run beside it, and say what is wrong with what came of it."""
    path, truth, clock = place / "run", place / "truth.jsonl", WallClock(place / "wall")
    address, offset_ns, since_ns = free_pair(), time.time_ns() - time.monotonic_ns(), time.time_ns()

    def ahead_ns(stamp_ns: int) -> int:
        return clock.ahead_ns(stamp_ns - offset_ns) if change.is_here else 0

    def loaded(url: str) -> tuple[Ended, int]:
        options = (*LOAD, *LENGTHS, *QUIET, "--otlp-listen", address, "--out", path)
        with start("run", url, *options, **clock.variables()) as process:
            until(
                lambda: process.poll() is not None or len(crash.answers(truth, since_ns)) > BEFORE,
                f"{BEFORE} answers",
            )
            changed_ns = time.time_ns()
            if process.poll() is None:
                done(process, change, clock)
            return ended(process, path), changed_ns

    async with relayed(address, ahead_ns) as relay:
        with processes.engine("--max-num-seqs", "6", "--truth", truth, "--otlp-endpoint", relay) as (url, _):
            left, changed_ns = await asyncio.to_thread(loaded, url)
    if left.code or "Traceback" in left.err + left.out:
        return f"exit {left.code}: {left.err.strip()}"
    return wrong_run(left, crash.answers(truth, since_ns), change, changed_ns)


def wrong_run(left: Ended, truth: Sequence[Mapping[str, Any]], change: Moved, changed_ns: int) -> str:
    """Say what is wrong with a run. Raises NotReachedError where its load was over when this process came to it."""
    report = logs.report(left.path)
    if report.wrong or report.code:
        return report.wrong or f"the report ends with {report.code}: {report.err}"
    within_ns = STAMPS_NS + (SLEWED_NS if change.slew else 0)
    killed = crash.Killed(left=left, killed_ns=0, descendants=())
    opened_run, known = open_run(left.path), {record["request_id"]: record for record in truth}
    warnings, events = "; ".join(left.summary["warnings"]), {event.name: event for event in opened_run.events}
    unsent = events["planned"].data["count"] - sum(row["submit_ns"] < changed_ns for row in left.requests())
    if events["phase_end"].at_ns < changed_ns:
        raise NotReachedError
    return (
        crash.wrong_rows(killed, truth, is_cut=False, within_ns=within_ns)
        or wrong_step(opened_run, CLOCK_LEFT, warnings, change)
        or wrong_parts(left, known, change)
        # The last of a plan may lie behind the end of the load.
        or (wrong_trust(left, known, change) if unsent > 1 and change.victim == VICTIMS["stop-worker"] else "")
    )


def wrong_step(opened_run: Run, name: str, warnings: str, change: Moved) -> str:
    """Say what is wrong with what is said and recorded of a step."""
    steps_s = [event.data["moved_ns"] / 1e9 for event in opened_run.events if event.name == name]
    if [round(step_s) for step_s in steps_s] != [change.step_s] * bool(change.step_s) and not change.slew:
        return f"recorded steps: {steps_s}"
    if (SET in warnings) != bool(steps_s):
        return f"{len(steps_s)} steps, and warnings: {warnings}"
    return ""


def wrong_parts(left: Ended, known: Mapping[str, Mapping[str, Any]], change: Moved) -> str:
    """Say which parts are not the engine's, which spans are left out for no good reason, and who is wrongly blamed."""
    errors = (left.path / "raw" / "receiver.stderr").read_text()
    rows = left.requests()
    apart = [row for row in rows if row["breakdown_source"] != "trace"]
    reasons = Counter(row["breakdown_reason"] for row in apart)
    is_clock = change.is_here and change.step_s
    if not all(reasons) or (change.victim is None and any(not is_clock or "clock" not in why for why in reasons)):
        return f"{len(apart)} of {len(rows)} are not joined: {reasons}"
    if change.is_far and not apart:
        return "spans that are an hour off are joined"
    if BLAME in errors or (change.is_far and SET not in errors):
        return f"blamed: {errors}"
    for row in (row for row in rows if row["breakdown_source"] == "trace"):
        record = known[row["request_id"]]
        parts_ms = {
            "queue_ms": (record["scheduled_ns"] - record["queued_ns"]) / 1e6,
            "prefill_ms": (record["first_token_ns"] - record["scheduled_ns"]) / 1e6,
        }
        if any(abs(row[name] - true_ms) > PARTS_MS for name, true_ms in parts_ms.items()):
            return f"{parts_ms}, and { ({name: row[name] for name in parts_ms}) } in the report"
        ways_ms = [row[name] for name in ("request_network_ms", "response_network_ms") if row[name] is not None]
        if any(not -1.0 <= way_ms <= row["e2e_ms"] for way_ms in ways_ms):
            return f"ways of {ways_ms} ms"
    return ""


def wrong_trust(left: Ended, known: Mapping[str, Mapping[str, Any]], change: Moved) -> str:
    """Say whether what is stated of a load generator that stood still is less than what it was."""
    check, warnings = left.summary["self_check"], left.summary["warnings"]
    if not check["arrivals"]["distorted"] and not any("were not sent" in text for text in warnings):
        return f"nothing is said of requests that left late: {check['arrivals']} {warnings}"
    late_ms = [
        row["ttft_ms"] - (record["first_token_ns"] - record["arrival_ns"]) / 1e6
        for row in left.requests()
        if row["ttft_ms"] is not None and (record := known.get(row["request_id"]))
    ]
    beyond_ms = check["error_ms"]["ttft"]["p99"] + 500 * change.stopped_s
    wrong = [late for late in late_ms if late > beyond_ms]
    return (
        ""
        if len(wrong) <= 0.01 * len(late_ms) + 1
        else f"TTFTs are wrong by {wrong} ms, stated are {check['error_ms']}"
    )


# A watch


async def sent(watch: Watch, clock: WallClock, change: Moved) -> int:
    """Send requests, and do in their middle what is to be done; return how many were sent."""
    for number in range(3 * BEFORE):
        if number == BEFORE:
            await change_of(watch, clock, change)
        ahead_ms = clock.ahead_ns(time.monotonic_ns()) / MS if change.is_here else 0.0
        await watch.send(request(number + 1, now_ms() + ahead_ms))
    return 3 * BEFORE


async def change_of(watch: Watch, clock: WallClock, change: Moved) -> None:
    """Do to a watch what is to be done."""
    if change.victim is None:
        clock.move(by_s=change.step_s, slew=change.slew)
        return
    (victim,) = child_processes(watch.process.pid, change.victim) if change.victim else [watch.process.pid]
    stopping = asyncio.create_task(asyncio.to_thread(stop, victim, change.stopped_s))
    await watch.send(request(999))
    await stopping


async def watch_run(place: Path, change: Moved) -> str:
    """Watch beside it, and say what is wrong with what came of it.

    Clients elsewhere have the right time: there, our clock is wrong at first, and is set right.
    """
    path, clock = place / "watch", WallClock(place / "wall", ahead_s=0.0 if change.is_here else -change.step_s)
    with inherited(clock):
        # Files keep the times of the true clock: none may seem to be old.
        async with watching(path, "--keep", "24h") as watch:
            count = await sent(watch, clock, change) + (change.victim is not None)
            if change.step_s:
                await watch.until_said(SET)
            await watch.end()
    # When the clock was set it went on in another directory.
    paths = [path, *([place / "watch-2"] if change.step_s else [])]
    wrongs = [wrong_directory(each, change) for each in paths]
    runs = [open_run(each) for each in paths]
    rows = [row for each in paths for row in Ended(code=0, out="", err="", path=each).requests()]
    refused = sum(run.span_counts.off_clock for run in runs if run.span_counts is not None)
    if len(rows) + refused / 3 != count or any(run.receiver_deaths for run in runs) or "Traceback" in str(watch.said):
        return f"{count} sent, {len(rows)} in the report, {refused} spans refused: {watch.said[-3:]}"
    return next(filter(None, wrongs), "") or wrong_step(runs[0], CLOCK_LEFT, "; ".join(watch.said), change)


def wrong_directory(path: Path, change: Moved) -> str:
    """Say what is wrong with a directory of a watch."""
    errors = (path / "raw" / "receiver.stderr").read_text()
    if "Traceback" in errors or (change.is_here and BLAME in errors):
        return errors
    report = logs.report(path)
    if report.wrong or report.code:
        return report.wrong or f"the report ends with {report.code}: {report.err}"
    rows = Ended(code=0, out="", err="", path=path).requests()
    false = [row for row in rows if any(abs(row[name] - ms) > PARTS_MS for name, ms in WATCHED.items())]
    return f"false: {false[:1]}" if false else ""


# The kind


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    whole: Mapping[str, Callable[[Path, Moved], Any]] = {"run": run, "watch": watch_run}
    stopped_s = LONG_STOPPED_S if setting.seconds else STOPPED_S

    def attempt(case: Case) -> str:
        place = setting.place / "case"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return str(asyncio.run(whole[case.row.partition(":")[0]](place, moved(case, stopped_s))))

    yield attempt


QUICK = ("run:-1h", "run:stop-worker", "watch:-1h")
CLOCK = Kind(
    name="clock",
    rows={
        row: int(row in QUICK)
        for row in (
            *(f"run:{what}" for what in (*STEPS, *SLEWS, *VICTIMS)),
            *(f"watch:{what}" for what in (*STEPS, *SLEWS, "stop-conductor", "stop-scraper", "stop-receiver")),
        )
    },
    opened=opened,
)
