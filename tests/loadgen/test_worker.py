from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from loadgen import clock, log, records

if TYPE_CHECKING:
    from conftest import Peer, Serve, Wire

BOUND_S = 20.0
PATH = "/v1/chat/completions"


class Worker:
    """A load worker as a process of its own, spoken to as the conductor does."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, offset_ns: int) -> None:
        self.process = process
        self.directory = directory
        self.clock = clock.Clock(offset_ns=offset_ns)

    async def send(self, **command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        await self.process.stdin.drain()

    async def hear(self) -> dict[str, object]:
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), BOUND_S)
        return json.loads(line) if line else {}

    async def run(self, *offsets: int, close: bool = True, **command: object) -> None:
        plan(self.directory / "plan", *offsets, close=close)
        start_ns = self.clock.now_ns()
        await self.send(**{"cmd": "run", "plan": str(self.directory / "plan"), "start_ns": start_ns} | command)

    async def exit_code(self) -> int:
        return await asyncio.wait_for(self.process.wait(), BOUND_S)

    def log(self) -> log.RequestLog:
        return assembled(self.directory)


def plan(path: Path, *offsets: int, close: bool = True, urls: int = 1) -> None:
    fd = log.open_log(path)
    for index, offset_ns in enumerate(offsets):
        log.append_record(
            fd,
            log.PlannedRequest(
                index=index, phase="measure", workload_class="test", path=PATH, body=b'{"n":%d}' % index,
                input_tokens=10, max_tokens=5, offset_ns=offset_ns,
                url=index % urls,
            ),
        )  # fmt: skip
    if close:
        log.append_record(fd, records.plan_end("measure"))
    os.close(fd)


def assembled(directory: Path) -> log.RequestLog:
    logged = [record for path in sorted(directory.glob("requests-*.log")) for record in log.read_log(path)]
    parts = [record for record in logged if isinstance(record, log.RequestPart)]
    return log.assemble(log.read_plan(directory / "plan"), parts, run_id="run")


Start = Callable[..., Awaitable[Worker]]


@asynccontextmanager
async def _killed(process: asyncio.subprocess.Process) -> AsyncIterator[None]:
    try:
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        process._transport.close()  # asyncio leaves the pipes of a killed child to the garbage collector


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    async with AsyncExitStack() as stack:

        async def begin(url: str, *, prelude: str = "", **changes: object) -> Worker:
            offset_ns = time.time_ns() - time.monotonic_ns()
            spec = {
                "worker": 0, "workers": 1, "run_id": "run", "clock_offset_ns": offset_ns, "urls": [url], "headers": {},
                "out": str(tmp_path / f"requests-{changes.get('worker', 0)}.log"), "request_timeout_s": BOUND_S,
            } | changes  # fmt: skip
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", f"{prelude}\nimport sys\nfrom loadgen.worker import main\nsys.exit(main())",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            await stack.enter_async_context(_killed(process))
            worker = Worker(process, tmp_path, offset_ns)
            await worker.send(**spec)
            return worker

        yield begin


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110  # the worker is another process
            await asyncio.sleep(0.005)


async def test_an_open_loop_from_plan_to_log(serve: Serve, wire: type[Wire], start: Start):
    """Five requests: ids and bodies as planned at the server; stamps, tokens and usage as sent in the log."""

    async def script(peer: Peer) -> None:
        await peer.say(wire.answer(3))

    server = await serve(script)
    worker = await start(server.url + "/v1", headers={"Authorization": "Bearer key", "accept": "text/x"})
    assert await worker.hear() == {"event": "ready"}
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


async def test_an_open_loop_does_not_wait_for_responses(serve: Serve, wire: type[Wire], start: Start):
    """A server that answers nobody before all twenty have arrived is served; a closed loop would never end."""
    all_there = asyncio.Event()

    async def script(peer: Peer) -> None:
        if len(server.peers) == 20:
            all_there.set()
        await all_there.wait()
        await peer.say(wire.answer(1))

    server = await serve(script)
    worker = await start(server.url)
    await worker.hear()
    await worker.run(*range(0, 40_000_000, 2_000_000))
    assert (await worker.hear())["finished"] == 20
    assert ["ok"] * 20 == worker.log().status.tolist()


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
    await worker.hear()
    await worker.run(*[-1] * 20, concurrency=4)
    assert (await worker.hear())["finished"] == 20
    assert max(counts) == 4
    assert server.connections == 4
    got = worker.log()
    assert got.scheduled_ns.tolist() == got.dispatch_ns.tolist()


async def test_workers_share_one_plan(serve: Serve, wire: type[Wire], start: Start):
    """Two workers send the requests of one worker's schedule, each its own, and the logs merge."""

    async def script(peer: Peer) -> None:
        await peer.say(wire.answer(1))

    server = await serve(script)
    workers = [await start(server.url, worker=number, workers=2) for number in range(2)]
    for worker in workers:
        await worker.hear()
    plan(workers[0].directory / "plan", *range(0, 9_000_000, 1_000_000))
    begin = {"cmd": "run", "plan": str(workers[0].directory / "plan"), "start_ns": workers[0].clock.now_ns()}
    for worker in workers:
        await worker.send(**begin)
    assert [5, 4] == [(await worker.hear())["finished"] for worker in workers]
    got = workers[0].log()
    assert list(range(9)) == got.index.tolist()
    assert [index % 2 for index in range(9)] == got.worker.tolist()
    assert [begin["start_ns"] + index * 1_000_000 for index in range(9)] == got.scheduled_ns.tolist()


async def test_a_growing_plan_is_followed(serve: Serve, wire: type[Wire], start: Start):
    """Requests that are planned while the loop runs are sent; the end record ends it."""

    async def script(peer: Peer) -> None:
        await peer.say(wire.answer(1))

    server = await serve(script)
    worker = await start(server.url)
    await worker.hear()
    await worker.run(-1, -1, close=False, concurrency=2)
    await _until(lambda: len(server.peers) == 2)
    plan(worker.directory / "more", -1, -1, -1)
    with (worker.directory / "plan").open("ab") as out:
        out.write((worker.directory / "more").read_bytes())
    assert (await worker.hear())["finished"] == 5


async def test_kill_9_leaves_a_readable_log(serve: Serve, wire: type[Wire], start: Start):
    """What had come half a second before the kill is there: first tokens of streams still going on."""

    async def script(peer: Peer) -> None:
        if b'"n":0' in peer.body:
            await peer.say(wire.answer(2))
            return
        await peer.say(wire.SSE_HEAD, wire.event(wire.ROLE))
        if b'"n":1' in peer.body:
            await asyncio.Event().wait()
        while True:
            await peer.say(wire.event(wire.content("x")))
            await asyncio.sleep(0.01)

    server = await serve(script)
    worker = await start(server.url)
    await worker.hear()
    await worker.run(0, 0, 0)
    await _until(lambda: len(worker.log()) == 3 and len(worker.log().chunk_ns) > 20)
    worker.process.kill()
    assert await worker.exit_code() == -signal.SIGKILL
    got = worker.log()
    assert ["ok", "in_flight", "in_flight"] == got.status.tolist()
    assert (got.first_token_ns >= 0).tolist() == [True, False, True]
    assert (got.submit_ns >= got.dispatch_ns).all()
    assert got.role_only_first.all()


@pytest.mark.parametrize("how", ["stop", "end of input", "exit"])
async def test_an_early_end_records_what_was_in_flight(serve: Serve, wire: type[Wire], start: Start, how: str):
    """Each way to end cancels, records and reports; SIGINT is not one of them."""
    streaming = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.say(wire.SSE_HEAD, wire.event(wire.content("x")))
        streaming.set()
        await peer.reader.read()

    server = await serve(script)
    worker = await start(server.url)
    await worker.hear()
    await worker.run(0, 10**12)
    await streaming.wait()
    worker.process.send_signal(signal.SIGINT)
    if how == "end of input":
        worker.process.stdin.close()
    else:
        await worker.send(cmd=how)
    drained = await worker.hear()
    assert ("drained", 1, 1) == (drained["event"], drained["started"], drained["finished"])
    if how == "stop":
        assert worker.process.returncode is None
        await worker.send(cmd="exit")
    assert await worker.exit_code() == 0
    got = worker.log()
    reasons = {
        "stop": "stopped",
        "end of input": "the conductor is gone",
        "exit": "the worker was told to leave",
    }
    assert [("cancelled", f"cancelled: {reasons[how]}")] == list(zip(got.status, got.error, strict=True))
    assert got.end_ns[0] > got.submit_ns[0]


async def test_sigterm_is_an_error_and_no_natural_end(serve: Serve, wire: type[Wire], start: Start):
    """What is in flight is recorded as cancelled; then an error event, no drained event, and exit code 143."""
    streaming = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.say(wire.SSE_HEAD, wire.event(wire.content("x")))
        streaming.set()
        await peer.reader.read()

    server = await serve(script)
    worker = await start(server.url)
    await worker.hear()
    await worker.run(0, 10**12)
    await streaming.wait()
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.hear() == {"event": "error", "message": "terminated by SIGTERM"}
    assert await worker.hear() == {}
    assert await worker.exit_code() == 143
    got = worker.log()
    assert [("cancelled", "cancelled: SIGTERM")] == list(zip(got.status, got.error, strict=True))
    assert got.end_ns[0] > got.submit_ns[0]


async def test_sigterm_ends_an_idle_worker(start: Start):
    """Though nothing runs."""
    worker = await start("http://127.0.0.1:1")
    await worker.hear()
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.hear() == {"event": "error", "message": "terminated by SIGTERM"}
    assert await worker.exit_code() == 143


async def test_a_drain_bound_ends_a_stream_that_never_ends(serve: Serve, wire: type[Wire], start: Start):
    """What still runs at the bound is cancelled by it."""

    async def script(peer: Peer) -> None:
        await peer.say(wire.SSE_HEAD, wire.event(wire.content("x")))
        await peer.reader.read()

    server = await serve(script)
    worker = await start(server.url)
    await worker.hear()
    await worker.run(0, drain_s=0.7)
    await worker.hear()
    assert worker.log().error.tolist() == ["cancelled: the drain bound was reached"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"worker": 2}, "there is no worker 2 of 1"),
        ({"urls": ["ftp://h"]}, "is not an http"),
        ({"urls": []}, "no URL"),
        ({"transport": "pigeon"}, "none of http"),
        ({"urls": ["https://h"], "tls": {"ca": "/nowhere.pem"}}, "No such file"),
        ({"headers": {"X": "a\r\nY: b"}}, "line break"),
        ({"out": "/nowhere/requests-0.log"}, "No such file"),
        ({"run_id": 7}, "run_id"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_an_unusable_specification_is_one_error(start: Start, changes: dict[str, object], says: str):
    """The event names what is wrong, and the exit code is 2."""
    worker = await start("http://127.0.0.1:1", **changes)
    event = await worker.hear()
    assert event["event"] == "error"
    assert says in str(event["message"])
    assert await worker.exit_code() == 2


async def test_commands_that_make_no_sense_are_answered(start: Start, tmp_path: Path):
    """No JSON, an unknown command, no plan; a stop while idle is answered at once."""
    worker = await start("http://127.0.0.1:1")
    await worker.hear()
    await worker.send(cmd="jump")
    assert "command" in str((await worker.hear())["message"])
    assert worker.process.stdin is not None
    worker.process.stdin.write(b'{"cmd":"\xff"}\n')
    assert "command" in str((await worker.hear())["message"])
    await worker.send(cmd="run", plan=str(tmp_path / "none"), start_ns=0)
    assert "No such file" in str((await worker.hear())["message"])
    assert (await worker.hear())["started"] == 0
    await worker.send(cmd="stop")
    assert (await worker.hear())["event"] == "drained"


def test_a_worker_starts_without_what_it_does_not_need():
    """Neither numpy nor aiohttp is imported by the process that stamps."""
    code = "import loadgen.worker, sys; print(sorted({'numpy', 'aiohttp', 'tiktoken'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"


@pytest.mark.parametrize("workers", [1, 2, 3])
async def test_one_schedule_whatever_the_workers(serve: Serve, wire: type[Wire], start: Start, workers: int):
    """All workers' logs together hold each planned request once, at the planned moment, by the worker of its index."""

    async def script(peer: Peer) -> None:
        await peer.say(wire.answer(2))

    server = await serve(script)
    several = [await start(server.url, worker=number, workers=workers) for number in range(workers)]
    for worker in several:
        await worker.hear()
    offsets_ns = [3_000_000 * (index * 7 % 11) for index in range(30)]
    plan(several[0].directory / "plan", *sorted(offsets_ns))
    start_ns = several[0].clock.now_ns()
    for worker in several:
        await worker.send(cmd="run", plan=str(several[0].directory / "plan"), start_ns=start_ns)
    assert sum([(await worker.hear())["finished"] for worker in several]) == 30
    got = several[0].log()
    assert list(range(30)) == got.index.tolist()
    assert sorted(offsets_ns) == (got.scheduled_ns - start_ns).tolist()
    assert [index % workers for index in range(30)] == got.worker.tolist()
    assert (["ok"] * 30, [2] * 30) == (got.status.tolist(), got.output_tokens.tolist())


async def test_requests_go_to_the_url_they_name(serve: Serve, wire: type[Wire], start: Start, tmp_path: Path):
    """Two servers and a proxy's path on the second take turns, each over connections of its own."""

    async def script(peer: Peer) -> None:
        await peer.say(wire.answer(1))

    servers = [await serve(script) for _ in range(2)]
    urls = [servers[0].url + "/v1", servers[1].url, servers[1].url + "/proxy/v1/"]
    worker = await start("", urls=urls)
    await worker.hear()
    plan(tmp_path / "plan", *[-1] * 6, urls=3)
    await worker.send(cmd="run", plan=str(tmp_path / "plan"), start_ns=0, concurrency=1)
    await worker.hear()
    got = worker.log()
    roots = [servers[0].url, servers[1].url, servers[1].url + "/proxy"]
    assert [roots[index % 3] + PATH for index in range(6)] == got.endpoint_url.tolist()
    assert [2, 4] == [len(server.peers) for server in servers]
    assert [1, 1] == [server.connections for server in servers]
    assert {servers[1].url.removeprefix("http://")} == {peer.header("Host") for peer in servers[1].peers}


async def test_a_worker_without_reuse_says_so(serve: Serve, wire: type[Wire], start: Start):
    """Connection: close in the request, and a connection a request."""

    async def script(peer: Peer) -> None:
        await peer.say(wire.answer(1))

    server = await serve(script)
    worker = await start(server.url, reuse=False)
    await worker.hear()
    await worker.run(-1, -1, concurrency=1)
    await worker.hear()
    assert {"close"} == {peer.header("Connection") for peer in server.peers}
    assert server.connections == 2


async def test_more_connections_than_descriptors(serve: Serve, wire: type[Wire], start: Start):
    """Two hundred at once where forty files may be open: those beyond are failures that say why, and the run ends."""
    served = asyncio.Event()

    async def script(peer: Peer) -> None:
        await served.wait()
        await peer.say(wire.answer(1))

    server = await serve(script)
    worker = await start(server.url, prelude="import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))")
    await worker.hear()
    await worker.run(*[0] * 200)
    await _until(lambda: len(worker.log()) == 200 and worker.log().status.tolist().count("failed") > 150)
    served.set()
    assert (await worker.hear())["finished"] == 200
    got = worker.log()
    assert {"", "connect: Too many open files"} == set(got.error)
    assert got.status.tolist().count("ok") == len(server.peers) > 0


async def test_a_worker_speaks_tls(serve: Serve, wire: type[Wire], start: Start, certificate: tuple[Path, Path]):
    """To a server whose authority its specification names."""

    async def script(peer: Peer) -> None:
        await peer.say(wire.answer(3))

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    server = await serve(script, ssl=context)
    worker = await start(server.url, tls={"ca": str(certificate[1])})
    await worker.hear()
    await worker.run(-1, -1, concurrency=1)
    await worker.hear()
    got = worker.log()
    assert (["ok"] * 2, [False, True]) == (got.status.tolist(), got.reused.tolist())
    assert (got.submit_ns >= got.connected_ns).all()


async def test_a_worker_tells_of_itself(serve: Serve, wire: type[Wire], start: Start):
    """How late its reads were, what its garbage collector cost, how much memory it has."""

    async def script(peer: Peer) -> None:
        await peer.say(wire.answer(3))

    server = await serve(script)
    worker = await start(server.url)
    await worker.hear()
    await worker.run(0, 0, 500_000_000)
    await worker.hear()
    logged = [*log.read_log(worker.directory / "requests-0.log")]
    last = [record for record in logged if isinstance(record, log.WorkerStat)][-1]
    assert last.gc_pause_max_ns <= last.gc_pause_total_ns
    assert 10_000_000 < last.rss_bytes < 100_000_000
    if last.kernel_stamps:
        assert sum(last.read_late_counts) > 0
        assert last.read_late_max_ns >= 0


async def test_a_full_disk_ends_the_worker(serve: Serve, wire: type[Wire], start: Start):
    """Nothing is sent that nobody records: an error event, and exit code 1."""

    async def script(peer: Peer) -> None:
        await peer.say(wire.answer(1))

    server = await serve(script)
    worker = await start(server.url, out="/dev/full")
    events = [await worker.hear(), await worker.hear()]
    assert events[1]["event"] == "error"
    assert "No space left" in str(events[1]["message"])
    assert await worker.exit_code() == 1
