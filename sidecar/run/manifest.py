"""The manifest: the options, versions and clock of a run. It is written when a run starts and again when it ends."""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import socket
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import to_builtins as builtins

from sidelight.recorded.directory import FORMAT, MANIFEST, RAW, create, log_ends, write_json
from sidelight.recorded.errors import CannotWrite, Interrupted, SidelightError, unwritten
from sidelight.recorded.syncing import LogSync
from sidelight.rundir.clock import AnchoredClock, iso_ms, utc_now
from sidelight.sidecar.options.config import as_recorded
from sidelight.sidecar.version import VERSION

if TYPE_CHECKING:
    from sidelight.sidecar.options.load import RunOptions
    from sidelight.sidecar.options.watch import ScrapeOptions, WatchOptions

PACKAGES = ("aiohttp", "msgspec", "numpy", "prometheus-client", "pyarrow", "tiktoken")


@asynccontextmanager
async def recorded(
    options: RunOptions | ScrapeOptions | WatchOptions,
    out: Path | None,
    command: Sequence[str],
    clock: AnchoredClock,
    stop: asyncio.Event,
    *,
    about: Mapping[str, Any],
    **decided: object,
) -> AsyncIterator[tuple[str, Path]]:
    """Create a run directory, and yield the run's id and the directory. Its manifest is written now and at the end,
    then with time and status: `complete`, `interrupted`, or `crashed` with a reason. Meanwhile its logs are synced.

    `about` describes the target, `decided` are options that were not given. Raises as `create`.
    """
    run_id = f"{utc_now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"  # sorts by time, and does not repeat
    path = out or Path("runs") / run_id
    now_ns = clock.now_ns()
    manifest = {
        "schema_version": FORMAT,
        "run_id": run_id,
        "tool": {"name": "sidelight", "version": VERSION},
        "command": list(command),
        "config": {**as_recorded(options), "out": str(path), **decided},
        "started_at": iso_ms(now_ns),
        "started_ns": now_ns,
        **_machine(clock),
        **about,
    }
    create(path)

    def close(status: str, **why: str) -> None:
        now_ns = clock.now_ns()
        ends = {"status": status, "ended_at": iso_ms(now_ns), "ended_ns": now_ns, "logs": builtins(log_ends(path))}
        write_json(path / MANIFEST, manifest | ends | why)

    write_json(path / MANIFEST, manifest)
    try:
        with LogSync(path / RAW):
            yield run_id, path
    except Interrupted:
        pass
    except (asyncio.CancelledError, KeyboardInterrupt):
        close("interrupted")  # a second signal: its sender does not wait for a report
        raise
    except (SidelightError, OSError) as error:
        failed = error if isinstance(error, SidelightError) else unwritten(path, error)
        failed.run_directory = path
        # On a full disk even this may fail; the run then reads as crashed without a reason.
        with suppress(CannotWrite):
            close("crashed", reason=str(failed))
        raise failed from error
    try:
        close("interrupted" if stop.is_set() else "complete")
    except CannotWrite as error:
        error.run_directory = path  # whose results are known all the same
        raise


def _machine(clock: AnchoredClock) -> dict[str, Any]:
    """Return the manifest's facts of the clock and of the host."""
    return {
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
            "packages": {name: version(name) for name in PACKAGES},
        },
    }
