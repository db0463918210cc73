"""Remote write: what is sent is what Prometheus reads, and a server that does not take it costs a line."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st

from exporter.prometheus import remote_write
from exporter.prometheus.remote_write import snappy, write, write_requests
from exporter.prometheus.snapshot import ClientCounts, Snapshot, bucketize, traced
from rundir.access import Access

Handler = Callable[[web.Request], Awaitable[web.Response]]
AT_NS = 1_795_256_419_150_000_000


def snapshots(steps: int) -> Iterator[tuple[int, Snapshot]]:
    """A run whose requests end at a rate of 1/step."""
    for step in range(steps):
        client = ClientCounts(requests={"ok": step}, in_flight=1, ttft=bucketize([0.2] * step, (0.1, 1.0)))
        yield AT_NS + step * 10**9, Snapshot(version="1", run_id="r", phase="measure", client=client)


@asynccontextmanager
async def receiving(handler: Handler) -> AsyncIterator[str]:
    """A server that takes remote writes; the URL to write to."""
    application = web.Application(client_max_size=2**24)
    application.router.add_post("/api/v1/write", handler)
    async with TestServer(application) as server:
        yield str(server.make_url("/api/v1/write"))


def unpacked(block: bytes) -> bytes:
    """Return what a block of snappy holds that is all literal, by the format's description."""
    size, at = varint(block, 0)
    data = b""
    while at < len(block):
        assert block[at] == 61 << 2, "a literal whose length stands in two bytes"
        length = struct.unpack_from("<H", block, at + 1)[0] + 1
        data += block[at + 3 : at + 3 + length]
        at += 3 + length
    assert size == len(data)
    return data


def varint(data: bytes, at: int) -> tuple[int, int]:
    number, shift = 0, 0
    while True:
        number |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return number, at


def fields(message: bytes) -> Iterator[tuple[int, bytes | int | float]]:
    """Give the fields of a message of protobuf: number and value."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        if key & 7 == 2:
            length, at = varint(message, at)
            yield key >> 3, message[at : at + length]
            at += length
        elif key & 7 == 1:
            yield key >> 3, struct.unpack_from("<d", message, at)[0]
            at += 8
        else:
            number, at = varint(message, at)
            yield key >> 3, number


def series(body: bytes, field: int = 2) -> dict[tuple[tuple[str, str], ...], list[tuple[int, float]]]:
    """Return the samples of a request by the labels of their series, as (ms, value); of field 3 its exemplars."""
    read = {}
    for _, message in fields(unpacked(body)):
        labels: list[tuple[str, str]] = []
        points = []
        assert isinstance(message, bytes)
        for number, value in fields(message):
            assert isinstance(value, bytes)
            inner = dict(fields(value))
            if number == 1:
                labels.append((bytes(inner[1]).decode(), bytes(inner[2]).decode()))  # type: ignore[arg-type]
            elif number == field:
                points.append((int(inner[field]), float(inner[field - 1])))  # type: ignore[arg-type]
        assert labels == sorted(labels), "the specification wants labels in order"
        read[tuple(labels)] = points
    return read


@given(st.binary(max_size=200_000))
def test_a_block_of_snappy_holds_its_data(data: bytes):
    """Empty, and longer than a literal may be."""
    assert unpacked(snappy(data)) == data


def test_each_series_has_its_samples_in_the_order_of_time():
    """With the run's own stamps, over as many requests as it takes."""
    merged: dict[tuple[tuple[str, str], ...], list[tuple[int, float]]] = {}
    total = 0
    for count, body in write_requests(snapshots(45)):
        read = series(body)
        assert count == sum(map(len, read.values()))
        total += count
        for labels, points in read.items():
            merged.setdefault(labels, []).extend(points)
    ok = merged[(("__name__", "sidelight_client_requests_total"), ("status", "ok"))]
    assert ok == [(AT_NS // 10**6 + 1000 * step, float(step)) for step in range(45)]
    buckets = {dict(labels)["le"]: points[-1][1] for labels, points in merged.items() if "le" in dict(labels)}
    assert buckets == {"0.1": 0.0, "1.0": 44.0, "+Inf": 44.0}
    assert total == sum(map(len, merged.values()))


def test_an_exemplar_is_sent_once():
    """With the sample with which it is new, in the series of its bucket."""
    ids, at_ns = np.array(["a" * 32, "b" * 32], dtype=object), np.array([AT_NS, AT_NS + 10**9])
    ttft = [traced(np.array([0.2, 0.3])[:count], (0.1, 1.0), ids[:count], at_ns[:count]) for count in (1, 1, 2)]
    steps = [
        (AT_NS + step * 10**9, Snapshot(version="1", run_id="r", phase="p", client=ClientCounts(requests={}, ttft=of)))
        for step, of in enumerate(ttft)
    ]
    ((_, body),) = write_requests(steps)
    exemplars = {dict(labels)["le"]: points for labels, points in series(body, field=3).items() if points}
    assert exemplars == {"1.0": [(AT_NS // 10**6, 0.2), (AT_NS // 10**6 + 1000, 0.3)]}
    assert [ids[0].encode() in body, body.count(ids[0].encode()), body.count(b"trace_id")] == [True, 1, 2]


async def test_a_server_that_asks_for_later_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    """And gets the same body."""
    monkeypatch.setattr("scraper.spans.forward.FIRST_PAUSE_S", 0.001)
    bodies: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        assert request.headers["X-Prometheus-Remote-Write-Version"] == "0.1.0"
        assert request.headers["X-Scope-OrgID"] == "team"
        return web.Response(status=503 if len(bodies) == 1 else 204)

    async with receiving(take) as url:
        sent = await write(snapshots(3), url, Access(headers={"X-Scope-OrgID": "team"}), report=lambda _: None)
    assert (sent.reason, bodies[0]) == ("", bodies[1])
    assert sent.samples == sum(map(len, series(bodies[1]).values()))


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (400, "out of bounds\n", "HTTP 400: out of bounds; for a run of over an hour ago, write --formats openmetrics"),
        (404, "", "HTTP 404; start Prometheus with --web.enable-remote-write-receiver; its path is /api/v1/write"),
        (401, "no", "HTTP 401: no"),
    ],
)
async def test_a_server_that_refuses_is_given_nothing_more(status: int, text: str, said: str):
    """Its reason stands with what to do."""
    asked = 0

    async def refuse(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=status, text=text)

    async with receiving(refuse) as url:
        sent = await write(snapshots(100), url, Access(), report=lambda _: None)
    assert (asked, sent.samples) == (1, 0)
    assert sent.reason.startswith(said)


async def test_a_server_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch):
    """After a while of trying. A port that is bound, and does not listen, refuses."""
    monkeypatch.setattr(remote_write, "PATIENCE_S", 0.01)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/w"
        sent = await write(snapshots(1), url, Access(), report=lambda _: None)
    assert sent.reason in {"connect: Connection refused", "no answer within 0.01 s"}
