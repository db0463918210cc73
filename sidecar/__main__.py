"""`python -m sidecar` is `sidelight`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; the version alone is told without loading it."""
    if sys.argv[1:] == ["--version"]:
        from sidecar.version import VERSION  # noqa: PLC0415  a quarter of the time of the rest

        sys.stdout.write(f"{VERSION}\n")
        return
    from sidecar.cli import main as cli  # noqa: PLC0415  as above

    cli()


if __name__ == "__main__":
    main()
