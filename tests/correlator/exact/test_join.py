"""Exact times: which source gives those of each request, and why one has none. A recorded vLLM has every odd case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import recordings
from recordings import Recording

from sidelight.correlator.exact.join import join
from sidelight.correlator.exact.table import SOURCES
from sidelight.loadgen.records import request_id
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.scraper.spans.request_times import TIMES
from sidelight.scraper.spans.requests import EngineSpans

REPOSITORY = Path(__file__).parents[3]
MS = 10**6
UUID = request_id("run", 7)  # Envoy changes its thirteenth digit
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Texts = npt.NDArray[np.object_]


def requests(*rows: Mapping[str, Any]) -> RequestLog:
    """Return requests from what is special about each; all else is as in a good reply without any ids."""
    usual = {"status": "ok", "http_status": 200, "submit_ns": 1000 * MS, "end_ns": 3000 * MS}
    return recordings.request_log([{**usual, **row} for row in rows])


def engine(*rows: Mapping[str, Any]) -> EngineSpans:
    """Return spans of vLLM from what is special about each; times in ms."""
    texts = {"trace_id": "", "span_id": "", "request_id": "", "clock": "", "machine": "", "engine": "vllm", "role": ""}
    stamps = {"arrival_ns": 1010 * MS, "end_ns": 2990 * MS}
    times = {f"{name}_s": np.nan for name in TIMES}
    columns: dict[str, Any] = {
        name: np.array([row.get(name, text) for row in rows], np.object_) for name, text in texts.items()
    }
    columns |= {name: np.array([row.get(name, stamp) for row in rows], np.int64) for name, stamp in stamps.items()}
    columns |= {name: np.array([row.get(f"{name[:-2]}_ms", np.nan) / 1e3 for row in rows]) for name in times}
    columns |= {
        f"{name}_tokens": np.array([row.get(f"{name}_tokens", -1) for row in rows], np.int64)
        for name in ("input", "output")
    }
    columns["fault"] = np.array([row.get("fault", "") for row in rows], np.object_)
    return EngineSpans(refused={}, **columns)


@pytest.fixture(scope="module")
def edges() -> Recording:
    """The recording `edges`: a small phase for each odd case."""
    return recordings.edges()


@pytest.fixture(scope="module")
def main() -> Recording:
    """The whole recording `main`; what needs it is skipped where it is absent."""
    return recordings.recording("main")


def test_every_request_of_a_run_is_joined_by_its_trace(main: Recording):
    """397 of 397, and each has the times of its span to the bit."""
    joined = join(main.requests, main.spans)
    assert ["trace"] * 397 == joined.source.tolist()
    assert {""} == set(joined.reason)
    place = {trace: number for number, trace in enumerate(main.spans.trace_id)}
    rows = [place[trace] for trace in main.requests.trace_id]
    for part in ("queue", "prefill", "decode", "ttft", "e2e"):
        assert getattr(main.spans, f"{part}_s")[rows].tobytes() == getattr(joined, f"{part}_s").tobytes()
    assert (main.spans.arrival_ns[rows] == joined.arrival_ns).all()
    assert list(main.spans.span_id[rows]) == list(joined.span_id)


def test_all_three_sources_agree(main: Recording):
    """Without trace ids the request id, without spans the reply: queue, prefill and decode are equal to the bit."""
    nameless = replace(main.requests, trace_id=np.full(397, "", dtype=np.object_))
    by_trace, by_id = join(main.requests, main.spans), join(nameless, main.spans)
    by_reply = join(main.requests, engine())
    assert [{"trace"}, {"request id"}, {"response"}] == [set(table.source) for table in (by_trace, by_id, by_reply)]
    for part in ("queue_s", "prefill_s", "decode_s"):
        expected = getattr(by_trace, part)
        assert expected.tobytes() == getattr(by_id, part).tobytes()
        # Replies were read in ms, and files state ms.
        assert (1e3 * expected).tobytes() == (1e3 * getattr(by_reply, part)).tobytes()
    assert (by_reply.arrival_ns == -1).all()


@pytest.mark.parametrize(
    ("phase", "source", "reason"),
    [
        ("no_traceparent", "request id", ""),
        ("no_ids_at_all", "request id", ""),
        ("unsampled", "response", ""),
        ("malformed", "request id", ""),
        ("zero_traceid", "request id", ""),
        ("nonstream", "trace", ""),
        ("n2", "trace", ""),
        ("n3_completions", "trace", ""),
        ("same_x_request_id", "trace", ""),
        ("one_token", "trace", ""),
        ("unknown_model", "none", "the server answered HTTP 404"),
        ("bad_param", "none", "the server answered HTTP 400"),
        ("too_long", "none", "the server answered HTTP 400"),
        ("cancel_decode", "none", "it was cancelled, and engines report only requests that they finished"),
        ("preempt", "trace", ""),
    ],
)
def test_every_odd_case_has_its_source(edges: Recording, phase: str, source: str, reason: str):
    """Or none, and why."""
    joined, here = join(edges.requests, edges.spans), edges.requests.workload_class == phase
    assert here.any()
    assert {(source, reason)} == set(zip(joined.source[here], joined.reason[here], strict=True))


def test_requests_cancelled_in_the_queue_have_no_times_and_the_others_do(edges: Recording):
    """Nine were cancelled while they waited, fifteen beside them ended."""
    joined, here = join(edges.requests, edges.spans), edges.requests.workload_class == "cancel_in_queue"
    cancelled = edges.requests.status[here] == "cancelled"
    assert (9, 15) == (int(cancelled.sum()), int((~cancelled).sum()))
    assert {"none"} == set(joined.source[here][cancelled])
    assert {"trace"} == set(joined.source[here][~cancelled])
    assert np.isnan(joined.queue_s[here][cancelled]).all()


def test_ids_that_were_sent_three_times_join_nothing_by_themselves(edges: Recording):
    """Without trace ids no span is known to be a request's; the reply still names the engine's times."""
    here = edges.requests.workload_class == "same_x_request_id"
    nameless = replace(edges.requests, trace_id=np.full(len(here), "", dtype=np.object_))
    silent = replace(
        nameless,
        server_queue_ms=np.full(len(here), np.nan),
        server_prefill_ms=np.full(len(here), np.nan),
    )
    assert {"response"} == set(join(nameless, edges.spans).source[here])
    reason = "3 requests share its request id; its reply tells neither queue nor prefill"
    assert {reason} == set(join(silent, edges.spans).reason[here])


def test_of_several_choices_the_first_token_counts():
    """Queue, prefill and TTFT of the choice that answered first, the decode of the one that went on longest."""
    spans = engine(
        {"trace_id": "t", "span_id": "a", "queue_ms": 300, "prefill_ms": 50, "decode_ms": 900, "ttft_ms": 360},
        {"trace_id": "t", "span_id": "b", "queue_ms": 100, "prefill_ms": 60, "decode_ms": 700, "ttft_ms": 170},
    )
    joined = join(requests({"trace_id": "t"}), spans)
    assert "b" == joined.span_id[0]
    assert (0.1, 0.06, 0.9) == (joined.queue_s[0], joined.prefill_s[0], joined.decode_s[0])


@pytest.mark.parametrize(
    ("fill", "queue_s", "prefill_s"),
    [
        ({}, 0.12, 0.36),
        ({"arrival_ns": 1210 * MS}, 0.1, 0.06),  # came later
        ({"end_ns": 1900 * MS}, 0.1, 0.06),  # went on
        ({"clock": "other"}, 0.1, 0.06),
        ({"ttft_ms": 340, "output_tokens": 1}, 0.1, 0.06),  # is a choice itself
    ],
)
def test_a_request_that_fills_the_cache_for_choices_is_part_of_their_wait(
    fill: dict[str, Any], queue_s: float, prefill_s: float
):
    """As SGLang does for n above 1: its span has neither a token nor an id."""
    spans = engine(
        {"trace_id": "t", "queue_ms": 20, "prefill_ms": 300, "end_ns": 1400 * MS, **fill},
        {"trace_id": "t", "request_id": "r", "queue_ms": 100, "prefill_ms": 60, "ttft_ms": 560, "output_tokens": 9},
    )
    joined = join(requests({"trace_id": "t", "response_id": "r"}), spans)
    assert (queue_s, prefill_s) == pytest.approx((joined.queue_s[0], joined.prefill_s[0]))


@pytest.mark.parametrize(
    ("ids", "engine_id"),
    [
        ({"response_id": "chatcmpl-1"}, "chatcmpl-1"),
        ({"response_id": "cmpl-1"}, "cmpl-1-0"),
        ({"request_id": "sl-1"}, "chatcmpl-sl-1"),
        ({"request_id": "sl-1", "response_id": "other"}, "cmpl-sl-1-0"),
        ({"request_id": UUID}, f"chatcmpl-{UUID[:14]}9{UUID[15:]}"),
        ({"request_id": UUID, "response_id": "other"}, f"cmpl-{UUID[:14]}b{UUID[15:]}-0"),
    ],
)
def test_engines_write_a_request_id_in_several_forms(ids: dict[str, str], engine_id: str):
    """That of the reply, with the number of the prompt, or with the header's inside."""
    spans = engine({"request_id": engine_id, "queue_ms": 1, "prefill_ms": 2}, {"request_id": "foreign", "queue_ms": 9})
    joined = join(requests(ids, {}), spans)
    assert ["request id", "none"] == joined.source.tolist()
    assert (0.001, 0.002) == (joined.queue_s[0], joined.prefill_s[0])


def test_several_prompts_are_one_request():
    """Each prompt has a number behind the id."""
    spans = engine(
        *(
            {"request_id": f"cmpl-1-{number}", "queue_ms": 5, "prefill_ms": 1, "decode_ms": number}
            for number in range(3)
        )
    )
    joined = join(requests({"response_id": "cmpl-1"}), spans)
    assert ("request id", 0.002) == (joined.source[0], joined.decode_s[0])


def test_a_form_holds_for_its_engine_only():
    """SGLang's id is the reply's, unchanged: with a number behind it, it is another request's."""
    spans = engine(
        {"request_id": "1-0", "engine": "sglang", "queue_ms": 1}, {"request_id": "2", "engine": "sglang", "queue_ms": 2}
    )
    joined = join(requests({"response_id": "1"}, {"response_id": "2"}), spans)
    assert ["none", "request id"] == joined.source.tolist()


def test_requests_of_one_trace_are_distinguished_by_their_ids():
    """As in an agent's trace: the trace id alone joins none of them."""
    rows = ({"trace_id": "t", "response_id": str(number)} for number in range(2))
    spans = engine(*({"trace_id": "t", "request_id": str(1 - number), "queue_ms": 10 * number} for number in range(2)))
    joined = join(requests(*rows), spans)
    assert ["request id"] * 2 == joined.source.tolist()
    assert [0.01, 0.0] == joined.queue_s.tolist()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ({"server_queue_ms": 1.0, "server_prefill_ms": 2.0, "timings_source": "vllm"}, ""),
        ({"server_prefill_ms": 2.0, "timings_source": "llamacpp"}, "the reply tells no queue"),
        ({"server_queue_ms": 2.0, "timings_source": "tgi"}, "the reply tells no prefill"),
    ],
)
def test_a_reply_may_give_some_of_the_parts(reply: dict[str, Any], reason: str):
    """What it leaves out is missing with a reason, never zero."""
    joined = join(requests(reply), engine())
    assert ("response", reason) == (joined.source[0], joined.reason[0])
    assert np.isnan(joined.decode_s[0])


@pytest.mark.parametrize(
    ("span", "reason"),
    [
        ({"queue_ms": 2500.0}, "its span tells longer times than the client waited"),
        ({"decode_ms": 10.0}, "its span tells neither queue nor prefill"),
    ],
)
def test_a_span_with_impossible_times_is_not_used(span: dict[str, float], reason: str):
    """The next source is used; without one, the reason stays."""
    spans = engine({"trace_id": "t", **span})
    silent, telling = {"trace_id": "t"}, {"trace_id": "t", "server_queue_ms": 5.0, "server_prefill_ms": 6.0}
    assert f"{reason}; its reply tells neither queue nor prefill" == join(requests(silent), spans).reason[0]
    assert "response" == join(requests(telling), spans).source[0]
    believed = join(
        requests({"trace_id": "t", "end_ns": -1}),
        engine({"trace_id": "t", "queue_ms": 9e9, "prefill_ms": 1, "end_ns": 10**16}),
    )
    assert "trace" == believed.source[0]


@pytest.mark.parametrize(
    ("span", "reply", "reason"),
    [
        (
            {"queue_ms": 50.0, "prefill_ms": 150.0, "end_ns": 1110 * MS},
            {},
            "span tells a queue and prefill longer than it",
        ),
        (
            {"queue_ms": 50.0, "prefill_ms": 150.0, "end_ns": 1010 * MS},
            {},
            "span tells a queue and prefill longer than it",
        ),
        ({"queue_ms": 480.0, "prefill_ms": 40.0}, {}, "span tells a queue and prefill longer than the client's TTFT"),
        ({}, {"queue": 2276.9, "prefill": 6.0}, "reply tells longer times than the client waited"),
        ({}, {"queue": 1276.9, "prefill": 6.0}, "reply tells a queue and prefill longer than the client's TTFT"),
    ],
)
def test_no_part_is_larger_than_its_whole(span: dict[str, float], reply: dict[str, float], reason: str):
    """SGLang's queue_time of a request that it retracted held later waits, too: 2,277 ms of a TTFT of 570 ms."""
    asked = {f"server_{name}_ms": time_ms for name, time_ms in reply.items()}
    request = requests({"trace_id": "t", "first_token_ns": 1500 * MS, **asked})
    joined = join(request, engine({"trace_id": "t", **span} if span else {"trace_id": "other"}))
    assert "none" == joined.source[0]
    assert f"its {reason}" in joined.reason[0]


def test_a_decode_beyond_the_request_is_left_out():
    """Queue and prefill are kept: what the client saw of them agrees."""
    spans = engine({"trace_id": "t", "queue_ms": 100.0, "prefill_ms": 100.0, "decode_ms": 1900.0})
    joined = join(requests({"trace_id": "t", "first_token_ns": 1300 * MS}), spans)
    assert ("trace", 0.1) == (joined.source[0], joined.queue_s[0])
    assert np.isnan(joined.decode_s[0])


@pytest.mark.parametrize("wrong", [-1.0, np.inf])
def test_a_reply_with_impossible_times_is_not_used(wrong: float):
    """A negative wait, or an infinite one."""
    joined = join(requests({"server_queue_ms": wrong, "server_prefill_ms": 1.0}), engine())
    assert ("none", "no spans came; its reply tells impossible times") == (joined.source[0], joined.reason[0])


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ({"status": "in_flight"}, "it did not end, and engines report only requests that they finished"),
        ({"status": "failed"}, "it failed, and engines report only requests that they finished"),
        ({"status": "failed", "http_status": 500}, "the server answered HTTP 500"),
        ({}, "no spans came; its reply tells neither queue nor prefill"),
    ],
    ids=str,
)
def test_no_times_have_a_reason(fate: dict[str, Any], reason: str):
    """How the request itself ended comes first."""
    joined = join(requests(fate), engine())
    assert ("none", reason) == (joined.source[0], joined.reason[0])


def test_nothing_is_joined_with_nothing():
    """An empty run has an empty table; every source is one that is known."""
    joined = join(requests(), engine())
    assert 0 == len(joined)
    assert ("trace", "request id", "response", "span by time", "record by time", "none") == SOURCES


def test_a_request_whose_span_ends_before_it_begins_has_that_reason():
    """The report said that no span had come."""
    backwards = {"trace_id": "a", "arrival_ns": -1, "end_ns": -1, "fault": "ends before it begins"}
    joined = join(requests({"trace_id": "a", "request_id": "r"}), engine(backwards))
    assert joined.reason[0].startswith("its span ends before it begins: refused;")


@pytest.mark.parametrize("ids", [{"trace_id": "a"}, {"request_id": "chatcmpl-r"}], ids=["trace", "request id"])
def test_a_request_whose_span_was_refused_for_its_clock_has_that_reason(ids: dict[str, str]):
    """By whichever id it would have been joined; another of its spans that was not refused still joins it."""
    off = {**ids, "arrival_ns": -1, "end_ns": -1, "fault": "was stamped by a clock 60 min off ours"}
    request = requests({"trace_id": "a", "request_id": "r"})
    joined = join(request, engine(off))
    assert "none" == joined.source[0]
    assert joined.reason[0].startswith("its span was stamped by a clock 60 min off ours: refused;")
    assert "none" != join(request, engine(off, {**ids, "queue_ms": 5.0, "prefill_ms": 7.0})).source[0]


OWN = {"trace_id": "t", "request_id": "chatcmpl-r", "queue_ms": 50, "prefill_ms": 150, "ttft_ms": 200}
OWN |= {"arrival_ns": 1100 * MS, "end_ns": 1500 * MS, "input_tokens": 50, "output_tokens": 20}
GUARD = {**OWN, "request_id": "chatcmpl-guard", "queue_ms": 1, "prefill_ms": 40, "ttft_ms": 41}
GUARD |= {"arrival_ns": 1010 * MS, "end_ns": 1070 * MS}
ASKED = {"trace_id": "t", "request_id": "r", "end_ns": 1510 * MS, "first_output_ns": 1301 * MS}
ASKED |= {"first_token_ns": 1301 * MS, "input_tokens": 50, "output_tokens": 20, "output_tokens_source": "usage"}
AMBIGUOUS = "2 spans of engines could be its own"


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("asked", "other", "reason"),
    [
        ({}, GUARD, ""),
        ({"request_id": "x"}, {**GUARD, "output_tokens": 3}, ""),
        ({"request_id": "x"}, GUARD, ""),  # it ends before the client's first output
        ({"request_id": "x"}, {**GUARD, "arrival_ns": 1420 * MS, "end_ns": 1490 * MS}, ""),  # its token came later
        ({"request_id": "x"}, {**GUARD, "clock": "other"}, AMBIGUOUS),
        ({"request_id": "x"}, {**GUARD, "arrival_ns": 500 * MS, "end_ns": 900 * MS}, AMBIGUOUS),
        ({}, {**OWN, "queue_ms": 0, "prefill_ms": 5, "ttft_ms": 5}, AMBIGUOUS),
        ({}, {**GUARD, "queue_ms": np.nan, "prefill_ms": np.nan, "fault": "lies"}, ""),
    ],
    ids=["id", "tokens", "ended before", "began after", "other clock", "not within", "same id", "faulty"],
)
def test_of_several_spans_in_a_trace_the_requests_own_is_used_or_none(
    asked: dict[str, Any], other: dict[str, Any], reason: str, *, reverse: bool
):
    """A guard model, a retry or an agent's other call stands in the same trace, in any order."""
    spans = [{**other, "span_id": "other"}, {**OWN, "span_id": "own"}]
    joined = join(requests({**ASKED, **asked}), engine(*(reversed(spans) if reverse else spans)))
    assert ("" if reason else "own", reason) == (joined.span_id[0], joined.refusal[0])
    assert (0.05, 0.15) == (joined.queue_s[0], joined.prefill_s[0]) or reason


def test_choices_are_one_request_by_the_tokens_that_the_client_counted():
    """They begin together; a span too many is not one of them."""
    choices = [{**OWN, "span_id": name, "ttft_ms": 200 + 10 * number} for number, name in enumerate("ab")]
    asked = {**ASKED, "output_tokens": 40}
    assert "a" == join(requests(asked), engine(*choices)).span_id[0]
    assert AMBIGUOUS == join(requests({**asked, "output_tokens": 30}), engine(*choices)).refusal[0]


def test_a_span_with_the_id_of_another_request_is_neithers():
    """Two senders mixed up their traces: neither trace nor id says whose it is."""
    asked = [{**ASKED, "trace_id": name, "request_id": name} for name in "ab"]
    swapped = [{**OWN, "trace_id": name, "request_id": f"chatcmpl-{other}"} for name, other in ("ab", "ba")]
    joined = join(requests(*asked), engine(*swapped))
    assert ["its span bears the id of another request"] * 2 == joined.refusal.tolist()
    assert ["none"] * 2 == joined.source.tolist()


def test_two_spans_are_no_choices_of_a_reply_of_one():
    """A guard model is asked beside the model: its tokens and the reply's add up to the reply's."""
    beside = {**OWN, "request_id": "chatcmpl-guard", "queue_ms": 0, "prefill_ms": 20, "ttft_ms": 20, "output_tokens": 0}
    joined = join(requests({**ASKED, "choices": 1}), engine({**beside, "span_id": "guard"}, {**OWN, "span_id": "own"}))
    assert "own" == joined.span_id[0]


def test_spans_of_other_requests_in_a_trace_are_joined_by_their_ids():
    """A context that leaks over a connection: all requests' spans stand in the trace of the first."""
    asked = [{**ASKED, "trace_id": name, "request_id": name} for name in "ab"]
    spans = [{**OWN, "trace_id": "a", "span_id": name, "request_id": f"chatcmpl-{name}"} for name in "ab"]
    joined = join(requests(*asked), engine(*spans))
    assert ["trace", "request id"] == joined.source.tolist()
    assert ["a", "b"] == joined.span_id.tolist()


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"ttft_ms": 1}, "longer than its own TTFT, or its whole"),
        ({"e2e_ms": 1}, "longer than its own TTFT, or its whole"),
        ({"queue_ms": 0.05, "prefill_ms": 0.15, "ttft_ms": 0.2, "decode_ms": 0.2, "e2e_ms": 0.4}, "a small part of"),
    ],
    ids=["TTFT", "whole", "unit"],
)
def test_times_of_a_span_that_contradict_each_other_are_refused(lie: dict[str, float], reason: str):
    """Queue and prefill longer than their whole, or all of it in another unit than seconds."""
    joined = join(requests(ASKED), engine({**OWN, "e2e_ms": 400, **lie}))
    assert "none" == joined.source[0]
    assert reason in joined.refusal[0]


@pytest.mark.parametrize("queue_ms", [np.inf, 1e-5])
def test_times_of_a_reply_that_cannot_be_are_refused(queue_ms: float):
    """Stated twice with two values, or a small part of the time in which its output came."""
    stated = {"server_queue_ms": queue_ms, "server_prefill_ms": 8e-5, "server_e2e_ms": 3e-4}
    joined = join(requests({**ASKED, **stated, "last_output_ns": 1500 * MS}), engine())
    assert "its reply tells" in joined.refusal[0]


def test_steps_of_a_beam_search_are_one_request():
    """Queue and prefill of the first step; then all is decode, the later steps' queues too."""
    steps = [
        {
            **OWN,
            "request_id": f"chatcmpl-r-{at}f-beam-{beam}",
            "arrival_ns": at * MS,
            "end_ns": (at + 90) * MS,
            "ttft_ms": 80,
        }
        | {"queue_ms": 20, "prefill_ms": 50, "decode_ms": 0, "e2e_ms": 90, "output_tokens": 1}
        for at in (1100, 1200, 1300)
        for beam in range(2)
    ]
    joined = join(requests({**ASKED, "first_output_ns": -1, "first_token_ns": -1}), engine(*steps))
    times_s = [float(getattr(joined, f"{name}_s")[0]) for name in ("queue", "prefill", "decode", "e2e")]
    assert [0.02, 0.05, 0.21, 0.29] == pytest.approx(times_s)


def test_a_span_that_outlasts_the_whole_reply_is_not_of_that_request():
    """Of a reply that was given up it may be: engines go on for a while."""
    spans = engine({**OWN, "end_ns": 61_500 * MS})
    assert "its span lasts longer than the whole reply" == join(requests(ASKED), spans).refusal[0]
    cancelled = join(requests({**ASKED, "status": "cancelled"}), spans)
    assert ("trace", "") == (cancelled.source[0], cancelled.refusal[0])


def test_stamps_of_a_request_are_all_by_one_clock():
    """Where engines shared it, the clock of the engine whose token came first."""
    both = {"trace_id": "a", "request_id": "x", "queue_ms": 1.0, "prefill_ms": 2.0}
    first = {**both, "clock": "p", "end_ns": 1500 * MS, "output_tokens": 1}
    later = {**both, "clock": "d", "arrival_ns": 9000 * MS, "end_ns": 9900 * MS, "output_tokens": 20}
    joined = join(requests({"trace_id": "a"}), engine(first, later))
    assert ("p", 1010 * MS, 1500 * MS) == (joined.clock[0], joined.arrival_ns[0], joined.end_ns[0])
