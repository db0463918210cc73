"""Runs through gateways: the part of one that sends spans, and joins behind one that passes nothing on."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from processes import Ended, engine, sidelight
from sent_spans import body
from series import WAITING, gauge, histogram

from sidelight.scraper.spans.log import read_log
from sidelight.scraper.spans.requests import engine_spans
from sidelight.sidecar.cli.measuring import free_pair

HELD_S = 0.03
PAGE = "/litellm/metrics"
RUNNING = "vllm:num_requests_running"
LOAD = ("--rate", "10", "--requests", "20", "--warmup", "0", "--listen", "off", "--quiet")


@asynccontextmanager
async def gateway(upstream: str, collector: str, *, is_plain: bool = False) -> AsyncIterator[str]:
    """Holds each request for HELD_S, passes it on as its own child, and sends a span of it by OTLP over HTTP.

    A plain one is instrumented as any HTTP server and client, and states nothing of models. Its page is as LiteLLM's.
    """
    counted = {"litellm_request_total_latency_metric": [0.0, 0.0], "litellm_llm_api_latency_metric": [0.0, 0.0]}
    async with aiohttp.ClientSession() as session:

        async def page(_: web.Request) -> web.Response:
            return web.Response(text="".join(histogram(name, *numbers) for name, numbers in counted.items()))

        async def passed(request: web.Request) -> web.StreamResponse:
            _, trace, parent, flags = (request.headers.get("traceparent") or "00-00-00-00").split("-")
            span_id, inner = (f"{int(parent, 16) ^ bit:016x}" for bit in (1, 2))
            sent = f"00-{trace}-{inner if is_plain else span_id}-{flags}"
            headers = {"traceparent": sent, "Content-Type": "application/json"}
            begun_ns, first_ns = time.time_ns(), 0
            if request.method == "POST":
                await asyncio.sleep(HELD_S)
            data = await request.read()
            called_ns = time.time_ns()
            async with session.request(request.method, upstream + request.path, data=data, headers=headers) as answer:
                reply = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
                await reply.prepare(request)
                async for chunk in answer.content.iter_any():
                    if not first_ns and b'"content":"' in chunk:
                        first_ns = time.time_ns()
                    await reply.write(chunk)
            if first_ns:
                ended_ns = time.time_ns()
                for numbers, since_ns in zip(counted.values(), (begun_ns, called_ns), strict=True):
                    numbers[:] = numbers[0] + 1, numbers[1] + (ended_ns - since_ns) / 1e9
                span = Span(
                    trace_id=bytes.fromhex(trace),
                    span_id=bytes.fromhex(span_id),
                    parent_span_id=bytes.fromhex(parent),
                    name="chat sim",
                    kind=Span.SPAN_KIND_SERVER,
                    start_time_unix_nano=begun_ns,
                    end_time_unix_nano=time.time_ns(),
                )
                spans = [span]
                if is_plain:
                    span.attributes.add(key="http.target").value.string_value = request.path
                    call = Span(name="POST", kind=Span.SPAN_KIND_CLIENT, trace_id=bytes.fromhex(trace))
                    call.span_id, call.parent_span_id = bytes.fromhex(inner), span.span_id
                    call.start_time_unix_nano, call.end_time_unix_nano = called_ns, time.time_ns()
                    spans.append(call)
                else:
                    span.attributes.add(key="gen_ai.operation.name").value.string_value = "chat"
                    first_chunk = span.attributes.add(key="gen_ai.response.time_to_first_chunk")
                    first_chunk.value.double_value = (first_ns - begun_ns) / 1e9
                protobuf = {"Content-Type": "application/x-protobuf"}
                # Nothing listens yet when the run first asks for a token.
                with suppress(aiohttp.ClientConnectionError):
                    await session.post(
                        f"{collector}/v1/traces", data=body(spans, service="my-gateway"), headers=protobuf
                    )
            return reply

        app = web.Application()
        app.router.add_get(PAGE, page)
        app.router.add_route("*", "/{path:.*}", passed)
        async with TestServer(app) as server:
            yield f"http://127.0.0.1:{server.port}"


@asynccontextmanager
async def silent_gateway(upstream: str, engine_ids: dict[str, str]) -> AsyncIterator[str]:
    """Passes on neither trace nor ids, and gives replies ids of its own; `engine_ids` notes the engine's by ours."""
    async with aiohttp.ClientSession() as session:

        async def passed(request: web.Request) -> web.StreamResponse:
            own_id = request.headers.get("X-Request-Id", "")
            headers = {"Content-Type": "application/json"}
            data = await request.read()
            async with session.request(request.method, upstream + request.path, data=data, headers=headers) as response:
                reply = web.StreamResponse(status=response.status, headers={"Content-Type": response.content_type})
                await reply.prepare(request)
                async for line in response.content:
                    if own_id and (stated := re.search(rb'"id": ?"(chatcmpl-[^"]+)"', line)):
                        engine_ids[own_id] = stated[1].decode()
                    await reply.write(re.sub(rb"chatcmpl-[^\"]+", b"chatcmpl-" + own_id.encode(), line))
            return reply

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", passed)
        async with TestServer(app) as server:
            yield f"http://127.0.0.1:{server.port}"


async def run_through(path: Path, *, is_plain: bool = False) -> Ended:
    """Run through a gateway, whose spans and the engine's are received."""
    address = free_pair()
    host, _, port = address.rpartition(":")
    collector = f"http://{host}:{int(port) + 1}"
    with engine("--otlp-endpoint", f"http://{address}") as (url, _):
        async with gateway(url, collector, is_plain=is_plain) as entrance:
            given = ("--url", entrance, "--metrics", f"{url}/metrics", "--metrics", entrance + PAGE)
            given += ("--otlp-listen", address)
            done: Ended = await asyncio.to_thread(sidelight, "run", *given, *LOAD, "--out", path, path=path)
    assert 0 == done.code, done.err
    return done


async def test_what_a_gateway_holds_up_is_the_gateways(tmp_path: Path):
    """At least the time for which it held each request, and nothing of it is left in the network's part."""
    done = await run_through(tmp_path / "run")
    rows = done.requests()
    assert 20 == len(rows)
    assert {"trace"} == {row["breakdown_source"] for row in rows}
    assert min(row["gateway_ms"] for row in rows) >= 1e3 * HELD_S
    for row in rows:
        parts = [row[f"{part}_ms"] for part in ("network", "gateway", "queue", "prefill", "other")]
        assert pytest.approx(row["ttft_ms"], abs=1e-6) == sum(parts)
        assert row["request_network_ms"] is None
    part = done.summary["correlation"]["breakdown"]["gateway_ms"]
    assert (len(rows), "trace") == (part["count"], part["source"])
    assert "network" == done.summary["correlation"]["breakdown"]["network_label"]
    assert " gateway " in (done.path / "report.txt").read_text()
    # What answers at the gateway's /version is of it, and not of the engine.
    assert (True, None) == (bool(done.manifest["target"]["version"]), done.summary["server"]["engine"]["version"])


async def test_a_gateway_with_plain_http_spans_gets_what_it_held_before_its_call(tmp_path: Path):
    """Without any attribute; what it took of the reply's way back is bounded, and the report says what it lacks."""
    done = await run_through(tmp_path / "run", is_plain=True)
    rows = done.requests()
    assert min(row["gateway_request_ms"] for row in rows) >= 1e3 * HELD_S
    assert all(row["gateway_ms"] == row["gateway_request_ms"] <= row["gateway_at_most_ms"] for row in rows)
    assert {"my-gateway"} == {gateway["service"] for row in rows for gateway in row["gateways"]}
    (summary,) = done.summary["correlation"]["gateways"]
    assert ("my-gateway", len(rows), {"unknown": len(rows)}) == (
        summary["service"],
        summary["requests"],
        summary["first_output"],
    )
    report = " ".join((done.path / "report.txt").read_text().split())
    assert 1 == report.count("The spans of gateway my-gateway do not say when its first output left.")
    assert "set gen_ai.response.time_to_first_chunk (seconds) on its server span" in report
    assert "gateway, inbound" in report
    (page,) = done.summary["server"]["gateways"]
    assert ("litellm", "end") == (page["gateway"], page["own_until"])
    assert page["own_ms"] >= 1e3 * HELD_S
    assert "LiteLLM proxy, by its page: " in report
    assert "rest outside the engine" in report


async def test_behind_a_gateway_that_passes_nothing_on_requests_are_joined_by_time(tmp_path: Path):
    """Each that is joined has the span of its own request, by the simulator's truth, and says how it was joined."""
    address, truth, ids = free_pair(), tmp_path / "truth.jsonl", dict[str, str]()
    with engine("--otlp-endpoint", f"http://{address}", "--truth", truth) as (url, _):
        async with silent_gateway(url, ids) as entrance:
            given = ("--url", entrance, "--metrics", f"{url}/metrics", "--otlp-listen", address, "--quiet")
            load = ("--rate", "20", "--requests", "60", "--warmup", "0", "--listen", "off")
            path = tmp_path / "run"
            done: Ended = await asyncio.to_thread(sidelight, "run", *given, *load, "--out", path, path=path)
    assert 0 == done.code, done.err
    spans = engine_spans(record for log in (path / "raw").glob("spans-*.log") for record in read_log(log))
    engine_id = dict(zip(spans.span_id.tolist(), spans.request_id.tolist(), strict=True))
    times = {row["response_id"]: row for row in map(json.loads, truth.read_text().splitlines())}
    joined = [row for row in done.requests() if row["engine_span_id"]]
    assert len(joined) > len(done.requests()) / 2
    assert {("trace", "by_time")} == {(row["breakdown_source"], row["breakdown_quality"]) for row in joined}
    for row in joined:
        assert ids[row["request_id"]] == engine_id[row["engine_span_id"]]
        true = times[ids[row["request_id"]]]
        assert (true["scheduled_ns"] - true["queued_ns"]) / 1e6 == pytest.approx(row["queue_ms"], abs=0.01)
    assert len(joined) == done.summary["correlation"]["quality"]["by_time"]
    assert f"{len(joined)} of them less surely: by time alone, for want of a common id" in " ".join(
        (path / "report.txt").read_text().split()
    )


async def test_two_routers_beside_four_engines_count_nothing_twice(tmp_path: Path):
    """Their pages repeat the engines' gauges by server: gateways' pages, of which nothing is the engines'."""
    pages = {f"/engine/{n}": gauge(RUNNING, n) + gauge(WAITING, 10 * n) for n in (1, 2, 3, 4)}
    copied = "".join(
        gauge(name, times * n, labels=[f'server="http://engine-{n}"'])
        for name, times in ((RUNNING, 1), (WAITING, 10), ("vllm:healthy_pods_total", 1), ("vllm:current_qps", 1))
        for n in (1, 2, 3, 4)
    )
    pages |= {f"/router/{n}": copied for n in (1, 2)}

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=pages[request.path])

    app = web.Application()
    app.add_routes([web.get(path, page) for path in pages])
    path = tmp_path / "run"
    async with TestServer(app, host="127.0.0.1") as server:
        metrics = [part for name in pages for part in ("--metrics", str(server.make_url(name)))]
        options = ("--duration", "1", "--scrape-interval", "0.1", "--out", path, "--quiet")
        run = await asyncio.to_thread(sidelight, "scrape", *metrics, *options, path=path)
    shown = run.summary["server"]
    assert (10, 100) == tuple(shown[name]["stats"]["max"] for name in ("requests_running", "requests_waiting"))
    assert ["production_stack"] * 2 == [page["gateway"] for page in shown["gateways"]]
    assert 4 == [page["engine"] for page in shown["endpoints"]].count("vllm")
