"""Damage to directories of runs, watches and studies: what is said of logs that others tore, changed or forged.

- Of a run or a watch that ended by itself no damage is silent: exit 3, and the damaged log is named. So too of a study,
  and of `compare`: a result that was complete stays what it was, or says that it is not.
- Where only the payload of a record is another, with a right checksum of its frame, the end of the log knows better.
- Where everything was forged, the end and the manifest too, no number can be right, but nothing is a defect of ours, no
  command takes long or much memory, and nothing outside is read or written. `--resume` trusts a study, and is held to
  the same.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import processes
from faults import bases
from faults.cases import Case, Kind, Setting, TooLongError, Try, cpu_limit, held_mib, peak_mib
from faults.damage import DAMAGE

from sidelight.methodology.execution import between, verb
from sidelight.methodology.execution.derive import RESULT
from sidelight.methodology.execution.record import LOG, STEPS, open_study
from sidelight.recorded.directory import LOGS, RAW
from sidelight.rundir.frames import read_frames
from sidelight.sidecar.cli import app as cli

RESUMED = "ttft"  # the study that goes on; the other one is a comparison
SHARE_CUT = 0.25  # of the studies, that were killed before they are damaged
QUICK_OF_STUDIES = ("truncate", "flip", "delete", "special-file", "forge", "change-manifest")
REWRITTEN = ("drop-frame", "repeat-frame", "change-record")  # a log of steps so is forged: nothing else states its end
DEFECT = "this is a defect"
DAMAGED = "recorded data are damaged"
MOST_CPU_S = 5.0
MOST_MIB = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How a command that reads a directory ended, and what it took."""

    code: int
    out: str
    err: str
    growth_mib: float

    @property
    def wrong(self) -> str:
        """Return what no command may do, whatever lies in the directory."""
        if DEFECT in self.err or "Traceback" in self.err + self.out:
            return f"a defect: {self.err.strip()}"
        if "Warning: " in self.err:  # of Python or numpy
            return f"not meant for users: {self.err.strip()}"
        if self.code == 2 and (self.err.count("\n") != 1 or not self.err.startswith("sidelight: ")):
            return f"not one line: {self.err}"
        return f"{self.growth_mib:.0f} MiB" if self.growth_mib > MOST_MIB else ""

    @property
    def ending(self) -> str:
        """Return how it ended, in words."""
        return f"exit {self.code}: {self.err.strip() or 'silent'}"


def ran(*arguments: object) -> Report:
    """Run a command in this process. Raises TooLongError."""
    out, err, before_mib, peak_before_mib = io.StringIO(), io.StringIO(), held_mib(), peak_mib()
    code, words = -1, list(map(str, arguments))
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings(), cpu_limit(MOST_CPU_S):
        warnings.simplefilter("default")  # as of a command: pytest makes errors of them
        try:
            with mock.patch.object(sys, "argv", ["sidelight", *words]):  # which is recorded
                cli.main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    growth_mib = peak_mib() - before_mib if peak_mib() > peak_before_mib else 0.0
    return Report(code=code, out=out.getvalue(), err=err.getvalue(), growth_mib=growth_mib)


def report(path: Path) -> Report:
    """Run `sidelight report` of a run or a watch in this process. Raises TooLongError."""
    return ran("report", path, "--formats", "json,csv,text")


# How the report of a run that was damaged so may end. Damage is said (3), and what is left is evaluated; of what no run
# can have recorded nothing may be left (2); and what fits throughout may be believed (0).
CODES: dict[str, tuple[int, ...]] = dict.fromkeys(DAMAGE, (3,)) | {
    "special-file": (2, 3),
    "change-record": (2, 3),
    "forge": (0, 2, 3),
    "change-manifest": (0, 2, 3),
    "bomb": (0, 2, 3),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """What is damaged, each a copy: runs, a watch and studies; and a run that stays sound."""

    runs: Mapping[str, Path]
    watch: Path
    studies: Mapping[str, Path]
    sound: Path


def of_run(run: Path, damage: str) -> str:
    """Say what is wrong with the report of a run or a watch."""
    result = report(run)
    if result.wrong:
        return result.wrong
    if result.code not in CODES[damage] or (result.code == 3 and DAMAGED not in result.err):
        return result.ending
    return ""


def of_study(study: Path, stand: Stand, damage: str, *, rests_on: Mapping[Path, bytes]) -> str:
    """Say what is wrong with the report of a study, with its comparison to a sound run, and with what going on with it
    does. Its result `rests_on` logs that held this before they were damaged.
    """
    is_changed = any(_holds(log) != data for log, data in rests_on.items())
    forged = 0 in CODES[damage] or (damage in REWRITTEN and not is_changed)
    codes = (2, 3) if is_changed and not forged else (0, 2, 3)
    for arguments in (("report", study), ("compare", study, stand.sound, "--out", study.parent / "compared")):
        result = ran(*arguments)
        if result.wrong or result.code not in codes:
            return f"{arguments[0]}: {result.wrong or result.ending}"
        if arguments[0] == "report" and not result.code and not forged:
            now, then = (json.loads((each / RESULT).read_text()) for each in (study, stand.studies[study.name]))
            if now != then and now["status"] == "complete":
                return "report: another result, and silent"
    if study.name == RESUMED:
        result = ran("test", RESUMED, "--resume", study, "--quiet")
        if result.wrong or result.code not in (0, 2, 3):
            return f"--resume: {result.wrong or result.ending}"
    return ""


def _holds(log: Path) -> bytes | None:
    return log.read_bytes() if log.is_file() and not log.is_symlink() else None


def cut(study: Path, rng: random.Random) -> None:
    """Leave of a study what one that was killed would."""
    payloads = list(read_frames(study / LOG))
    bases.rewrite(study / LOG, payloads[: rng.randrange(1, len(payloads))])
    begun = {each.run for each in open_study(study).begun.values()}
    for run in (study / STEPS).iterdir():
        if f"{STEPS}/{run.name}" not in begun:
            shutil.rmtree(run)


def damaged(case: Case, stand: Stand, work: Path) -> str:
    """Damage a copy of a directory, and say what is wrong with what is said of it."""
    of, _, damage = case.row.rpartition(":")
    rng = case.random()
    group = {"study": stand.studies, "watch": {"watch": stand.watch}}.get(of, stand.runs)
    base = group[rng.choice(sorted(group))]
    path = Path(shutil.copytree(base, work / base.name))
    if of != "study":
        DAMAGE[damage](path, rng)
        return of_run(path, damage)
    if rng.random() < SHARE_CUT:
        cut(path, rng)
    finished = [path / each.run / RAW for each in open_study(path).finished]
    rests_on = {log: log.read_bytes() for raw in finished for log in raw.glob(LOGS)}
    DAMAGE[damage](path, rng)
    return of_study(path, stand, damage, rests_on=rests_on)


def _require_sound(*commands: Sequence[object]) -> None:
    """Raise AssertionError where a command ends otherwise than well: what is not damaged yet."""
    for command in commands:
        result = ran(*command)
        assert result.code == 0, (command, result.ending)


@contextmanager
def standing(place: Path) -> Iterator[Stand]:
    """Make what is damaged, and let steps of studies that go on be copies of a sound run."""
    runs = {name: bases.recorded(name, place) for name in bases.RUNS}
    sound = bases.recorded(bases.STEPS[0], place)
    with processes.serving(processes.Script()) as server, mock.patch.object(between, "READY_S", 0.0):
        studies = {
            test: bases.study(place / "studies", f"{server}/plain/1", [sound, runs[bases.STEPS[1]]], test=test)
            for test in (RESUMED, "compare")
        }
        watch = bases.watch(place)
        with mock.patch.object(verb, "Conduct", bases.copying([sound])):
            _require_sound(*(("report", path) for path in (*runs.values(), watch, *studies.values())))
            _require_sound(("test", RESUMED, "--resume", studies[RESUMED], "--quiet"))
            yield Stand(runs=runs, watch=watch, studies=studies, sound=sound)


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    with standing(setting.place) as stand:

        def attempt(case: Case) -> str:
            work = setting.place / "case"
            shutil.rmtree(work, ignore_errors=True)
            (work / "here").mkdir(parents=True)
            (work / "outside").write_text("untouched")
            with chdir(work / "here"):
                try:
                    wrong = damaged(case, stand, work)
                except TooLongError as error:
                    return str(error)
            if (work / "outside").read_text() != "untouched" or any((work / "here").iterdir()):
                return "a file outside of the directory was written"
            return wrong

        yield attempt


LOG_FAULTS = Kind(
    name="logs",
    rows={
        **dict.fromkeys(DAMAGE, 1),
        **{f"watch:{damage}": 1 for damage in DAMAGE},
        **{f"study:{damage}": int(damage in QUICK_OF_STUDIES) for damage in DAMAGE},
    },
    opened=opened,
)
