"""`sidelight report` in a process with limited memory and CPU time: others may have made what it reads."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

from sidelight.rundir.process import limit_growth

UNBOUNDED = "--no-untrusted"
STRICT = "--untrusted"
# And more for what lies on the disk. Of the time a fifth is enough for runs that were measured, of the memory a third:
# a day of pages that hardly change takes 200 bytes for each of its log.
LEAST_BYTES, BYTES_PER_BYTE = 2 * 1024**3, 512
LEAST_CPU_S, CPU_S_PER_MB = 20, 4
_KILLED_AFTER_S = 2  # where a library does not come back to us
_MOST_FILES = 100_000  # that are counted
_UNUSABLE = 2  # recorded.errors.ConfigurationError's exit code: nothing is imported yet


def continue_in_child(arguments: Sequence[str], heeded: Sequence[int]) -> None:
    """Continue in a child process with limits that grow with the directories in the arguments.

    The parent waits for it and exits with its code, or with a line where a library ended it that got no memory. Signals
    that are `heeded` it hands on. It goes before the first large import, whose memory would be copied.
    """
    disk_bytes = sum(map(_disk_bytes, arguments))
    most_bytes, cpu_s = LEAST_BYTES, LEAST_CPU_S + CPU_S_PER_MB * disk_bytes // 10**6
    if STRICT not in arguments:
        most_bytes += BYTES_PER_BYTE * disk_bytes
    if (pid := os.fork()) == 0:
        _bound_this_process(most_bytes, cpu_s)
        return
    for number in heeded:
        signal.signal(number, lambda number, _: _send(pid, number))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        is_late = code in (-signal.SIGKILL, -signal.SIGXCPU)
        sys.stderr.write(f"sidelight: {_too_long(cpu_s) if is_late else _too_large(most_bytes)}\n")
        code = _UNUSABLE
    sys.exit(code)


def processes(arguments: Sequence[str]) -> int:
    """Return the number of processes that read a run: one for each core, and one alone with --untrusted."""
    return 1 if STRICT in arguments else os.cpu_count() or 1


def interrupt_once(_number: int, _frame: object) -> None:
    """Raise KeyboardInterrupt at the first signal: a terminal's comes from our parent, too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _bound_this_process(most_bytes: int, cpu_s: int) -> None:
    """Limit the memory and CPU time of this process, and its imports to installed modules.

    Beyond the time, ConfigurationError is raised wherever it is then, each second again, and soon it is killed.
    """

    def end(*_: object) -> None:
        from sidelight.recorded.errors import ConfigurationError  # noqa: PLC0415  no large import before the fork

        raise ConfigurationError("report.time", _too_long(cpu_s))

    ours, current = Path(__file__).parents[1], Path.cwd()
    if current != ours:
        sys.path[:] = [path for path in sys.path if path and Path(path).resolve() != current]
    os.environ["OMP_NUM_THREADS"] = "1"  # each thread has room of its own
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # others take a gigabyte at once, for later
    signal.signal(signal.SIGXCPU, end)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard == resource.RLIM_INFINITY or hard > cpu_s + _KILLED_AFTER_S:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + _KILLED_AFTER_S))
    limit_growth(most_bytes)


def _too_long(cpu_s: int) -> str:
    return (
        f"report: evaluating took more than {cpu_s} s of the processor's time, many times what a run of this size "
        f"takes; if you trust who made the directory, {UNBOUNDED} lifts the bound"
    )


def _too_large(most_bytes: int) -> str:
    return (
        f"report: evaluating took more than {most_bytes // 1024**2} MiB of memory, or broke a library; if you trust "
        f"who made the directory, {UNBOUNDED} lifts the bound"
    )


def _disk_bytes(argument: str) -> int:
    """Return the disk space of the files in a directory, in bytes; 0 if it is not a directory. Holes in a file do not
    count.
    """
    return sum(islice(_sizes(Path(argument.rpartition("=")[2])), _MOST_FILES))


def _sizes(path: Path) -> Iterator[int]:
    for directory, _, files in os.walk(path):
        for file in files:
            try:
                yield (Path(directory) / file).lstat().st_blocks * 512
            except OSError:  # it has gone
                continue
