"""Files of a run directory: where they stand, made and read whole.

A manifest says what was asked, with what and when; everything measured stands in append-only logs under `raw/`. A run
whose manifest has no end was cut short, and is read all the same up to the tear.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from shutil import disk_usage
from typing import IO, Any

from sidelight.recorded.errors import ConfigurationError, unusable_place, unwritten
from sidelight.rundir.files import make_directory, read_regular, replace_file, sync
from sidelight.rundir.frames import log_end
from sidelight.rundir.framing import LogEnd
from sidelight.rundir.printable.masking import without_secrets, without_secrets_all
from sidelight.rundir.printable.text import printable_json

MANIFEST = "manifest.json"
RAW = "raw"
LOGS = "*.log"
FORMAT = "1.0"  # of a run directory: another first number is not read by earlier versions
SCRAPES = "scrapes-{}.log"  # by how many scrapers died before
SCARCE_BYTES = 256 * 10**6  # free, before anything is recorded


def require_free(path: Path | None) -> None:
    """Raise ConfigurationError for an occupied run directory; None, a new name, is always free."""
    if path is not None and path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "holds another run" if (path / MANIFEST).exists() or (path / RAW).exists() else "is not empty"
        raise ConfigurationError(
            "out.in-use", f"--out {path}: {what}; choose a new one, results are never mixed or overwritten"
        )


def create(path: Path) -> Path:
    """Make a new run directory with its `raw/`, private to its owner.

    It holds prompts and replies. A directory that exists already stays readable for whom it is; its `raw/` does not.
    Raises ConfigurationError as `require_free` does and where there can be no directory; CannotWrite where the disk is
    full.
    """
    require_free(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        (path / RAW).mkdir(mode=0o700)
        sync(path.parent)
    except OSError as error:
        raise unusable_place("--out", path, error) from error
    return path


def scarce(path: Path) -> str:
    """Return a warning if the disk has little free space, else an empty string."""
    try:
        free = disk_usage(path).free
    except OSError:
        return ""
    if free >= SCARCE_BYTES:
        return ""
    return (
        f"only {free / 1e6:,.0f} MB are free on the disk of {path}: where it is full, a load ends with what was "
        "recorded up to then, and a watch loses what it cannot write; make room, or give another --out"
    )


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file as `replace_file` does. Raises CannotWrite."""
    try:
        replace_file(path, write)
    except OSError as error:
        raise unwritten(path, error) from error


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, without secrets. Raises CannotWrite."""
    write_whole(path, lambda file: file.write(without_secrets(text).encode()))


def write_texts(path: Path, files: Mapping[str, str]) -> None:
    """Write several texts by their names in a directory, in folders of it too. Raises CannotWrite."""
    try:
        for folder in {(path / name).parent for name in files}:
            make_directory(folder)
    except OSError as error:
        raise unwritten(path, error) from error
    for name, text in files.items():
        write_text(path / name, text)


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write strict JSON (no NaN), keys in the order given."""
    write_text(path, json_text(data))


def json_text(data: Mapping[str, Any]) -> str:
    """Return strict JSON for a run directory, without secrets or control characters."""
    return printable_json(json.dumps(without_secrets_all(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of a run directory. Raises ConfigurationError if it is none."""
    try:
        text = read_regular(path / MANIFEST)
        manifest = json.loads(text, parse_constant=_refuse_constant)
    except FileNotFoundError:
        what = f"no {MANIFEST} here" if path.is_dir() else "there is no such directory"
        within = max(path.glob(f"*/{MANIFEST}"), key=lambda each: each.lstat().st_mtime_ns, default=None)
        newest = f", such as the newest, {within.parent}" if within else " (its --out)"
        raise ConfigurationError("run.none", f"{path}: {what}; give the directory of a run{newest}") from None
    except OSError as error:
        raise ConfigurationError("run.unreadable", f"{path / MANIFEST}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError("run.unreadable", f"{path / MANIFEST}: cannot be read: {error}") from error
    if not isinstance(manifest, dict) or "run_id" not in manifest:
        raise ConfigurationError(
            "run.none", f"{path / MANIFEST}: not the manifest of a run; give the directory of a run (its --out)"
        )
    require_format(path / MANIFEST, manifest, FORMAT)
    return manifest


def require_format(path: Path, content: Mapping[str, Any], newest: str) -> None:
    """Raise ConfigurationError for a file of a format newer than the newest readable."""
    version = re.match(r"\d{1,9}", str(content.get("schema_version", "")))
    if version is not None and int(version[0]) > int(newest.partition(".")[0]):
        raise ConfigurationError(
            "run.newer-format",
            f"{path}: of format {version[0]}, written by a newer Sidelight; this one reads up to {newest}: update it",
        )


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def log_ends(path: Path) -> dict[str, LogEnd | None]:
    """Return the end records of a run directory's logs by name; None if the writer was killed."""
    ends: dict[str, LogEnd | None] = {}
    for log in sorted((path / RAW).glob(LOGS)):
        with suppress(OSError):  # another kind of file is not ours
            ends[log.name] = log_end(log)
    return ends
