"""Remote write: what is sent is what Prometheus reads, and a server that does not take it costs a line."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from waiting import BOUND_S
from written import received

from sidelight.exporter.prometheus import remote_write
from sidelight.exporter.prometheus.remote_write import LiveWriter, write
from sidelight.exporter.prometheus.snapshot import ClientCounts, Snapshot, bucketize, traced
from sidelight.exporter.prometheus.write_request import WriteRequest, encoded, samples_of, write_requests
from sidelight.rundir.access import Access

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


def series(body: bytes, kind: str = "samples") -> dict[tuple[tuple[str, str], ...], list[tuple[int, float]]]:
    """The samples, or exemplars, of a request by the labels of their series, as (ms, value)."""
    read = {}
    for each in received(body).timeseries:
        labels = tuple((label.name, label.value) for label in each.labels)
        assert labels == tuple(sorted(labels)), "the specification wants labels in order"
        read[labels] = [(point.timestamp, point.value) for point in getattr(each, kind)]
    return read


def test_a_request_has_the_fields_of_the_specification():
    """Byte for byte: labels (1), samples (2) of value (1) and ms (2), exemplars (3) of labels, value and ms (3)."""
    timeseries = {
        "labels": [{"name": "a", "value": "b"}],
        "samples": [{"value": 1.0, "timestamp": 5}],
        "exemplars": [{"labels": [{"name": "c", "value": "d"}], "value": 2.0, "timestamp": 3}],
    }
    value, exemplar = b"\x09" + struct.pack("<d", 1.0), b"\x11" + struct.pack("<d", 2.0)
    sent = WriteRequest(timeseries=[timeseries]).SerializeToString()
    assert sent == (
        b"\x0a\x2a\x0a\x06\x0a\x01a\x12\x01b\x12\x0b" + value + b"\x10\x05"
        b"\x1a\x13\x0a\x06\x0a\x01c\x12\x01d" + exemplar + b"\x18\x03"
    )


def test_each_series_has_its_samples_in_the_order_of_time():
    """With the run's own stamps, over as many requests as it takes."""
    merged: dict[tuple[tuple[str, str], ...], list[tuple[int, float]]] = {}
    total = 0
    for request in write_requests(snapshots(45), {}):
        read = series(encoded(request))
        assert samples_of(request) == sum(map(len, read.values()))
        total += samples_of(request)
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
    (request,) = write_requests(steps, {})
    body = encoded(request)
    exemplars = {dict(labels)["le"]: points for labels, points in series(body, kind="exemplars").items() if points}
    assert exemplars == {"1.0": [(AT_NS // 10**6, 0.2), (AT_NS // 10**6 + 1000, 0.3)]}
    plain = received(body).SerializeToString()
    assert [plain.count(ids[0].encode()), plain.count(b"trace_id")] == [1, 2]


async def test_a_server_that_asks_for_later_is_asked_again(monkeypatch: pytest.MonkeyPatch):
    """And gets the same body."""
    monkeypatch.setattr("sidelight.scraper.spans.forward.FIRST_PAUSE_S", 0.001)
    bodies: list[bytes] = []

    async def take(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        assert request.headers["X-Prometheus-Remote-Write-Version"] == "0.1.0"
        assert request.headers["X-Scope-OrgID"] == "team"
        return web.Response(status=503 if len(bodies) == 1 else 204, headers={"Retry-After": "0"})

    async with receiving(take) as url:
        sent = await write(snapshots(3), url, Access(headers={"X-Scope-OrgID": "team"}), report=lambda _: None)
    assert (sent.reason, bodies[0]) == ("", bodies[1])
    assert sent.samples == sum(map(len, series(bodies[1]).values()))


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (405, "", "HTTP 405; start Prometheus with --web.enable-remote-write-receiver; its path is /api/v1/write"),
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


class Store:
    """What a Prometheus without an out-of-order window keeps: a request is taken whole or, where a sample is older than
    the last of its series or older than `since_ms`, not at all.
    """

    def __init__(self, since_ms: int = 0) -> None:
        self.since_ms = since_ms
        self.points: dict[tuple[tuple[str, str], ...], list[tuple[int, float]]] = {}

    async def take(self, request: web.Request) -> web.Response:
        came = series(await request.read())
        for labels, points in came.items():
            last = self.points.get(labels, [(0, 0.0)])[-1]
            if points[0][0] < self.since_ms:
                return web.Response(status=400, text="out of bounds")
            if points[0][0] < last[0] or (points[0][0] == last[0] and points[0] != last):
                return web.Response(status=400, text="out of order sample")
        for labels, points in came.items():
            had = self.points.setdefault(labels, [])
            had.extend(point for point in points if point not in had)
        return web.Response(status=204)


async def test_what_was_sent_half_way_is_completed_by_sending_all_again():
    """The server refuses what it has: that changes nothing, and what is later is taken. A third time adds nothing."""
    store, whole = Store(), Store()
    async with receiving(store.take) as url, receiving(whole.take) as other_url:
        every = (await write(snapshots(45), other_url, Access(), report=print)).samples
        half = await write(snapshots(25), url, Access(), report=print)
        rest, again = [await write(snapshots(45), url, Access(), report=print) for _ in range(2)]
    assert store.points == whole.points
    last_step = every // 45  # its last samples again: a server takes them and has one of each
    assert (half.samples + rest.samples, rest.reason) == (every + last_step, "")
    assert rest.there == half.samples - last_step
    assert (again.samples, again.there, again.reason) == (last_step, every - last_step, "")


async def test_samples_that_are_too_old_are_counted_and_the_others_sent():
    """Of a run that began over an hour ago."""
    store = Store(since_ms=AT_NS // 10**6 + 30_000)
    async with receiving(store.take) as url:
        sent = await write(snapshots(45), url, Access(), report=print)
    assert (sent.too_old, sent.samples, sent.reason) == (30 * sent.samples // 15, sent.samples, "")
    assert {len(points) for points in store.points.values()} == {15}


@pytest.mark.parametrize("status", [429, 400, 503])
async def test_a_live_sender_never_waits(status: int, monkeypatch: pytest.MonkeyPatch):
    """What cannot be sent waits, the oldest makes room and is counted as lost; one line when it begins, one when the
    server goes on. 400 is not asked again for the same samples.
    """
    monkeypatch.setattr("sidelight.scraper.spans.forward.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(remote_write, "STEPS_WAITING", 3)
    store, refused, is_open = Store(), asyncio.Event(), asyncio.Event()

    async def take(request: web.Request) -> web.Response:
        if is_open.is_set():
            return await store.take(request)
        refused.set()
        return web.Response(status=status, text="later")

    said, taken = list[str](), list[tuple[int, int, int]]()
    steps = list(snapshots(7))
    async with receiving(take) as url:
        on_taken = lambda *counts: taken.append(counts)  # noqa: E731
        async with LiveWriter(url, Access(), say=said.append, on_taken=on_taken) as writer:
            writer.offer(*steps[0])
            await refused.wait()
            if status == 400:  # it is lost, and the next ones wait for nothing
                await writer.sent(BOUND_S)
            for step in steps[1:6]:
                writer.offer(*step)
            is_open.set()
            await writer.sent(BOUND_S)
            writer.offer(*steps[6])
            await writer.sent(BOUND_S)
    (points,) = (points for labels, points in store.points.items() if ("status", "ok") in labels)
    sent_steps = {round((at_ms - AT_NS // 10**6) / 1000) for at_ms, _ in points}
    assert sent_steps == ({3, 4, 5, 6} if status == 400 else {0, 3, 4, 5, 6})
    per_step = taken[-1][1] // len(sent_steps)
    assert taken[-1] == (steps[6][0], len(sent_steps) * per_step, (7 - len(sent_steps)) * per_step)
    assert said == [f"does not take the series: HTTP {status}: later; it is asked again", "takes the series again"]


async def test_what_cannot_be_sent_is_said_and_ends_nothing():
    """A label whose name has no UTF-8, which no option lets through: the steps behind it are sent."""
    store, said, steps = Store(), list[str](), list(snapshots(2))
    async with receiving(store.take) as url, LiveWriter(url, Access(), say=said.append) as writer:
        writer.offer(steps[0][0], replace(steps[0][1], labels={"\udcff": "team"}))
        writer.offer(*steps[1])
        await writer.sent(BOUND_S)
    assert len(said) == 2
    assert {at_ms for points in store.points.values() for at_ms, _ in points} == {steps[1][0] // 10**6}


async def test_a_live_sender_says_that_its_samples_are_older_than_what_is_there():
    """As after the clock was set back: they are lost, and that is said once."""
    store, said = Store(), list[str]()
    later, *earlier = reversed(list(snapshots(3)))
    async with receiving(store.take) as url, LiveWriter(url, Access(), say=said.append) as writer:
        for step in (later, *earlier):
            writer.offer(*step)
        await writer.sent(BOUND_S)
        lost = writer.lost
    assert said == ["does not take the series: HTTP 400: out of order sample; it is asked again"]
    assert lost == 2 * sum(map(len, store.points.values())) > 0


async def test_a_live_sender_leaves_a_server_that_never_answers():
    """At once: what it has not sent, the report sends."""
    asked = asyncio.Event()

    async def hang(_: web.Request) -> web.Response:
        asked.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with receiving(hang) as url, LiveWriter(url, Access(), say=print) as writer:
        for step in snapshots(3):
            writer.offer(*step)
        await asked.wait()


async def test_a_server_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch):
    """After a while of trying. A port that is bound, and does not listen, refuses."""
    monkeypatch.setattr(remote_write, "PATIENCE_S", 0.01)
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/w"
        sent = await write(snapshots(1), url, Access(), report=lambda _: None)
    assert sent.reason in {"connect: Connection refused", "no answer within 0.01 s"}
