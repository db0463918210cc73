"""The scraping process at TensorRT-LLM's `/perf_metrics`, which each reading empties, and the clock beside it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from aiohttp import web
from scraper_process import started
from served import Serve, answer
from waiting import BOUND_S

from sidelight.scraper.perf_metrics import ReplyRecord, read_log, timings

TIMES = {"arrival_time": 1.0, "first_scheduled_time": 2.0, "first_token_time": 3.0, "last_token_time": 4.0}
ITEM = {"request_id": 1, "perf_metrics": {"timing_metrics": TIMES}}


async def steady_clock(_: web.Request) -> web.Response:
    now_s = time.monotonic()
    return web.json_response({"receive_ts": now_s, "transmit_ts": now_s})


def replies(path: Path) -> list[ReplyRecord]:
    return list(read_log(path / "timings-0.log"))


async def test_each_record_is_kept_once_and_the_clock_is_read_at_both_ends(serve: Serve, tmp_path: Path):
    """Records go to a log of their own, raw; a page beside it is scraped as ever; failures are recorded."""
    held: list[list[object]] = [[ITEM], [], [ITEM, ITEM]]
    asked = asyncio.Event()

    async def perf_metrics(_: web.Request) -> web.Response:
        if held:
            return web.json_response(held.pop(0))
        asked.set()
        return web.Response(status=503)

    base = await serve(
        {"/perf_metrics": perf_metrics, "/steady_clock_offset": steady_clock, "/metrics": answer("x 1\n")}
    )
    targets = [f"{base}/metrics", f"{base}/perf_metrics"]
    async with started(tmp_path, targets=targets, timings_out=str(tmp_path / "timings-0.log")) as worker:
        ready = await worker.event("ready")
        assert ready["ok"] >= 2  # each has answered, one perhaps twice
        assert (0, 0) == (ready["failed"], ready["stale"])
        await asyncio.wait_for(asked.wait(), BOUND_S)
        worker.send({"cmd": "settle", "seconds": 0})
        await worker.event("settled", over=("stale",))
        assert 0 == await worker.ended()
    records = replies(tmp_path)
    clocks = [record for record in records if record.url.endswith("/steady_clock_offset")]
    assert 2 == len(clocks)
    read = timings(records)
    assert 3 == len(read)
    assert {"HTTP 503"} == set(read.failures)
    known = read.clocks[f"{base}/steady_clock_offset"]
    assert abs(known.offset_ns - 10**18) <= known.error_ns + 1000  # the offset that the worker was given
    assert {f"{base}/metrics"} == {record.url for record in worker.records()}


async def test_records_need_a_log(tmp_path: Path):
    """Without one nothing is read, since it would be lost; without such a target there is no log."""
    async with started(tmp_path, targets=["http://127.0.0.1:9/perf_metrics"]) as worker:
        assert "timings_out" in (await worker.event("error"))["message"]
    async with started(tmp_path, targets=[], timings_out=str(tmp_path / "timings-0.log")) as worker:
        await worker.event("ready")
        assert 0 == await worker.ended()
    assert not (tmp_path / "timings-0.log").exists()
