"""One process, one good target and bad ones that hang, flood or break: each is named, the good one never notices."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

from aiohttp import web
from children import peak_bytes
from scraper_process import started
from served import TEXT, Serve, answer
from waiting import BOUND_S

from sidelight.scraper.series.log import FailureRecord, ScrapeRow
from sidelight.scraper.targets.target import offset_ns

INTERVAL_NS = 250_000_000
TIMEOUT_S = 3.0
TICKS = 12
TURNS = ("stale", "fresh")
MIB = 1024 * 1024
# What each target does, and what is said of it.
REASONS = {
    "/torn": "cut off: the connection ended before the page did",
    "/protobuf": "speaks something else: protobuf, though text was asked for",
    "/silent": "timeout: no complete page within 3 s",
    "/slow": "timeout: no complete page within 3 s",
    "/endless": "too large: more than 1048576 bytes",
    "/latin": "malformed page: ",
    "/nested": "malformed page: not JSON: ",
}


async def silent(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def slow(request: web.Request) -> web.StreamResponse:
    """Answer a byte at a time, for ever."""
    response = web.StreamResponse(headers={"Content-Type": TEXT})
    await response.prepare(request)
    while True:
        await response.write(b"#")
        await asyncio.sleep(0.01)  # a slow loris is slow


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": TEXT})
    await response.prepare(request)
    while True:
        await response.write(b"x 1\n" * 16_384)


async def torn(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": TEXT, "Content-Length": "100"})
    await response.prepare(request)
    await response.write(b"x 1\n")
    request.transport.close()
    return response


@asynccontextmanager
async def targets(serve: Serve, enough: asyncio.Event) -> AsyncIterator[dict[str, str]]:
    """Serve them all; the answer is each one's URL. One is a port at which nothing listens.

    The event says that the good one was asked TICKS times.
    """
    hostile = {
        "/protobuf": answer(b"\xff" * 64, "application/vnd.google.protobuf; encoding=delimited"),
        "/latin": answer(b'["\xe9"]'),
        "/nested": answer(b"[" * 100_000, "application/json"),
        "/silent": silent,
        "/slow": slow,
        "/endless": endless,
        "/torn": torn,
    }
    count = iter(range(10**9))

    async def good(_: web.Request) -> web.Response:
        number = next(count)
        if number == TICKS:
            enough.set()
        return web.Response(text=f"# TYPE x counter\nx {number}\n")

    base = await serve({**hostile, "/good": good})
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and never listens
        closed = f"http://127.0.0.1:{reserved.getsockname()[1]}/closed"
        yield {**{name: base + name for name in (*hostile, "/good")}, "/closed": closed}


async def test_bad_targets_are_named_and_the_good_one_is_unharmed(serve: Serve, tmp_path: Path):
    """Each has its reason in the log; the good one waits for none that hangs; memory stays that of a few pages."""
    enough = asyncio.Event()
    async with targets(serve, enough) as urls:
        spec = {"interval_s": INTERVAL_NS / 1e9, "timeout_s": TIMEOUT_S, "limit_bytes": MIB}
        spec["clock_offset_ns"] = time.time_ns() - time.monotonic_ns()
        async with started(tmp_path, targets=list(urls.values()), **spec) as worker:
            await worker.event("ready", over=TURNS)
            begun_bytes = peak_bytes(worker.process.pid)  # each page was read once
            await asyncio.wait_for(enough.wait(), BOUND_S)
            worker.send({"cmd": "settle", "seconds": 0})
            settled = await worker.event("settled", over=TURNS)
            ended_bytes = peak_bytes(worker.process.pid)
            assert 0 == await worker.ended()
        good, closed = urls["/good"], urls["/closed"]
        expected = {urls[name]: reason for name, reason in REASONS.items()} | {closed: "connect: Connection refused"}
    records = {url: [record for record in worker.records() if record.url == url] for url in urls.values()}
    for url, reason in expected.items():
        said = {record.error if isinstance(record, FailureRecord) else "a page" for record in records[url]}
        assert all(error.startswith(reason) for error in said), (url, said)
        assert len(records[url]) >= 2  # the first and the settled scrape always try
    rows = records[good]
    assert {ScrapeRow} == {type(row) for row in rows}
    gaps_ns = [later.tick_ns - row.tick_ns for row, later in pairwise(rows)]
    assert {0} == {gap_ns % INTERVAL_NS for gap_ns in gaps_ns}
    assert INTERVAL_NS <= min(gaps_ns)
    # At its ticks, while the first scrapes of those that hang were under way.
    hung = [records[urls[name]][0] for name in ("/silent", "/slow")]
    assert any(
        stuck.request_ns < row.request_ns <= row.response_ns < stuck.response_ns for stuck in hung for row in rows[1:-1]
    )
    early = [row for row in rows if row.request_ns < row.tick_ns + offset_ns(good, INTERVAL_NS)]
    assert len(early) <= 2  # the first and the settled scrape come when they are asked for
    assert list(range(len(rows))) == [int(row.values[0]) for row in rows]
    assert len(expected) * 2 <= settled["failed"] == sum(len(records[url]) for url in expected)
    assert begun_bytes < 200 * MIB
    assert ended_bytes - begun_bytes < 32 * MIB
