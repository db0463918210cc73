"""The scraping process as its conductor starts it, for the tests of what it does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from children import piped
from waiting import BOUND_S

from scraper.series.log import FailureRecord, Row, read_log


class Worker:
    """The process, its events and its log."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process = process
        self.log = log

    def send(self, command: dict[str, Any] | str) -> None:
        assert self.process.stdin is not None
        text = command if isinstance(command, str) else json.dumps(command)
        self.process.stdin.write(text.encode() + b"\n")

    async def event(self, name: str, *, over: Container[str] = ()) -> dict[str, Any]:
        """The next event that is not passed over, which must be this one."""
        assert self.process.stdout is not None
        while True:
            event: dict[str, Any] = json.loads(await asyncio.wait_for(self.process.stdout.readline(), BOUND_S))
            said = event.pop("event")
            if said not in over:
                assert name == said, event
                return event

    async def ended(self) -> int:
        """Its exit code, after the end of its input at the latest."""
        self.send({"cmd": "exit"})
        return await asyncio.wait_for(self.process.wait(), BOUND_S)

    def records(self) -> list[Row | FailureRecord]:
        return list(read_log(self.log))


@asynccontextmanager
async def started(path: Path, *, prelude: str = "", **spec: Any) -> AsyncIterator[Worker]:
    """Start it, after a few lines of Python where there are any, and send its specification."""
    code = f"{prelude}\nimport runpy\nrunpy.run_module('scraper.worker', run_name='__main__')"
    async with piped("-c", code) as process:
        worker = Worker(process, path / "scrapes-0.log")
        worker.send({"interval_s": 0.02, "clock_offset_ns": 10**18, "out": str(worker.log)} | spec)
        yield worker
