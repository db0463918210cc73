"""`python -m sidelight` is `sidelight`."""

from __future__ import annotations

from sidelight.sidecar.__main__ import main

if __name__ == "__main__":
    main()
