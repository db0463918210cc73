"""Child processes that a test speaks to over pipes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def piped(*arguments: str, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run Python with these arguments and variables, its input and output as pipes; it is gone at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **variables},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # asyncio leaves the pipes of a killed child to the garbage collector


def peak_bytes(pid: int) -> int:
    """Return the most memory that a process has held so far; 0 where the system does not say."""
    status = Path(f"/proc/{pid}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
