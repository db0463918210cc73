"""Requests that two engines shared behind a router whose two calls say more: llm-d by its source, a recorded Dynamo."""

from __future__ import annotations

import base64
import json
import lzma
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import recordings
from llm_d_spans import Age, Truth, llm_d
from sent_spans import MS, NOON, SERVER, TRACE, S, call, export, gateway, identity, span, two_pods

from sidelight.correlator.breakdown import Parts, break_down
from sidelight.correlator.estimate.table import nothing
from sidelight.correlator.exact.clock_offset import handed_over
from sidelight.correlator.exact.join import join
from sidelight.correlator.exact.table import EARLY, NO_FIRST_OUTPUT, UNDIVIDED
from sidelight.correlator.live.breakdown import break_down_ended
from sidelight.correlator.live.window import TraceWindow
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.gateway_spans import GatewaySpans, nested
from sidelight.scraper.spans.log import ExportRecord, packed
from sidelight.scraper.spans.requests import engine_spans

SECONDS_OFF = {"picker": 3000.0, "prefill": -7000.0, "decode": 11_000.0}
FEW_OFF = {"picker": 10.0, "prefill": -15.0, "decode": 20.0}


def run(requests: RequestLog, exports: Iterable[ExportRecord]) -> Parts:
    """Break requests down as a run does."""
    exports, gateways = list(exports), GatewaySpans()
    for record in exports:
        for received in record.spans():
            gateways.add(received)
    joined, by_trace = join(requests, engine_spans(exports)), gateways.by_trace()
    traces = zip(requests.trace_id.tolist(), joined.trace_id.tolist(), strict=True)
    passed = [nested(*(by_trace.get(trace, ()) for trace in dict.fromkeys(pair))) for pair in traces]
    joined = handed_over(joined, requests, gateways=passed)
    return break_down(requests, joined, nothing(len(requests), ""), gateways=passed)


def watched(requests: RequestLog, exports: Iterable[ExportRecord]) -> Parts:
    """Break requests down as a watch does, whose clients send spans of their own."""
    window, exports = TraceWindow(), list(exports)
    parents = {
        each.span.trace_id: each.span.parent_span_id
        for record in exports
        for each in record.spans()
        if each.span.name == "http-request"
    }
    for row, trace in enumerate(map(bytes.fromhex, requests.trace_id)):
        begun_ns = int(requests.submit_ns[row])
        first_ms, last_ms = (
            (int(column[row]) - begun_ns) / MS for column in (requests.first_output_ns, requests.end_ns)
        )
        start_ms = (begun_ns - NOON) / MS
        client = call(first_ms=first_ms, start_ms=start_ms, end_ms=start_ms + last_ms, trace=trace)
        client.span_id = parents.get(trace, client.span_id)
        window.take(export([client], at_s=(start_ms + last_ms) / 1e3))
    for record in exports:
        window.take(record)
    return break_down_ended(window.finished(int(requests.end_ns.max()) + 9 * S, all_of_it=True)).parts


def sent(truths: Mapping[bytes, Truth]) -> RequestLog:
    """The requests of a client, by trace; an id of the client's own stands for its X-Request-Id."""
    rows: list[dict[str, Any]] = [
        {
            "status": "ok", "http_status": 200, "trace_id": trace.hex(), "request_id": trace.hex(), "submit_ns": NOON,
            "end_ns": NOON + round((truth.ttft + 310) * MS),
            **dict.fromkeys(("first_output_ns", "first_token_ns"), NOON + round(truth.ttft * MS)),
        }
        for trace, truth in truths.items()
    ]  # fmt: skip
    return recordings.request_log(rows)


def milliseconds(parts: Parts, row: int = 0) -> dict[str, float]:
    return {
        part.name: round(1e3 * float(parts.seconds(part)[row]), 6)
        for part in TTFT_PARTS
        if np.isfinite(parts.seconds(part)[row])
    }


@pytest.mark.parametrize("of", [run, watched])
@pytest.mark.parametrize(
    ("age", "clocks_ms"),
    [("0.8", {}), ("0.8", FEW_OFF), ("0.9", FEW_OFF), ("0.10", {}), ("0.10", FEW_OFF), ("0.10", SECONDS_OFF)],
)
def test_the_parts_of_a_request_through_llm_d_are_its_truth(of: Any, age: Age, clocks_ms: Mapping[str, float]):
    """Up to what lies between the pods, which is known as well as the ways to them are short, whatever the clocks say.

    What a picker took is up to its decision, what the sidecar took up to its first call.
    """
    truths = {bytes([number]) * 16: Truth(held=80.0 + 40 * number, queue=7.0 * number) for number in range(1, 4)}
    exports = [
        record
        for trace, truth in truths.items()
        for record in llm_d(age, truth, trace, parent="client", clocks_ms=clocks_ms)
    ]
    parts = of(sent(truths), exports)
    assert ["exact"] * 3 == parts.quality.tolist()
    for row, truth in enumerate(truths.values()):
        found_ms, true_ms = milliseconds(parts, row), truth.parts
        error_ms = 1e3 * float(parts.router_error_s[row])
        assert error_ms < 3
        assert found_ms.pop("router") == pytest.approx(true_ms.pop("router"), abs=error_ms + 1e-6)
        assert found_ms.pop("network") == pytest.approx(true_ms.pop("network"), abs=error_ms + 1e-6)
        assert true_ms == pytest.approx(found_ms)
        assert ["llm_d_epp", "llm_d_sidecar"] == [gateway.name for gateway in parts.gateways[row]]
    total_s = sum(np.nan_to_num(parts.seconds(part)) for part in TTFT_PARTS)
    assert parts.ttft_s.tolist() == pytest.approx(total_s.tolist(), abs=1e-12)


def test_a_picker_that_begins_a_trace_of_its_own_is_joined_by_the_request_s_id():
    """As before 0.9: the client's trace has no spans then."""
    truth = Truth()
    parts = run(sent({b"c" * 16: truth}), llm_d("0.8", truth, b"c" * 16))
    renamed = replace(sent({b"c" * 16: truth}), trace_id=np.array(["d" * 32], dtype=object))
    alone = run(renamed, llm_d("0.8", truth, b"c" * 16))
    assert milliseconds(parts) == milliseconds(alone)
    assert 37 == milliseconds(alone)["gateway"]


@pytest.fixture(scope="module")
def dynamo() -> tuple[recordings.Recording, list[ExportRecord]]:
    """Six of 36 requests to Dynamo 1.6.1 with mockers as prefill and decode worker, and what came of them."""
    (line,) = lzma.decompress(
        (recordings.REPOSITORY / "tests/data/dynamo_two_workers.jsonl.xz").read_bytes()
    ).splitlines()
    row = json.loads(line)
    case = recordings.recorded(row["requests"], row["exports"], row["anchor"])
    exports = [packed(each["recv_unix_ns"], "grpc", base64.b64decode(each["body_b64"])) for each in row["exports"]]
    return case, exports


def stated(exports: Iterable[ExportRecord], trace: str) -> dict[str, float]:
    """What the spans of a trace say in ms: the worker's prefill, and from the call of it to the first output."""
    spans = [each.span for record in exports for each in record.spans() if each.span.trace_id.hex() == trace]
    frontend = next(each for each in spans if each.name == "http-request")
    calls = sorted(
        (each for each in spans if each.name == "router.route_request"), key=lambda each: each.start_time_unix_nano
    )
    texts = {each.span_id: {item.key: item.value.string_value for item in each.attributes} for each in spans}
    worker = next(each for each in spans if texts[each.span_id].get("component") == "prefill")
    first_ms = float(texts[frontend.span_id]["ttft_ms"])
    lasted_ms = (worker.end_time_unix_nano - worker.start_time_unix_nano) / MS
    rest_ms = first_ms - (calls[0].end_time_unix_nano - frontend.start_time_unix_nano) / MS
    return {"prefill": lasted_ms, "first_step": rest_ms, "gateway": first_ms - lasted_ms - rest_ms}


@pytest.mark.parametrize("which", [run, watched])
def test_dynamos_prefill_worker_is_one_part_and_what_follows_another(dynamo: Any, which: Any):
    """By the frontend's clock alone, since the workers' spans overlap; the sum is the TTFT, and nothing is negative."""
    case, exports = dynamo
    parts = which(case.requests, exports)
    known = np.flatnonzero(parts.source == "trace")
    assert 4 == len(known)
    for row in known.tolist():
        found_ms = milliseconds(parts, row)
        assert {"network", "gateway", "prefill", "first_step", "other"} == set(found_ms)
        assert min(found_ms.values()) >= 0
        true_ms = stated(exports, case.requests.trace_id[row])
        assert true_ms == pytest.approx({name: found_ms[name] for name in true_ms}, abs=1e-5)
        assert parts.ttft_s[row] == pytest.approx(sum(found_ms.values()) / 1e3, abs=1e-8)
    assert {UNDIVIDED} == set(parts.reason[known])
    assert {""} == set(parts.merged[known])


def test_a_first_output_before_the_prefill_was_done_is_not_divided(dynamo: Any):
    """As of two of the 36 requests: the TTFT stays whole, with the reason."""
    case, exports = dynamo
    parts = run(case.requests, exports)
    rows = np.flatnonzero(parts.source == "none")
    assert 2 == len(rows)
    assert all(EARLY in reason for reason in parts.reason[rows])


def test_without_the_frontends_span_nothing_is_known_of_two_workers(dynamo: Any):
    case, exports = dynamo
    workers = [record for record in exports if all(each.service != "dynamo-frontend" for each in record.spans())]
    parts = run(case.requests, workers)
    assert {"none"} == set(parts.source)
    assert all(NO_FIRST_OUTPUT in reason for reason in parts.reason)


def worker(name: str, parent: str, component: str, **when: float) -> Any:
    attributes: dict[str, str | float] = {"component": component, "endpoint": "generate", "request_id": "r"}
    return span("handle_payload", name, parent, kind=SERVER, attributes=attributes, **when)  # type: ignore[arg-type]


@pytest.mark.parametrize("of", [run, watched])
@pytest.mark.parametrize("shared", [True, False])
def test_an_engines_spans_within_dynamos_workers_count_before_theirs(of: Any, *, shared: bool):
    """As of vLLM behind them: what it tells is divided. One worker of its own is none of two."""
    prefill, decode = two_pods(80)
    prefill.parent_span_id, decode.parent_span_id = identity("prefill_"), identity("decode_")
    calls = [
        span("router.route_request", f"{name}call", "front", start_ms=start_ms, end_ms=end_ms)
        for name, start_ms, end_ms in (("p", 46, 182), ("d", 255, 640))
    ]
    workers = [worker("prefill_", "pcall", "prefill", start_ms=48, end_ms=181)]
    workers += [worker("decode_", "dcall", "backend", start_ms=256, end_ms=630)]
    front = gateway("front", "client", first_ms=300, start_ms=40, end_ms=645)
    first = 0 if shared else 1
    exports = [
        export([front, *calls[first:]], service="dynamo-frontend"),
        *(export([each], service="w") for each in workers[first:]),
        *(export([each], instance=name) for each, name in ((prefill, "p"), (decode, "d"))[first:]),
    ]
    parts = of(sent({TRACE: Truth(held=120.0)}), exports)
    assert ["exact"] == parts.quality.tolist()
    assert "" == parts.reason[0]
    found_ms = milliseconds(parts)
    assert (20 if shared else 40) == found_ms["queue"]
    assert shared == ("decode_queue" in found_ms)


def test_dynamos_worker_alone_tells_nothing_of_the_engine():
    exports = [export([worker("w", "client", "backend")], service="w")]
    parts = run(sent({TRACE: Truth()}), exports)
    assert ["none"] == parts.source.tolist()
    assert "tells neither queue nor prefill" in parts.reason[0]
