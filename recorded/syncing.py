"""Periodic syncing of logs to disk: a crash of the machine loses about one second."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Self

from sidelight.rundir.files import sync

EVERY_S = 1.0
log = logging.getLogger(__name__)


class LogSync:
    """Context manager that syncs a directory's logs once a second and at the end.

    It covers the logs of all processes that write there. It has its own thread: a disk may take its time, and nothing
    that is stamped may wait for it.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._synced: dict[str, tuple[int, int]] = {}  # size and time of a log when it was
        self._failed = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._sync_on, name="sync of logs", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self.sync()

    def _sync_on(self) -> None:
        while not self._ending.wait(EVERY_S):
            self.sync()

    def sync(self) -> None:
        """Sync the logs written since the last call, and the directory after new logs."""
        try:
            with os.scandir(self._directory) as entries:
                stats = {entry.name: entry.stat(follow_symlinks=False) for entry in entries if _is_log(entry)}
            states = {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
            for name, state in states.items():
                if self._synced.get(name) != state:
                    sync(self._directory / name)
            if states.keys() - self._synced.keys():
                sync(self._directory)
            self._synced = states
        except FileNotFoundError:  # a watch deletes its oldest; the others are synced the next time
            return
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning(
                    "%s: cannot be synced to its disk (%s); a crash of the machine may cost what was recorded",
                    error.filename or self._directory,
                    error.strerror,
                )


def _is_log(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(".log") and entry.is_file(follow_symlinks=False)
