"""Requests that a prefill engine and a decode engine shared: real pods of vLLM, and made-up ones."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import recordings
from hypothesis import given
from hypothesis import strategies as st
from sent_spans import MS, NOON, engine, export, sglang_node, two_pods

from sidelight.correlator.breakdown import Parts, break_down, network_label
from sidelight.correlator.estimate.table import nothing
from sidelight.correlator.exact.clock_offset import EngineClocks, clock_offsets, handed_over
from sidelight.correlator.exact.join import join
from sidelight.correlator.parts import SHARED_PARTS, TTFT_PARTS
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import take
from sidelight.scraper.spans.log import ExportRecord
from sidelight.scraper.spans.requests import engine_spans

WAIT_MS = 330.0  # of a client whose request two pods shared with 80 ms between them: 12 are outside


def pods() -> list[Any]:
    """Some requests of four recordings of two real pods behind a proxy: each with the proxy's stamps by trace."""
    with lzma.open(recordings.REPOSITORY / "tests/data/vllm_two_pods.jsonl.xz", "rt") as file:
        return [json.loads(line) for line in file]


def parts_of(requests: RequestLog, exports: Iterable[ExportRecord], *, one_machine: bool = False) -> Parts:
    where = np.full(len(requests), one_machine)
    joined = handed_over(join(requests, engine_spans(exports)), requests, where)
    return break_down(requests, joined, nothing(len(requests), ""), clock_offsets(requests, joined))


def shared(*traces: bytes, wait_ms: float = WAIT_MS) -> RequestLog:
    """Requests whose spans are those of `two_pods`."""
    stamps = {"submit_ns": NOON + 45 * MS, "end_ns": NOON + 950 * MS}
    first = dict.fromkeys(("first_output_ns", "first_token_ns"), NOON + round((45 + wait_ms) * MS))
    usual = {"status": "ok", "http_status": 200, **stamps, **first}
    return recordings.request_log([{**usual, "trace_id": trace.hex()} for trace in traces])


def milliseconds(parts: Parts) -> dict[str, float]:
    """The parts of one request in ms, without unknown ones."""
    return {
        part.name: round(1e3 * float(parts.seconds(part)[0]), 6)
        for part in TTFT_PARTS
        if np.isfinite(parts.seconds(part)[0])
    }


@pytest.mark.parametrize("recorded", pods(), ids=lambda recorded: str(recorded["name"]))
def test_the_parts_of_real_pods_are_those_of_the_proxy(recorded: Any):
    """The parts are the TTFT to the digit; what lies between the pods holds what the proxy held, and HTTP twice.

    KV loads of NIXL are in the decode pod's queue, those of ExampleConnector in its first step.
    """
    case = recordings.recorded(recorded["requests"], recorded["exports"], recorded["anchor"])
    joined = handed_over(join(case.requests, case.spans), case.requests, np.full(len(case.requests), True))
    parts = break_down(case.requests, joined, nothing(len(joined), ""))
    assert ["exact"] * len(parts) == parts.quality.tolist()
    assert parts.by_two_engines.all()
    total_s = sum(np.nan_to_num(parts.seconds(part)) for part in TTFT_PARTS)
    assert parts.ttft_s.tolist() == pytest.approx(total_s.tolist(), abs=1e-12)
    proxy = [recorded["proxy"][trace] for trace in case.requests.trace_id]
    held_ms = np.array([(stamps["d_call_ns"] - stamps["p_return_ns"]) / 1e6 for stamps in proxy])
    assert (1e3 * parts.router_s - held_ms > 0).all()
    assert (1e3 * parts.router_s - held_ms < 11).all()
    decode_ms = np.array([(stamps["d_first_ns"] - stamps["d_call_ns"]) / 1e6 for stamps in proxy])
    rest_ms = decode_ms - 1e3 * (parts.decode_queue_s + parts.first_step_s)
    assert (rest_ms > 0).all()
    assert np.median(rest_ms) < 15  # of its API server, and HTTP
    spans = list(zip(case.spans.trace_id, case.spans.role, strict=True))
    first, second = ([spans.index((trace, role)) for trace in case.requests.trace_id] for role in ("prefill", ""))
    assert case.spans.queue_s[first].tolist() == parts.queue_s.tolist()
    assert case.spans.prefill_s[first].tolist() == parts.prefill_s.tolist()
    assert case.spans.queue_s[second].tolist() == parts.decode_queue_s.tolist()
    assert case.spans.prefill_s[second].tolist() == parts.first_step_s.tolist()


def test_each_part_of_a_shared_request_has_its_name():
    """By one clock, which both pods' resources name: API servers and what a span lasts beyond its output are other."""
    prefill, decode = two_pods(80)
    exports = [export([prefill], instance="p", machine="node"), export([decode], instance="d", machine="node")]
    parts = parts_of(shared(b"t" * 16), exports)
    known = {"queue": 20, "prefill": 100, "router": 80, "decode_queue": 40, "first_step": 15}
    # Of 330 the pods had 130 and 60, and 80 lay between.
    assert {"network": 60, "other": 15, **known} == milliseconds(parts)
    assert [0.0] == parts.router_error_s.tolist()
    assert [0.3] == parts.decode_s.tolist()
    assert [NOON + 320 * MS] == (parts.engine_first_token_ns - parts.arrival_ns + NOON + 50 * MS).tolist()


@pytest.mark.parametrize("clock_ms", [-7000.0, 0.0, 3000.0])
def test_what_no_clock_tells_stays_outside_the_engines(clock_ms: float):
    """A decode pod's clock set anyhow moves no part but the one between, which is then not known by itself."""
    prefill, decode = two_pods(80, clock_ms=clock_ms)
    parts = parts_of(shared(b"t" * 16), [export([prefill], instance="p"), export([decode], instance="d")])
    known = {"queue": 20, "prefill": 100, "decode_queue": 40, "first_step": 15}
    assert {"network": 140, "other": 15, **known} == milliseconds(parts)
    assert [-1] == parts.engine_first_token_ns.tolist()
    assert "outside the engines" == network_label(parts, np.array([True]))


@pytest.mark.parametrize("clock_ms", [-7000.0, -100.0, 3000.0])
def test_the_name_of_a_machine_that_the_stamps_contradict_makes_no_clock_one(clock_ms: float):
    """As of containers on two machines with one host name: nothing is before its cause, nor lasts beyond the wait."""
    prefill, decode = two_pods(80, clock_ms=clock_ms)
    sent = [export([prefill], instance="p", machine="node"), export([decode], instance="d", machine="node")]
    known = {"queue": 20, "prefill": 100, "decode_queue": 40, "first_step": 15}
    assert {"network": 140, "other": 15, **known} == milliseconds(parts_of(shared(b"t" * 16), sent))


def test_the_name_of_a_process_that_two_engines_share_makes_no_clock_one():
    """As of containers whose process has the same number in both."""
    prefill, decode = two_pods(80, clock_ms=30)
    parts = parts_of(shared(b"t" * 16), [export([prefill, decode], instance="7")])
    assert "router" not in milliseconds(parts)
    assert parts.by_two_engines.all()


def test_stamps_bound_the_time_between_of_a_reply_in_one_piece_too():
    prefill, decode = two_pods(80, clock_ms=3000)
    sent = [export([prefill], instance="p", machine="node"), export([decode], instance="d", machine="node")]
    unseen = np.array([-1])
    log = replace(shared(b"t" * 16), first_output_ns=unseen, first_token_ns=unseen)
    assert "router" not in milliseconds(parts_of(log, sent))


def tokens_of(log: RequestLog, count: int) -> RequestLog:
    return replace(log, output_tokens=np.array([count]), output_tokens_source=np.array(["usage"], dtype=object))


def with_times(sent: Any, **times_ms: float) -> Any:
    for attribute in sent.attributes:
        name = attribute.key.rpartition(".")[2]
        attribute.value.double_value = times_ms.get(name, 1e3 * attribute.value.double_value) / 1e3
    return sent


@pytest.mark.parametrize("case", ["prefill alone", "a prefill again", "refused", "longer", "by an impossible time"])
def test_nothing_is_exact_where_the_spans_of_both_cannot_be_read(case: str):
    """What one engine did is then not all that a request waited for, and the rest is not outside the engines."""
    prefill, decode = two_pods(80)
    again, _ = two_pods(80)
    again.span_id = b"again..."
    late = export([decode], instance="d", at_s=10_000.0)
    sent = {
        "prefill alone": [export([prefill], instance="p")],
        "a prefill again": [export([prefill], instance="p"), export([again], instance="q"), export([decode])],
        "refused": [export([prefill], instance="p"), late],
        "longer": [export([prefill], instance="p"), export([with_times(decode, time_in_queue=100.0)], instance="d")],
        "by an impossible time": [
            export([prefill], instance="p"), export([with_times(decode, time_in_queue=-1.0)], instance="d")
        ],
    }  # fmt: skip
    joined = join(tokens_of(shared(b"t" * 16), 16), engine_spans(sent[case]))
    assert (["none"], True) == (joined.source.tolist(), bool(joined.refusal[0]))


def test_one_token_that_a_client_asked_for_is_of_one_engine():
    prefill, _ = two_pods()
    parts = parts_of(tokens_of(shared(b"t" * 16), 1), [export([prefill], instance="p")])
    assert ["exact"] == parts.quality.tolist()


@given(st.lists(st.tuples(st.floats(0, 400), st.floats(0.5, 60)), min_size=2, max_size=12), st.floats(-5000, 5000))
def test_the_time_between_is_within_its_error(ways: list[tuple[float, float]], clock_ms: float):
    """Whatever lies between, outside, and between the clocks."""
    traces = [bytes([number]) * 16 for number in range(1, len(ways) + 1)]
    pairs = [
        two_pods(between_ms, clock_ms=clock_ms, trace=trace)
        for trace, (between_ms, _) in zip(traces, ways, strict=True)
    ]
    usual = {"status": "ok", "http_status": 200, "submit_ns": NOON + 50 * MS, "end_ns": NOON + 1500 * MS}
    firsts_ns = [NOON + round((240 + sum(way)) * MS) for way in ways]
    log = recordings.request_log(
        [
            {**usual, "trace_id": trace.hex(), "first_output_ns": first_ns, "first_token_ns": first_ns}
            for trace, first_ns in zip(traces, firsts_ns, strict=True)
        ]
    )
    first, second = zip(*pairs, strict=True)
    parts = parts_of(log, [export(first, instance="p"), export(second, instance="d")])
    assert parts.by_two_engines.all()
    true_s = np.array([between_ms for between_ms, _ in ways]) / 1e3
    known = np.isfinite(parts.router_s)
    assert known.all() or not known.any()
    assert (np.abs(parts.router_s - true_s)[known] <= parts.router_error_s[known] + 1e-6).all()
    total_s = sum(np.nan_to_num(parts.seconds(part)) for part in TTFT_PARTS)
    assert parts.ttft_s.tolist() == pytest.approx(total_s.tolist(), abs=1e-12)


def test_choices_of_one_token_are_of_one_engine():
    """A client that asked for one token, twice: the spans are alike a prefill pod's, and begin together."""
    stated: dict[str, str | float] = {
        "gen_ai.usage.prompt_tokens": 512, "gen_ai.usage.completion_tokens": 1, "gen_ai.request.max_tokens": 1,
    }  # fmt: skip
    spans = [engine(f"choice{number}", ttft_ms=160, e2e_ms=160, decode_ms=0, stated=stated) for number in range(2)]
    log = shared(b"t" * 16)
    parts = parts_of(log, [export(spans, instance="e")])
    assert not parts.by_two_engines.any()
    assert {"queue": 50.0, "prefill": 100.0} == {name: milliseconds(parts)[name] for name in ("queue", "prefill")}


def test_one_engine_has_no_parts_of_two():
    parts = parts_of(shared(b"t" * 16), [export([engine()], instance="e")])
    assert not {part.name for part in SHARED_PARTS}.intersection(milliseconds(parts))


def test_clocks_that_requests_one_by_one_tell_apart():
    """In a watch each comes alone: the bounds of those before it hold for it too."""
    traces, betweens_ms = [bytes([number]) * 16 for number in range(1, 6)], (90, 0.5, 70, 250, 120)
    log = shared(*traces)
    late, routers_ms = EngineClocks(), []
    for place, (trace, between_ms) in enumerate(zip(traces, betweens_ms, strict=True)):
        prefill, decode = two_pods(between_ms, clock_ms=2000, trace=trace)
        sent = [export([prefill], instance="p"), export([decode], instance="d")]
        first_ns = np.array([NOON + round((240.5 + between_ms) * MS)])
        request = replace(take(log, np.array([place])), first_output_ns=first_ns, first_token_ns=first_ns)
        joined = handed_over(join(request, engine_spans(sent)), request, late=late)
        routers_ms.append(1e3 * float(joined.router_s[0]))
        off_ms = abs(routers_ms[-1] - between_ms)
        assert np.isnan(off_ms) or off_ms <= 1e3 * joined.router_error_s[0] + 1e-6
    assert [False, True, True, True, True] == np.isfinite(routers_ms).tolist()


def test_many_pairs_of_clocks_are_bounded_together():
    """Of 20 prefill and 20 decode engines each pair is known by its own requests; of 50,000 only the last ones are."""
    late, bound = EngineClocks(), np.array([5], dtype=np.int64)
    for _ in range(30):
        lengths = {len(late.extended(f"{pair}", -bound, bound)[0]) for pair in range(400)}
    assert {30} == lengths
    for pair in range(50_000):
        late.extended(f"{pair}", -bound, bound)
    assert (30_000, 2) == (late.size, len(late.extended("49999", -bound, bound)[0]))


def sglang(role: str, begin_ms: float, stages: Mapping[str, tuple[float, float]], **stated: float) -> ExportRecord:
    return export(sglang_node(role, begin_ms, stages, **stated), instance=role)


def test_the_handshake_and_the_transfer_of_sglang_are_no_queue():
    """Both nodes have the request at once; the decode node waits for the prefill node's work within its own TTFT.

    Stages by the source of SGLang 0.5.23. The clocks of the two are seconds apart, and nothing is compared.
    """
    prefill = sglang(
        "prefill",
        52.0,
        {
            "api_server_dispatch": (1, 3),
            "prefill_prepare": (8, 9),
            "prefill_bootstrap": (9, 39),
            "prefill_waiting": (39, 59),
            "prefill_forward": (59, 159),
            "prefill_transfer_kv_cache": (159, 199),
        },
        time_to_first_token=160.0,
        e2e=200.0,
    )
    decode = sglang(
        "decode",
        9050.0,
        {
            "api_server_dispatch": (1, 3),
            "decode_prepare": (4, 5),
            "decode_bootstrap": (5, 45),
            "decode_transferred": (45, 205),
            "decode_waiting": (205, 225),
            "fake_output": (225, 230),
            "decode_forward": (225, 700),
        },
        time_to_first_token=235.0,
        e2e=700.0,
        time_in_model_decode=465.0,
    )
    parts = parts_of(shared(b"t" * 16, wait_ms=250.0), [prefill, decode])
    known = {"queue": 20, "prefill": 100, "kv_transfer": 70, "decode_queue": 20, "first_step": 5}
    assert {"network": 15, "other": 20, **known} == milliseconds(parts)
    assert [0.005] == parts.scheduler_intake_s.tolist()
    assert [0.465] == parts.decode_s.tolist()


@pytest.mark.parametrize("ttft_s", [1e300, -0.005])
def test_an_impossible_ttft_leaves_no_part_that_is_impossible(ttft_s: float):
    """No number is beyond int64: it is refused, or left out of what is known; the sum is the TTFT all the same."""
    prefill, decode = two_pods(80)
    for attribute in decode.attributes:
        if attribute.key == "gen_ai.latency.time_to_first_token":
            attribute.value.double_value = ttft_s
    parts = parts_of(shared(b"t" * 16), [export([prefill], instance="p"), export([decode], instance="d")])
    known = milliseconds(parts)
    assert all(0 <= time_ms <= WAIT_MS for time_ms in known.values())
    assert sum(known.values()) == pytest.approx(WAIT_MS if parts.source[0] != "none" else 0.0)


def test_a_stage_of_that_name_is_no_part_of_one_engines_ttft():
    """SGLang's decode_waiting, behind the first token."""
    stages = {"prefill_waiting": (5.0, 25.0), "prefill_forward": (25.0, 125.0), "decode_waiting": (125.0, 145.0)}
    alone = sglang("engine", 50.0, stages, time_to_first_token=130.0, e2e=300.0)
    parts = parts_of(shared(b"t" * 16, wait_ms=150.0), [alone])
    assert {"network": 20, "queue": 20, "prefill": 100, "other": 10} == milliseconds(parts)
