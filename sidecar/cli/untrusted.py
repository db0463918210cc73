"""`sidelight report --untrusted`: the same command in a process that may only take so much memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from sidecar.errors import ConfigurationError

MOST_BYTES = 2 * 1024**3
OPTION = "--untrusted"
# Before the limit: where OpenBLAS gets no memory for what it takes once, it asks for it again and again, for ever.
_FIRST = "import numpy, scipy.linalg; scipy.linalg.inv(numpy.eye(9) @ numpy.eye(9))"


def run_bounded(arguments: Sequence[str], most_bytes: int = MOST_BYTES) -> int:
    """Run a command of ours, but for this option, with at most so many bytes of address space; return its exit code.

    Raises ConfigurationError where it ends by a signal, as a library does that gets no memory.
    """
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({most_bytes}, {most_bytes}))"
    program = f"{_FIRST}; {limit}; import sys; from sidecar.cli import main; main(sys.argv[1:])"
    others = [argument for argument in arguments if argument != OPTION]
    # A thread a core, each with room of its own, would take the more of it the more cores there are.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    code = subprocess.run([sys.executable, "-c", program, *others], check=False, env=environment).returncode
    if code < 0:
        raise ConfigurationError(
            f"report {OPTION}: evaluating took more than {most_bytes // 1024**2} MiB of memory, or broke a library; no "
            "run of a usual size writes such a directory"
        )
    return code
