"""`python -m sidecar` is `sidelight`."""

from __future__ import annotations

import gc
import signal
import sys

# Imported modules stay: collecting them again and again took a tenth of the time to the first request.
GC_THRESHOLD = 100_000


def main() -> None:
    """Run the command line; --version alone is answered without loading it.

    SIGTERM and SIGHUP end a command as Ctrl-C does; nohup's ignored SIGHUP stays ignored.
    """
    gc.set_threshold(GC_THRESHOLD)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    if sys.argv[1:] == ["--version"]:
        from sidecar import VERSION  # noqa: PLC0415  a quarter of the time of the rest

        sys.stdout.write(f"{VERSION}\n")
        return
    from sidecar.cli import main as cli  # noqa: PLC0415  as above

    cli()


if __name__ == "__main__":
    main()
