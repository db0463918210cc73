"""Servers as processes of their own, which end with the block that started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

POLL_S = 0.5
END_WITHIN_S = 20
NICENESS = 5


def free_port() -> int:
    """Return a port that was free a moment ago: programs of others do not say which one they bound."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def answers(url: str) -> bool:
    """Return whether a GET is answered with a success."""
    with suppress(OSError, urllib.error.URLError), urllib.request.urlopen(url, timeout=5) as reply:  # noqa: S310
        return bool(reply.status < 400)
    return False


@contextmanager
def running(
    command: Sequence[str | Path],
    *,
    log: Path,
    is_ready: Callable[[], bool],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    ready_within_s: float = 300,
) -> Iterator[int]:
    """Run a program in a process group of its own until the end of the block, and give its pid once it is ready.

    Its output goes to `log`, `folder` is its current directory. Raises RuntimeError, with the last lines of the log,
    where it does not become ready.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            start_new_session=True,
        )
    os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
    try:
        _wait(process, is_ready, log, ready_within_s)
        yield process.pid
    finally:
        _end(process)


def _wait(process: subprocess.Popen[bytes], is_ready: Callable[[], bool], log: Path, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while not is_ready():
        code = process.poll()
        if code is not None or time.monotonic() > deadline:
            state = "is not ready" if code is None else f"ended with {code}"
            last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"{log.stem} {state}; the last lines of {log}:\n{last}")
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the group: kindly, then for good."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_WITHIN_S)
