from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from children import peak_bytes

from sidelight.loadgen import records
from sidelight.loadgen.protocols.reading.reply import unpack

if TYPE_CHECKING:
    from conftest import Peer, Serve, Start, Wire

PATH = "/v1/chat/completions"


async def test_an_open_loop_from_plan_to_log(serve: Serve, wire: type[Wire], start: Start):
    """Five requests: ids and bodies as planned at the server; stamps, tokens and usage as sent in the log."""

    server = await serve(wire.answer(3))
    worker = await start(server.url + "/v1", headers={"Authorization": "Bearer key", "accept": "text/x"})
    await worker.run(*range(0, 50_000_000, 10_000_000))
    drained = await worker.hear()
    assert ("drained", "measure", 5, 5) == tuple(drained[key] for key in ("event", "phase", "started", "finished"))
    await worker.send(cmd="exit")
    assert await worker.exit_code() == 0
    got = worker.log()
    assert ["ok"] * 5 == got.status.tolist()
    assert [(10, 3)] * 5 == list(zip(got.input_tokens.tolist(), got.output_tokens.tolist(), strict=True))
    assert [3] * 5 == np.diff(got.chunk_start).tolist()
    times = [got.scheduled_ns, got.dispatch_ns, got.connected_ns, got.submit_ns, got.first_token_ns, got.last_token_ns]
    assert (np.diff(np.array([*times, got.end_ns]), axis=0) >= 0).all()
    assert (drained["first_ns"], drained["last_ns"]) == (got.dispatch_ns.min(), got.end_ns.max())
    peers = sorted(server.peers, key=lambda peer: peer.body)
    assert [b'{"n":%d}' % index for index in range(5)] == [peer.body for peer in peers]
    assert got.request_id.tolist() == [peer.header("X-Request-Id") for peer in peers]
    assert [records.traceparent("run", index) for index in range(5)] == [peer.header("traceparent") for peer in peers]
    assert {("Bearer key", "text/x", "identity")} == {
        (peer.header("Authorization"), peer.header("Accept"), peer.header("Accept-Encoding")) for peer in peers
    }
    assert all(peer.head.startswith(f"POST {PATH} HTTP/1.1\r\n".encode()) for peer in peers)
    assert {server.url + PATH} == set(got.endpoint_url)


async def test_a_client_leaves_in_the_middle_of_a_reply(serve: Serve, wire: type[Wire], start: Start):
    """The server sees its connection closed; what had come is on record, and no error is; its slot goes to the next."""
    gone = []

    async def script(peer: Peer) -> None:
        await peer.say(wire.SSE_HEAD + wire.event(wire.content("w")))
        gone.append(await peer.reader.read())

    server = await serve(script)
    worker = await start(server.url)
    await worker.run(-1, -1, concurrency=1, leave_ns=1_000_000_000)
    assert 2 == (await worker.hear())["finished"]
    await worker.until(lambda: len(gone) == 2)
    got = worker.log()
    assert (["left"] * 2, [""] * 2, [1, 1]) == (
        got.status.tolist(),
        got.error.tolist(),
        np.diff(got.chunk_start).tolist(),
    )


async def test_a_reply_that_ends_before_its_client_leaves_is_ok(serve: Serve, wire: type[Wire], start: Start):
    server = await serve(wire.answer(3))
    worker = await start(server.url)
    await worker.run(0, leave_ns=60_000_000_000)
    await worker.hear()
    assert ["ok"] == worker.log().status.tolist()


async def test_a_closed_loop_keeps_its_concurrency(serve: Serve, wire: type[Wire], start: Start):
    """The server answers only while all four slots are with it; every request gets through."""
    here = 0
    full = asyncio.Condition()

    async def script(peer: Peer) -> None:
        nonlocal here
        async with full:
            here += 1
            counts.append(here)
            full.notify_all()
            # The last round: fewer than four are left to come.
            await full.wait_for(lambda: here == 4 or len(server.peers) >= 17)
            here -= 1
        await peer.say(wire.answer(1))

    counts: list[int] = []
    server = await serve(script)
    worker = await start(server.url)
    await worker.run(*[-1] * 20, concurrency=4)
    assert (await worker.hear())["finished"] == 20
    assert max(counts) == 4
    assert server.connections == 4
    got = worker.log()
    assert got.scheduled_ns.tolist() == got.dispatch_ns.tolist()


async def test_a_growing_plan_is_followed(serve: Serve, wire: type[Wire], start: Start):
    """Requests that are planned while the loop runs are sent; the end record ends it."""

    server = await serve(wire.answer(1))
    worker = await start(server.url)
    await worker.run(-1, -1, close=False, concurrency=2)
    await worker.until(lambda: len(server.peers) == 2)
    worker.plan(-1, -1, -1)
    assert (await worker.hear())["finished"] == 5


def test_a_worker_starts_without_what_it_does_not_need():
    """Neither numpy nor aiohttp is imported by the process that stamps."""
    code = "import sidelight.loadgen.worker, sys; print(sorted({'numpy', 'aiohttp', 'tiktoken'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


async def test_requests_go_to_the_url_they_name(serve: Serve, wire: type[Wire], start: Start, tmp_path: Path):
    """Two servers and a proxy's path on the second take turns, each over connections of its own."""

    servers = [await serve(wire.answer(1)) for _ in range(2)]
    urls = [servers[0].url + "/v1", servers[1].url, servers[1].url + "/proxy/v1/"]
    worker = await start("", urls=urls)
    worker.plan(*[-1] * 6, urls=3)
    await worker.send(cmd="run", plan=str(tmp_path / "plan"), start_ns=0, concurrency=1)
    await worker.hear()
    got = worker.log()
    roots = [servers[0].url, servers[1].url, servers[1].url + "/proxy"]
    assert [roots[index % 3] + PATH for index in range(6)] == got.endpoint_url.tolist()
    assert [2, 4] == [len(server.peers) for server in servers]
    assert [1, 1] == [server.connections for server in servers]
    assert {servers[1].url.removeprefix("http://")} == {peer.header("Host") for peer in servers[1].peers}


async def test_a_worker_logs_its_own_statistics(serve: Serve, wire: type[Wire], start: Start):
    """How late its reads were, what its garbage collector cost, how much memory it has."""

    server = await serve(wire.answer(3))
    worker = await start(server.url)
    await worker.run(0, 0, 500_000_000)
    await worker.hear()
    logged = [*records.read_log(worker.directory / "requests-0.log")]
    last = [record for record in logged if isinstance(record, records.WorkerStat)][-1]
    assert last.gc_pause_max_ns <= last.gc_pause_total_ns
    if peak := peak_bytes(worker.process.pid):
        assert peak / 2 < last.rss_bytes < 1.1 * peak
    if last.kernel_stamps:
        assert sum(last.read_late_counts) > 0
        assert last.read_late_max_ns >= 0


async def test_a_reply_without_its_texts_is_read_as_before(
    serve: Serve, wire: type[Wire], start: Start, tmp_path: Path
):
    """The log has the times, lengths and tokens of the reply, and its hash; a field's secret was sent in full."""
    server = await serve(wire.answer(3))
    worker = await start(server.url, redact_bodies=True, stand_ins={'"n"': "hush"})
    await worker.run(0)
    await worker.hear()
    got = worker.log()
    assert (["ok"], [3]) == (got.status.tolist(), got.output_tokens.tolist())
    parts = [part for part in records.read_log(tmp_path / "requests-0.log") if isinstance(part, records.RequestPart)]
    assert {b""} == {unpack(part).body for part in parts}
    assert 64 == len(parts[-1].sha256)
    assert [b"{hush:0}"] == [peer.body for peer in server.peers]
