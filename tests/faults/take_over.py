"""kill -9 of a receiver between any two writes of a take-over: it passes on what a dead watch has left, and who follows
it goes on there, the next receiver of its watch or that of another one.

Each export reaches the collector, but for one that cannot be read, and is counted once, as forwarded or as dropped. The
one that was on its way at the kill, and no other, comes twice: the collector had answered, and no cursor said so yet.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer
from children import piped
from faults.cases import NotReachedError
from faults.injected.sitecustomize import Fault, environment
from odd_exports import odd_export
from waiting import BOUND_S

from scraper.spans.backlog import Backlog, final_counts, left_beside
from scraper.spans.log import Counts, ExportRecord, SpanLog, StateRecord, compressed, read_log
from scraper.spans.spec import TRACES

MODULE = "scraper.worker.spans"
FOLLOWERS = ("receiver", "watch")
LIMIT_BYTES = 1 << 20
# What was left, in its order: spans that the collector takes, spans that it refuses, some that are no export, and logs.
TAKEN, REFUSED = (odd_export(1, trace_id=bytes([number]) * 16) for number in (1, 2))
UNREADABLE, LOGS = b"not zlib", b"\x0a\x02\x12\x00"
FORWARDED, DROPPED = 1, 2  # of spans
# To both cursors as they are opened, then to each for each export, and as nothing is left to that of the dead watch.
WRITES = 2 + 2 * 4 + 1
CASES = [(follower, nth) for nth in range(1, WRITES + 1) for follower in FOLLOWERS]
BEFORE_COUNTED = (3, 5, 9)  # the first for each export that was sent


def leave(raw: Path, url: str) -> None:
    """Leave exports as a watch that was killed does."""
    raw.mkdir(parents=True)
    log, now_ns = raw / "spans-000000.log", time.time_ns()
    backlog = Backlog.resume(log, url, most_bytes=LIMIT_BYTES, most_other_bytes=LIMIT_BYTES)
    with closing(SpanLog(log)) as written:
        written.append(StateRecord(at_ns=now_ns, state="started", counts=Counts()))
        for bytes_of_it in (compressed(TAKEN), compressed(REFUSED), UNREADABLE):
            written.append(ExportRecord(received_ns=now_ns, via="grpc", packed=bytes_of_it))
            backlog.spans.add(TRACES, len(bytes_of_it))
    backlog.put("logs", compressed(LOGS), now_ns)
    backlog.close()


@asynccontextmanager
async def collector(begins: asyncio.Event) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Answer exports, once it begins; give the URL, and what was sent."""
    sent: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        sent.append(body := await request.read())
        await begins.wait()
        return web.Response(status=400 if body == REFUSED else 200)

    app = web.Application()
    app.router.add_post("/v1/{signal}", take)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}", sent


async def receive(log: Path, url: str, begins: asyncio.Event, **variables: str) -> int:
    """Run a receiver until nothing waits beside its log, and end it, or until it dies; return its code."""
    log.parent.mkdir(parents=True, exist_ok=True)
    receiver: dict[str, Any] = {"grpc": "127.0.0.1:0", "http": "", "forward": url}
    receiver |= {"clock_offset_ns": time.time_ns() - time.monotonic_ns()}
    receiver |= {"forward_keep": {"seconds": 3600, "most_bytes": LIMIT_BYTES}}
    spec = {"out": str(log), "stderr": str(log.with_suffix(".stderr")), "receiver": receiver}
    async with piped("-m", MODULE, **variables) as process, asyncio.timeout(BOUND_S):
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(spec).encode() + b"\n")
        while line := await process.stdout.readline():
            if json.loads(line)["event"] == "ready":
                break
        begins.set()
        while left_beside(log) and process.returncode is None:  # noqa: ASYNC110  another process
            await asyncio.sleep(0.01)
        process.stdin.close()
        return await process.wait()


def counted(raws: list[Path]) -> tuple[int, int]:
    """Return how many exports of spans the receivers of these folders have forwarded, and dropped."""
    forwarded = dropped = 0
    for raw in raws:
        records = [record for log in sorted(raw.glob("spans-*.log")) for record in read_log(log)]
        counts, _ = final_counts(raw, [record for record in records if isinstance(record, StateRecord)])
        if counts is not None:
            forwarded, dropped = forwarded + counts.forwarded, dropped + counts.forward_dropped
    return forwarded, dropped


async def killed(place: Path, follower: str, nth: int) -> str:
    """Kill a receiver before its n-th write to a cursor, let another follow, and say what is wrong with what came of
    it.
    """
    begins, dead, taker = asyncio.Event(), place / "dead/raw", place / "taker/raw"
    async with collector(begins) as (url, sent):
        leave(dead, url)
        fault = Fault(under=str(place), process=MODULE, call="pwrite", nth=nth, error="KILL", lasting=False)
        fault.marker.unlink(missing_ok=True)  # of the case before
        if await receive(taker / "spans-000000.log", url, begins, **environment(fault)) == 0:
            raise NotReachedError
        follows = taker / "spans-000001.log" if follower == "receiver" else place / "next/raw/spans-000000.log"
        if code := await receive(follows, url, begins):
            return f"the receiver that follows ends with {code}"
    times, again = Counter(sent), int(nth in BEFORE_COUNTED)
    if not all(times[body] for body in (TAKEN, REFUSED, LOGS)) or len(sent) != len(times) + again:
        return f"of 3 exports, of which {again} was on its way, these were sent: {sent}"
    if (counts := counted([dead, taker, place / "next/raw"])) != (FORWARDED, DROPPED):
        return f"{counts[0]} exports are counted as forwarded, {counts[1]} as dropped, {len(sent)} were sent"
    return ""
