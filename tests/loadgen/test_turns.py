from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from waiting import BOUND_S

from sidelight.loadgen import records
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.records import PlannedRequest, RequestPart
from sidelight.loadgen.transports.transport import Exchange
from sidelight.loadgen.turns import next_turn
from sidelight.rundir import frames

if TYPE_CHECKING:
    from conftest import Peer, Serve, Start, Wire

SECOND = 1_000_000_000
PATH = "/v1/chat/completions"
CHAT = PROTOCOLS["chat"]


def chat(*contents: str) -> bytes:
    """A chat request's body: what user and assistant said by turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    return json.dumps({"model": "m", "messages": messages}, separators=(",", ":")).encode()


def session(number: int, *said: str, index: int, think_ns: int = 0) -> PlannedRequest:
    """A session of as many turns as the user says something; its indices follow `index`."""
    turns = [
        PlannedRequest(
            index=index + turn, path=PATH, body=chat(text), session=number, turn=turn, think_ns=think_ns if turn else -1
        )
        for turn, text in enumerate(said)
    ]
    return msgspec.structs.replace(turns[0], turns=tuple(turns[1:]))


def exchange(head: bytes, body: bytes, *, status: int = 200, error: str = "") -> Exchange:
    """A finished turn whose reply was logged and kept."""
    return Exchange(
        index=0, scheduled_ns=0, dispatch_ns=0, end_ns=5 * SECOND, status=status, error=error, reads_ns=array("q"),
        kept_body=bytearray(body), kept_head=head,
    )  # fmt: skip


def answer(wire: type[Wire], *texts: str) -> bytes:
    """The body of a streamed reply, chunk by chunk."""
    payloads = [wire.ROLE, *map(wire.content, texts), wire.content("", "stop"), "[DONE]"]
    return b"".join(map(wire.event, payloads)) + wire.END


async def test_a_turn_takes_up_the_history_and_the_reply(wire: type[Wire]):
    """Its body is all that was said, the reply included; it is due its think time after the reply's end."""
    first = session(4, "Hello.", "And now?", "Bye.", index=7, think_ns=2 * SECOND)
    second = await next_turn(first, exchange(wire.SSE_HEAD, answer(wire, "Good", " day.")), protocol=CHAT)
    assert second is not None
    turn, due_ns = second
    assert (7 * SECOND, 8, 1, 1) == (due_ns, turn.index, turn.turn, len(turn.turns))
    assert json.loads(chat("Hello.", "Good day.", "And now?")) == json.loads(turn.body)
    third = await next_turn(turn, exchange(wire.SSE_HEAD, answer(wire, "Nothing.")), protocol=CHAT)
    assert third is not None
    assert json.loads(chat("Hello.", "Good day.", "And now?", "Nothing.", "Bye.")) == json.loads(third[0].body)
    assert await next_turn(third[0], exchange(wire.SSE_HEAD, answer(wire, "Bye.")), protocol=CHAT) is None


async def test_a_whole_conversation_replaces_the_history(wire: type[Wire]):
    """Nothing is carried into a turn that says all; it is sent only after a reply that came well."""
    first = session(4, "Hello.", "And now?", index=7)
    first = msgspec.structs.replace(first, turns=(msgspec.structs.replace(first.turns[0], whole=True),))
    second = await next_turn(first, exchange(wire.SSE_HEAD, answer(wire, "Good")), protocol=CHAT)
    assert second is not None
    assert first.turns[0].body == second[0].body
    assert await next_turn(first, exchange(wire.SSE_HEAD, b"", status=500), protocol=CHAT) is None


@given(st.lists(st.text(), min_size=1, max_size=100))
def test_what_is_carried_is_what_was_said(texts: list[str]):
    """Whatever the reply says, in however many events."""
    events = [{"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in texts]
    body = b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    following = asyncio.run(next_turn(session(0, "a", "b", index=0), exchange(head, body), protocol=CHAT))
    assert following is not None
    assert "".join(texts) == json.loads(following[0].body)["messages"][1]["content"]


async def test_a_whole_reply_is_carried_too():
    """JSON instead of a stream; reasoning is not shown to the model again."""
    message = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
    following = await next_turn(session(0, "So?", "Why?", index=0), exchange(head, body), protocol=CHAT)
    assert following is not None
    assert json.loads(chat("So?", "Yes.", "Why?")) == json.loads(following[0].body)


async def test_a_turn_that_failed_is_the_last(wire: type[Wire]):
    """No reply, a torn one, an error's status, an error under 200, and what cannot be a reply at all."""
    first = session(0, "a", "b", index=0)
    good = answer(wire, "Good.")
    failed = [
        exchange(b"", b"", status=0, error="connect: Connection refused"),
        exchange(wire.SSE_HEAD, good[:40], error="reset: closed by the peer after 40 body bytes"),
        exchange(wire.SSE_HEAD, b"{}", status=500),
        exchange(wire.SSE_HEAD, wire.event(wire.content("Go")) + wire.END),  # ended well, without a finish reason
        exchange(wire.SSE_HEAD, wire.event('{"error":{"message":"out of memory"}}') + good),
        exchange(wire.SSE_HEAD, wire.event("{") + good),
        exchange(wire.SSE_HEAD, b"zz\r\n" + good),
        exchange(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n", b"<html>"),
        exchange(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n", b'{"error":{"message":"no"}}'),
    ]
    assert [None] * len(failed) == [await next_turn(first, outcome, protocol=CHAT) for outcome in failed]


async def test_others_go_on_while_a_long_reply_is_read(wire: type[Wire]):
    """Of 640 events the event loop comes round at least twenty times."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    reply = exchange(wire.SSE_HEAD, answer(wire, *["word "] * 640))
    following = await next_turn(session(0, "a", "b", index=0), reply, protocol=CHAT)
    task.cancel()
    assert following is not None
    assert turns >= 20


# The load worker as a process of its own


async def driven(start: Start, url: str, *sessions: PlannedRequest, **command: object) -> dict[str, object]:
    """What a worker says of a plan of sessions, two at a time."""
    worker = await start(url, sessions=True)
    path = worker.directory / "plan"
    frame_log = frames.FrameLog(path)
    for record in (*sessions, records.plan_end("measure")):
        records.append_record(frame_log, record)
    frame_log.close()
    await worker.send(**{"cmd": "run", "plan": str(path), "start_ns": 0, "concurrency": 2} | command)
    return await worker.hear()


def parts(directory: Path) -> list[RequestPart]:
    logged = [record for path in sorted(directory.glob("requests-*.log")) for record in records.read_log(path)]
    return [record for record in logged if isinstance(record, RequestPart)]


async def test_a_worker_carries_each_sessions_own_history(serve: Serve, wire: type[Wire], start: Start, tmp_path: Path):
    """Two sessions at once; the server's replies repeat what it was sent last. Every turn is in the log."""

    async def script(peer: Peer) -> None:
        said = json.loads(peer.body)["messages"][-1]["content"]
        await peer.say(wire.SSE_HEAD, answer(wire, "You said ", said))

    server = await serve(script)
    sessions = (session(0, "a", "b", "c", index=0), session(1, "x", "y", index=3))
    drained = await driven(start, server.url, *sessions)
    assert (5, 5) == (drained["started"], drained["finished"])
    expected = [
        chat("a"),
        chat("a", "You said a", "b"),
        chat("a", "You said a", "b", "You said b", "c"),
        chat("x"),
        chat("x", "You said x", "y"),
    ]
    bodies = {peer.header("X-Request-Id"): json.loads(peer.body) for peer in server.peers}
    assert list(map(json.loads, expected)) == [bodies[records.request_id("run", index)] for index in range(5)]
    stamps = {part.index: (part.scheduled_ns, part.dispatch_ns, part.end_ns) for part in parts(tmp_path)}
    assert list(range(5)) == sorted(stamps)
    # A turn is due when the one before it has ended, and begins after that.
    assert [stamps[0][2], stamps[1][2], stamps[3][2]] == [stamps[1][0], stamps[2][0], stamps[4][0]]
    assert all(scheduled <= dispatched <= ended for scheduled, dispatched, ended in stamps.values())


async def test_a_reply_that_was_logged_in_parts_is_carried_whole(
    serve: Serve, wire: type[Wire], start: Start, tmp_path: Path
):
    """The second half comes when the first is on disk already."""

    async def script(peer: Peer) -> None:
        whole = answer(wire, "first", " second")
        cut = whole.index(b"second") - 90
        await peer.say(wire.SSE_HEAD, whole[:cut])
        async with asyncio.timeout(BOUND_S):
            while len(server.peers) == 1 and not any(part.body for part in parts(tmp_path)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await peer.say(whole[cut:])

    server = await serve(script)
    await driven(start, server.url, session(0, "a", "b", index=0))
    assert json.loads(chat("a", "first second", "b")) == json.loads(server.peers[1].body)
    assert sum(part.index == 0 for part in parts(tmp_path)) > 1


async def test_a_worker_sends_nothing_behind_a_failed_turn(
    serve: Serve, wire: type[Wire], start: Start, tmp_path: Path
):
    """The second turn is refused: the third is in no log, and the next session begins."""

    async def script(peer: Peer) -> None:
        if b'"b"' in peer.body:
            await peer.say(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")
        else:
            await peer.say(wire.SSE_HEAD, answer(wire, "ok"))

    server = await serve(script)
    sessions = (session(0, "a", "b", "c", index=0), session(1, "x", "y", index=3))
    drained = await driven(start, server.url, *sessions, concurrency=1)
    assert 4 == drained["finished"]
    assert {0: 200, 1: 503, 3: 200, 4: 200} == {part.index: part.status for part in parts(tmp_path)}
