"""`python -m sidelight` is `sidelight`."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from collections.abc import Callable
from types import FrameType

from sidelight.sidecar.report import bounded

INTERRUPTED = 130  # recorded.errors.Interrupted's, which is not imported yet
# Imported modules stay: collecting them again and again took a tenth of the time to the first request.
GC_THRESHOLD = 100_000
UNABLE = 3  # SidelightError's exit code
# Of address space. Where there is less, libraries that find no room end the process, or ask for it for ever.
LEAST_BYTES = 512 * 1024**2


def main() -> None:
    """Run the command line; --version alone is answered without loading it.

    SIGTERM and SIGHUP end a command as Ctrl-C does; nohup's ignored SIGHUP stays ignored. While the command line is
    imported there is nothing to end, and an exception would be that of any import: each of them ends the process.
    What is imported above, and by `sidecar` itself, comes before that, and a signal then ends Python with its own code.
    """
    gc.set_threshold(GC_THRESHOLD)
    # None of our matrices is large: OpenBLAS would take 32 MB of address space for each core, and do so twice.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    heeded = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    ]
    for number in heeded:
        signal.signal(number, _leave)
    if sys.argv[1:] == ["--version"]:
        from sidelight.sidecar.version import VERSION  # noqa: PLC0415  a quarter of the time of the rest

        sys.stdout.write(f"{VERSION}\n")
        return
    most_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most_bytes != resource.RLIM_INFINITY and most_bytes < LEAST_BYTES:
        sys.stderr.write(
            f"sidelight: this process may take {most_bytes // 1024**2} MiB of memory (ulimit -v), and needs "
            f"{LEAST_BYTES // 1024**2}: raise the limit\n"
        )
        sys.exit(UNABLE)
    interrupt: Callable[[int, FrameType | None], object] = signal.default_int_handler
    if sys.argv[1:2] == ["report"] and bounded.UNBOUNDED not in sys.argv:
        bounded.continue_in_child(sys.argv[2:], heeded)
        interrupt = bounded.interrupt_once
    from sidelight.sidecar.cli.app import main as cli  # noqa: PLC0415  as above

    for number in heeded:
        signal.signal(number, interrupt)
    cli()


def _leave(_number: int, _frame: object) -> None:
    os.write(sys.stderr.fileno(), b"sidelight: interrupted before it began\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
