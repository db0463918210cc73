"""The process that receives spans as it is started: whatever comes, it goes on."""

from __future__ import annotations

import asyncio
import gzip
import socket
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from odd_exports import counted, odd_export, over_grpc, over_http
from scraper_process import receiving
from waiting import BOUND_S

from sidelight.rundir.frames import read_frames
from sidelight.scraper.spans.log import ReceiverCounts, decode
from sidelight.scraper.spans.requests import engine_spans
from sidelight.scraper.spans.spec import CannotListen, require_free


def export(number: int, *, late_ns: int = 0, **changes: object) -> bytes:
    ids = {"trace_id": number.to_bytes(16), "span_id": number.to_bytes(8)}
    return odd_export(time.time_ns() - late_ns, service="vllm", **(ids | changes))  # type: ignore[arg-type]


def trace(number: int) -> str:
    return number.to_bytes(16).hex()


async def test_hostile_spans_are_counted_and_said_once(tmp_path: Path):
    """Each kind is counted and said in one line, however often it comes, and good spans are used."""
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
    async with receiving(tmp_path) as worker:
        ports = await worker.event("listening")
        await worker.event("ready")
        for number in (1, 2):
            for body, headers, status in bad_http:
                assert status == (await over_http(ports["http_port"], body, **headers))[0]
            for body in bad_grpc:
                await over_grpc(ports["grpc_port"], body)
            assert 200 == (await over_http(ports["http_port"], export(number)))[0]
        worker.send({"cmd": "settle", "trace_ids": [trace(1), trace(2)]})
        settled = await worker.event("settled")
        assert 0 == await worker.ended()
    expected = {"exports": 12, "spans": 12, "bad_spans": 8, "malformed": 2, "too_large": 2, "off_clock": 2}
    assert {**dict.fromkeys(ReceiverCounts.__struct_fields__, 0), **expected, "missing": 0} == settled
    kinds = ("no valid trace id", "no valid span id", "an end before its start", "more than 1024 attributes")
    kinds += (
        "spans of 'vllm' that came over grpc are not used: their clock is 36",
        "not an ExportTraceServiceRequest",
        "more than 4194304 bytes",
    )
    said = (tmp_path / "receiver.stderr").read_text().splitlines()
    assert [1] * len(kinds) == [sum(kind in line for line in said) for kind in kinds]
    assert len(kinds) == len(said)
    records = [decode(payload) for payload in read_frames(tmp_path / "spans-0.log")]
    assert (ReceiverCounts(**expected), 0) == counted(records)
    spans = engine_spans(records)
    used = spans.fault == ""
    # An end before its start: the clock was set back under way, or is wrong, and the request is to say so.
    assert ({trace(1), trace(2)}, {trace(6), trace(8)}) == (set(spans.trace_id[used]), set(spans.trace_id[~used]))
    assert {-1} == {*spans.arrival_ns[~used].tolist(), *spans.end_ns[~used].tolist()}


async def test_idle_connections_keep_no_sender_away(tmp_path: Path):
    """More of them at each port than files may be open: exports come through, little is written."""
    files = 144
    prelude = f"import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))"
    async with receiving(tmp_path, prelude=prelude) as worker, AsyncExitStack() as stack:
        ports = await worker.event("listening")
        await worker.event("ready")
        for _ in range(files):
            for port in ports.values():
                idle = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=BOUND_S))
                idle.setblocking(False)
            await asyncio.sleep(0)
        assert 200 == (await over_http(ports["http_port"], export(1)))[0]
        worker.send({"cmd": "settle"})
        settled = await worker.event("settled")
        assert 0 == await worker.ended()
    assert 1 == settled["exports"]
    assert settled["cut_connections"] > files / 2
    assert (tmp_path / "receiver.stderr").stat().st_size < 2000


@pytest.mark.skipif(sys.platform != "linux", reason="this system does not limit the memory of a process")
async def test_an_export_for_which_the_system_has_no_memory_is_refused(tmp_path: Path):
    """Parsed it takes a hundred times its bytes. It may be sent again; the next export is taken."""
    size = 3 << 20  # of empty spans, two bytes each, in one scope of one sender
    bomb = b"\x0a\x85\x80\xc0\x01\x12\x80\x80\xc0\x01" + b"\x12\x00" * (size // 2)
    async with receiving(tmp_path, receiver={"memory_bytes": 150_000_000}) as worker:
        ports = await worker.event("listening")
        await worker.event("ready")
        assert 503 == (await over_http(ports["http_port"], bomb))[0]
        assert 200 == (await over_http(ports["http_port"], export(1)))[0]
        worker.send({"cmd": "settle", "trace_ids": [trace(1)]})
        settled = await worker.event("settled")
        assert 0 == await worker.ended()
    assert (1, 1, 0) == (settled["exports"], settled["no_memory"], settled["malformed"])


async def test_a_settle_waits_for_the_spans_of_the_last_requests(tmp_path: Path):
    """It ends with the last of them."""
    async with receiving(tmp_path) as worker:
        ports = await worker.event("listening")
        assert {} == await worker.event("ready")
        await over_grpc(ports["grpc_port"], export(1))
        worker.send({"cmd": "settle", "trace_ids": [trace(1), trace(2)]})
        await over_grpc(ports["grpc_port"], export(2))
        settled = await worker.event("settled")
        assert (2, 0) == (settled["spans"], settled["missing"])
        assert 0 == await worker.ended()


async def test_a_first_span_may_still_be_on_its_way(tmp_path: Path):
    """Where none has come yet, one is waited for as long as was said, and not at all where nothing was."""
    async with receiving(tmp_path) as worker:
        ports = await worker.event("listening")
        await worker.event("ready")
        worker.send({"cmd": "settle", "trace_ids": [trace(1)]})
        assert 1 == (await worker.event("settled"))["missing"]
        worker.send({"cmd": "settle", "trace_ids": [trace(1)], "first_span_s": BOUND_S})
        await over_grpc(ports["grpc_port"], export(1))
        assert 0 == (await worker.event("settled"))["missing"]
        assert 0 == await worker.ended()


@pytest.mark.parametrize("wire", ["grpc", "http"])
async def test_an_address_in_use_is_an_unusable_spec(tmp_path: Path, wire: str):
    """Said with the address and the reason, exit 2; and `require_free` raises it beforehand."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(CannotListen, match=f"cannot listen on {address}: Address already in use"):
            require_free(address)
        async with receiving(tmp_path, receiver={wire: address}) as worker:
            message = (await worker.event("error"))["message"]
            assert message.startswith(f"unusable spec: cannot listen on {address}: ")
            assert 2 == await asyncio.wait_for(worker.process.wait(), BOUND_S)
    require_free(address)


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ({"grpc": "4317"}, "'4317' is not HOST:PORT"),
        ({"forward": "collector:4317"}, "collector:4317 is not a grpc(s) or http(s) URL"),
        ({"colour": "red"}, "Object contains unknown field `colour` - at `$.receiver`"),
        ({"forward": "https://127.0.0.1:1", "access": {"ca": "/nowhere.pem"}}, "ca: No such file or directory"),
    ],
    ids=["address", "no url", "unknown field", "certificate"],
)
async def test_a_receiver_that_cannot_be_is_an_unusable_spec(tmp_path: Path, spans: dict[str, Any], reason: str):
    """Said in one line, exit 2."""
    async with receiving(tmp_path, receiver=spans) as worker:
        assert f"unusable spec: {reason}" == (await worker.event("error"))["message"]
        assert 2 == await asyncio.wait_for(worker.process.wait(), BOUND_S)


def test_a_scraper_does_not_import_grpc():
    """Nor the messages of OTLP."""
    heavy = "('grpc', 'opentelemetry')"
    asked = f"import sys, sidelight.scraper.worker.__main__; print([name for name in {heavy} if name in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=BOUND_S)
    assert "[]\n" == shown.stdout
