"""What servers say of a request's own times, in their own words, and where the log puts it."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest

from sidelight.loadgen.protocols.reading.reply import Reply
from sidelight.loadgen.protocols.reading.timings import ServerTimings
from sidelight.loadgen.protocols.table import PROTOCOLS

NAN = math.nan
JSON = "application/json"


def _read(body: bytes, *, protocol: str = "chat", kind: str = "text/event-stream", more: str = "") -> Reply:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\n{more}\r\n".encode()
    stamps = (np.array([1]), np.array([len(body)]))
    return PROTOCOLS[protocol].read_reply(200, head, body, *stamps)


def _last(**extra: object) -> bytes:
    """A stream whose last event carries an engine's extra fields."""
    delta = {"id": "x", "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
    last = {"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}, **extra}
    return b"".join(f"data: {json.dumps(payload)}\n\n".encode() for payload in (delta, last)) + b"data: [DONE]\n\n"


def _same(expected: ServerTimings, timings: ServerTimings | None) -> None:
    assert timings is not None
    for name in ServerTimings.__slots__:
        wanted = getattr(expected, name)
        assert (wanted if isinstance(wanted, str) else pytest.approx(wanted, nan_ok=True)) == getattr(timings, name), (
            name
        )


def test_vllm(shared: Path):
    """Recorded: the body's first token time is the span's prefill, its queue the span's queue."""
    path = shared / "fixtures/vllm/recorded/main"
    with gzip.open(path / "requests.jsonl.gz", "rt") as file:
        metrics = {
            request["trace_id"]: request["server_metrics"]
            for request in map(json.loads, file)
            if request["server_metrics"]
        }
    with gzip.open(path / "spans.jsonl.gz", "rt") as file:
        spans = [
            span for span in map(json.loads, file) if span["trace_id"] in metrics and span["name"] == "llm_request"
        ]
    assert len(spans) > 300
    for span in spans:
        timings = _read(_last(metrics=metrics[span["trace_id"]])).timings
        attributes = span["attributes"]
        expected = ServerTimings(
            source="vllm",
            queue_ms=attributes["gen_ai.latency.time_in_queue"] * 1e3,
            prefill_ms=attributes["gen_ai.latency.time_in_model_prefill"] * 1e3,
            decode_ms=attributes["gen_ai.latency.time_in_model_decode"] * 1e3,
        )
        _same(expected, timings)


def test_llamacpp(shared: Path):
    """Recorded: prefill, decode and their rates; the cached tokens are the slot's."""
    final = json.loads((shared / "fixtures/llamacpp/final_chunk_timings.json").read_text())
    reply = _read(_last(timings=final["timings"]))
    expected = ServerTimings(
        source="llamacpp", prefill_ms=30.958, decode_ms=661.064, prompt_tps=32.301828283480845,
        generation_tps=52.94494935437416,
    )  # fmt: skip
    _same(expected, reply.timings)
    assert (236, 35) == (reply.cached_tokens, reply.timed_tokens)


def test_ollama(shared: Path):
    """Recorded: durations in ns; what zero would be is left out, and unknown."""
    final = json.loads((shared / "fixtures/ollama/generate_final_chunk.json").read_text())
    reply = _read(json.dumps(final).encode() + b"\n", protocol="ollama", kind="application/x-ndjson")
    expected = ServerTimings(
        source="ollama", load_ms=6338.219291, prefill_ms=130.079, decode_ms=4232.71, e2e_ms=10706.818083,
        prompt_tps=26 / 0.130079, generation_tps=259 / 4.23271,
    )  # fmt: skip
    _same(expected, reply.timings)
    assert (26, 259, True) == (reply.input_tokens, reply.output_tokens, reply.complete)
    bare = _read(b'{"done":true,"eval_count":3}\n', protocol="ollama", kind="application/x-ndjson")
    _same(ServerTimings(source="ollama"), bare.timings)


def test_dynamo():
    """Asked for by nvext.extra_fields; every one of them may be missing."""
    timing = {"request_received_ms": 17e11, "prefill_wait_time_ms": 4.5, "prefill_time_ms": 20, "ttft_ms": 24.5}
    expected = ServerTimings(source="dynamo", queue_ms=4.5, prefill_ms=20, ttft_ms=24.5)
    _same(expected, _read(_last(nvext={"timing": timing, "worker_id": {}})).timings)
    assert _read(_last(nvext={"timing": {"request_received_ms": 1}})).timings is None
    assert _read(_last(nvext={"worker_id": {"prefill_worker_id": 1}})).timings is None


STATS = {
    "prompt_tps": 500.0, "generation_tps": 20.0, "prompt_tokens": 100, "generation_tokens": 41,
    "peak_memory_usage": {"inBytes": 123},
}  # fmt: skip


def test_exo():
    """In the body of /bench, and in a comment before [DONE] of a stream; times follow from the definitions."""
    expected = ServerTimings(
        source="exo", prefill_ms=200, decode_ms=2000, prompt_tps=500, generation_tps=20, peak_memory_bytes=123
    )
    body = {"id": "r", "choices": [{"message": {"content": "a"}, "finish_reason": "length"}], "generation_stats": STATS}
    _same(expected, _read(json.dumps(body).encode(), protocol="exo", kind=JSON).timings)
    stream = _last().replace(b"data: [DONE]", f": generation_stats {json.dumps(STATS)}\n\ndata: [DONE]".encode())
    reply = _read(stream)
    _same(expected, reply.timings)
    assert (True, "", 1) == (reply.complete, reply.error, reply.output_tokens)
    assert _read(_last().replace(b"data: [DONE]", b": prefill_progress {}\n\ndata: [DONE]")).timings is None


@pytest.mark.parametrize("hit", ["partial", "exact"])
def test_exos_prefill_after_a_cache_hit_is_unknown(hit: str):
    """The rate is then not that of this prompt."""
    body = {"choices": [{"finish_reason": "length"}], "generation_stats": STATS | {"prefix_cache_hit": hit}}
    timings = _read(json.dumps(body).encode(), protocol="exo", kind=JSON).timings
    assert timings is not None
    assert math.isnan(timings.prefill_ms)
    assert timings.decode_ms == 2000


def test_sglang():
    """In meta_info, of the native endpoint and of a chat; without --enable-metrics only the whole is there."""
    meta = {
        "id": "r", "finish_reason": {"type": "stop"}, "queue_time": 0.5, "forward_entry_time": 1700000000.5,
        "prefill_finished_time": 1700000001.0, "request_finished_ts": 1700000003.5, "first_token_latency": 1.25,
        "e2e_latency": 3.25, "decode_throughput": 60.0, "cached_tokens": 7,
        "api_server_dispatch_finish_ts": 1699999999.75,
    }  # fmt: skip
    expected = ServerTimings(
        source="sglang", queue_ms=500, prefill_ms=500, decode_ms=2000, ttft_ms=1250, e2e_ms=3250,
        scheduler_intake_ms=250, generation_tps=60,
    )  # fmt: skip
    native = _read(json.dumps({"text": "a", "meta_info": meta}).encode(), protocol="sglang", kind=JSON)
    _same(expected, native.timings)
    assert native.cached_tokens == 7
    chat = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop", "meta_info": meta}]}
    _same(expected, _read(json.dumps(chat).encode(), kind=JSON).timings)
    bare = {"text": "a", "meta_info": {"finish_reason": {"type": "stop"}, "e2e_latency": 2}}
    expected = ServerTimings(source="sglang", e2e_ms=2000)
    _same(expected, _read(json.dumps(bare).encode(), protocol="sglang", kind=JSON).timings)


def test_the_queue_of_a_retracted_request_is_not_known():
    """SGLang's queue_time then holds the waits behind its first token, too; all else is as it was."""
    meta = {
        "finish_reason": {"type": "stop"}, "queue_time": 2.2769, "num_retractions": 1, "e2e_latency": 3.25,
        "forward_entry_time": 1700000000.5, "prefill_finished_time": 1700000001.0,
        "api_server_dispatch_finish_ts": 1699999998.0,
    }  # fmt: skip
    expected = ServerTimings(source="sglang", prefill_ms=500, e2e_ms=3250)
    _same(expected, _read(json.dumps({"text": "a", "meta_info": meta}).encode(), protocol="sglang", kind=JSON).timings)
    expected = ServerTimings(source="sglang", queue_ms=2276.9, prefill_ms=500, e2e_ms=3250, scheduler_intake_ms=0)
    meta["num_retractions"], meta["api_server_dispatch_finish_ts"] = 0, 1699999998.2236
    _same(expected, _read(json.dumps({"text": "a", "meta_info": meta}).encode(), protocol="sglang", kind=JSON).timings)


def test_tgi():
    """In headers, and only of replies that are not streamed."""
    body = b'{"generated_text":"a","details":{"finish_reason":"length","generated_tokens":1,"input_length":3}}'
    more = "x-queue-time: 4\r\nx-inference-time: 30\r\nx-total-time: 36\r\n"
    expected = ServerTimings(source="tgi", queue_ms=4, e2e_ms=36)
    _same(expected, _read(body, protocol="tgi", kind=JSON, more=more).timings)
    odd = _read(body, protocol="tgi", kind=JSON, more="x-queue-time: soon\r\n")
    _same(ServerTimings(source="tgi"), odd.timings)


@pytest.mark.parametrize("extra", [{}, *({name: None} for name in ("metrics", "timings", "nvext"))])
def test_absent_times_are_none(extra: dict[str, object]):
    """Where a server says nothing, or null."""
    assert _read(_last(**extra)).timings is None


@pytest.mark.parametrize("odd", [7, [], "x", {"queue_time_ms": "x"}, {"prompt_ms": []}, {"timing": 3}])
@pytest.mark.parametrize("name", ["metrics", "timings", "nvext", "generation_stats"])
def test_extras_that_cannot_be_read_spoil_no_reply(name: str, odd: object):
    """The reply is what it is without them."""
    reply = _read(_last(**{name: odd}))
    assert (True, "", 1, None) == (reply.complete, reply.error, reply.output_tokens, reply.timings)


def test_cached_tokens_of_usage():
    """As vLLM says them with --enable-prompt-tokens-details; -1 where no server says."""
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    assert _read(_last(usage=usage)).cached_tokens == 2
    assert _read(_last()).cached_tokens == -1


@pytest.mark.parametrize(
    ("inside", "beside", "expected"),
    [
        (
            {"metrics": {"queue_time_ms": 2.0, "time_to_first_token_ms": 5.0, "generation_time_ms": 9.0}},
            {},
            ServerTimings(source="vllm", queue_ms=2.0, prefill_ms=5.0, decode_ms=9.0),
        ),
        (
            {},
            {"timings": {"prompt_ms": 5.0, "predicted_ms": 9.0, "prompt_per_second": 600.0}},
            ServerTimings(source="llamacpp", prefill_ms=5.0, decode_ms=9.0, prompt_tps=600.0),
        ),
    ],
    ids=["vllm", "llamacpp"],
)
def test_a_response_carries_them_too(inside: dict[str, object], beside: dict[str, object], expected: ServerTimings):
    """In the last event of /v1/responses: vLLM's within the response, llama.cpp's beside it."""
    usage = {"input_tokens": 3, "output_tokens": 1}
    events = (
        {"type": "response.output_text.delta", "delta": "a"},
        {"type": "response.completed", "response": {"id": "x", "status": "completed", "usage": usage, **inside}}
        | beside,
    )
    body = b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
    _same(expected, _read(body, protocol="responses").timings)


def test_a_queue_or_a_prefill_stated_twice_with_two_values_is_no_time():
    """A later statement knows more, and contradicts no earlier one."""
    first = json.dumps({"choices": [], "metrics": {"queue_time_ms": 10.0, "generation_time_ms": 1.0}}).encode()
    for queue_ms, expected in ((10.0, 10.0), (80.0, math.inf)):
        timings = _read(b"data: " + first + b"\n\n" + _last(metrics={"queue_time_ms": queue_ms})).timings
        assert timings is not None
        assert expected == timings.queue_ms


def test_drafts_of_vllm_0_33():
    """By the source of 0.33.0: beside times, or alone where only --per-request-spec-decode-metrics was given."""
    drafts = {
        "mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.6, "acceptance_histogram": [3, 2, 2, 5],
        "num_spec_steps": 12, "num_accepted_draft_tokens": 21, "num_draft_tokens": 35, "num_spec_tokens": 3,
        "per_step_accepted": [0, 3], "per_step_drafted": [3, 3],
    }  # fmt: skip
    stated = {"drafts": 12, "draft_tokens": 35, "draft_tokens_accepted": 21}
    alone = {"time_to_first_token_ms": None, "speculative_decoding": drafts}
    _same(ServerTimings(source="vllm", **stated), _read(_last(metrics=alone)).timings)
    both = {"queue_time_ms": 3.5, "speculative_decoding": drafts}
    _same(ServerTimings(source="vllm", queue_ms=3.5, **stated), _read(_last(metrics=both)).timings)


@pytest.mark.parametrize(
    "drafts",
    [
        None, [], {}, {"num_spec_steps": 2},
        {"num_spec_steps": -1, "num_draft_tokens": 3, "num_accepted_draft_tokens": 1},
        {"num_spec_steps": 2, "num_draft_tokens": 3, "num_accepted_draft_tokens": 4},
        {"num_spec_steps": "2", "num_draft_tokens": 3, "num_accepted_draft_tokens": 1},
    ],
)  # fmt: skip
def test_drafts_that_cannot_be_so_take_no_times_away(drafts: object):
    """Its shape may change, says vLLM."""
    timings = _read(_last(metrics={"queue_time_ms": 3.5, "speculative_decoding": drafts})).timings
    _same(ServerTimings(source="vllm", queue_ms=3.5), timings)


def test_drafts_of_sglang():
    """By the source of 0.5.23: of its native route, in the last event's meta_info."""
    meta = {
        "id": "x", "e2e_latency": 0.5, "spec_accept_rate": 0.5, "spec_accept_length": 2.5, "spec_verify_ct": 4,
        "spec_num_correct_drafts": 6, "spec_num_proposed_drafts": 12,
    }  # fmt: skip
    body = b"data: " + json.dumps({"text": "a", "meta_info": meta}).encode() + b"\n\ndata: [DONE]\n\n"
    expected = ServerTimings(source="sglang", e2e_ms=500.0, drafts=4, draft_tokens=12, draft_tokens_accepted=6)
    _same(expected, _read(body, protocol="sglang").timings)
