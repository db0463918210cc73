"""Replies that are read in parts: they say what they would say as a whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.protocols.reading import events
from sidelight.loadgen.protocols.reading.reply import Reads, Reply
from sidelight.loadgen.protocols.table import PROTOCOLS

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LINES = SSE.replace(b"text/event-stream", b"application/x-ndjson")
JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"


def _event(text: str, **more: object) -> str:
    return json.dumps({"id": "r", "choices": [{"index": 0, "delta": {"content": text}}], **more})


def _sse(texts: list[str], end: str) -> bytes:
    usage = json.dumps({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}})
    return "".join(f"data: {event}{end}" for event in [*map(_event, texts), usage, "[DONE]"]).encode()


def _lines(texts: list[str]) -> bytes:
    events = [{"message": {"content": text}, "done": False} for text in texts]
    last = {"message": {"content": ""}, "done": True, "done_reason": "stop", "eval_count": 5}
    return "".join(json.dumps(event) + "\n" for event in [*events, last]).encode()


texts = st.lists(st.sampled_from(["a", "", " ", "caf\u00e9", "\n\n", 'say "so"', "x" * 40]), max_size=12)
ends = st.sampled_from(["\n\n", "\r\n\r\n", "\r\r", "\n: \n\n"])
bodies = st.one_of(
    st.tuples(
        st.just(("chat", SSE)), st.builds(_sse, texts, st.sampled_from(["\n\n", "\r\n\r\n", "\r\r", "\n: \n\n"]))
    ),
    st.tuples(st.just(("ollama", LINES)), st.builds(_lines, texts)),
    st.tuples(st.just(("chat", SSE)), st.binary(max_size=60)),
    st.tuples(st.just(("chat", JSON)), st.just(json.dumps({"choices": [{"message": {"content": "hi"}}]}).encode())),
)
edges = st.lists(st.integers(0, 3000), max_size=30)


def _cut(whole: bytes, at: list[int]) -> list[bytes]:
    places = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in at)})
    return [whole[begin:end] for begin, end in itertools.pairwise(places)]


def _parts(reads: list[bytes], sizes: list[int]) -> list[Reads]:
    """Return reads as parts of some reads each, stamped 10, 20, ..."""
    parts, at = [], 0
    for size in [*(1 + size % 5 for size in sizes), len(reads) + 1]:
        taken = reads[at : at + size]
        ends = np.cumsum([len(read) for read in taken], dtype=np.int64)
        stamps_ns = 10 * np.arange(at + 1, at + len(taken) + 1, dtype=np.int64)
        parts.append(Reads(stamps_ns=stamps_ns, ends=ends, body=b"".join(taken)))
        at += size
    return parts


def _facts(reply: Reply) -> str:
    """Return what a reply says, as text: missing times are NaN, which equals nothing."""
    arrays = {name: getattr(reply, name).tolist() for name in ("chunk_ns", "chunk_chars")}
    return repr(msgspec.structs.replace(reply, **arrays))


@given(bodies, edges, edges, edges)
def test_a_reply_in_parts_says_what_the_whole_says(
    reply: tuple[tuple[str, bytes], bytes], chunks: list[int], reads: list[int], parts: list[int]
):
    """However it is chunked, read, and handed on in parts; torn too."""
    (name, head), body = reply
    wire = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in _cut(body, chunks)) + b"0\r\n\r\n"
    wire = wire[: len(wire) - (chunks[0] % 20 if chunks else 0)]
    pieces, protocol = _cut(wire, reads), PROTOCOLS[name]
    (whole,) = _parts(pieces, [])
    assert _facts(protocol.read_parts(200, head, [whole])) == _facts(
        protocol.read_parts(200, head, _parts(pieces, parts))
    )


@pytest.mark.parametrize("head", [SSE, JSON])
def test_an_event_without_end_is_not_collected(monkeypatch: pytest.MonkeyPatch, head: bytes):
    """Nor is a reply in one piece: what is larger than any that can be read is an error, and nothing more is read."""
    monkeypatch.setattr(events, "MOST_MESSAGE_BYTES", 1 << 20)
    taken = []

    def parts() -> Iterator[Reads]:
        for _ in range(100):
            taken.append(1)
            body = b"10000\r\n%b\r\n" % (b"x" * 65_536)
            yield Reads(stamps_ns=np.array([10]), ends=np.array([len(body)]), body=body)

    reply = PROTOCOLS["chat"].read_parts(200, head, parts())
    assert reply.error == "protocol: more than 1 MiB without the end of an event"
    assert len(taken) < 20


def test_tokens_before_an_event_without_end_are_kept(monkeypatch: pytest.MonkeyPatch):
    """What came before it stands."""
    monkeypatch.setattr(events, "MOST_MESSAGE_BYTES", 1000)
    bodies = [_sse(["a", "b"], "\n\n").partition(b"data: [DONE]")[0], *[b"x" * 600] * 3]
    wire = [b"%x\r\n%b\r\n" % (len(body), body) for body in bodies]
    parts = [Reads(stamps_ns=np.array([10]), ends=np.array([len(body)]), body=body) for body in wire]
    reply = PROTOCOLS["chat"].read_parts(200, SSE, parts)
    assert [10, 10] == reply.chunk_ns.tolist()
    assert reply.output_tokens == 7
    assert "without the end" in reply.error
