"""The directory of a study: `study.json` with the request, and `steps.log` with the progress.

Each step is a run directory under `steps/`. All else in the directory is derived (`derive`).
"""

from __future__ import annotations

import os
import platform
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Struct

from sidelight.methodology.options import StudyOptions
from sidelight.methodology.study.model import Finished, Outcome, Step, StudySettings
from sidelight.recorded.directory import MANIFEST, RAW, require_format, write_json
from sidelight.recorded.errors import ConfigurationError, unusable_place, unwritten
from sidelight.recorded.logs import one_line
from sidelight.rundir.clock import utc_now
from sidelight.rundir.fields import NO_UNIT, StampNs, doc
from sidelight.rundir.files import LockHeld, lock, read_regular, require_directory, require_regular, sync
from sidelight.rundir.frames import FrameLog, FrameTail
from sidelight.rundir.framing import GAP, Extent
from sidelight.rundir.printable.masking import blanked
from sidelight.rundir.printable.numbers import count_of
from sidelight.sidecar.options.config import as_recorded
from sidelight.sidecar.version import VERSION

STUDY, LOG, STEPS, ALL, LOCK = "study.json", "steps.log", "steps", "all.json", ".lock"
TORN = ".torn"
Status = Literal["complete", "partial", "interrupted"]


class TargetSeen(Struct, frozen=True, kw_only=True):
    """The target at a configuration's address at the beginning of the study."""

    url: Annotated[str, doc("Its address.")]
    model: Annotated[str, doc("The model as the requests name it.")]
    max_model_len: Annotated[int | None, doc("Longest input and output together.", "tokens")]
    version: Annotated[str | None, doc("The engine's version, where it tells one.")]


class StudyRecord(Struct, frozen=True, kw_only=True):
    """`study.json`: the resolved request, and its targets."""

    schema_version: Annotated[Literal[1], doc("Version of this schema.", NO_UNIT)] = 1
    study_id: Annotated[str, doc("Names the study; sorts by time.")]
    tool: Annotated[dict[str, str], doc("Name and version of the tool.")]
    command: Annotated[list[str], doc("The command line, secrets masked.")]
    started_at: Annotated[str, doc("When it began, ISO 8601.")]
    asked: Annotated[StudySettings, doc("What was asked: the test decides by it.")]
    options: Annotated[dict[str, Any], doc("All options, secrets masked.")]
    seen: Annotated[dict[str, TargetSeen], doc("What answered, by configuration.")]
    host: Annotated[dict[str, Any], doc("The machine that the load came from.")]


class Decided(Struct, frozen=True, kw_only=True, tag="decided"):
    """The next step was decided on."""

    at_ns: StampNs
    number: int
    step: Step


class StepStarted(Struct, frozen=True, kw_only=True, tag="begun"):
    """Its run was started; `warmed_by` names the step that warmed the engine up, empty: this one."""

    at_ns: StampNs
    number: int
    run: str
    warmed_by: str = ""
    engine_start_ns: int | None = None
    notes: tuple[str, ...] = ()


class StepEnded(Struct, frozen=True, kw_only=True, tag="ended"):
    """Its run came to an end, of that status."""

    at_ns: StampNs
    number: int
    status: str


class Judged(Struct, frozen=True, kw_only=True, tag="verdict"):
    """Outcome of a step, as all later decisions take it."""

    at_ns: StampNs
    number: int
    outcome: Outcome


class Retried(Struct, frozen=True, kw_only=True, tag="retried"):
    """A step that was void twice is tried again by a resumed study."""

    at_ns: StampNs
    number: int


class Stopped(Struct, frozen=True, kw_only=True, tag="stopped"):
    """The study ended, or was left; it may be resumed."""

    at_ns: StampNs
    status: Status
    reason: str


Frame = Decided | StepStarted | StepEnded | Judged | Retried | Stopped
_decode_frame = msgspec.msgpack.Decoder(Frame).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study as its directory has it.

    `pending` is a step that was decided on and has no verdict, `damage` what is lost of its log.
    """

    path: Path
    record: StudyRecord
    finished: tuple[Finished, ...] = ()
    begun: Mapping[int, StepStarted] = field(default_factory=dict)
    ended_ns: Mapping[int, int] = field(default_factory=dict)
    pending: Decided | None = None
    stopped: Stopped | None = None
    damage: str = ""


def new(options: StudyOptions, asked: StudySettings, command: list[str], seen: Mapping[str, TargetSeen]) -> StudyRecord:
    """Return `study.json` of a study that begins now."""
    now = utc_now()
    return StudyRecord(
        study_id=f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
        tool={"name": "sidelight", "version": VERSION},
        command=command,
        started_at=now.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        asked=asked,
        options=as_recorded(options),
        seen=dict(seen),
        host={
            "name": socket.gethostname(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
    )


def directory_of(options: StudyOptions, name: str) -> Path:
    """Return the directory of a study: --out, else one of its own."""
    return options.out or Path("runs") / f"{utc_now():%Y%m%d-%H%M%S}-{name}"


def create(path: Path, record: StudyRecord) -> Study:
    """Make the directory of a new study, for its owner alone. Raises ConfigurationError where something is there,
    CannotWrite.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "holds a study; go on with it by --resume" if (path / STUDY).exists() else "is not empty; choose another"
        raise ConfigurationError("out.in-use", f"--out {path}: {what}")
    make(path)
    try:
        (path / STEPS).mkdir(mode=0o777 & path.stat().st_mode)
    except OSError as error:  # also where a study that began at the same time has it
        raise unusable_place("--out", path, error) from error
    write_json(path / STUDY, msgspec.to_builtins(record))
    return Study(path=path, record=record)


def write_all(path: Path, options: Mapping[str, Any]) -> None:
    """Write the options of all tests into their directory. Raises CannotWrite."""
    write_json(path / ALL, {"schema_version": 1, "options": dict(options)})


def make(path: Path) -> None:
    """Make the directory of a study or of all tests. Raises ConfigurationError; CannotWrite if the disk is full."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise unusable_place("--out", path, error) from error


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Lock a study, or all tests, against other processes. The lock lasts until the block or this process ends.

    Raises ConfigurationError naming the process that does, CannotWrite.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(lock(path / LOCK))
        except LockHeld as error:
            raise ConfigurationError(
                "study.in-use", f"{path}: is not free, {error.strerror}; wait for its end, or stop it"
            ) from error
        except OSError as error:
            raise unwritten(path / LOCK, error) from error
        yield


def read_all(path: Path) -> dict[str, Any]:
    """Return the options of all tests. Raises ConfigurationError where there are none."""
    try:
        read = msgspec.json.decode(read_regular(path / ALL), type=dict[str, Any])
        return dict(read["options"])
    except FileNotFoundError:
        raise ConfigurationError(
            "study.none", f"{path}: no {ALL} here; give the directory of all tests (their --out)"
        ) from None
    except (OSError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise ConfigurationError("study.unreadable", f"{path / ALL}: cannot be read: {one_line(error)}") from error


def append(path: Path, *frames: Frame) -> None:
    """Append to the log of steps, and sync it to the disk. Raises CannotWrite."""
    try:
        require_regular(path / LOG)
        with FrameLog(path / LOG) as log:
            log.append(*map(_encoded, frames))
        sync(path / LOG)
    except OSError as error:
        raise unwritten(path / LOG, error) from error


def _encoded(frame: Frame) -> bytes:
    """Return the bytes of a frame; what went wrong may repeat a secret."""
    payload = msgspec.msgpack.encode(frame)
    return payload if isinstance(frame, Decided) else blanked(payload)


def open_study(path: Path) -> Study:
    """Read a study's record and every step with a verdict. Raises ConfigurationError where there is no study."""
    frames: list[Frame] = []
    try:
        text = read_regular(path / STUDY)
        require_format(path / STUDY, msgspec.json.decode(text, type=dict[str, Any]), "1")
        record = msgspec.json.decode(text, type=StudyRecord)
        extent = Extent()
        with suppress(FileNotFoundError), FrameTail(path / LOG) as tail:
            while payloads := tail.read_block() or tail.read_rest():
                frames += [_decode_frame(payload) for payload in payloads if payload is not GAP]
            extent = tail.extent
        damage = _damage(path, extent, frames)
    except FileNotFoundError:
        raise ConfigurationError(
            "study.none", f"{path}: no {STUDY} here; give the directory of a study (its --out)"
        ) from None
    except OSError as error:
        raise ConfigurationError("study.unreadable", f"{error.filename or path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(
            "study.unreadable", f"{path}: {STUDY} or {LOG} cannot be read: {one_line(error)}"
        ) from error
    return replace(_study(path, record, frames), damage=damage)


def open_whole(path: Path) -> Study:
    """Read a study without damage, for others that rest on it. Raises ConfigurationError as `open_study` does."""
    study = open_study(path)
    if study.damage:
        raise ConfigurationError("study.damaged", f"{path}: {study.damage}")
    return study


def _damage(path: Path, extent: Extent, frames: Sequence[Frame]) -> str:
    """Return the damage of the log of steps if records are lost, else "". Half a record that a killed study left does
    not count.
    """
    if extent.lost_frames:
        return f"{LOG} is damaged: it lost {count_of(extent.lost_frames, 'record')}; restore it from a copy"
    begun = {frame.run for frame in frames if isinstance(frame, StepStarted)}  # which is written before a run is
    runs = sorted(f"{STEPS}/{each.parent.name}" for each in path.glob(f"{STEPS}/*/{MANIFEST}"))
    unnamed = [run for run in runs if run not in begun and TORN not in run]
    return f"{LOG} is damaged: it does not name {unnamed[0]}; restore it from a copy" if unnamed else ""


def step_directory(study: Path, run: str, *, outside: bool = False) -> Path:
    """Return the directory of a step's run, as its study names it. It is in the study, but of a comparison of recorded
    runs.

    Raises ConfigurationError for one that lies elsewhere, unless it may be `outside`, and for one behind a link.
    """
    parts = PurePath(run).parts
    if outside and PurePath(run).is_absolute():
        return Path(run)
    if len(parts) != 2 or parts[0] != STEPS or parts[1] == "..":
        raise ConfigurationError(
            "study.outside",
            f"{study / LOG}: names a run outside of the study, {run[:200]}; where you trust this study, `sidelight "
            "report --outside` reads it",
        )
    path = study / STEPS / parts[1]
    try:
        require_directory(path.parent)
        require_directory(path)
    except OSError as error:
        raise ConfigurationError("study.unreadable", f"{error.filename}: {error.strerror}") from error
    return path


def _study(path: Path, record: StudyRecord, frames: Sequence[Frame]) -> Study:
    decided: dict[int, Decided] = {}
    begun: dict[int, StepStarted] = {}
    ended_ns: dict[int, int] = {}
    finished: dict[int, Finished] = {}
    for frame in frames:
        if isinstance(frame, Decided):
            decided[frame.number] = frame  # anew where it was set aside
            finished.pop(frame.number, None)
            begun.pop(frame.number, None)
        elif isinstance(frame, StepStarted):
            begun[frame.number] = frame
        elif isinstance(frame, StepEnded):
            ended_ns[frame.number] = frame.at_ns
        elif isinstance(frame, Judged) and frame.number in decided and frame.number in begun:
            step, run = decided[frame.number].step, begun[frame.number].run
            finished[frame.number] = Finished(number=frame.number, run=run, step=step, outcome=frame.outcome)
        elif isinstance(frame, Retried) and frame.number in finished:
            finished[frame.number] = msgspec.structs.replace(finished[frame.number], again=True)
    if sorted(finished) != list(range(1, len(finished) + 1)):
        raise ConfigurationError(
            "study.damaged", f"{path / LOG}: is damaged: verdicts of steps are missing; restore it from a copy"
        )
    pending = [frame for number, frame in decided.items() if number not in finished]
    last = frames[-1] if frames else None
    return Study(
        path=path,
        record=record,
        finished=tuple(finished[number] for number in sorted(finished)),
        begun=begun,
        ended_ns=ended_ns,
        pending=pending[-1] if pending else None,
        stopped=last if isinstance(last, Stopped) else None,
    )


def run_name(number: int, step: Step) -> str:
    """Return the path of a step's run inside the study's directory."""
    again = "-again" if step.repeat else ""
    return f"{STEPS}/{number:04d}-{step.label.replace('/', '-')}{again}"


def is_whole(run: Path) -> bool:
    """Return whether a run's manifest states that the run is complete."""
    try:
        manifest = msgspec.json.decode(read_regular(run / MANIFEST))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("status") == "complete" and (run / RAW).is_dir()


def set_aside(run: Path) -> Path | None:
    """Rename the run directory of an unfinished step. Returns its new name, None if there is no directory.

    Raises CannotWrite, and ConfigurationError for a directory that is not a step's.
    """
    if not run.exists():
        return None
    if run.parent.name != STEPS or not (run.parent.parent / STUDY).is_file():
        raise ConfigurationError("study.step", f"{run}: is not a step of a study, and is left as it is; {LOG} names it")
    number = 1
    while (aside := run.with_name(f"{run.name}{TORN}{'' if number == 1 else f'-{number}'}")).exists():
        number += 1
    try:
        return run.rename(aside)
    except OSError as error:
        raise unwritten(run, error) from error
