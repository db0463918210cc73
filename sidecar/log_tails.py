"""The logs of a run that goes on: what is new in them, and deleting the oldest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from loadgen.frames import FrameTail


class LogTails:
    """Owns the open files of a directory's logs. A context manager."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tails: dict[Path, FrameTail] = {}
        self._done: set[Path] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for tail in self._tails.values():
            tail.close()

    def news(self, pattern: str, *, in_turn: bool = False) -> Iterator[tuple[Path, bytes]]:
        """Give the payloads that are new, in order, each with its file.

        Files grow side by side, but where they are written `in_turn`: one that another follows is then closed.
        """
        paths = sorted(self._directory.glob(pattern))
        for path in paths:
            if path in self._done:
                continue
            if path not in self._tails:
                self._tails[path] = FrameTail(path)
            while payloads := self._tails[path].read_new():
                for payload in payloads:
                    yield path, payload
            if in_turn and path != paths[-1]:  # which was there before we read to the end: nothing more comes
                self._tails.pop(path).close()
                self._done.add(path)

    def prune(self, patterns: Sequence[str], *, keep_s: float, keep_bytes: int) -> None:
        """Delete the files that were written to last longer ago, and the oldest of those beyond so many bytes.

        The newest of each pattern stays, and so does what was not read.
        """
        files = [path for pattern in patterns for path in sorted(self._directory.glob(pattern))]
        found = {path: path.stat() for path in files}
        total = sum(one.st_size for one in found.values())
        old_s = time.time() - keep_s
        for path in sorted(self._done & found.keys(), key=lambda one: found[one].st_mtime):
            if found[path].st_mtime < old_s or total > keep_bytes:
                path.unlink(missing_ok=True)
                total -= found[path].st_size
        self._done = {path for path in self._done if path.exists()}


def next_number(directory: Path, pattern: str) -> int:
    """Return the number of the file that comes after those that are there."""
    numbers = [int(path.stem.rpartition("-")[2]) for path in directory.glob(pattern)]
    return max(numbers, default=-1) + 1
