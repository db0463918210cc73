"""What the workloads that read a file have in common: which file it was, and in which order its pieces are sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadgen.plan.workloads.fields import WorkloadError
from loadgen.plan.workloads.mix import stream_rng


def about_file(path: Path, option: str = "--dataset") -> dict[str, Any]:
    """Return name, size and SHA-256 of a file, which tell its version. Raises WorkloadError naming the option."""
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return {"file": path.name, "bytes": file.tell(), "sha256": digest}
    except OSError as error:
        raise unreadable(path, error, option) from error


def file_state(path: Path) -> tuple[int, int]:
    """Return what changes when a file is written anew: its time of change in ns and its size. Raises WorkloadError."""
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(path, error) from error
    return status.st_mtime_ns, status.st_size


def unreadable(path: Path, error: OSError, option: str = "--dataset") -> WorkloadError:
    """Return the error of a file that cannot be opened or read."""
    return WorkloadError(f"{path}: {error.strerror or error}; give the path of a readable file with {option}")


def endless_order(count: int, *, seed: int, stream: int) -> Iterator[int]:
    """Give positions 0 to count - 1 in a random order, all of them before any comes again, without end."""
    rng = stream_rng(seed, stream)
    while True:
        yield from rng.permutation(count).tolist()
