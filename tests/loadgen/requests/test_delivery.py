from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import request_log
from msgspec import UNSET, to_builtins

from sidelight.loadgen.requests import delivery as chunks
from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.loadgen.requests.summary import client_summary
from sidelight.loadgen.requests.table.log import RequestLog


def _reply(sizes: list[int], **more: object) -> dict[str, object]:
    """A reply with so many tokens in each of its chunks, 10 ms apart."""
    stamps = tuple(range(100, 100 + 10 * len(sizes), 10))
    row = {"submit": 80, "first": 100, "last": stamps[-1], "end": stamps[-1], "output": sum(sizes), "chunks": stamps}
    return row | more


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=20), min_size=1, max_size=6))
def test_the_bounds_hold_the_truth(replies: list[list[int]]):
    """However tokens fall into chunks, as many chunks with one token as there are lie between least and most."""
    got = chunks.single_token_chunks(request_log(*map(_reply, replies)))
    truth = sum(size == 1 for sizes in replies for size in sizes)
    assert got.least <= truth <= got.most
    assert sum(map(len, replies)) == got.chunks
    if all(size == 1 for sizes in replies for size in sizes):
        assert got.least == got.most == got.chunks


@pytest.mark.parametrize(
    ("rows", "option"),
    [
        ([], "none"),
        ([{"submit": 0, "end": 10, "output": 5}], "none"),
        ([_reply([1] * 20)], "direct"),
        ([_reply([1] * 20, output=21)], "direct"),
        ([_reply([1] * 20, output=-1)], "A"),
        ([_reply([3] * 20)], "A"),
        ([_reply([3] * 20, server_decode_ms=200.0)], "C"),
        ([_reply([1] * 20, server_decode_ms=200.0)], "direct"),
        ([_reply([3] * 20, server_decode_ms=200.0), _reply([3] * 20)], "A"),
        ([_reply([1] * 90), _reply([2] * 10)], "A"),
        ([_reply([1] * 91), _reply([2] * 9)], "direct"),
    ],
    ids=[
        "nothing", "not streamed", "one each", "and an end-of-sequence token", "no usage", "three each",
        "three each, server times", "one each, server times", "server times of half", "exactly 90 %", "91 %",
    ],
)  # fmt: skip
def test_gaps_are_used_by_the_drafts_rule(rows: list[dict[str, object]], option: str):
    """Directly above 90 % single-token chunks, else the server's times, else chunk timing."""
    assert option == chunks.itl_option(request_log(*rows))


def _delivery(log: RequestLog) -> dict[str, object]:
    return chunks.delivery(log)


def test_delivery_has_the_sizes_of_chunks():
    """Tokens a chunk by reply, characters by chunk, and what one read brought together."""
    got = _delivery(request_log(_reply([3] * 4, chars=(9, 9, 12, 9)), {"submit": 0, "end": 10, "output": 5}))
    assert ("A", 4, 1, 1) == tuple(
        getattr(got, key) for key in ("itl_option", "chunks", "replies_in_chunks", "replies_whole")
    )
    assert {"least": 0.0, "most": 0.75} == to_builtins(got.single_token_chunks_ratio)
    assert (1, 3.0) == (got.tokens_per_chunk.count, got.tokens_per_chunk.mean)
    assert (4, 9.75) == (got.characters_per_chunk.count, got.characters_per_chunk.mean)
    assert 0.0 == got.same_read_ratio
    json.dumps(to_builtins(got), allow_nan=False)


def test_what_counts_as_content_is_stated():
    """The rule in words, and what replies began with; one without a first token began with nothing."""
    rows = [_reply([1, 1], first_kind=kind) for kind in ("content", "reasoning", "reasoning", "tool", "")]
    got = _delivery(request_log(*rows))
    assert {"content": 1, "reasoning": 2, "tool": 1} == to_builtins(got.first_tokens)
    assert "reasoning and tool calls count as content" in str(got.content_rule)


def test_a_first_visible_token_is_stated_where_a_reply_reasons():
    """Of the replies that have one; else it is the TTFT, and stated once."""
    rows = [
        _reply([1, 1], first_kind="reasoning", submit=0, first=10, first_visible_ns=visible_ns, reasoning_tokens=1)
        for visible_ns in (30_000_000, -1)
    ]
    got = client_summary(request_log(*rows))
    assert (10.0, 30.0, 1) == (got.ttft_ms.p50, got.first_visible_token_ms.p50, got.first_visible_token_ms.count)
    assert got.reasoning_tokens.mean == 1.0
    plain = client_summary(request_log(_reply([1, 1], first_kind="content")))
    assert (UNSET, UNSET) == (plain.first_visible_token_ms, plain.reasoning_tokens)


def test_chunks_of_one_read_are_counted():
    """Chunks with equal stamps came in one read."""
    got = _delivery(request_log(_reply([1, 1, 1], chunks=(100, 100, 110))))
    assert 0.5 == got.same_read_ratio


def test_the_servers_time_between_tokens_is_its_decode_time():
    """Over one less than the tokens; none for one token, or without its word."""
    rows = [_reply([3] * 4, server_decode_ms=33.0), _reply([1], server_decode_ms=0.0), _reply([1, 1])]
    got = chunks.server_itl_ms(request_log(*rows))
    assert np.array_equal([3.0, np.nan, np.nan], got, equal_nan=True)


@pytest.mark.parametrize("decode_ms", [-5.0, 1e5, 1e-4, np.inf])
def test_a_decode_that_the_reply_contradicts_gives_no_time_between_tokens(decode_ms: float):
    """Below 0, longer than the client waited, or in another unit."""
    row = _reply([3] * 4, chunks=(100, 500, 900, 1300), last=1300, end=1400, server_decode_ms=decode_ms)
    assert np.isnan(chunks.server_itl_ms(request_log(row))).all()


def test_an_empty_log_has_a_delivery():
    """Reasons, no zeros for what was not measured."""
    got = _delivery(request_log())
    assert (None, "no reply came in chunks") == (got.same_read_ratio, got.characters_per_chunk.missing)
    json.dumps(to_builtins(got), allow_nan=False)


def test_a_reply_in_one_read_has_no_time_between_tokens():
    """No TPOT of 0 and no gap: missing, with the reason, and no objective of them is met; the zero gaps are counted."""
    row = {"submit": 0, "first": 400, "last": 400, "end": 401, "output": 20, "chunks": (400,) * 20}
    client = client_summary(request_log(row), slo=parse_slo("tpot<50ms,itl<50ms"))
    gaps = client.itl_ms or client.time_between_chunks_ms
    assert (400.0, None, None) == (client.ttft_ms.p50, client.tpot_ms.p50, gaps and gaps.p50)
    assert "one read" in str(client.tpot_ms.missing)
    assert (1, 1.0) == (client.delivery.replies_in_one_read, client.delivery.same_read_ratio)
    assert client.slo is not None
    assert (None, 0, 1) == (client.slo.met, client.slo.good_requests, client.slo.undetermined_requests)
    short = client_summary(request_log(row | {"output": 3, "chunks": (400,) * 3}))
    assert 0 == short.delivery.replies_in_one_read
