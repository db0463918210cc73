"""The processes that scrape and receive spans, as their conductor starts them, for the tests of what they do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from children import piped
from waiting import BOUND_S

from sidelight.scraper.series.log import FailureRecord, ScrapeRow, read_log


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

    def records(self) -> list[ScrapeRow | FailureRecord]:
        return list(read_log(self.log))


@asynccontextmanager
async def receiving(path: Path, *, prelude: str = "", **spec: Any) -> AsyncIterator[Worker]:
    """Start one that receives spans at free ports by a clock that is right, unless the specification has others."""
    code = f"{prelude}\nimport runpy\nrunpy.run_module('sidelight.scraper.worker.spans', run_name='__main__')"
    addresses = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0"}
    clock = {"clock_offset_ns": time.time_ns() - time.monotonic_ns()}
    async with piped("-c", code) as process:
        worker = Worker(process, path / "spans-0.log")
        files = {"out": str(worker.log), "stderr": str(path / "receiver.stderr")}
        worker.send(files | spec | {"receiver": addresses | clock | spec.get("receiver", {})})
        yield worker


@asynccontextmanager
async def started(path: Path, *, prelude: str = "", **spec: Any) -> AsyncIterator[Worker]:
    """Start it, after a few lines of Python where there are any, and send its specification."""
    code = f"{prelude}\nimport runpy\nrunpy.run_module('sidelight.scraper.worker', run_name='__main__')"
    async with piped("-c", code) as process:
        worker = Worker(process, path / "scrapes-0.log")
        worker.send({"interval_s": 0.02, "clock_offset_ns": 10**18, "out": str(worker.log)} | spec)
        yield worker
