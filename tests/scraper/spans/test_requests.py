"""From exports to the times of requests: a recorded vLLM, and the other engines as their sources have them."""

from __future__ import annotations

import base64
import gzip
import json
import lzma
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sidelight.scraper.spans.log import ExportRecord, decode, packed
from sidelight.scraper.spans.received import BACKWARDS, CONFLICTING, OFF_CLOCK, classify
from sidelight.scraper.spans.requests import IMPOSSIBLE, PROBE, EngineSpans, RequestSpans, engine_spans

MS = 10**6
START_NS = 1_700_000_000 * 10**9
TRACE, ROOT = b"t" * 16, b"r" * 8
QUEUE, PREFILL, DECODE, TTFT, E2E = (
    f"gen_ai.latency.{name}"
    for name in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode", "time_to_first_token", "e2e")
)


def record(
    *spans: dict[str, Any],
    scope: str = "",
    received_ns: int = START_NS,
    resource: Mapping[str, str | int] | None = None,
) -> ExportRecord:
    """Return one export of spans, each from what is special about it; `from_ms`, `to_ms` count from one start."""
    request = ExportTraceServiceRequest()
    sent = request.resource_spans.add()
    for key, value in (resource or {}).items():
        attribute = sent.resource.attributes.add(key=key).value
        setattr(attribute, "string_value" if isinstance(value, str) else "int_value", value)
    under = sent.scope_spans.add()
    under.scope.name = scope
    for changes in spans:
        fields = {"trace_id": TRACE, "span_id": ROOT, "from_ms": 0, "to_ms": 1000, "attributes": {}, **changes}
        attributes, begin, end = fields.pop("attributes"), fields.pop("from_ms"), fields.pop("to_ms")
        span = under.spans.add(
            **fields, start_time_unix_nano=START_NS + begin * MS, end_time_unix_nano=START_NS + end * MS
        )
        for key, stated in attributes.items():
            for value in stated if isinstance(stated, tuple) else (stated,):
                kind = {str: "string_value", int: "int_value", float: "double_value"}[type(value)]
                setattr(span.attributes.add(key=key).value, kind, value)
    return packed(received_ns, "grpc", request.SerializeToString())


def times(spans: EngineSpans) -> list[tuple[float, ...]]:
    """Queue, prefill, decode and TTFT in ms; -1 where unknown."""
    columns = (spans.queue_s, spans.prefill_s, spans.decode_s, spans.ttft_s)
    return [
        tuple(-1.0 if np.isnan(number) else round(1e3 * float(number), 6) for number in row)
        for row in zip(*columns, strict=True)
    ]


@pytest.fixture(scope="session")
def edges() -> list[ExportRecord]:
    """Every export of the recording `edges`."""
    with lzma.open(Path(__file__).parents[2] / "data/vllm_edges_spans.jsonl.xz", "rt") as file:
        lines = [json.loads(line) for line in file]
    exports = (line["export"] for line in lines if "export" in line)
    return [packed(line["recv_unix_ns"], "grpc", base64.b64decode(line["body_b64"])) for line in exports]


def test_vllms_requests_are_found_among_its_start_up(edges: Sequence[ExportRecord]):
    """57 of 69 spans are requests; the parts of each fit into it. One process sent them."""
    spans = engine_spans(edges)
    assert (57, {}, {"vllm"}) == (len(spans), spans.refused, set(spans.engine))
    assert (spans.queue_s + spans.prefill_s + spans.decode_s <= (spans.end_ns - spans.arrival_ns) / 1e9).all()
    assert (spans.queue_s + spans.prefill_s <= spans.ttft_s).all()
    assert {"68133369-4d70-41c9-8ebd-4345a951c037"} == set(spans.clock)
    assert 3 == (spans.request_id == "cmpl-req-b423297a918a7115-0").sum()


def test_a_recorded_run_has_the_sums_of_its_histograms(shared: Path):
    """Recording main: 397 requests; queue, prefill and decode add up as the engine's own counters do."""
    with gzip.open(shared / "fixtures/vllm/recorded/main/otlp_exports.jsonl.gz", "rt") as file:
        lines = [json.loads(line) for line in file]
    spans = engine_spans(packed(line["recv_unix_ns"], "grpc", base64.b64decode(line["body_b64"])) for line in lines)
    assert 397 == len(spans)
    sums = [
        float(column.sum()) for column in (spans.queue_s, spans.prefill_s, spans.decode_s, spans.ttft_s, spans.e2e_s)
    ]
    assert [523.980877, 39.125597, 412.870587, 574.201821, 986.981339] == [round(total, 6) for total in sums]


def test_the_same_export_twice_is_one_request(edges: Sequence[ExportRecord]):
    """An exporter whose acknowledgement was lost sends again."""
    once, twice = engine_spans(edges), engine_spans([*edges, *edges])
    assert list(once.span_id) == list(twice.span_id)
    assert {"repeated": 69} == twice.refused


@pytest.mark.parametrize("reverse", [False, True])
def test_a_span_that_came_twice_with_different_contents_states_nothing(*, reverse: bool):
    """Which of the two is true, nothing says; a third that repeats one of them changes nothing."""
    sent = [{"name": "llm_request", "attributes": {QUEUE: queue_s}} for queue_s in (0.05, 0.0, 0.05)]
    spans = engine_spans([record(span, scope="vllm.x") for span in (reversed(sent) if reverse else sent)])
    assert ([(-1.0,) * 4], ["came twice, with different contents"]) == (times(spans), list(spans.fault))
    assert {CONFLICTING: 1, "repeated": 1} == spans.refused


def test_a_stage_that_came_twice_with_different_stamps_states_nothing():
    """The queue is unknown, and so is the prefill, which is what it leaves of a sum."""
    root, thread, stage = sglang([("prefill_waiting", 50, 350)])
    spans = engine_spans([record(root, thread, stage), record({**stage, "to_ms": 90})])
    assert ([(-1, -1, 400, 550)], {CONFLICTING: 1}) == (times(spans), spans.refused)


@pytest.mark.parametrize(
    ("resource", "clock"),
    [
        ({}, ""),
        ({"service.name": "vllm", "telemetry.sdk.language": "python"}, ""),
        ({"service.instance.id": "a1", "host.name": "h"}, "a1"),
        ({"process.pid": 4711, "host.name": "h"}, "h/4711"),
        ({"k8s.pod.name": "vllm-0", "host.name": ""}, "vllm-0"),
        ({"service.instance.id": "x" * 1000}, "x" * 80),
    ],
)
def test_the_clock_of_a_span_is_named_by_its_resource(resource: Mapping[str, str | int], clock: str):
    """By the sender's own id, else by its place: machine and process. What all state alike distinguishes none."""
    spans = engine_spans([record({"name": "llm_request"}, scope="vllm.x", resource=resource)])
    assert [clock] == list(spans.clock)


def test_of_a_span_off_our_clock_only_the_ids_are_used():
    """Nor do its stages; a span that came well is read as ever."""
    hour_ns = 3600 * 10**9
    stages = (("prefill_waiting", 0, 100), ("prefill_forward", 100, 300))
    off = engine_spans([record(*sglang(stages), received_ns=START_NS + hour_ns)])
    assert ([(-1.0,) * 4], ["rid-1"], ["was stamped by a clock 60 min off ours"], [-1], [-1]) == (
        times(off),
        list(off.request_id),
        list(off.fault),
        off.arrival_ns.tolist(),
        off.end_ns.tolist(),
    )
    assert {OFF_CLOCK: len([*sglang(stages)])} == off.refused
    gone = {
        "name": "http-request",
        "attributes": {"method": "POST", "uri": "/v1/chat/completions", "x_request_id": "1"},
    }
    assert {OFF_CLOCK: 1} == engine_spans([record(gone, received_ns=START_NS + hour_ns)]).refused


def test_of_a_span_that_ends_before_its_start_only_the_ids_are_used():
    """As of one that was under way when the clock of its engine was set back: that it came is known."""
    backwards = engine_spans([record({"name": "llm_request", "to_ms": -900}, scope="vllm.x")])
    assert ([(-1.0,) * 4], [TRACE.hex()], [-1], [-1]) == (
        times(backwards),
        list(backwards.trace_id),
        backwards.arrival_ns.tolist(),
        backwards.end_ns.tolist(),
    )
    assert {BACKWARDS: 1} == backwards.refused


def sglang(stages: Sequence[tuple[str, int, int]], *, parent: bytes = b"thread00") -> Iterator[dict[str, Any]]:
    """A root span of SGLang as its source has it, and stages under the span of a scheduler."""
    attributes = {
        "module": "sglang::request",
        "gen_ai.request.id": "rid-1",
        PREFILL: 0.5,
        DECODE: 0.4,
        TTFT: 0.55,
        E2E: 0.95,
    }
    yield {"name": " Req rid-1", "attributes": attributes}
    yield {"name": "scheduler [TP 0]", "span_id": b"thread00", "parent_span_id": ROOT}
    for number, (name, begin, end) in enumerate(stages):
        span_id = f"stage{number:03d}".encode()
        yield {"name": name, "span_id": span_id, "parent_span_id": parent, "from_ms": begin, "to_ms": end}


AGAIN = [("prefill_waiting", 600, 700), ("prefill_forward", 700, 800)]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        ([("prefill_waiting", 50, 350), ("prefill_forward", 350, 540)], (300, 190, 400, 550)),
        (
            [("prefill_waiting", 50, 350), ("chunked_prefill", 350, 440), ("prefill_forward", 440, 545)],
            (300, 195, 400, 550),
        ),
        # retracted and run again: the first token is what the first round gave
        (
            [("prefill_waiting", 50, 350), ("prefill_forward", 350, 540), *AGAIN],
            (300, 190, 400, 550),
        ),
        ([("prefill_waiting", 50, 350)], (300, 200, 400, 550)),
        ([], (-1, -1, 400, 550)),
    ],
    ids=["whole", "chunked", "retracted", "no forward", "no stages"],
)
def test_sglangs_queue_is_a_stage_and_no_attribute(stages: list[tuple[str, int, int]], expected: tuple[float, ...]):
    """Its prefill attribute has the queue in it: less the queue it is the prefill, without a queue it is nothing."""
    assert [expected] == times(engine_spans([record(*sglang(stages))]))


@pytest.mark.parametrize(
    ("stages", "intake_ms"),
    [
        ([("api_server_dispatch", 10, 40), ("prefill_waiting", 90, 150)], 50),
        ([("prefill_waiting", 90, 150), ("api_server_dispatch", 10, 40), ("prefill_waiting", 500, 501)], 50),
        ([("api_server_dispatch", 10, 40), ("prefill_waiting", 35, 150)], 0),
        ([("api_server_dispatch", 10, 40), ("prefill_waiting", 20, 150)], None),
        ([("api_server_dispatch", 10, 40)], None),
        ([("prefill_waiting", 90, 150)], None),
    ],
    ids=["apart", "after a retraction", "overlap", "another clock", "no queue", "no dispatch"],
)
def test_the_schedulers_intake_lies_between_stages_of_two_processes(
    stages: list[tuple[str, int, int]], intake_ms: float | None
):
    """From the API process to the queue. The two are of one machine: what overlaps by more than a little is unknown."""
    spans = engine_spans([record(*sglang(stages))])
    assert spans.scheduler_intake_s.tolist() == pytest.approx(
        [math.nan if intake_ms is None else intake_ms / 1e3], nan_ok=True
    )


def test_a_health_probe_is_counted_and_is_no_request():
    """GET /health of SGLang generates a token; what marks it is the id."""
    root, *others = sglang([("prefill_waiting", 50, 350), ("prefill_forward", 350, 540)])
    probe = {**root, "attributes": {**root["attributes"], "gen_ai.request.id": "HEALTH_CHECK_1795318691.5"}}
    spans = engine_spans([record(probe, *others)])
    assert (0, {PROBE: 1}) == (len(spans), spans.refused)


def test_stages_may_come_before_and_apart_from_their_request():
    """Each process exports by itself; a stage whose parent never came is that of the only request of its trace."""
    root, thread, *stages = sglang([("prefill_waiting", 50, 350), ("prefill_forward", 350, 540)])
    whole = [(300, 190, 400, 550)]
    assert whole == times(engine_spans([record(*stages), record(thread), record(root)]))
    assert whole == times(engine_spans([record(*stages), record(root)]))
    other = {**root, "span_id": b"another0"}
    assert [(-1, -1, 400, 550)] * 2 == times(engine_spans([record(*stages), record(root, other)]))
    assert [*whole, (-1, -1, 400, 550)] == times(engine_spans([record(*stages, thread), record(root, other)]))


def test_the_prefill_of_tensorrt_llm_is_the_rest_of_its_ttft():
    """It states the queue, the TTFT and the end-to-end time; whatever its span is called."""
    attributes = {QUEUE: 0.1, TTFT: 0.25, E2E: 1.0, "gen_ai.request.id": 17}
    spans = engine_spans([record({"name": "anything", "attributes": attributes})])
    assert [(100, 150, 750, 250)] == times(spans)
    assert ("trtllm", "17") == (spans.engine[0], spans.request_id[0])


@pytest.mark.parametrize(
    ("text", "queue_ms"),
    [("1.5s", 1500), ("45.6ms", 45.6), ("120µs", 0.12), ("80ns", 0.00008), ("soon", -1), ("1.5", -1)],
)
def test_tgi_states_times_as_text(text: str, queue_ms: float):
    """As Rust shows a duration; it does not separate prefill from decode."""
    stage = {"name": "generate_stream", "attributes": {"queue_time": text, "inference_time": "2s", "total_time": "3s"}}
    assert [(queue_ms, -1, -1, -1)] == times(engine_spans([record(stage)]))


def test_a_gateways_span_is_no_request_of_an_engine():
    """Dynamo's frontend, beside the engine's span in the same trace."""
    attributes = {"method": "POST", "uri": "/v1/chat/completions", "x_request_id": "sl-1"}
    gateway = {"name": "http-request", "attributes": attributes}
    engine = {
        "name": "llm_request",
        "span_id": b"e" * 8,
        "parent_span_id": ROOT,
        "from_ms": 5,
        "attributes": {QUEUE: 0.1},
    }
    spans = engine_spans([record(gateway), record(engine, scope="vllm.tracing.otel")])
    assert ["vllm"] == spans.engine.tolist()
    assert [START_NS + 5 * MS] == spans.arrival_ns.tolist()
    assert [(100, -1, -1, -1)] == times(spans)


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), (0.1, 0.05), (0.1, 0.05, 0.1), ("x", 0.1)])
def test_an_impossible_time_is_refused(value: float | tuple[str | float, ...]):
    """Negative, no number, or several: the span is counted, and its ids are kept, so that its request can say why."""
    spans = engine_spans([record({"name": "llm_request", "attributes": {QUEUE: value, TTFT: 0.2}}, scope="vllm.x")])
    assert ([(-1.0,) * 4], {IMPOSSIBLE: 1}) == (times(spans), spans.refused)
    assert ([TRACE.hex()], [f"states {IMPOSSIBLE}"]) == (list(spans.trace_id), list(spans.fault))


def test_an_attribute_that_stands_twice_is_one_if_its_values_agree():
    """An id, or a count of tokens, with two values is not known; the times of its span are."""
    ids, tokens = "gen_ai.request.id", "gen_ai.usage.completion_tokens"
    for stated, expected in (((("a", "a"), (7, 7)), ("a", 7)), ((("a", "b"), (7, 8)), ("", -1))):
        attributes = {QUEUE: (0.1, 0.1), TTFT: 0.2, **dict(zip((ids, tokens), stated, strict=True))}
        spans = engine_spans([record({"name": "llm_request", "attributes": attributes}, scope="vllm.x")])
        assert (100, *expected) == (times(spans)[0][0], spans.request_id[0], spans.output_tokens[0])


@pytest.mark.parametrize("attributes", [{QUEUE: "long"}, {}, {QUEUE: 0.5, TTFT: 0.2}], ids=["text", "none", "too long"])
def test_a_time_that_is_absent_is_unknown(attributes: dict[str, float | str]):
    """Never zero; and what is left of a whole that is shorter than its part is unknown as well."""
    spans = engine_spans([record({"name": "llm_request", "attributes": attributes}, scope="vllm.x")])
    assert np.isnan(spans.prefill_s).all()
    assert [(500.0 if attributes.get(QUEUE) == 0.5 else -1.0)] == [row[0] for row in times(spans)]


def test_spans_of_other_services_are_no_requests():
    """Whatever else is sent, as by a service in the same pipeline."""
    assert 0 == len(engine_spans([record({"name": "GET /"}, {"name": "llm_request", "span_id": b"2" * 8})]))


def test_what_is_awaited_is_a_span_that_says_all():
    """vLLM's does; SGLang's root has stages to come, and a gateway's is not an engine's."""
    (vllm,) = record({"name": "llm_request"}).spans()
    root, *_ = record(*sglang([])).spans()
    assert [True, False, False] == [
        classify(vllm.span, "vllm.llm_engine").tells_all,
        classify(vllm.span, "other").tells_all,
        classify(root.span, "").tells_all,
    ]


@given(st.binary(max_size=2000), st.integers(-1, 2**63 - 1))
def test_what_was_logged_is_what_is_read(body: bytes, received_ns: int):
    """Any bytes come back as they were, those that are no export too: they are refused where they are parsed."""
    logged = decode(msgspec.msgpack.encode(packed(received_ns, "http", body)))
    assert (received_ns, "http", body) == (logged.received_ns, logged.via, logged.body())


def test_bytes_that_no_receiver_wrote_are_an_error():
    """A log is ours alone: what cannot be parsed was not written by a receiver."""
    with pytest.raises(ValueError, match="not an export"):
        packed(0, "http", b"\xff").spans()
    with pytest.raises(ValueError, match="not an export"):
        ExportRecord(received_ns=0, via="http", packed=b"x").spans()


def test_no_message_outlives_its_export():
    """A span of Protobuf holds on to the whole export: neither a request's nor a stage's may be kept."""
    stage = {"name": "prefill_forward", "span_id": b"s" * 8, "parent_span_id": ROOT}
    spans = [
        *record({"name": "llm_request"}, scope="vllm.llm_engine").spans(),
        *record(stage, scope="sglang").spans(),
    ]
    references = [sys.getrefcount(span.span) for span in spans]
    requests = RequestSpans()
    for span in spans:
        requests.add(span)
    assert [span.kind.role for span in spans] == ["request", "stage"]
    assert [sys.getrefcount(span.span) for span in spans] == references
