"""`sidelight report --untrusted`: the same command in a process with limited memory and time."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from recorded.errors import ConfigurationError

MOST_BYTES = 2 * 1024**3
LEAST_CPU_S = 8  # and a second more for each MB on the disk: of a usual run a fifth of that is enough
OPTION = "--untrusted"
_KILLED_AFTER_S = 2  # where a library does not come back to us
_MOST_FILES = 100_000  # that are counted
# Before the limit: where OpenBLAS gets no memory for what it takes once, it asks for it again and again, for ever.
_FIRST = "import numpy, scipy.linalg; scipy.linalg.inv(numpy.eye(9) @ numpy.eye(9))"


def run_bounded(arguments: Sequence[str], *, most_bytes: int = MOST_BYTES, least_cpu_s: int = LEAST_CPU_S) -> int:
    """Run one of our commands, without this option, under limits on memory and CPU time; return its exit code. The
    address space is limited to `most_bytes`, CPU time to `least_cpu_s` and a second more for each MB of the directories
    in the arguments.

    Raises ConfigurationError where it ends by a signal, as a library does that gets no memory.
    """
    others = [argument for argument in arguments if argument != OPTION]
    cpu_s = least_cpu_s + sum(_disk_bytes(argument) for argument in others) // 10**6
    bounds = f"from sidecar.cli import untrusted; untrusted.bound_this_process({most_bytes}, {cpu_s})"
    paths = f"import sys; sys.path += {_import_paths()}"
    program = f"{paths}; {_FIRST}; {bounds}; from sidecar.cli import main; main(sys.argv[1:])"
    # A thread a core, each with room of its own, would take the more of it the more cores there are.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = subprocess.run([sys.executable, "-I", "-c", program, *others], check=False, env=environment).returncode
    if code in (-signal.SIGKILL, -signal.SIGXCPU):
        raise ConfigurationError(_too_long(cpu_s))
    if code < 0:
        raise ConfigurationError(
            f"report {OPTION}: evaluating took more than {most_bytes // 1024**2} MiB of memory, or broke a library; no "
            "run of a usual size writes such a directory"
        )
    return code


def bound_this_process(most_bytes: int, cpu_s: int) -> None:
    """Limit the memory and CPU time of this process. Beyond the time, ConfigurationError is raised wherever it is then,
    each second again, and soon the process is killed.
    """

    def end(*_: object) -> None:
        raise ConfigurationError(_too_long(cpu_s))

    signal.signal(signal.SIGXCPU, end)
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + _KILLED_AFTER_S))
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))


def _import_paths() -> list[str]:
    """Return this process's import paths for a child with -I: without the current directory, unless we lie there."""
    ours, current = Path(__file__).parents[2], Path.cwd()
    return [path for path in sys.path if path and (Path(path).resolve() != current or current == ours)]


def _too_long(cpu_s: int) -> str:
    return (
        f"report {OPTION}: evaluating took more than {cpu_s} s of the processor's time, and a run of this size takes a "
        f"fraction of that; without {OPTION} there is no bound"
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
