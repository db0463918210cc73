"""The scraping process: `python -m scraper.worker`, obeying JSON lines on its standard input.

The first line is a `Spec`; `{"cmd":"settle","seconds":x}` scrapes on for that time, then once more, and says `settled`;
`{"cmd":"exit"}` or the end of input scrapes a last time and ends. It only stamps and appends; nothing is parsed here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import struct
import sys
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp
import msgspec

from scraper.endpoint import LIMIT_BYTES, Limits, open_session, scrape
from scraper.series import ScrapeRecord

_ENCODER = msgspec.msgpack.Encoder()
MIN_INTERVAL_S = 0.01  # a scrape takes milliseconds on both sides
MAX_INTERVAL_S = 86_400.0
_LINE_LIMIT = 4 * 1024 * 1024  # a spec of many targets is one line


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What to scrape: resolved URLs, the tick in seconds, the run's clock offset, and the log to append to."""

    targets: list[str]
    interval_s: float
    clock_offset_ns: int
    out: str
    timeout_s: float = 5.0
    limit_bytes: int = LIMIT_BYTES
    headers: dict[str, str] = {}


class Log:
    """An append-only file of framed records: length and CRC-32 (little endian), then the MessagePack of the record."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append(self, record: ScrapeRecord) -> None:
        """Write one record; what was written survives the death of this process."""
        payload = _ENCODER.encode(record)
        frame = memoryview(struct.pack("<II", len(payload), zlib.crc32(payload)) + payload)
        while frame:
            frame = frame[os.write(self._fd, frame) :]

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class Target:
    """One URL, scraped by one task at a time."""

    def __init__(self, url: str, spec: Spec, session: aiohttp.ClientSession, log: Log) -> None:
        self.ok = 0
        self.failed = 0
        self._url = url
        self._spec = spec
        self._session = session
        self._log = log
        self._busy = asyncio.Lock()

    async def scrape(self, due_ns: int) -> None:
        """Scrape once and append the outcome, after a scrape that may be under way."""
        limits = Limits(timeout_s=self._spec.timeout_s, body_bytes=self._spec.limit_bytes)
        offset = self._spec.clock_offset_ns
        async with self._busy:
            record = await scrape(self._session, self._url, due_ns=due_ns, clock_offset_ns=offset, limits=limits)
            self._log.append(record)
        if record.error:
            self.failed += 1
        else:
            self.ok += 1

    async def tick(self, stopping: asyncio.Event) -> None:
        """Scrape at every tick of the clock until told to stop; a tick that finds a scrape under way is skipped."""
        interval_ns = round(self._spec.interval_s * 1e9)
        due_ns = 0
        while not stopping.is_set():
            now_ns = time.monotonic_ns() + self._spec.clock_offset_ns
            due_ns = next_tick(max(now_ns, due_ns), interval_ns)
            with suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), (due_ns - now_ns) / 1e9)
            if not stopping.is_set():
                await self.scrape(due_ns)


def next_tick(now_ns: int, interval_ns: int) -> int:
    """Return the first multiple of the interval after `now_ns` on the Unix clock: all targets share their ticks."""
    return (now_ns // interval_ns + 1) * interval_ns


async def run(spec: Spec, commands: asyncio.StreamReader) -> None:
    """Scrape every target until told to exit."""
    log = Log(spec.out)
    stopping = asyncio.Event()
    try:
        async with open_session(spec.headers) as session:
            targets = [Target(url, spec, session, log) for url in spec.targets]
            await _scrape_all(targets, spec)
            _say({"event": "ready", **_counts(targets)})
            async with asyncio.TaskGroup() as group:
                for target in targets:
                    group.create_task(target.tick(stopping))
                settled = await _obey(targets, spec, commands)
                stopping.set()
            if not settled:
                await _scrape_all(targets, spec)
    finally:
        log.close()


async def _obey(targets: list[Target], spec: Spec, commands: asyncio.StreamReader) -> bool:
    """Follow commands until `exit` or the end of input; true if the last scrape of each target is already written."""
    settled = False
    while True:
        command = await _read_line(commands)
        if command is None or command.get("cmd") == "exit":
            return settled and command is not None
        seconds = command.get("seconds", 0)
        if command.get("cmd") == "settle" and isinstance(seconds, int | float) and 0 <= seconds <= 3600:
            await asyncio.sleep(seconds)
            await _scrape_all(targets, spec)
            settled = True
            _say({"event": "settled", **_counts(targets)})
        else:
            _say({"event": "error", "message": f"unknown command {json.dumps(command)}"})


async def _scrape_all(targets: list[Target], spec: Spec) -> None:
    due_ns = time.monotonic_ns() + spec.clock_offset_ns
    async with asyncio.TaskGroup() as group:
        for target in targets:
            group.create_task(target.scrape(due_ns))


def _counts(targets: list[Target]) -> dict[str, int]:
    return {"ok": sum(t.ok for t in targets), "failed": sum(t.failed for t in targets)}


def _say(event: Mapping[str, Any]) -> None:
    with suppress(BrokenPipeError):  # the conductor died: the end of our input says so as well
        print(json.dumps(event), flush=True)


async def _read_line(commands: asyncio.StreamReader) -> dict[str, Any] | None:
    """Read one JSON object; nothing at the end of input. A line that is none is answered and passed over."""
    while line := await commands.readline():
        try:
            return msgspec.json.decode(line, type=dict[str, Any])
        except msgspec.DecodeError as error:
            _say({"event": "error", "message": f"not a JSON object: {error}"})
    return None


def _check(line: bytes) -> Spec:
    spec = msgspec.json.decode(line, type=Spec)
    if not MIN_INTERVAL_S <= spec.interval_s <= MAX_INTERVAL_S:
        raise ValueError(f"interval_s must be {MIN_INTERVAL_S:g} to {MAX_INTERVAL_S:g}, not {spec.interval_s:g}")
    if not spec.timeout_s > 0:
        raise ValueError("timeout_s must be above 0")
    return spec


async def _main() -> int:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=_LINE_LIMIT)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    try:
        spec = _check(await commands.readline())
    except ValueError as error:  # msgspec's errors are ValueErrors
        _say({"event": "error", "message": f"unusable spec: {error}"})
        return 2
    code = 0
    try:
        await run(spec, commands)
    except* OSError as group:
        _say({"event": "error", "message": f"cannot write {spec.out}: {group.exceptions[0]}"})
        code = 1
    return code


def main() -> int:
    """Run the worker and return its exit code; the conductor decides what Ctrl-C means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return asyncio.run(_main())


if __name__ == "__main__":
    sys.exit(main())
