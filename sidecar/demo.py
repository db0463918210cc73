"""The demonstration: the simulated engine in a process of its own, loaded and scraped like any other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from sidecar import session
from sidecar.config import check
from sidecar.load_options import RunOptions
from sidecar.processes import Child
from sidecar.progress import Progress

READY_TIMEOUT_S = 30.0


async def demo(options: RunOptions, *, engine: str, command: Sequence[str], progress: Progress) -> Path:
    """Run a session against a simulated engine. Returns the run directory."""
    check(replace(options, url=("http://127.0.0.1",)))  # what is wrong with it is said before an engine is started
    arguments = ["simulator", "--engine", engine, "--seed", str(options.seed), "--exit-on-eof"]
    with TemporaryDirectory(prefix="sidelight-") as scratch:
        stderr = Path(scratch) / "simulator.stderr"
        async with Child("simulated engine", arguments, stderr=stderr) as simulated:
            ready = await simulated.expect("ready", timeout_s=READY_TIMEOUT_S)
            progress.stage(f"simulated {engine} engine at {ready['url']}")
            return await session.run(
                check(replace(options, url=(str(ready["url"]),))), command=command, progress=progress
            )
