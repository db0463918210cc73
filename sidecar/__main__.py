"""`python -m sidecar` is `sidelight`."""

from __future__ import annotations

import gc
import os
import signal
import sys
from typing import NoReturn

INTERRUPTED = 130  # sidecar.errors.Interrupted's, which is not imported yet
# Imported modules stay: collecting them again and again took a tenth of the time to the first request.
GC_THRESHOLD = 100_000


def main() -> None:
    """Run the command line; --version alone is answered without loading it.

    SIGTERM and SIGHUP end a command as Ctrl-C does; nohup's ignored SIGHUP stays ignored. While the command line is
    imported there is nothing to end, and an exception would be that of any import: each of them ends the process.
    """
    gc.set_threshold(GC_THRESHOLD)
    heeded = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    ]
    for number in heeded:
        signal.signal(number, _leave)
    if sys.argv[1:] == ["--version"]:
        from sidecar import VERSION  # noqa: PLC0415  a quarter of the time of the rest

        sys.stdout.write(f"{VERSION}\n")
        return
    from sidecar.cli import main as cli  # noqa: PLC0415  as above

    for number in heeded:
        signal.signal(number, signal.default_int_handler)
    cli()


def _leave(_number: int, _frame: object) -> NoReturn:
    os.write(sys.stderr.fileno(), b"sidelight: interrupted before it began\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
