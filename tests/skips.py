"""Which tests continuous integration may skip: those that need another machine than the one it has.

Everything else that a test needs (Prometheus, OpenSSL, the recordings of `../shared`, a git clone) is there in
continuous integration, so a skip means that the set-up failed and something went untested.
"""

from __future__ import annotations

import os
import re

# Reasons of skips that depend on the kernel, the devices or the release of a machine, each with what it lacks or has.
OF_THE_MACHINE = (
    r"this kernel gives no receive stamps",  # SO_TIMESTAMPNS of sandboxed kernels
    r"this kernel tells no steal time",
    r"adjtimex was refused \(errno \d+\)",  # some containers
    r"chronyc is here",
    r"ray is not installed",  # 200 MB, which only a load from many machines needs
    r"this machine has an NVIDIA driver",
    r"this victoria-metrics is too old to take OTLP",  # Debian 12's
)


def in_ci() -> bool:
    """Return whether these tests decide what lands: `CI` is set, as `.ci/run` and hosted runners do."""
    return os.environ.get("CI", "").lower() not in {"", "0", "false"}


def is_expected(reason: str) -> bool:
    """Return whether a test may be skipped for this reason where nothing may go untested."""
    return any(re.fullmatch(pattern, reason) for pattern in OF_THE_MACHINE)
