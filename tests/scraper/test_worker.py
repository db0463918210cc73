"""The scraping process as it is started: a recorded engine replayed to it, and its commands."""

from __future__ import annotations

import asyncio
import itertools
import json
import resource
import signal
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from scraper_process import started
from served import Handler, Serve
from waiting import BOUND_S

from sidelight.rundir.frames import FrameTail
from sidelight.scraper.exposition import histograms
from sidelight.scraper.series.log import ScrapeRow
from sidelight.scraper.series.table import build
from sidelight.scraper.targets.scrape import Scrape
from sidelight.scraper.targets.target import offset_ns
from sidelight.scraper.window.increase import counter, histogram
from sidelight.scraper.window.window import ScrapeSelection, Window, select_scrapes

INTERVAL_NS = 20_000_000
GIVEN_UP_S = 1.0  # within which a scrape would be given up that must not be
RARELY_S = 86_400  # no tick comes while a test goes on


def replay(pages: list[str]) -> tuple[Handler, asyncio.Event]:
    """Serve one page after another, then the last for ever; the event says that all were served."""
    served = asyncio.Event()
    position = iter(range(10**9))

    async def handler(_: web.Request) -> web.Response:
        index = next(position)
        if index >= len(pages) - 1:
            served.set()
        headers = {"Content-Type": "text/plain; version=1.0.0; charset=utf-8"}
        return web.Response(text=pages[min(index, len(pages) - 1)], headers=headers)

    return handler, served


def by_hand(page: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Cumulative samples of a page by the oracle's parser: counters, and sums and counts of histograms."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page)
        if family.type in ("counter", "histogram")
        for sample in family.samples
    }


async def test_replayed_recording_gives_the_deltas_of_its_first_and_last_page(
    serve: Serve, vllm_scrapes: list[Scrape], tmp_path: Path
):
    """What the process scraped of a replayed engine has the increases that its first and last page have by hand."""
    pages = [record.body.decode() for record in vllm_scrapes]
    handler, served = replay(pages)
    base = await serve({"/metrics": handler})
    async with started(tmp_path, targets=[f"{base}/metrics"]) as worker:
        assert {"ok": 1, "failed": 0, "skipped": 0, "stale": 0} == await worker.event("ready")
        await asyncio.wait_for(served.wait(), BOUND_S)
        worker.send({"cmd": "settle", "seconds": 0})
        await worker.event("settled")
        assert 0 == await worker.ended()
    (endpoint,) = build(worker.records())
    window = Window(start_ns=int(endpoint.response_ns[0]), end_ns=int(endpoint.response_ns[-1]))
    chosen = select_scrapes(endpoint, window, 2 * 10**9)
    assert isinstance(chosen, ScrapeSelection)
    first, last = by_hand(pages[0]), by_hand(pages[-1])
    compared = 0
    for column, series in enumerate(endpoint.series):
        if series.type == "counter":
            increase = counter(endpoint, column, chosen)
            assert last[series.name, series.labels] - first.get((series.name, series.labels), 0.0) == increase.total, (
                series
            )
            compared += 1
    for columns in histograms(endpoint.series):
        observed = histogram(endpoint, columns, chosen)
        for suffix, value in (("_count", observed.count), ("_sum", observed.sum)):
            key = (columns.family + suffix, columns.labels)
            assert last[key] - first.get(key, 0.0) == value, key
            compared += 1
    assert 78 == compared


async def test_ticks_are_aligned_and_never_pile_up(serve: Serve, tmp_path: Path):
    """Ticks are multiples of the interval; while a scrape is late its ticks are skipped, and none overlaps."""
    running = 0
    gate = asyncio.Event()
    count = iter(range(10**9))
    many = asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        nonlocal running
        running += 1
        assert running == 1
        number = next(count)
        if number == 2:
            await asyncio.wait_for(gate.wait(), BOUND_S)
        if number == 5:
            many.set()
        running -= 1
        return web.Response(text="x 1\n")

    quick, quick_served = replay(["x 1\n"] * 12)
    base = await serve({"/slow": handler, "/metrics": quick})
    async with started(tmp_path, targets=[f"{base}/slow", f"{base}/metrics"]) as worker:
        await worker.event("ready")
        await asyncio.wait_for(quick_served.wait(), BOUND_S)
        gate.set()
        await asyncio.wait_for(many.wait(), BOUND_S)
        worker.process.send_signal(signal.SIGINT)  # the conductor's business
        worker.send("not json")
        await worker.event("error")
        worker.send({"cmd": "dance"})
        assert {"message": 'unknown command {"cmd": "dance"}'} == await worker.event("error")
        assert 0 == await worker.ended()
    slow = [record for record in worker.records() if record.url.endswith("/slow")]
    ticks = [record.tick_ns for record in slow]
    assert [0] * len(ticks) == [tick_ns % INTERVAL_NS for tick_ns in ticks]
    assert sorted(set(ticks)) == ticks
    assert max(b - a for a, b in pairwise(ticks)) >= 2 * INTERVAL_NS
    assert all(a.response_ns <= b.request_ns for a, b in pairwise(slow))
    offset = offset_ns(f"{base}/slow", INTERVAL_NS)
    assert all(record.request_ns >= record.tick_ns + offset for record in slow[1:-1])


async def test_end_of_input_scrapes_a_last_time_and_ends(serve: Serve, tmp_path: Path):
    """When its conductor dies, the process scrapes once more and exits, with failures as records."""
    page, _ = replay(["x 1\n"])
    base = await serve({"/metrics": page})
    targets = [f"{base}/metrics", f"{base}/absent"]
    async with started(tmp_path, targets=targets, interval_s=RARELY_S) as worker:
        assert {"ok": 1, "failed": 1, "skipped": 0, "stale": 0} == await worker.event("ready")
        worker.process.stdin.close()
        assert 0 == await asyncio.wait_for(worker.process.wait(), BOUND_S)
    records = worker.records()
    assert [0, 2, 2] == [len(records) % 2, *(sum(r.url == url for r in records) for url in targets)]
    assert {"", "HTTP 404"} == {getattr(record, "error", "") for record in records}


async def test_a_scrape_under_way_at_the_end_is_logged(serve: Serve, tmp_path: Path):
    """And the last one after it: a page that is handed out once would be lost."""
    count = itertools.count()
    asked, asked_again = asyncio.Event(), asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        number = next(count)
        if number == 4:
            asked_again.set()
        if number == 3:
            asked.set()
            with suppress(TimeoutError):
                await asyncio.wait_for(asked_again.wait(), GIVEN_UP_S)
        return web.Response(text=f"x {number}\n")

    base = await serve({"/metrics": handler})
    async with started(tmp_path, targets=[f"{base}/metrics"]) as worker:
        await worker.event("ready")
        await asyncio.wait_for(asked.wait(), BOUND_S)
        assert 0 == await worker.ended()
    rows = [record for record in worker.records() if isinstance(record, ScrapeRow)]
    assert [0, 1, 2, 3, 4] == [value for row in rows for value in row.values.tolist()]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"timeout": 3}, "Object contains unknown field `timeout`"),
        ({"access": {"header": {}}}, "Object contains unknown field `header` - at `$.access`"),
        ({"interval_s": 0.009}, "interval_s must be 0.01 to 86400, not 0.009"),
        ({"interval_s": 1e300}, "interval_s must be 0.01 to 86400, not 1e+300"),
        ({"targets": ["https://h/metrics"], "access": {"ca": "/nowhere.pem"}}, "ca: No such file or directory"),
    ],
)
async def test_an_unusable_spec_is_one_error(tmp_path: Path, changes: dict[str, object], says: str):
    """A misspelt field, an interval that no clock keeps, a certificate that has gone: before anything is scraped."""
    async with started(tmp_path, **{"targets": []} | changes) as worker:
        assert {"message": f"unusable spec: {says}"} == await worker.event("error")
        assert 2 == await asyncio.wait_for(worker.process.wait(), BOUND_S)


@pytest.mark.parametrize("file", ["out", "stderr"])
async def test_a_log_that_cannot_be_written(tmp_path: Path, file: str):
    """It is one error event and exit code 1; so is a file for standard error."""
    async with started(tmp_path, **{"targets": [], file: str(tmp_path / "no" / "log")}) as worker:
        assert f"cannot write {tmp_path}/no/log: " in (await worker.event("error"))["message"]
        assert 1 == await asyncio.wait_for(worker.process.wait(), BOUND_S)


async def test_a_full_disk_costs_what_could_not_be_written(serve: Serve, tmp_path: Path):
    """It is counted and said, and scrapes are kept again when there is room. What is in the log is whole."""
    page, _ = replay(["x 1\n"])
    base = await serve({"/metrics": page})
    async with started(tmp_path, targets=[f"{base}/metrics"]) as worker:
        await worker.event("ready")
        pid, limit = worker.process.pid, resource.RLIMIT_FSIZE
        _, most = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, (1, most))
        full = await worker.event("unwritten", over=("stale",))
        assert (True, "File too large") == (full["count"] > 0, full["reason"])
        resource.prlimit(pid, limit, (most, most))
        assert full["count"] <= (await worker.event("written", over=("unwritten", "stale", "fresh")))["count"]
        worker.send({"cmd": "settle", "seconds": 0})
        settled = await worker.event("settled")
        assert 0 == await worker.ended()
    assert settled["scrapes"] == len(worker.records()) == settled["ok"] - settled["unwritten"]
    assert all(isinstance(record, ScrapeRow) and [1.0] == record.values.tolist() for record in worker.records())
    with FrameTail(worker.log) as tail:
        while tail.read_block() or tail.read_rest():
            pass
        assert (0, 0, 0) == (tail.extent.lost_frames, tail.extent.lost_bytes, tail.extent.torn_bytes)


async def test_a_scrape_at_a_stated_moment_has_a_tick_of_its_own(serve: Serve, tmp_path: Path):
    """The first and the settled scrapes have ticks that all targets share and none has twice; no more follow."""
    page, _ = replay(["x 1\n"])
    base = await serve({"/a/metrics": page, "/b/metrics": page})
    async with started(tmp_path, targets=[f"{base}/a/metrics", f"{base}/b/metrics"], interval_s=RARELY_S) as worker:
        await worker.event("ready")
        for _ in range(2):
            worker.send({"cmd": "settle", "seconds": 0})
            await worker.event("settled")
        worker.process.stdin.close()
        assert 0 == await asyncio.wait_for(worker.process.wait(), BOUND_S)
    ticks = {
        name: [record.tick_ns for record in worker.records() if record.url == f"{base}/{name}/metrics"]
        for name in ("a", "b")
    }
    first = ticks["a"][0]
    assert 0 == first % (RARELY_S * 10**9)
    assert {"a": [first + number * RARELY_S * 10**9 for number in range(3)], "b": ticks["a"]} == ticks


async def test_a_target_that_is_gone_is_stale_until_it_answers_again(serve: Serve, tmp_path: Path):
    """After five intervals without an answer it is said once, with the reason, and again when it is back."""
    gone = asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=503) if gone.is_set() else web.Response(text="x 1\n")

    base = await serve({"/metrics": handler})
    url = f"{base}/metrics".replace("http://", "http://ann:hush@")
    async with started(tmp_path, targets=[url]) as worker:
        await worker.event("ready")
        gone.set()
        stale = await worker.event("stale")
        assert stale.pop("silent_s") > 5 * INTERVAL_NS / 1e9
        shown = url.replace("ann:hush", "***")
        assert {"url": shown, "reason": "HTTP 503"} == stale
        gone.clear()
        assert {"url": shown} == await worker.event("fresh")
        gone.set()
        await worker.event("stale")
        worker.send({"cmd": "settle", "seconds": 0})
        assert 1 == (await worker.event("settled"))["stale"]
        assert 0 == await worker.ended()
    assert b"hush" not in worker.log.read_bytes()


async def test_a_target_that_fails_is_asked_less_often(serve: Serve, tmp_path: Path):
    """Its failures lie ever more ticks apart, to ten; a tick that it was left alone is not one that was missed."""
    asked = 0
    enough = asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 12:
            enough.set()
        return web.Response(status=503)

    base = await serve({"/metrics": handler})
    async with started(tmp_path, targets=[f"{base}/metrics"]) as worker:
        await worker.event("ready")
        await asyncio.wait_for(enough.wait(), BOUND_S)
        assert 0 == await worker.ended()
    apart = [(b.tick_ns - a.tick_ns) // INTERVAL_NS for a, b in pairwise(worker.records()[:12])]
    assert min(apart[4:]) >= 5
    assert [1] == apart[:1] or apart[0] > 1  # a busy machine may miss a tick, never make one


async def test_its_output_is_not_read(serve: Serve, tmp_path: Path):
    """Scraping goes on however often a target comes and goes while its conductor has something else to do."""
    count = iter(range(10**9))
    many = asyncio.Event()

    async def flapping(_: web.Request) -> web.Response:
        return web.Response(status=503)

    async def steady(_: web.Request) -> web.Response:
        if next(count) == 60:
            many.set()
        return web.Response(text="x 1\n")

    names = [f"/{number}/{'x' * 3000}/metrics" for number in range(100)]
    base = await serve({**dict.fromkeys(names, flapping), "/metrics": steady})
    targets = [f"{base}{name}" for name in names]
    async with started(tmp_path, targets=[*targets, f"{base}/metrics"]) as worker:
        await asyncio.wait_for(many.wait(), BOUND_S)
        worker.send({"cmd": "exit"})
        said = (await worker.process.stdout.read()).splitlines()
        assert 0 == await asyncio.wait_for(worker.process.wait(), BOUND_S)
    assert 1 <= len(said) <= len(targets) + 1
    assert all(isinstance(json.loads(line), dict) for line in said)


async def test_headers_reach_the_target(serve: Serve, tmp_path: Path):
    """Those for all, and those of its host; a target that stands there twice is scraped once."""
    asked: list[tuple[str, str]] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append((request.headers["X-Tenant"], request.headers["Authorization"]))
        return web.Response(text="x 1\n")

    base = await serve({"/metrics": handler})
    access = {
        "headers": {"X-Tenant": "a"},
        "host_headers": {base.removeprefix("http://"): {"Authorization": "Bearer k"}},
    }
    async with started(tmp_path, targets=[f"{base}/metrics"] * 2, access=access, interval_s=RARELY_S) as worker:
        assert 1 == (await worker.event("ready"))["ok"]
        await worker.ended()
    assert [("a", "Bearer k")] * 2 == asked
