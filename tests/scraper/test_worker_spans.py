"""The scraping process as it is started, with spans coming in: whatever comes, scraping goes on."""

from __future__ import annotations

import asyncio
import gzip
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from odd_exports import odd_export, over_grpc, over_http
from scraper_process import Worker, started
from served import Serve
from waiting import BOUND_S

from rundir.frames import read_frames
from scraper.series.log import Row
from scraper.spans.log import Counts, decode, last_counts
from scraper.spans.requests import engine_spans
from scraper.spans.spec import CannotListen, require_free

ANYWHERE = {"grpc": "127.0.0.1:0", "http": "127.0.0.1:0"}


@asynccontextmanager
async def receiving(path: Path, **spec: Any) -> AsyncIterator[Worker]:
    whole = {
        "spans": ANYWHERE | {"clock_offset_ns": time.time_ns() - time.monotonic_ns()},
        "spans_out": str(path / "spans-0.log"),
        "stderr": str(path / "scraper.stderr"),
    }
    async with started(path, **whole | spec) as worker:
        yield worker


def export(number: int, *, late_ns: int = 0, **changes: object) -> bytes:
    ids = {"trace_id": number.to_bytes(16), "span_id": number.to_bytes(8)}
    return odd_export(time.time_ns() - late_ns, service="vllm", **(ids | changes))  # type: ignore[arg-type]


def trace(number: int) -> str:
    return number.to_bytes(16).hex()


async def test_hostile_spans_do_not_disturb_scraping(serve: Serve, tmp_path: Path):
    """Each kind is counted and said in one line, however often it comes; pages are read on, and good spans are used."""
    served = 0

    async def page(_: web.Request) -> web.Response:
        nonlocal served
        served += 1
        return web.Response(text=f"# TYPE vllm:x counter\nvllm:x_total {served}\n", content_type="text/plain")

    bad_http = [
        (export(3)[:-3], {}, 400),
        (gzip.compress(bytes(8 * 1024 * 1024), mtime=0), {"Content_Encoding": "gzip"}, 413),
    ]
    bad_grpc = [
        export(4, trace_id=b"short"),
        export(5, span_id=bytes(8)),
        export(6, start_time_unix_nano=2, end_time_unix_nano=1),
        export(7, attributes=10_000),
        export(8, late_ns=3600 * 10**9),
    ]
    base = await serve({"/metrics": page})
    async with receiving(tmp_path, targets=[f"{base}/metrics"], interval_s=0.05) as worker:
        ports = await worker.event("listening")
        await worker.event("ready")
        for number in (1, 2):
            for body, headers, status in bad_http:
                assert status == (await over_http(ports["http_port"], body, **headers))[0]
            for body in bad_grpc:
                await over_grpc(ports["grpc_port"], body)
            assert 200 == (await over_http(ports["http_port"], export(number)))[0]
        before = served
        worker.send({"cmd": "settle", "seconds": 0.2, "trace_ids": [trace(1), trace(2)]})
        settled = await worker.event("settled")
        assert before < served
        assert 0 == await worker.ended()
    expected = {"exports": 12, "spans": 12, "bad_spans": 8, "malformed": 2, "too_large": 2, "off_clock": 2}
    assert {**dict.fromkeys(Counts.__struct_fields__, 0), **expected, "missing": 0} == settled.pop("spans")
    assert (0, 0) == (settled["failed"], settled["stale"])
    scrapes = worker.records()
    assert all(isinstance(record, Row) for record in scrapes)
    # The last one at a tick may have been given up as the worker left.
    assert [*range(1, len(scrapes) + 1)] == [int(record.values[0]) for record in scrapes]
    assert served - 1 <= len(scrapes) <= served
    kinds = ("no valid trace id", "no valid span id", "an end before its start", "more than 1024 attributes")
    kinds += (
        "spans of 'vllm' that came over grpc are not used: their clock is 36",
        "not an ExportTraceServiceRequest",
        "more than 4194304 bytes",
    )
    said = (tmp_path / "scraper.stderr").read_text().splitlines()
    assert [1] * len(kinds) == [sum(kind in line for line in said) for kind in kinds]
    assert len(kinds) == len(said)
    records = [decode(payload) for payload in read_frames(tmp_path / "spans-0.log")]
    assert (Counts(**expected), 0) == last_counts(records)
    spans = engine_spans(records)
    used = np.isnan(spans.off_clock_s)
    assert ({trace(1), trace(2)}, {trace(8)}) == (set(spans.trace_id[used]), set(spans.trace_id[~used]))
    assert {-1} == {*spans.arrival_ns[~used].tolist(), *spans.end_ns[~used].tolist()}


async def test_idle_connections_take_no_descriptors_from_scrapes(serve: Serve, tmp_path: Path):
    """More of them at each port than files may be open: no scrape fails, exports come through, little is written."""
    pages: asyncio.Queue[None] = asyncio.Queue()

    async def page(_: web.Request) -> web.Response:
        pages.put_nowait(None)
        return web.Response(text="x 1\n", headers={"Connection": "close"})

    base, files = await serve({"/metrics": page}), 144
    prelude = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))"
    urls = [f"{base}/metrics?{number}" for number in range(10)]
    async with receiving(tmp_path, targets=urls, interval_s=0.05, prelude=prelude) as worker, AsyncExitStack() as stack:
        ports = await worker.event("listening")
        await worker.event("ready")
        for _ in range(files):
            for port in ports.values():
                idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=BOUND_S))
                idle.setblocking(False)
            await asyncio.sleep(0)
        async with asyncio.timeout(BOUND_S):
            for _ in range(pages.qsize() + 100):
                await pages.get()
        assert 200 == (await over_http(ports["http_port"], export(1)))[0]
        worker.send({"cmd": "settle", "seconds": 0})
        settled = await worker.event("settled")
        assert 0 == await worker.ended()
    assert (0, 1) == (settled["failed"], settled["spans"]["exports"])
    assert settled["spans"]["cut_connections"] > files / 2
    assert (tmp_path / "scraper.stderr").stat().st_size < 2000


async def test_a_settle_waits_for_the_spans_of_the_last_requests(tmp_path: Path):
    """It ends with the last of them, without a page to scrape too."""
    async with receiving(tmp_path, targets=[]) as worker:
        ports = await worker.event("listening")
        assert {"ok": 0, "failed": 0, "skipped": 0, "stale": 0} == await worker.event("ready")
        await over_grpc(ports["grpc_port"], export(1))
        worker.send({"cmd": "settle", "trace_ids": [trace(1), trace(2)]})
        await over_grpc(ports["grpc_port"], export(2))
        settled = await worker.event("settled")
        assert (2, 0) == (settled["spans"]["spans"], settled["spans"]["missing"])
        assert 0 == await worker.ended()


async def test_a_first_span_may_still_be_on_its_way(tmp_path: Path):
    """Where none has come yet, one is waited for as long as was said, and not at all where nothing was."""
    async with receiving(tmp_path, targets=[]) as worker:
        ports = await worker.event("listening")
        await worker.event("ready")
        worker.send({"cmd": "settle", "trace_ids": [trace(1)]})
        assert 1 == (await worker.event("settled"))["spans"]["missing"]
        worker.send({"cmd": "settle", "trace_ids": [trace(1)], "first_span_s": BOUND_S})
        await over_grpc(ports["grpc_port"], export(1))
        assert 0 == (await worker.event("settled"))["spans"]["missing"]
        assert 0 == await worker.ended()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_scrapes_that_cannot_be_written_do_not_disturb_the_receiver(serve: Serve, tmp_path: Path):
    """Their log is of their own: what was acknowledged before and after is in that of spans, which has its end."""
    asked = asyncio.Event()

    async def page(_: web.Request) -> web.Response:
        await asked.wait()
        return web.Response(text="x 1\n")

    base = await serve({"/metrics": page})
    async with receiving(tmp_path, targets=[f"{base}/metrics"], out="/dev/full") as worker:
        ports = await worker.event("listening")
        await over_grpc(ports["grpc_port"], export(1))
        asked.set()
        assert (await worker.event("unwritten", over=("ready", "stale")))["reason"] == "No space left on device"
        await over_grpc(ports["grpc_port"], export(2))
        assert 0 == await worker.ended()
    states = [decode(payload) for payload in read_frames(tmp_path / "spans-0.log")]
    assert (Counts(exports=2, spans=2), 0) == last_counts(states)


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_an_address_in_use_is_an_unusable_spec(tmp_path: Path, wire: str):
    """Said with the address and the reason, exit 2; and `require_free` raises it beforehand."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CannotListen, match=f"cannot listen on {address}: Address already in use"):
            require_free(address)
        async with receiving(tmp_path, targets=[], spans=ANYWHERE | {wire: address}) as worker:
            message = (await worker.event("error"))["message"]
            assert message.startswith(f"unusable spec: cannot listen on {address}: ")
            assert 2 == await asyncio.wait_for(worker.process.wait(), BOUND_S)
    require_free(address)


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ({"grpc": "4317"}, "'4317' is not HOST:PORT"),
        ({"forward": "collector:4317"}, "collector:4317 is not a grpc(s) or http(s) URL"),
        ({"colour": "red"}, "Object contains unknown field `colour` - at `$.spans`"),
        ({"forward": "https://127.0.0.1:1", "access": {"ca": "/nowhere.pem"}}, "ca: No such file or directory"),
    ],
    ids=["address", "no url", "unknown field", "certificate"],
)
async def test_a_receiver_that_cannot_be_is_an_unusable_spec(tmp_path: Path, spans: dict[str, Any], reason: str):
    """Said in one line, exit 2."""
    async with receiving(tmp_path, targets=[], spans=ANYWHERE | spans) as worker:
        assert f"unusable spec: {reason}" == (await worker.event("error"))["message"]
        assert 2 == await asyncio.wait_for(worker.process.wait(), BOUND_S)


def test_a_scraper_without_spans_does_not_import_grpc():
    """Nor the messages of OTLP."""
    heavy = "('grpc', 'opentelemetry')"
    asked = f"import sys, scraper.worker; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=BOUND_S)
    assert "[]\n" == shown.stdout
