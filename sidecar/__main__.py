"""`python -m sidecar` is `sidelight`."""

from __future__ import annotations

from sidecar.cli import main

if __name__ == "__main__":
    main()
