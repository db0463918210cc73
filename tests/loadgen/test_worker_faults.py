from __future__ import annotations

import asyncio
import signal
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sidelight.loadgen.protocols.reading.reply import unpack
from sidelight.loadgen.records import RequestPart, read_log
from sidelight.loadgen.transports.transport import PART_BYTES

if TYPE_CHECKING:
    from conftest import Peer, Serve, Start, Wire, Worker


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
    await worker.run(0, 0, 0)
    await worker.until(lambda: len(worker.log()) == 3 and len(worker.log().chunk_ns) > 20)
    worker.process.kill()
    assert await worker.exit_code() == -signal.SIGKILL
    got = worker.log()
    assert ["ok", "in_flight", "in_flight"] == got.status.tolist()
    assert (got.first_token_ns >= 0).tolist() == [True, False, True]
    assert (got.submit_ns >= got.dispatch_ns).all()
    assert got.role_only_first.all()


async def _streaming(serve: Serve, wire: type[Wire], start: Start) -> Worker:
    """A worker with a stream in flight, and a request that is due long after."""
    streaming = asyncio.Event()

    async def script(peer: Peer) -> None:
        await peer.say(wire.SSE_HEAD, wire.event(wire.content("x")))
        streaming.set()
        await peer.reader.read()

    server = await serve(script)
    worker = await start(server.url)
    await worker.run(0, 10**12)
    await streaming.wait()
    return worker


@pytest.mark.parametrize("how", ["stop", "end of input", "exit"])
async def test_an_early_end_records_what_was_in_flight(serve: Serve, wire: type[Wire], start: Start, how: str):
    """Each way to end cancels, records and reports; SIGINT is not one of them."""
    worker = await _streaming(serve, wire, start)
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
    worker = await _streaming(serve, wire, start)
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
    worker.process.send_signal(signal.SIGTERM)
    assert await worker.hear() == {"event": "error", "message": "terminated by SIGTERM"}
    assert await worker.exit_code() == 143


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"urls": ["ftp://h"]}, "is not an http"),
        ({"urls": []}, "`array` of length >= 1 - at `$.urls`"),
        ({"transport": "pigeon"}, "Invalid enum value 'pigeon' - at `$.transport`"),
        ({"urls": ["https://h"], "tls": {"ca": "/nowhere.pem"}}, "No such file"),
        ({"headers": {"X": "a\r\nY: b"}}, "line break"),
        ({"out": "/nowhere/requests-0.log"}, "No such file"),
        ({"run_id": 7}, "run_id"),
        ({"colour": "red"}, "colour"),
        ({"tls": {"certificate": "a.pem"}}, "unknown field `certificate` - at `$.tls`"),
    ],
)
async def test_an_unusable_specification_is_one_error(start: Start, changes: dict[str, object], says: str):
    """The event names what is wrong, and the exit code is 2."""
    worker = await start("http://127.0.0.1:1", ready=False, **changes)
    event = await worker.hear()
    assert event["event"] == "error"
    assert says in str(event["message"])
    assert await worker.exit_code() == 2


async def test_commands_that_make_no_sense_are_answered(start: Start, tmp_path: Path):
    """No JSON, an unknown command or option, no plan; a stop while idle is answered at once."""
    worker = await start("http://127.0.0.1:1")
    await worker.send(cmd="jump")
    assert "command" in str((await worker.hear())["message"])
    assert worker.process.stdin is not None
    worker.process.stdin.write(b'{"cmd":"\xff"}\n')
    assert "command" in str((await worker.hear())["message"])
    await worker.send(cmd="run", plan=str(tmp_path / "none"), start_ns=0)
    assert "No such file" in str((await worker.hear())["message"])
    assert (await worker.hear())["started"] == 0
    await worker.send(cmd="run", plan="p", start_ns=0, until_s=1)
    assert "until_s" in str((await worker.hear())["message"])
    await worker.send(cmd="stop", now=True)
    assert "now" in str((await worker.hear())["message"])
    await worker.send(cmd="stop")
    assert (await worker.hear())["event"] == "drained"


@pytest.mark.parametrize("size", [10, 300_000])
async def test_a_reset_right_behind_a_reply_is_noticed(serve: Serve, wire: type[Wire], start: Start, size: int):
    """As of a server that is killed: the request fails at once and not by its time-out, and what had come is there."""

    async def script(peer: Peer) -> None:
        raw = peer.writer.get_extra_info("socket")
        await peer.say(wire.SSE_HEAD, wire.event(wire.content("x" * size)))
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.writer.transport.abort()

    server = await serve(script)
    worker = await start(server.url)
    await worker.run(*[0] * 8)
    assert (await worker.hear())["finished"] == 8
    assert ["reset: Connection reset by peer after"] * 8 == [error[:37] for error in worker.log().error]


async def test_more_connections_than_descriptors(serve: Serve, wire: type[Wire], start: Start):
    """Two hundred at once where forty files may be open: those beyond are failures that say why, and the run ends."""
    served = asyncio.Event()

    async def script(peer: Peer) -> None:
        await served.wait()
        await peer.say(wire.answer(1))

    server = await serve(script)
    worker = await start(server.url, prelude="import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))")
    await worker.run(*[0] * 200)
    await worker.until(lambda: len(worker.log()) == 200 and worker.log().status.tolist().count("failed") > 150)
    served.set()
    assert (await worker.hear())["finished"] == 200
    got = worker.log()
    assert {"", "connect: Too many open files"} == set(got.error)
    assert got.status.tolist().count("ok") == len(server.peers) > 0


async def test_a_full_disk_ends_the_worker(serve: Serve, wire: type[Wire], start: Start):
    """Nothing is sent without being recorded: an error event, and exit code 1."""

    server = await serve(wire.answer(1))
    worker = await start(server.url, out="/dev/full")
    event = await worker.hear()
    assert event["event"] == "error"
    assert "No space left" in str(event["message"])
    assert await worker.exit_code() == 1


async def test_a_reply_without_end_is_ended_and_logged_in_parts(serve: Serve, wire: type[Wire], start: Start):
    """The request fails by a kind of its own, what came of it is kept, and never much of it is in memory."""

    async def script(peer: Peer) -> None:
        if b'"n":1' in peer.body:
            await peer.say(wire.answer(2))
            return
        await peer.say(wire.SSE_HEAD, wire.event(wire.ROLE))
        while True:
            await peer.say(wire.event(wire.content("x" * 60_000)))

    server = await serve(script)
    worker = await start(server.url, max_reply_bytes=3_000_000)
    await worker.run(0, 0)
    await worker.hear()
    log = worker.log()
    assert ["failed", "ok"] == log.status.tolist()
    assert log.error[0] == "too_large: more than 3000000 body bytes"
    assert 3_000_000 < log.received_bytes[0] < 3_300_000
    assert log.first_token_ns[0] > 0
    records = [*read_log(worker.directory / "requests-0.log")]
    parts = [unpack(record) for record in records if isinstance(record, RequestPart) and record.index == 0]
    assert len(parts) >= 6
    assert max(len(part.body) for part in parts) < PART_BYTES + 200_000
