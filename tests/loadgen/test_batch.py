"""Replies that are read many at once are the same as each read alone; and the usual ones are read at once."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from sidelight.loadgen.http1 import dechunk
from sidelight.loadgen.protocols.openai import FORM
from sidelight.loadgen.protocols.reading import batch
from sidelight.loadgen.protocols.reading.batch import WholeReply, may_join, read_whole
from sidelight.loadgen.protocols.reading.events import SseEvent
from sidelight.loadgen.protocols.reading.reply import Reads, Reply, head_of, joined, read_parts
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.records import RequestPart, read_log
from sidelight.loadgen.requests.table.fold import RequestFold, assemble
from sidelight.loadgen.requests.table.log import RequestLog

GOLDEN = Path(__file__).parents[1] / "golden"
RECORDINGS = ("sglang_trtllm", "torn", "two_engines", "vllm_plain")
PLAIN_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CHUNKED_HEAD = PLAIN_HEAD[:-2] + b"Transfer-Encoding: chunked\r\n\r\n"
COUNTS = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
DONE = b"data: [DONE]\n\n"


def facts(reply: Reply) -> str:
    """Return every field of a reply; NaN is equal to itself in it."""
    values = structs.asdict(reply).items()
    return repr({name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values})


def alone(whole: WholeReply) -> Reply:
    """Return a reply as it is read alone."""
    return read_parts(FORM, whole.http_status, whole.head, [whole.reads])


def logged_parts(name: str) -> list[list[RequestPart]]:
    """Return the parts of each request that a recorded run has from its first part to its last."""
    requests: dict[int, list[RequestPart]] = {}
    for log in sorted((GOLDEN / name / "raw").glob("requests-*.log")):
        for record in read_log(log):
            if isinstance(record, RequestPart):
                requests.setdefault(record.index, []).append(record)
    ordered = [sorted(parts, key=lambda part: part.seq) for parts in requests.values()]
    return [parts for parts in ordered if parts[-1].last]


def recorded(name: str) -> list[WholeReply]:
    """Return the replies of a recorded run."""
    return [
        WholeReply(http_status=parts[-1].status, head=head_of(parts), reads=next(joined(parts)))
        for parts in logged_parts(name)
    ]


def chunk(data: bytes) -> bytes:
    """Return data as a chunk of HTTP."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole_reply(reads: list[bytes], head: bytes = CHUNKED_HEAD, stamps_ns: list[int] | None = None) -> WholeReply:
    """Return a reply that came in these reads."""
    ends = np.array(list(accumulate(map(len, reads))), np.int64)
    stamps = np.array(stamps_ns or range(100, 100 + len(reads)), np.int64)
    return WholeReply(http_status=200, head=head, reads=Reads(stamps_ns=stamps, ends=ends, body=b"".join(reads)))


def event(payload: object, *, ascii_only: bool = True) -> bytes:
    """Return an event of JSON."""
    data = json.dumps(payload, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    return b"data: " + data + b"\n\n"


def choice(delta: dict[str, object] | None = None, **more: object) -> dict[str, object]:
    """Return a chunk of one choice."""
    return {"id": "r-1", "object": "chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": None} | more]}


def usual(field: str = "content", index: int = 0, texts: tuple[str, ...] = (" a", "b", "\n", " é", " c", ".")) -> list:
    """Return the payloads of a usual reply but for its end."""
    first = [choice({"role": "assistant", "content": ""}, index=index)]
    if field == "text":
        return [choice(None, text=text) for text in texts]
    return first + [choice({field: text}, index=index) for text in texts]


END: list[Any] = [choice({}, finish_reason="length"), {"id": "r-1", "choices": [], "usage": COUNTS}]
SERVERS: dict[str, list[Any]] = {
    "content": usual() + END,
    "completions": [*usual("text"), choice(None, text="", finish_reason="length"), *END[1:]],
    "reasoning": usual("reasoning_content") + usual()[1:] + END,
    "role in each": [choice({"role": "assistant", "content": text}) for text in ("", "", "a", "", "b", "c", "d")] + END,
    "usage in each": [payload | {"usage": COUNTS} for payload in usual()] + END,
    "timings": [*usual(), choice({}, finish_reason="stop") | {"timings": {"predicted_n": 6, "predicted_ms": 5.0}}],
    "tools": [*usual(), choice({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}), *END],
    "two choices": [each for pair in zip(usual(), usual(index=1), strict=True) for each in pair] + END,
    "blank only": usual(texts=("\n", " ", "\u200b") * 3) + END,
    "blank first": usual(texts=("", "\n", " ", "\u200b", "a", "b", "\u200b", "\x7f", "c")) + END,
}
TEXTS = st.text(max_size=4) | st.sampled_from(
    ["", " ", " a", "\n", '"', "\\", "hé", "\u2028", "🙂", "\u200b", "\x7f", '"},"x":"', "data: ", "\ud83d"]
)
FIELDS = st.sampled_from(["content", "content", "reasoning", "reasoning_content", "refusal"])
# Events that servers or gateways may put between others.
STRANGE = st.sampled_from(
    [
        b": keep-alive\n\n", DONE, b"data:[DONE]\n\n", b"data:  [DONE] \n\n", b"event: message\n", b"id: 5\n", b"\n",
        b"data:\n\n", b"data: {\n\n", b"data: \n\n", b"\r\n", b"data: {}\r\n\r\n",
        b': generation_stats {"prompt_tps": 5.0}\n\n',
        b'data: {"error": {"message": "out of memory", "code": 500}}\n\n',
        b'event: error\ndata: {"message": "gone"}\n\n',
        b'data: {"id": "r-1", "choices": [{"delta": {"content": "\\ud83d"}}]}\n\n',
        b'data: {"id": "r-1", "choices": [{"delta": {"content": "\xff"}}]}\n\n',
        b'data: {"id": "r-1", "choices": [{"delta": {"content": "a\tb"}}]}\n\n',
        b'data: {"id": "r-1", "choices": [{"delta": {"content": "a", "content": "b"}}]}\n\n',
        b'data: {"id": "r-1", "choices": [{"delta": {"content": "a\\"}}]}\n\n',
        event({"id": "r-1", "choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": "7"}}),
        event({"id": "r-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 10**9}}),
        event(choice({"content": ""}, finish_reason="abort")),
        event(choice({"content": "x"}, finish_reason="content_filter")),
        event(choice({"role": "assistant"}, index=2)),
    ]
)  # fmt: skip


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Return the events of a reply, as servers send them or changed."""
    name = draw(st.sampled_from([*SERVERS, "recorded"]))
    if name == "recorded":
        body = dechunk(draw(st.sampled_from(RECORDED)).reads.body).data
        events = [data + b"\n\n" for data in body.split(b"\n\n")[:-1]]
    else:
        events = [event(payload, ascii_only=draw(st.booleans())) for payload in SERVERS[name]] + [DONE]
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(events)))
        match draw(st.sampled_from(["text", "texts", "strange", "drop", "again", "crlf", "byte"])):
            case "text":
                events[at:at] = [event(choice({draw(FIELDS): draw(TEXTS)}), ascii_only=draw(st.booleans()))]
            case "texts":
                more = [choice({"content": text}) for text in draw(st.lists(TEXTS, min_size=5, max_size=9))]
                events[at:at] = [event(payload, ascii_only=draw(st.booleans())) for payload in more]
            case "strange":
                events[at:at] = [draw(STRANGE)]
            case "drop":
                del events[at : at + draw(st.integers(1, 3))]
            case "again":
                events[at:at] = events[at : at + 2]
            case "crlf":
                events = [line.replace(b"\n", b"\r\n") for line in events] if at % 2 else events
            case "byte":
                events = flipped(draw, b"".join(events), [b"\n\n"])
    return events


def flipped(draw: st.DrawFn, data: bytes, breaks: list[bytes]) -> list[bytes]:
    """Return data with one byte changed, put in or left out, split behind each break."""
    at = draw(st.integers(0, len(data)))
    byte = draw(st.sampled_from([b"", b"\\", b'"', b"\n", b"\r", b"\x00", b"\xc3", b"0", b"a", b" ", b"{"]))
    data = data[:at] + byte + data[at + draw(st.integers(0, 1)) :]
    pieces = data.split(breaks[0])
    return [piece + breaks[0] for piece in pieces[:-1]] + [piece for piece in pieces[-1:] if piece]


@st.composite
def replies(draw: st.DrawFn) -> WholeReply:
    """Return a reply of any such stream, framed and cut into reads in any way."""
    events = draw(streams())
    if draw(st.integers(0, 3)) == 0:  # several events a chunk, or chunks that begin amid an event
        data = b"".join(events)
        cuts = sorted(draw(st.sets(st.integers(0, len(data)), max_size=4)))
        events = [data[a:b] for a, b in pairwise([0, *cuts, len(data)]) if a < b]
        if draw(st.booleans()):
            events = [piece + b"\n\n" for piece in data.split(b"\n\n") if piece]
            events = [b"".join(events[at : at + 3]) for at in range(0, len(events), 3)]
    is_chunked = draw(st.booleans())
    reads = [chunk(piece) for piece in events if piece] + [b"0\r\n\r\n"] if is_chunked else events
    if draw(st.integers(0, 7)) == 0:
        reads = flipped(draw, b"".join(reads), [b"\r\n"])
    if draw(st.integers(0, 2)) == 0:
        data = b"".join(reads)
        anywhere = st.integers(0, len(data))
        around_line_ends = st.sampled_from([at for at, byte in enumerate(data) if byte == ord("\n")] or [0])
        near = st.builds(lambda at, off: max(0, min(len(data), at + off)), around_line_ends, st.integers(-2, 2))
        cuts = sorted(draw(st.sets(anywhere | near, max_size=8)))
        end = len(data) if draw(st.integers(0, 3)) else draw(st.integers(0, len(data)))
        reads = [data[a:b] for a, b in pairwise([0, *cuts, end])]
    stamps_ns = draw(st.lists(st.integers(0, 50), min_size=len(reads), max_size=len(reads)))
    whole = whole_reply(reads, CHUNKED_HEAD if is_chunked else PLAIN_HEAD, stamps_ns)
    if draw(st.integers(0, 9)) == 0 and reads:  # as no worker logs it
        ends = whole.reads.ends + np.array(draw(st.lists(st.integers(-9, 9), min_size=len(reads), max_size=len(reads))))
        return WholeReply(
            http_status=200,
            head=whole.head,
            reads=Reads(stamps_ns=whole.reads.stamps_ns, ends=ends, body=whole.reads.body),
        )
    return whole


RECORDED = [reply for name in RECORDINGS for reply in recorded(name) if len(reply.reads.ends) < 40]
USUAL = [
    whole_reply([*(chunk(event(payload)) for payload in SERVERS["content"]), chunk(DONE), b"0\r\n\r\n"])
] * batch.LEAST_REPLIES


@settings(max_examples=100)
@given(st.lists(replies(), min_size=1, max_size=4), st.integers(0, 1))
def test_replies_read_together_are_those_read_alone(drawn: list[WholeReply], behind: int):
    """Every field, whatever was changed, and those of their neighbours."""
    together = [*USUAL, *(reply for reply in drawn if may_join(FORM, reply)), *USUAL[:behind]]
    assert [facts(alone(reply)) for reply in together] == [facts(reply) for reply in read_whole(FORM, together)]


@pytest.fixture
def read_alone(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return the bodies of replies that the batch leaves to the reader of single ones, as it goes on."""
    bodies: list[bytes] = []

    def noting(form: Form, status: int, head: bytes, parts: list[Reads]) -> Reply:
        bodies.append(parts[0].body)
        return read_parts(form, status, head, parts)

    monkeypatch.setattr(batch, "read_parts", noting)
    return bodies


def taken(replies: list[WholeReply]) -> tuple[int, int]:
    """Return the number of events that are decoded singly, and of all."""
    decoded: list[bytes] = []

    def take(seen: ReplyState, event: SseEvent) -> None:
        decoded.append(event.data)
        FORM.take(seen, event)

    read_whole(replace(FORM, take=take), replies)
    return len(decoded), sum(reply.reads.body.count(b"data: {") for reply in replies)


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_reply_of_recorded_servers_is_read_at_once(name: str, read_alone: list[bytes]):
    """And of each only the role, the finish reason and the usage singly, or two more of a text in an odd place."""
    whole = recorded(name)
    assert len(whole) > 15
    assert [facts(alone(reply)) for reply in whole] == [facts(reply) for reply in read_whole(FORM, whole)]
    assert [True] * len(whole) == [may_join(FORM, reply) for reply in whole]
    assert [] == read_alone
    decoded, events = taken(whole)
    assert decoded <= 4 * len(whole) < events / 4


def reply_in_chunks(events: list[bytes]) -> WholeReply:
    """Return a whole reply, one event a chunk and a chunk a read."""
    return whole_reply([*map(chunk, events), b"0\r\n\r\n"])


@pytest.mark.parametrize("name", SERVERS)
def test_the_usual_replies_of_every_kind_are_read_at_once(name: str, read_alone: list[bytes]):
    """In chunks and without, one event a chunk and several, whichever escapes a server uses."""
    events = [event(payload, ascii_only=at % 2 == 0) for at, payload in enumerate(SERVERS[name])] + [DONE]
    pairs = [b"".join(events[at : at + 2]) for at in range(0, len(events), 2)]
    replies = [reply_in_chunks(events), whole_reply(events, PLAIN_HEAD), reply_in_chunks(pairs)] * 2
    expected = [facts(alone(reply)) for reply in replies]
    assert expected == [facts(reply) for reply in read_whole(FORM, replies)]
    assert [True] * len(replies) == [may_join(FORM, reply) for reply in replies]
    assert [] == read_alone


WORDS = (" a", "\n", " \u00e9", '"', "", "b", "\u200b", "c", "d", "e")


@pytest.mark.parametrize(
    ("payloads", "singly"),
    [
        (usual(texts=WORDS), 3),
        (usual("text", texts=WORDS), 2),
        (usual("reasoning", texts=WORDS) + usual(texts=WORDS)[1:], 3),
        (usual(index=1, texts=WORDS), 3),
    ],
    ids=["content", "completions", "reasoning and content", "another choice"],
)
def test_only_events_in_no_frame_are_decoded(payloads: list[Any], singly: int):
    """A role, the finish reason and the usage, however many events there are between these."""
    reply = reply_in_chunks([*map(event, payloads + END), DONE])
    assert singly * batch.LEAST_REPLIES == taken([reply] * batch.LEAST_REPLIES)[0]


ODD_LINES = {
    "a comment": [*map(event, usual()), b": keep-alive\n\n", DONE],
    "a named event": [*map(event, usual()), b'event: error\ndata: {"message": "gone"}\n\n'],
    "lines that end with CRLF": [event(payload).replace(b"\n", b"\r\n") for payload in usual()],
    "a carriage return in an event": [*map(event, usual()), b"data: {}\rdata: {}\n\n"],
    "two lines of data": [*map(event, usual()), b"data: {\ndata: }\n\n"],
}


GOOD = reply_in_chunks([event(payload) for payload in SERVERS["content"]] + [DONE])
LEFT = {
    **{name: reply_in_chunks(events) for name, events in ODD_LINES.items()},
    "chunks behind the last": whole_reply([*map(chunk, map(event, usual())), b"0\r\n\r\n", chunk(DONE), b"0\r\n\r\n"]),
    "a size that is none": whole_reply([b"x" + GOOD.reads.body[1:]]),
    "another size": whole_reply([b"1" + GOOD.reads.body[1:]]),
    "reads in disorder": structs.replace(
        GOOD, reads=structs.replace(GOOD.reads, ends=GOOD.reads.ends[[1, 0, *range(2, len(GOOD.reads.ends))]])
    ),
    "reads of more": structs.replace(GOOD, reads=structs.replace(GOOD.reads, ends=GOOD.reads.ends + 1)),
    "reads of less": structs.replace(GOOD, reads=structs.replace(GOOD.reads, ends=GOOD.reads.ends - 1)),
}


@pytest.mark.parametrize("name", LEFT)
def test_replies_of_another_form_are_left_to_the_reader_of_single_ones(name: str, read_alone: list[bytes]):
    """They take no other reply with them."""
    odd = LEFT[name]
    assert may_join(FORM, odd)
    read = read_whole(FORM, [*USUAL, odd, *USUAL])
    assert [odd.reads.body] == read_alone
    assert facts(alone(odd)) == facts(read[len(USUAL)])
    assert {facts(alone(USUAL[0]))} == {facts(reply) for reply in (*read[: len(USUAL)], *read[len(USUAL) + 1 :])}


@pytest.mark.parametrize(
    "reply",
    [
        structs.replace(GOOD, http_status=500),
        structs.replace(GOOD, head=b""),
        structs.replace(GOOD, head=CHUNKED_HEAD.replace(b"event-stream", b"html")),
        structs.replace(GOOD, head=CHUNKED_HEAD[:-2] + b"Content-Encoding: gzip\r\n\r\n"),
        whole_reply([GOOD.reads.body[:-5]]),
        whole_reply([GOOD.reads.body + b"\n"]),
    ],
    ids=["an error", "no head", "another type", "compressed", "torn", "more behind it"],
)
def test_what_is_no_whole_stream_waits_for_no_others(reply: WholeReply):
    """Nor does any reply of a protocol without frames."""
    assert may_join(FORM, GOOD)
    assert not may_join(FORM, reply)
    assert not may_join(PROTOCOLS["tgi"].form, GOOD)


def test_requests_are_the_same_however_many_are_read_together():
    """All at the end, a few at each look at the logs, and one by one; in the order in which they ended."""
    parts = [part for request in logged_parts("vllm_plain") for part in request]
    together = assemble([], parts, run_id="r")
    for step in (1, 9):
        fold = RequestFold(run_id="r")
        ended = []
        for at in range(0, len(parts), step):
            for part in parts[at : at + step]:
                fold.add(part)
            ended += fold.ended().index.tolist()
        assert [part.index for part in parts if part.last] == ended
        for column in fields(RequestLog):
            np.testing.assert_array_equal(getattr(together, column.name), getattr(fold.table(), column.name))
