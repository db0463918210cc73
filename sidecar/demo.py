"""The demonstration: the simulated engine in a process of its own, loaded, scraped and traced like any other."""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from sidecar.options.config import check
from sidecar.options.load import RunOptions
from sidecar.processes import START_TIMEOUT_S, Child
from sidecar.progress import Progress
from sidecar.run import session

LOOPBACK = "127.0.0.1"


async def demo(options: RunOptions, *, engine: str, command: Sequence[str], progress: Progress) -> Path:
    """Run a session against a simulated engine that sends its spans here. Returns the run directory."""
    options = replace(options, otlp_listen=free_pair())
    check(replace(options, url=("http://127.0.0.1",)))  # what is wrong with it is said before an engine is started
    arguments = ["simulator", "--engine", engine, "--seed", str(options.seed), "--exit-on-eof"]
    arguments += ["--otlp-endpoint", f"http://{options.otlp_listen}"]
    with TemporaryDirectory(prefix="sidelight-") as scratch:
        stderr = Path(scratch) / "simulator.stderr"
        async with Child("simulated engine", arguments, stderr=stderr) as simulated:
            ready = await simulated.expect("ready", timeout_s=START_TIMEOUT_S)
            progress.stage(f"simulated {engine} engine at {ready['url']}")
            return await session.run(
                check(replace(options, url=(str(ready["url"]),))), command=command, progress=progress
            )


def free_pair() -> str:
    """Return a HOST:PORT of the loopback that is free at this moment, as is PORT+1.

    Below the ports that systems give to outgoing connections: one of those may take it before we listen.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server((LOOPBACK, port)), socket.create_server((LOOPBACK, port + 1)):
            return f"{LOOPBACK}:{port}"
