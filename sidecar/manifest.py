"""The manifest: what was asked, with what, by which clock; written when a run starts and again when it ends."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sidecar.clock import Clock, iso_ms
from sidecar.version import VERSION

SCHEMA_VERSION = "1.0"
DRAFT = "draft-gaikwad-llm-benchmarking-methodology-00"
PACKAGES = ("aiohttp", "msgspec", "numpy", "prometheus-client", "pyarrow", "tiktoken")


def new_run_id() -> str:
    """Return an id that sorts by time and does not repeat."""
    return f"{datetime.now(tz=UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def begin(
    run_id: str, *, config: Mapping[str, Any], command: Sequence[str], clock: Clock, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the manifest of a run that starts now; `about` is what was found out about the target."""
    now_ns = clock.now_ns()
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run_id,
        "tool": {"name": "sidelight", "version": VERSION},
        "command": list(command),
        "config": dict(config),
        "started_at": iso_ms(now_ns),
        "started_ns": now_ns,
        "clock": {
            "source": "CLOCK_MONOTONIC, anchored once to CLOCK_REALTIME",
            "offset_ns": clock.offset_ns,
            "anchor_error_ns": clock.error_ns,
            "resolution_ns": max(1, round(time.get_clock_info("monotonic").resolution * 1e9)),
        },
        "host": {
            "name": socket.gethostname(),
            "system": platform.platform(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "packages": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        },
        **about,
    }


def end(manifest: Mapping[str, Any], *, status: str, clock: Clock, reason: str | None = None) -> dict[str, Any]:
    """Return the manifest with how and when the run ended: `complete`, `interrupted` or `crashed` with a reason."""
    now_ns = clock.now_ns()
    closing: dict[str, Any] = {"status": status, "ended_at": iso_ms(now_ns), "ended_ns": now_ns}
    return {**manifest, **closing, **({"reason": reason} if reason else {})}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
