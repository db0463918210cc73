"""Scrape many targets with the real worker process, and print what that cost it.

    python benchmarks/scrape.py [--targets 200] [--seconds 20] [--interval 1] [--engines 3] [--recording FILE --every N]

One small server process answers for all targets, on another core than the worker's. A target's pages are twenty of a
real vLLM under load, with two more engines beside the first (115 kB), one after another from a place of its own: every
scrape finds other numbers, and now and then a new layout. They were recorded five seconds apart; of another recording
(JSON lines) every Nth page is taken. CPU time is the worker's alone, parsing and writing included; what it spends
before all targets have answered once (imports, first layouts) is apart. A scrape is late by what its request left after
its tick and the offset of its target, which spreads them over the interval.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from parse import RECORDING, pages, with_engines

from sidelight.rundir.frames import read_frames
from sidelight.scraper.series.log import LogReader
from sidelight.scraper.targets.target import offset_ns

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Serve, scrape, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--targets", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--interval", type=float, default=1.0)
    parser.add_argument("--recording", type=Path, default=RECORDING)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(_serve(_pages(options)) if options.serve else _measure(options))


def _pages(options: argparse.Namespace) -> list[bytes]:
    return [
        with_engines(page, options.engines).encode()
        for page in islice(pages(options.recording), 0, None, options.every)
    ]


async def _serve(pages: list[bytes]) -> None:
    """Answer every GET of a path with the page after the one that it got before; print the port."""
    replies = [
        b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=1.0.0; charset=utf-8\r\nContent-Length: %d\r\n\r\n%s"
        % (len(page), page)
        for page in pages
    ]
    asked: dict[bytes, int] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
                number = asked[path] = asked.get(path, zlib.crc32(path)) + 1
                writer.write(replies[number % len(replies)])
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


async def _measure(options: argparse.Namespace) -> None:
    targets, interval_s = options.targets, options.interval
    served = _pages(options)[-1]
    samples = sum(not line.startswith(b"#") for line in served.splitlines())
    server = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--serve", "--recording", options.recording, "--every", str(options.every),
        "--engines", str(options.engines), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert server.stdout is not None
    port = int(await server.stdout.readline())
    with tempfile.TemporaryDirectory(prefix="sidelight-bench-") as scratch:
        log = Path(scratch) / "scrapes.log"
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "sidelight.scraper.worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        with suppress(OSError):  # one core alone
            os.sched_setaffinity(worker.pid, {0})
            os.sched_setaffinity(server.pid, {1})
        await _send(
            worker,
            targets=[f"http://127.0.0.1:{port}/{number}/metrics" for number in range(targets)],
            interval_s=interval_s,
            clock_offset_ns=time.time_ns() - time.monotonic_ns(),
            out=str(log),
        )
        ready = await _event(worker, "ready")
        cpu_s, begun, begun_ns = _cpu_s(worker.pid), time.monotonic(), time.time_ns()
        starting_s, layouts_bytes = cpu_s, log.stat().st_size
        await asyncio.sleep(options.seconds)
        used_s, elapsed_s = _cpu_s(worker.pid) - cpu_s, time.monotonic() - begun
        scraped_bytes = log.stat().st_size - layouts_bytes
        await _send(worker, cmd="settle", seconds=0)
        settled = await _event(worker, "settled")
        peak_mib = _peak_mib(worker.pid)
        await _send(worker, cmd="exit")
        await worker.wait()
        late_ms = np.array(list(_late_ms(log, begun_ns, round(interval_s * 1e9))))
    server.kill()
    await server.wait()
    done = settled["ok"] - ready["ok"] - targets  # without the scrape that settled
    print(f"{targets} targets of {len(served) / 1e3:.0f} kB ({samples} samples) every {interval_s:g} s")
    missed = settled["skipped"] - ready["skipped"]
    print(f"{elapsed_s:.1f} s: {done} scrapes, {settled['failed']} failed, {missed} ticks missed")
    print(
        f"CPU of the worker: {used_s:.2f} s, {used_s / elapsed_s:.1%} of a core, {1e3 * used_s / done:.2f} ms a scrape"
    )
    p50, p99, most = np.percentile(late_ms, (50, 99, 100))
    print(f"late by {p50:.1f} ms at p50, {p99:.1f} at p99, {most:.1f} at most; load average {os.getloadavg()[0]:.1f}")
    print(f"before that, until all had answered once: {starting_s:.2f} s and {ready['skipped']} ticks missed")
    print(f"on disk: {scraped_bytes / done / samples:.2f} bytes a sample; layouts and first rows {layouts_bytes} bytes")
    print(f"peak memory of the worker: {peak_mib:.0f} MiB")


def _late_ms(log: Path, since_ns: int, interval_ns: int) -> Iterator[float]:
    """Yield how late each scrape of a log was, of those since a moment."""
    reader = LogReader()
    for payload in read_frames(log):
        scrape = reader.take(payload)
        if scrape is not None and scrape.tick_ns >= since_ns:
            yield (scrape.request_ns - scrape.tick_ns - offset_ns(scrape.url, interval_ns)) / 1e6


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


async def _send(worker: asyncio.subprocess.Process, **command: Any) -> None:
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(command).encode() + b"\n")
    await worker.stdin.drain()


async def _event(worker: asyncio.subprocess.Process, name: str) -> dict[str, Any]:
    assert worker.stdout is not None
    while line := await worker.stdout.readline():
        event: dict[str, Any] = json.loads(line)
        if event["event"] == name:
            return event
    raise RuntimeError(f"the worker ended before it was {name}")


if __name__ == "__main__":
    main()
