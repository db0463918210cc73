"""What a server's usage may say, and what contradicts it."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.records import PlannedRequest, RequestPart
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.loadgen.requests.slo.results import goodput
from sidelight.loadgen.requests.summary import client_summary
from sidelight.loadgen.requests.table.fold import assemble
from sidelight.loadgen.requests.table.log import RequestLog

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
MS = 1_000_000
TEXTS = [f"tok{number} " for number in range(20)]
BODY = json.dumps({"messages": [{"role": "user", "content": "word " * 50}]}).encode()


def chunk(
    text: str, choice: int = 0, usage: object = None, key: str = "content", finish: str | None = None
) -> dict[str, object]:
    delta = {"choices": [{"index": choice, "delta": {key: text}, "finish_reason": finish}]}
    return delta if usage is None else {**delta, "usage": usage}


def usage(output: object, prompt: object = 50, **more: object) -> dict[str, object]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **more}}


def log_of(*events: dict[str, object], at_ms: Sequence[float] = (), **planned: object) -> RequestLog:
    """A log of one request whose events came in reads of their own, 10 ms after one another or at these times."""
    pieces = [f"data: {json.dumps(event)}\n\n".encode() for event in events] + [b"data: [DONE]\n\n"]
    stamps = [round(MS * at) for at in at_ms] or [10 * MS * (number + 1) for number in range(len(pieces))]
    stamps += stamps[-1:] * (len(pieces) - len(stamps))
    part = RequestPart(
        index=0, last=True, status=200, head=HEAD, dispatch_ns=0, submit_ns=0, end_ns=stamps[-1],
        reads_ns=array("q", stamps).tobytes(), read_ends=array("q", np.cumsum([*map(len, pieces)]).tolist()).tobytes(),
        body=zlib.compress(b"".join(pieces), 1),
    )  # fmt: skip
    plan = PlannedRequest(
        **{"index": 0, "phase": "measure", "input_tokens": 50, "max_tokens": 20, "body": BODY} | planned
    )
    return assemble([plan], [part], run_id="r")


def reply(*closing: dict[str, object], **planned: object) -> RequestLog:
    """A reply of 20 chunks of text, and what stands behind them."""
    return log_of(*map(chunk, TEXTS), *closing, **planned)


HONEST = [
    ({"closing": [usage(20)]}, 20),
    ({"closing": [usage(60)], "max_tokens": 60}, 60),  # speculation: three tokens a chunk
    ({"closing": [usage(20.0)]}, 20),
    ({"closing": [usage(0, 0), usage(20)]}, 20),  # counts of 0 before the true ones
    ({"closing": [usage(300, completion_tokens_details={"reasoning_tokens": 280})], "max_tokens": 400}, 300),
    ({"closing": [usage(20)], "max_tokens": 10}, 20),  # a server that does not keep to the limit
    ({"closing": [usage(20, 5000)]}, 20),  # a prompt that a gateway adds to
    ({"closing": [usage(20)], "max_tokens": -1, "input_tokens": -1}, 20),
]


@pytest.mark.parametrize(("said", "tokens"), HONEST)
def test_a_usage_that_may_be_so_counts(said: dict[str, object], tokens: int):
    """Speculation, hidden reasoning, limits that are not kept to, prompts that gateways add to."""
    said = dict(said)
    log = reply(*said.pop("closing"), **said)
    assert ("", "usage", tokens) == (log.usage_contradiction[0], log.output_tokens_source[0], log.output_tokens[0])
    assert log.input_tokens[0] > 0


OF_OUTPUT = [
    [usage(1_000_000)],
    [usage(2**53)],
    [usage(2**63)],
    [usage(10**30)],
    [usage(0)],
    [usage(10)],
    [usage(70, 50)],
    [usage(-1)],
    [usage("20")],
    [usage(20.5)],
    [usage(True)],
    [usage([20])],
    [{"choices": [], "usage": "20"}],
    [usage(20), usage(0, 0)],
    [usage(20), usage(19)],
    [usage(20, completion_tokens_details={"reasoning_tokens": 500})],
]


@pytest.mark.parametrize("closing", OF_OUTPUT)
def test_output_tokens_that_cannot_be_are_not_used(closing: list[dict[str, object]]):
    """The reply is ok; its tokens, TPOT and rates are unknown, no objective of them is met, and the text says why."""
    log = reply(*closing)
    metrics = request_metrics(log)
    assert ("ok", "contradicted", -1) == (log.status[0], log.output_tokens_source[0], log.output_tokens[0])
    assert log.usage_contradiction[0]
    assert np.isnan([metrics.tpot_ms[0], metrics.request_output_tps[0]]).all()
    slo = parse_slo("tpot<50ms,output_tokens_per_s>1")
    assert [True] == goodput(slo, log, metrics).unknown.tolist()
    client = client_summary(log, slo=slo)
    assert client.slo is not None
    assert [None, None] == [objective.met for objective in client.slo.objectives]


def test_a_contradicted_count_stays_as_it_was_stated():
    """Beside what is used."""
    log = reply(usage(1_000_000, 10**6, prompt_tokens_details={"cached_tokens": 10**7}))
    stated = (log.usage_output_tokens[0], log.usage_input_tokens[0], log.usage_cached_tokens[0])
    assert (1_000_000, 10**6, 10**7) == stated
    assert (-1, -1, -1) == (log.output_tokens[0], log.input_tokens[0], log.cached_tokens[0])
    assert 3 == len(log.usage_contradiction[0].split("; "))


@pytest.mark.parametrize("prompt", [0, 10**6, 5, -3, "50", None])
def test_input_tokens_that_cannot_be_are_not_used(prompt: object):
    """None at all, more than the request has bytes, far fewer than the tokenizer counted; the output stays."""
    log = reply(usage(20, prompt))
    assert (-1, 20) == (log.input_tokens[0], log.output_tokens[0])
    assert (prompt is None) == (not log.usage_contradiction[0])


def test_input_tokens_that_change_are_not_used():
    """Between two statements; but 0 before the first one states nothing."""
    assert reply(usage(20, 50), usage(20, 60)).input_tokens[0] == -1
    assert reply(usage(0, 0), usage(20, 60)).input_tokens[0] == 60


def test_more_cached_than_input_tokens_are_not_used():
    """SGLang adds up what each of several choices found: that may be more."""
    details = {"prompt_tokens_details": {"cached_tokens": 80}}
    alone = reply(usage(20, **details))
    assert (-1, 50) == (alone.cached_tokens[0], alone.input_tokens[0])
    two = log_of(chunk("a"), chunk("b", 1), usage(2, **details))
    assert two.cached_tokens[0] == 80


def test_a_usage_of_every_chunk_rises():
    """One that stands still or falls counts nothing that was generated."""
    rising = [chunk(text, usage=usage(number + 1)["usage"]) for number, text in enumerate(TEXTS)]
    still = [chunk(text, usage=usage(20)["usage"]) for text in TEXTS]
    ones = [chunk(text, usage=usage(1)["usage"]) for text in TEXTS]
    falling = [chunk(text, usage=usage(20 - number)["usage"]) for number, text in enumerate(TEXTS)]
    assert [20, -1, -1, -1] == [int(log_of(*events).output_tokens[0]) for events in (rising, still, ones, falling)]


def test_a_total_that_is_no_sum_is_said_and_takes_nothing_away():
    """Some servers count hidden reasoning in the total alone."""
    log = reply(usage(20, 50, total_tokens=570))
    assert (20, 50) == (log.output_tokens[0], log.input_tokens[0])
    assert "570" in log.usage_contradiction[0]
    assert not reply(usage(20, 50, total_tokens=70)).usage_contradiction[0]


def test_calls_of_tools_hold_tokens():
    """Their text is not counted in characters, but their bytes came."""
    arguments = [{"function": {"arguments": "x" * 200}}]
    call = {"choices": [{"index": 0, "delta": {"tool_calls": arguments}, "finish_reason": "tool_calls"}]}
    assert log_of(call, usage(60), max_tokens=100).output_tokens[0] == 60


@given(
    st.lists(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5), min_size=1, max_size=30),
    st.integers(0, 10),
    st.integers(1, 3),
)
def test_no_honest_usage_is_contradicted(chunks: list[list[str]], silent: int, choices: int):
    """Tokens of a character or more, several a chunk, some without text, of one or more choices."""
    events = [chunk("".join(tokens), number % choices) for number, tokens in enumerate(chunks)]
    events += [chunk("")] * silent
    tokens = sum(map(len, chunks)) + silent
    log = log_of(*events, usage(tokens), max_tokens=tokens)
    assert ("", tokens) == (log.usage_contradiction[0], log.output_tokens[0])


def test_the_time_per_token_of_several_choices_is_that_of_each():
    """Two choices, a token each 10 ms, by turns: 10 ms a token, and gaps of 10 ms; not half of it."""
    events = [chunk(text, number % 2) for number, text in enumerate(TEXTS)]
    log = log_of(*events, usage(20), at_ms=[100 + 10 * (number // 2) + number % 2 for number in range(20)])
    metrics = request_metrics(log)
    assert (2, 20) == (log.choices[0], log.output_tokens[0])
    assert metrics.tpot_ms[0] == pytest.approx(10.0)
    assert metrics.itl_ms.tolist() == pytest.approx([10.0] * 18)
    assert metrics.itl_end_ns.tolist() == [MS * (110 + 10 * at + choice) for choice in (0, 1) for at in range(9)]
    assert metrics.max_pause_ms[0] == pytest.approx(10.0)


def test_choices_in_one_event_are_each_a_chunk():
    """As some servers send them."""
    both = {"choices": [{"index": at, "delta": {"content": "a "}, "finish_reason": None} for at in range(2)]}
    log = log_of(*[both] * 5, usage(10))
    metrics = request_metrics(log)
    assert (10, 10, 10) == (len(log.chunk_ns), metrics.tpot_ms[0], metrics.itl_ms.mean())


def test_reasoning_that_does_not_show_has_no_time_per_token():
    """180 of 200 tokens were generated before the first event: 20 tokens in 190 ms are 10 ms each."""
    hidden = usage(200, completion_tokens_details={"reasoning_tokens": 180})
    assert request_metrics(reply(hidden, max_tokens=200)).tpot_ms[0] == pytest.approx(10.0)
    shown = [chunk(text, key="reasoning_content") for text in TEXTS[:10]] + [*map(chunk, TEXTS[10:])]
    seen = log_of(*shown, usage(20, completion_tokens_details={"reasoning_tokens": 10}))
    assert request_metrics(seen).tpot_ms[0] == pytest.approx(10.0)


def test_what_came_in_one_read_has_no_time_per_token():
    """Not 0 ms: when each token was made is not known, and no objective of it is met."""
    log = log_of(*map(chunk, TEXTS), usage(20), at_ms=[100] * 22)
    metrics = request_metrics(log)
    assert np.isnan(metrics.tpot_ms[0])
    assert [True] == goodput(parse_slo("tpot<50ms"), log, metrics).unknown.tolist()


NO_TOKENS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]},
    {"choices": [{"index": 0, "delta": {"content": ""}, "finish_reason": None}]},
    chunk("\u200b"),
    chunk("\ufeff", key="reasoning_content", finish="length"),
]


@pytest.mark.parametrize("event", NO_TOKENS)
@pytest.mark.parametrize("counted", [[usage(20)], []])
@pytest.mark.parametrize("where", [0, 1, 12, 20])
def test_what_is_no_content_has_no_part_in_the_times(event: dict[str, object], counted: list[object], where: int):
    """Of 20 tokens in 20 chunks, a chunk each 10 ms: a heartbeat, half a second from the others, is none of them."""
    events = [*map(chunk, TEXTS[:where]), event, *map(chunk, TEXTS[where:]), *counted]
    at_ms = [10.0 * number for number in range(1, 21)]
    at_ms = [at + (500.0 if number >= where else 0.0) for number, at in enumerate(at_ms)]
    at_ms.insert(where, at_ms[where] - 5.0 if where < 20 else 700.0)
    log = log_of(*events, at_ms=at_ms)
    metrics = request_metrics(log)
    last_ms = 700.0 if where < 20 else 200.0
    assert [last_ms] == metrics.e2e_ms.tolist()
    assert 20 == len(log.chunk_ns)
    assert (log.first_token_ns[0], log.last_token_ns[0]) == (log.first_output_ns[0], log.last_output_ns[0])


def test_a_token_that_is_not_seen_keeps_its_time():
    """Where more tokens were counted than other contents came: one that ends the reply, or joins characters."""
    ending = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    assert request_metrics(reply(ending, usage(21), max_tokens=30)).tpot_ms[0] == pytest.approx(10.0)
    joined = log_of(*map(chunk, TEXTS), chunk("\u200d"), usage(21), max_tokens=30)
    assert (21, 10.0) == (len(joined.chunk_ns), pytest.approx(request_metrics(joined).tpot_ms[0]))


@pytest.mark.parametrize("predicted", [500, 5])
def test_counts_of_timings_are_doubted_as_those_of_a_usage(predicted: int):
    """llama.cpp's predicted_n, where no usage came."""
    log = reply({"choices": [], "timings": {"predicted_n": predicted}})
    assert ("contradicted", -1) == (log.output_tokens_source[0], log.output_tokens[0])


def test_a_reply_counts_once_for_each_count_that_cannot_be_read():
    """Two counts as texts were two replies of one, and the input was not named."""
    doubted = client_summary(reply(usage("20", "50"))).contradicted_usage
    assert {"output tokens that are no number of tokens": 1, "input tokens that are no number of tokens": 1} == (
        doubted.kinds
    )
    assert (1, 1) == (doubted.without_output_tokens, doubted.without_input_tokens)
