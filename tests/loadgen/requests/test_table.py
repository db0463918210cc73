from __future__ import annotations

import itertools
import random
import zlib
from array import array
from dataclasses import fields
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from sidelight.loadgen import records
from sidelight.loadgen.requests.metrics import refused_by_filter
from sidelight.loadgen.requests.table.fold import RequestFold, assemble
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import take

if TYPE_CHECKING:
    from conftest import Wire


def _planned(index: int, **changes: object) -> records.PlannedRequest:
    return records.PlannedRequest(**{"index": index, "phase": "measure", "input_tokens": 12} | changes)


def _parts(
    index: int, reply: bytes, *, pieces: int = 1, reads: int = 4, error: str = "", last: bool = True
) -> list[records.RequestPart]:
    """The parts of a request whose reply came in equal reads at 100, 200, ... ns and was logged in some pieces."""
    stop = reply.find(b"\r\n\r\n") + 4 if reply else 0
    head, body = reply[:stop], reply[stop:]
    ends = [round(len(body) * (k + 1) / reads) for k in range(reads)] if reply else []
    parts = []
    for seq in range(pieces):
        part_chunks = [k for k in range(len(ends)) if k * pieces // reads == seq]
        begin = ends[part_chunks[0] - 1] if part_chunks and part_chunks[0] else 0
        piece = body[begin : ends[part_chunks[-1]]] if part_chunks else b""
        final = last and seq == pieces - 1
        parts.append(
            records.RequestPart(
                index=index, seq=seq, last=final, status=int(head[9:12] or 0), head=head if seq == 0 else b"",
                reads_ns=array("q", [100 * (k + 1) for k in part_chunks]).tobytes(),
                read_ends=array("q", [ends[k] - begin for k in part_chunks]).tobytes(),
                body=zlib.compress(piece, 1), end_ns=100 * reads if final else -1, error=error if final else "",
            )
        )  # fmt: skip
    return parts


def _same(first: RequestLog, second: RequestLog) -> None:
    for name in (column.name for column in fields(RequestLog)):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name), name)


def test_parts_join_to_the_reply_they_came_from(wire: type[Wire]):
    """In one part or in four, and in any order of the log, a request is the same row."""
    reply = wire.answer(6)
    plan = [_planned(7)]
    whole = assemble(plan, _parts(7, reply), run_id="r")
    in_four = _parts(7, reply, pieces=4)
    for order in itertools.permutations(in_four):
        _same(whole, assemble(plan, order, run_id="r"))
    assert ("ok", 6, "length") == (whole.status[0], whole.output_tokens[0], whole.finish_reason[0])
    assert whole.chunk_start.tolist() == [0, 6]
    assert set(whole.chunk_ns.tolist()) <= {100, 200, 300, 400}
    assert whole.first_read_ns.tolist() == [100]
    assert whole.received_bytes.tolist() == [len(reply) - len(wire.SSE_HEAD)]
    assert (whole.request_id[0], whole.trace_id[0]) == (records.request_id("r", 7), records.trace_id("r", 7))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (',"usage":{"prompt_tokens":1,"completion_tokens":7},"timings":{"predicted_n":8}', (7, "usage")),
        (',"timings":{"predicted_n":8,"predicted_ms":4.0}', (8, "timings")),
        ("", (3, "estimate")),
    ],
    ids=["usage", "timings", "estimate"],
)
def test_who_counted_the_output_tokens(said: str, expected: tuple[int, str], wire: type[Wire]):
    """The server's usage, else llama.cpp's timings, else a quarter of the characters."""
    event = f'{{"choices":[{{"delta":{{"content":"fifteen letters"}},"finish_reason":"stop"}}]{said}}}'
    reply = wire.SSE_HEAD + wire.event(event) + wire.event("[DONE]") + wire.END
    got = assemble([_planned(0)], _parts(0, reply), run_id="r")
    assert expected == (got.output_tokens[0], got.output_tokens_source[0])


def test_rows_are_sorted_and_only_what_was_dispatched(wire: type[Wire]):
    """The plan gives phase, class and declared lengths; what it lacks is unknown; what has no part is not there."""
    parts = [*_parts(3, wire.answer(1)), *_parts(1, wire.answer(1)), *_parts(9, wire.answer(1))]
    got = assemble([_planned(1, phase="warmup"), _planned(2), _planned(3)], parts, run_id="r")
    assert [1, 3, 9] == got.index.tolist()
    assert ["warmup", "measure", ""] == got.phase.tolist()
    assert [12, 12, -1] == got.declared_input_tokens.tolist()
    assert len(assemble([_planned(1)], [], run_id="r")) == 0


HTTP = "HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def test_what_a_content_filter_refused_is_known_from_other_errors(wire: type[Wire]):
    """By the reason why a reply ended, by the code of an error, or by its words; a limit of rates is none."""
    begun = wire.SSE_HEAD + wire.event(wire.ROLE) + wire.event(wire.content("a"))
    filtered = begun + wire.event(wire.content("", "content_filter")) + wire.event("[DONE]") + wire.END
    bodies = (
        b'{"error":{"message":"No.","type":"content_filter"}}',
        b'{"error":{"message":"No.","code":"content_filter"}}',
        b'{"error":"blocked by guardrail pii"}',
        b'{"error":{"message":"Too many requests","code":429}}',
    )
    replies = [filtered, *(b"HTTP/1.1 400 X\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body) for body in bodies)]
    parts = [part for index, reply in enumerate(replies) for part in _parts(index, reply)]
    got = assemble([], parts, run_id="r")
    assert ["refused"] * 5 == got.status.tolist()
    assert [True, True, True, True, False] == refused_by_filter(got).tolist()
    assert "http_400: content_filter: No." == got.error[1]


def test_how_a_request_ended(wire: type[Wire]):
    """The status rule, one case a line."""
    begun = wire.SSE_HEAD + wire.event(wire.ROLE) + wire.event(wire.content("a"))
    finished = begun + wire.event(wire.content("", "stop"))
    filtered = begun + wire.event(wire.content("", "content_filter")) + wire.event("[DONE]") + wire.END
    died = begun + wire.event('{"error":{"message":"engine died"}}') + wire.event("[DONE]") + wire.END
    cases = [
        (wire.answer(2), {}, "ok", ""),
        (wire.answer(2), {"error": "timeout: no complete reply"}, "ok", "timeout: no complete reply"),
        (finished + wire.END, {}, "ok", ""),
        (finished, {"error": "reset: after 9 body bytes"}, "failed", "reset: after 9 body bytes"),
        (begun + wire.END, {}, "failed", "incomplete: the reply ended without a finish reason or [DONE]"),
        (wire.SSE_HEAD + wire.END, {}, "failed", "empty: the stream ended without any output"),
        (wire.SSE_HEAD + wire.event("[DONE]") + wire.END, {}, "failed", "empty: the stream ended without any output"),
        (filtered, {}, "refused", ""),
        (died, {}, "failed", "server: engine died"),
        ((HTTP % 404).encode(), {}, "refused", "http_404: no message"),
        ((HTTP % 429).encode(), {}, "refused", "http_429: no message"),
        ((HTTP % 503).encode(), {}, "failed", "http_503: no message"),
        (b"", {"error": "connect: Connection refused"}, "failed", "connect: Connection refused"),
        (begun, {"error": "cancelled: stopped"}, "cancelled", "cancelled: stopped"),
        (begun, {"last": False}, "in_flight", ""),
        (wire.answer(2), {"last": False}, "in_flight", ""),
    ]  # fmt: skip
    parts = [part for index, (reply, how, *_) in enumerate(cases) for part in _parts(index, reply, **how)]
    got = assemble([], parts, run_id="r")
    assert [(status, error) for *_, status, error in cases] == list(zip(got.status, got.error, strict=True))


@pytest.mark.parametrize("error", ["timeout: no complete reply", "cancelled: the drain bound was reached"])
def test_a_body_kept_open_behind_done_does_not_move_the_end(wire: type[Wire], error: str):
    """A reply that was cut off ended when its [DONE] came, at the 3rd of 4 reads; any other when it was cut off."""
    head, body = wire.SSE_HEAD, wire.answer(2)[len(wire.SSE_HEAD) : -len(wire.END)]
    keep_alive = b"%x\r\n%b\r\n" % (len(body) // 3 - 4, b":" * (len(body) // 3 - 4))
    held = _parts(0, head + body + keep_alive, error=error)
    unsaid = _parts(1, head + body[: len(body) // 2], error=error)
    parts = [*held, *unsaid, *_parts(2, wire.answer(2))]
    got = assemble([], parts, run_id="r")
    assert [300, 400, 400] == got.end_ns.tolist()
    assert ["ok", "ok"] == [got.status[0], got.status[2]]


def test_an_impossible_count_spoils_no_other_request(wire: type[Wire]):
    """It is that request's error, and its count is missing."""
    broken = wire.SSE_HEAD + wire.event(wire.content("a")) + wire.event(wire.usage(1, 10**30)) + wire.END
    got = assemble([], [*_parts(0, broken), *_parts(1, wire.answer(2))], run_id="r")
    assert ["failed", "ok"] == got.status.tolist()
    assert [-1, 2] == got.output_tokens.tolist()


def test_a_request_of_very_many_parts_is_joined(wire: type[Wire]):
    """Each part is looked at once: 20 000 parts, last one first, take no 200 million steps."""
    count = 20_000
    body = [
        records.RequestPart(
            index=0, seq=seq, last=seq == count - 1, status=200, head=wire.SSE_HEAD if seq == 0 else b""
        )
        for seq in range(count)
    ]
    assert len(assemble([], reversed(body), run_id="r")) == 1


def test_a_gap_in_the_parts_ends_what_is_known(wire: type[Wire]):
    """Without its third part a request is made of the first two, and is in flight."""
    first, second, _, fourth = _parts(0, wire.answer(6), pieces=4)
    got = assemble([], [first, fourth, second], run_id="r")
    assert ["in_flight"] == got.status.tolist()
    assert 0 < len(got.chunk_ns) < 6
    assert len(assemble([], [fourth], run_id="r")) == 0


def test_a_first_token_is_known_when_it_has_come_and_as_the_table_has_it(wire: type[Wire]):
    """Said once while the reply goes on, with the reads from it on; not of a request that has ended."""
    fold = RequestFold(run_id="r")
    fold.plan(_planned(7))
    fold.plan(_planned(8))
    *parts, last = _parts(7, wire.answer(6), reads=8, pieces=8)
    said, streamed = [], []
    for part in parts:
        fold.add(part)
        said += fold.first_tokens()
        streamed.append(fold.streamed["measure"])
    fold.add(last)
    for part in _parts(8, wire.answer(6), pieces=4):
        fold.add(part)
    assert [] == fold.first_tokens()
    assert {"measure": 0} == fold.streamed
    (first,) = said
    table = fold.table()
    assert ("measure", 7, table.trace_id[0]) == (first.phase, first.index, first.trace_id)
    assert (table.submit_ns[0], table.first_token_ns[0]) == (first.submit_ns, first.first_token_ns)
    reads = [max(0, 1 + n - first.first_token_ns // 100) for n in range(1, 8)]
    assert [max(min(1, count), count - 3) for count in reads] == streamed


def test_a_reply_that_goes_on_has_no_more_tokens_than_were_asked_for(wire: type[Wire]):
    """However many reads its events came in: with log probabilities one is larger than a packet."""
    fold = RequestFold(run_id="r")
    fold.plan(_planned(7, max_tokens=6))
    for part in _parts(7, wire.answer(6), reads=60, pieces=60)[:-1]:
        fold.add(part)
    assert [7] == [first.index for first in fold.first_tokens()]
    assert {"measure": 6} == fold.streamed


def test_a_reply_with_much_before_its_first_token_is_not_looked_through_again_and_again(wire: type[Wire]):
    """Comments of 100 kB first: its first token is known with its end. What no worker has written hurts no other."""
    head, _, body = wire.answer(6).partition(b"\r\n\r\n")
    fold = RequestFold(run_id="r")
    comment = wire.event(wire.ROLE) + b"186a3\r\n:" + b"x" * 100_000 + b"\n\n\r\n"
    long = _parts(7, head + b"\r\n\r\n" + comment + body, pieces=4)
    bad = msgspec.structs.replace(_parts(8, head + b"\r\n\r\n" + body, last=False)[0], body=b"not packed")
    for part in (*long[:-1], bad):
        fold.add(part)
        assert [] == fold.first_tokens()
    fold.add(long[-1])
    assert [7] == fold.ended().index.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_selecting_keeps_rows_and_their_chunks(wire: type[Wire], seed: int):
    """Selecting then looking is looking then selecting; all is the identity; none is empty."""
    rng = random.Random(seed)
    parts = [part for index in range(12) for part in _parts(index, wire.answer(rng.randint(0, 5)), reads=3)]
    whole = assemble([], parts, run_id="r")
    _same(whole, take(whole, np.ones(12, np.bool_)))
    mask = np.array([rng.random() < 0.5 for _ in range(12)])
    some = take(whole, mask)
    expected = [whole.chunk_ns[whole.chunk_start[i] : whole.chunk_start[i + 1]].tolist() for i in np.flatnonzero(mask)]
    actual = [some.chunk_ns[some.chunk_start[i] : some.chunk_start[i + 1]].tolist() for i in range(len(some))]
    assert expected == actual
    assert whole.index[mask].tolist() == some.index.tolist()
    assert len(take(whole, np.zeros(12, np.bool_))) == 0


def test_a_sessions_turns_are_requests(wire: type[Wire]):
    """Planned as its first turn, logged as each of them; what belongs to no session says so."""
    later = (_planned(4, session=2, turn=1, think_ns=5), _planned(5, session=2, turn=2, think_ns=5))
    plan = [_planned(3, session=2, turns=later), _planned(9)]
    parts = [part for index in (3, 4, 9) for part in _parts(index, wire.answer(1))]
    got = assemble(plan, parts, run_id="r")
    assert ([3, 4, 9], [2, 2, -1], [0, 1, 0]) == (got.index.tolist(), got.session.tolist(), got.turn.tolist())
    assert ["measure"] * 3 == got.phase.tolist()


def test_a_log_is_read_by_its_protocol(wire: type[Wire]):
    """The bytes of one are nothing in another; the server's own times stand in columns."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\r\n"
    lines = (
        b'{"message":{"content":"a"},"done":false}\n{"message":{"content":"bc"},"done":false}\n'
        b'{"message":{"content":""},"done":true,"done_reason":"stop","eval_count":2,"eval_duration":3000000}\n'
    )
    got = assemble([], _parts(0, head + lines), run_id="r", protocol="ollama")
    reply = [got.status[0], got.finish_reason[0], got.output_tokens[0], got.first_kind[0]]
    assert ["ok", "stop", 2, "content"] == reply
    assert [1, 2] == got.chunk_chars.tolist()
    assert ("ollama", 3.0) == (got.timings_source[0], got.server_decode_ms[0])
    assert np.isnan(got.server_queue_ms[0])
    assert ["failed"] == assemble([], _parts(0, head + lines), run_id="r").status.tolist()
    chat = assemble([], _parts(0, wire.answer(2)), run_id="r")
    assert ("", -1, -1) == (chat.timings_source[0], chat.cached_tokens[0], chat.peak_memory_bytes[0])
    with pytest.raises(KeyError):
        assemble([], [], run_id="r", protocol="gopher")


def test_a_part_says_whether_it_was_retried():
    """One of fewer fields, as it was once written, was not."""
    old = records.RequestPart(index=7, last=True)
    new = msgspec.structs.replace(old, index=8, retried=True)
    assert [False, True] == assemble([_planned(7), _planned(8)], [old, new], run_id="r").retried.tolist()
    assert records.decode_log(msgspec.msgpack.encode(msgspec.msgpack.decode(msgspec.msgpack.encode(old))[:-2])) == old
