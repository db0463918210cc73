"""The simulated SGLang's spans against those that a real one sent, and against the truth.

tests/data/sglang_traces.jsonl.xz holds six recorded traces, without most of their many decode_loop spans.
"""

from __future__ import annotations

import json
import lzma
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from simulated_load import ARRIVALS, LIMITS, ask, play

from sidelight.simulator.engine.history import RequestRecord
from sidelight.simulator.engine.scheduler import SimulatedEngine
from sidelight.simulator.settings import SimulatorSettings
from sidelight.simulator.telemetry.spans import export

Spans = Sequence[dict[str, Any]]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def recorded(case: str) -> Spans:
    """Return the spans of a recorded trace."""
    with lzma.open(Path(__file__).parents[2] / "data/sglang_traces.jsonl.xz", "rt") as file:
        return [span for span in map(json.loads, file) if span["case"] == case]


def simulated(*records: RequestRecord) -> Spans:
    """Return the spans that the simulator sends of some records, in the recording's form."""
    request = export(records, SimulatorSettings(engine="sglang"))
    return [
        {
            "service": resource.resource.attributes[0].value.string_value,
            "instance": resource.resource.attributes[1].value.string_value,
            "scope": scope.scope.name,
            "trace_id": span.trace_id.hex(),
            "span_id": span.span_id.hex(),
            "parent_span_id": span.parent_span_id.hex(),
            "name": span.name,
            "kind": span.kind,
            "start_unix_ns": span.start_time_unix_nano,
            "end_unix_ns": span.end_time_unix_nano,
            "attributes": {
                each.key: getattr(each.value, str(each.value.WhichOneof("value"))) for each in span.attributes
            },
        }
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def general(name: str) -> str:
    """Return a span's name without the ids in it."""
    process = r"\(host:\w{8} \| pid:\d+\)"
    threads = {rf"Tokenizer{process}": "Tokenizer", rf"Scheduler \[TP 0\]  \[PP 0\] {process}": "Scheduler"}
    patterns = {r" Req .{1,8}": "Req", **threads}
    return next((plain for pattern, plain in patterns.items() if re.fullmatch(pattern, name)), name)


def shape(spans: Spans) -> set[tuple[object, ...]]:
    """Return which spans there are: name, parent's name, kind, scope, service, whether the root's process sent it."""
    by_id = {span["span_id"]: span for span in spans}
    (root,) = (span for span in spans if general(span["name"]) == "Req")
    return {
        (
            general(span["name"]),
            general(by_id[span["parent_span_id"]]["name"]) if span["parent_span_id"] in by_id else "",
            *(span[key] for key in ("kind", "scope", "service")),
            span["instance"] == root["instance"],
        )
        for span in spans
    }


def record(**changes: Any) -> RequestRecord:
    """Return a request of 30 tokens that was prefilled in two chunks."""
    (played,) = play(LIMITS, [(0, replace(ask("a", 30, 5), **changes))], keep_steps=True).records
    return played


def retracted() -> RequestRecord:
    """Return a request that had to give up its blocks while it was decoding."""
    played = play(LIMITS, [(at, ask(str(at), 30, 24, token=256 + at // 2)) for at in range(6)], keep_steps=True)
    return next(
        each for each in played.records if each.preemptions and each.steps[-1].begin_ns > each.first_token_ns
        and any(step.is_prefill and step.end_ns > each.first_token_ns for step in each.steps)
        and sum(step.end_ns <= each.first_token_ns for step in each.steps) > 1
    )  # fmt: skip


def aborted() -> RequestRecord:
    """Return a request whose client left before the first token."""
    engine = SimulatedEngine(LIMITS, keep_steps=True)
    engine.abandon(engine.submit(ask("a", 8, 24), 0))
    now_ns = 1
    while (duration_s := engine.begin_step(now_ns)) is not None:
        now_ns += round(duration_s * 1e9)
        for ended in engine.finish_step(now_ns).finished:
            return ended
    raise AssertionError("the request did not end")


@pytest.mark.parametrize(
    ("case", "like"),
    [
        ("plain", play(LIMITS, [(0, ask("a", 8, 5))], keep_steps=True).records[0]),
        ("one token", play(LIMITS, [(0, ask("a", 8, 1))], keep_steps=True).records[0]),
        ("aborted", aborted()),
        ("retracted", retracted()),
    ],
    ids=["plain", "one token", "aborted", "retracted"],
)
def test_a_trace_has_the_spans_of_a_recorded_one(case: str, like: RequestRecord):
    """Threads of two processes under the request, stages under these; after a retraction prefill chunks and decodes
    lie in the decode. Attributes are some of the recorded ones.
    """
    real, ours = recorded(case), simulated(replace(like, traceparent=f"00-{TRACE}-{PARENT}-01"))
    assert shape(real) == shape(ours)
    assert {PARENT} == {span["parent_span_id"] for span in ours if general(span["name"]) == "Req"}
    shown: dict[str, set[str]] = {}
    for span in real:
        shown.setdefault(general(span["name"]), set()).update(span["attributes"])
    assert [] == [span["name"] for span in ours if not set(span["attributes"]) <= shown[general(span["name"])]]
    reason = "gen_ai.response.finish_reasons"
    assert {span["attributes"].get(reason) for span in real} == {span["attributes"].get(reason) for span in ours}


def test_a_trace_of_its_own_has_an_id_of_64_bits():
    """As SGLang makes them up where no traceparent came."""
    for spans in (recorded("own trace"), simulated(record())):
        (trace_id,) = {span["trace_id"] for span in spans}
        assert ("0" * 16, "") == (
            trace_id[:16],
            next(span["parent_span_id"] for span in spans if span["name"].startswith(" Req")),
        )


def test_the_prefix_of_several_samples_is_two_requests_spans():
    """n + 2 for n: one with no tokens and no stages, one without a request id that has the stages."""
    prefix = record(role="prefix", samples=2, max_tokens=1)
    samples = [record(samples=2, request_id=f"cmpl-{number}") for number in range(2)]
    for spans in (recorded("two samples"), simulated(prefix, *samples)):
        roots = [span for span in spans if general(span["name"]) == "Req"]
        ids = Counter("gen_ai.request.id" in root["attributes"] for root in roots)
        assert {True: 3, False: 1} == ids
        tokens = sorted(
            root["attributes"]["gen_ai.usage.completion_tokens"]
            for root in roots
            if "gen_ai.usage.completion_tokens" in root["attributes"]
        )
        assert (0, True) == (tokens[0], tokens[1] == tokens[2] > 0)
        (empty,) = (root for root in roots if root["attributes"].get("gen_ai.usage.completion_tokens") == 0)
        (bare,) = (root for root in roots if "gen_ai.request.id" not in root["attributes"])
        with_scheduler = {span["parent_span_id"] for span in spans if general(span["name"]) == "Scheduler"}
        assert bare["span_id"] in with_scheduler
        assert empty["span_id"] not in with_scheduler
        assert {"gen_ai.latency.e2e", "gen_ai.latency.time_in_model_inference"} == {
            name for name in bare["attributes"] if name.startswith("gen_ai.")
        }


@given(ARRIVALS)
@settings(max_examples=25, deadline=None)
def test_stages_are_the_truth(arrivals: list[Any]):
    """To the nanosecond: the queue, the prefill, a decode_loop for each token after the first but those of a prefill
    that was done again; each span lies within its parent.
    """
    for each in play(LIMITS, arrivals, keep_steps=True).records:
        spans = simulated(each)
        by_id = {span["span_id"]: span for span in spans}
        assert len(by_id) == len(spans)
        for span in spans:
            around = by_id.get(span["parent_span_id"], span)
            assert around["start_unix_ns"] <= span["start_unix_ns"] <= span["end_unix_ns"] <= around["end_unix_ns"]
        times = {span["name"]: (span["start_unix_ns"], span["end_unix_ns"]) for span in spans}
        assert (each.queued_ns, each.scheduled_ns) == times["prefill_waiting"]
        assert (each.scheduled_ns, each.first_token_ns) == times["prefill_forward"]
        decoded = sum(span["name"] == "decode_loop" for span in spans)
        assert each.output_tokens - 1 - each.preemptions <= decoded <= each.output_tokens - 1
