"""A prefill engine and a decode engine in virtual time: spans and pages of both, against the truth."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import recordings
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_load import samples_of
from virtual_pair import play_pair

from sidelight.correlator.breakdown import Parts, break_down
from sidelight.correlator.estimate.table import nothing
from sidelight.correlator.exact.clock_offset import handed_over
from sidelight.correlator.exact.join import join
from sidelight.scraper.spans.log import packed
from sidelight.scraper.spans.requests import engine_spans
from sidelight.simulator.engine.history import EngineRequest, RequestRecord
from sidelight.simulator.engine.scheduler import SimulatedEngine
from sidelight.simulator.settings import KV_TOKEN_BYTES, EngineSettings, SimulatorSettings
from sidelight.simulator.telemetry.spans import export
from sidelight.simulator.virtual import EPOCH_NS, Played, SimulatedLoad, VirtualExchange, VirtualServer

MS = 10**6
PREFILL = EngineSettings(kv_role="prefill")
DECODE = EngineSettings(kv_role="decode")


def requests(count: int, *, length: int = 200, **known: Any) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=f"cmpl-{number}",
            prompt_token_ids=tuple(range(1000 * number, 1000 * number + length)),
            traceparent=f"00-{number + 1:032x}-{1:016x}-01",
            max_tokens=20,
            **known,
        )
        for number in range(count)
    ]


def play(
    sent: Sequence[EngineRequest], every_ms: float, prefill: EngineSettings, decode: EngineSettings, *, hold_ms: float
) -> tuple[Played, Played]:
    """Play requests that come evenly on both engines."""
    offsets_ns = [round(number * every_ms * MS) for number in range(len(sent))]
    return play_pair(sent, offsets_ns, (prefill, decode), hold_s=hold_ms / 1e3, scrapes_s=(None, 0.01))


def by_id(played: Played) -> dict[str, VirtualExchange]:
    return {each.request.request_id: each for each in played.exchanges}


def records(played: Played) -> Iterator[RequestRecord]:
    for each in played.exchanges:
        assert each.record is not None
        yield each.record


def parts_of(first: Played, second: Played) -> Parts:
    """Break down the requests of both by nothing but their spans."""
    answers = by_id(second)
    log = recordings.request_log(
        [
            {
                "status": "ok",
                "http_status": 200,
                "trace_id": each.request.traceparent[3:35],
                "submit_ns": each.submit_ns,
                "end_ns": answers[each.request.request_id].end_ns,
                **dict.fromkeys(("first_output_ns", "first_token_ns"), answers[each.request.request_id].token_ns[0]),
            }
            for each in first.exchanges
        ]
    )
    exports = [
        packed(
            EPOCH_NS,
            "grpc",
            export(tuple(records(played)), SimulatorSettings(engine_settings=each)).SerializeToString(),
        )
        for played, each in ((first, PREFILL), (second, DECODE))
    ]
    joined = handed_over(join(log, engine_spans(exports)), log, np.full(len(log), True))
    return break_down(log, joined, nothing(len(log), ""))


@pytest.mark.parametrize("transfer_ms", [20, 150, 450])
@pytest.mark.parametrize("busy", ["", "prefill", "decode"])
def test_spans_tell_each_part_of_a_shared_request(transfer_ms: int, busy: str):
    """All but the decode engine's queue and the load in it, which are one there; by one clock to the rounding."""
    decode = replace(DECODE, kv_latency_s=transfer_ms / 1e3, max_num_seqs=2 if busy == "decode" else 16)
    prefill = replace(PREFILL, max_num_seqs=1 if busy == "prefill" else 16)
    first, second = play(requests(40), 25.0 if busy == "prefill" else 60.0, prefill, decode, hold_ms=30)
    parts, answers = parts_of(first, second), by_id(second)
    assert parts.by_two_engines.all()
    loads = [answers[each.request.request_id].record for each in first.exchanges]
    true_s = {
        "queue": [each.queue_s for each in records(first)],
        "prefill": [each.prefill_s for each in records(first)],
        "router": [0.03] * len(loads),
        "decode_queue": [each.queue_s for each in loads if each],
        "first_step": [each.prefill_s for each in loads if each],
    }
    for name, expected in true_s.items():
        assert getattr(parts, f"{name}_s").tolist() == pytest.approx(expected, abs=1e-6), name
    assert {transfer_ms * MS} == {each.loaded_ns - each.load_ns for each in loads if each}
    queues_s = {"prefill": true_s["queue"], "decode": [s - transfer_ms / 1e3 for s in true_s["decode_queue"]]}
    assert {busy} - {""} == {name for name, waits in queues_s.items() if np.median(waits) > 0.1}


def test_the_page_of_the_decode_engine_splits_its_queue():
    """Requests by stage over time are the time in each; those whose load has begun are deferred, others not."""
    decode = replace(DECODE, kv_latency_s=0.15, max_num_seqs=2)
    _, second = play(requests(40), 60.0, PREFILL, decode, hold_ms=0)
    stages = ("waiting_to_start", "in_progress", "completed_waiting")
    pages = [by_label(page.body) for page in second.pages]
    spent_s = {stage: 0.01 * sum(page[stage] for page in pages) / 40 for stage in stages}
    true = list(records(second))
    expected = {
        "waiting_to_start": np.mean([each.load_ns - each.queued_ns for each in true]) / 1e9,
        "in_progress": 0.15,
        "completed_waiting": np.mean([each.scheduled_ns - each.loaded_ns for each in true]) / 1e9,
    }
    assert min(expected.values()) > 0.02
    assert spent_s == pytest.approx(expected, abs=0.008)
    for page in pages:
        assert page["deferred"] == page["in_progress"] + page["completed_waiting"]
        assert page["capacity"] == page["waiting_to_start"]
    last = pages[-1]
    assert (40, 40 * 200, 0, 40 * 200) == (
        last["vllm:nixl_xfer_time_seconds_count"],
        last["external_kv_transfer"],
        last["local_compute"],
        last["p2p"],
    )
    assert last["vllm:nixl_xfer_time_seconds_sum"] == pytest.approx(40 * 0.15)


def by_label(page: bytes) -> dict[str, float]:
    """The values of a page by the last label, where there is one beside engine and model, else by the name."""
    return {
        next((value for label, value in labels if label in {"stage", "reason", "source"}), name): value
        for (name, labels), value in samples_of(page).items()
        if not name.endswith(("_bucket", "_created"))
    }


@pytest.mark.parametrize(
    ("role", "shown"), [("", (False, False)), ("prefill", (True, False)), ("decode", (True, True))]
)
def test_who_shows_what(role: str, shown: tuple[bool, bool]):
    """NIXL's families are on both engines' pages, those of loads on the decode engine's alone."""
    server = VirtualServer(SimulatorSettings(engine_settings=EngineSettings(kv_role=role)))
    (page,) = server.play(SimulatedLoad(requests=(), offsets_ns=()), scrape_s=1).pages
    names = {name for name, _ in samples_of(page.body)}
    assert shown == ("vllm:nixl_xfer_time_seconds_count" in names, "vllm:num_requests_kv_fetch_by_stage" in names)


def test_a_load_takes_longer_for_more_tokens_but_not_for_cached_ones():
    """At so many tokens a second, behind the latency; what the decode engine has of a prompt is not moved."""
    decode = replace(DECODE, kv_latency_s=0.01, kv_bytes_per_s=1000.0 * KV_TOKEN_BYTES)
    server = VirtualServer(SimulatorSettings(engine_settings=decode))
    (sent,) = requests(1, remote_prefill=True)
    played = server.play(SimulatedLoad(requests=[sent, sent], concurrency=1))
    loads = [(each.cached_tokens, each.loaded_tokens, each.loaded_ns - each.load_ns) for each in records(played)]
    assert [(0, 200, 210 * MS), (192, 8, 18 * MS)] == loads


def test_a_synchronous_load_is_in_the_first_step():
    """One after the other, before the step computes: no queue has them, and no gauge or transfer of NIXL shows them."""
    decode = replace(DECODE, kv_latency_s=0.1, kv_async=False)
    server = VirtualServer(SimulatorSettings(engine_settings=decode))
    played = server.play(SimulatedLoad(requests=requests(2, remote_prefill=True), offsets_ns=[0, 0]), scrape_s=0.01)
    first, second = records(played)
    assert (0.0, 0.0) == (first.queue_s, second.queue_s)
    assert first.scheduled_ns == first.load_ns == first.loaded_ns - 100 * MS == second.load_ns - 100 * MS
    assert first.first_token_ns == second.first_token_ns > second.loaded_ns
    pages = [by_label(page.body) for page in played.pages]
    assert {0} == {page[name] for page in pages for name in ("waiting_to_start", "in_progress", "completed_waiting")}
    last = pages[-1]
    assert (0, 400) == (last["vllm:nixl_xfer_time_seconds_count"], last["external_kv_transfer"])
    assert (0, 400) == (last["p2p"], last["external_unspecified"])


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.booleans()), min_size=1, max_size=20),
    st.integers(1, 4),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_all_requests_end_however_little_room_there_is(sent: list[tuple[int, int, bool]], seats: int, kv_async: bool):
    """Loads hold their blocks before they run: none waits for ever, and no block is left in use."""
    limits = EngineSettings(
        kv_role="decode",
        kv_blocks=5,
        max_model_len=80,
        max_num_seqs=seats,
        max_num_batched_tokens=64,
        kv_latency_s=0.03,
        kv_async=kv_async,
    )
    server = VirtualServer(SimulatorSettings(engine_settings=limits))
    asked = [
        EngineRequest(
            request_id=f"cmpl-{number}", prompt_token_ids=tuple(range(length)), max_tokens=20, remote_prefill=is_loaded
        )
        for number, (length, _, is_loaded) in enumerate(sent)
    ]
    played = server.play(SimulatedLoad(requests=asked, offsets_ns=sorted(at_ms * MS for _, at_ms, _ in sent)))
    assert [20] * len(sent) == [each.output_tokens for each in records(played)]
    assert [is_loaded for *_, is_loaded in sent] == [each.load_ns >= 0 for each in records(played)]
    assert 0 == server.engine.pool.used


def test_an_abort_ends_a_load():
    """Its blocks are free again, and the engine has nothing left to do."""
    engine = SimulatedEngine(DECODE)
    number = engine.submit(requests(1, remote_prefill=True)[0], EPOCH_NS)
    assert engine.begin_step(EPOCH_NS) is not None
    outcome = engine.finish_step(EPOCH_NS + MS)
    assert (1, 0, 1) == (outcome.waiting, outcome.running, outcome.kv_fetch.in_progress)
    record = engine.abort(number, EPOCH_NS + 2 * MS)
    assert record is not None
    assert ("abort", EPOCH_NS, -1) == (record.finish_reason, record.load_ns, record.scheduled_ns)
    assert 0 == engine.pool.used
    assert engine.begin_step(EPOCH_NS + 3 * MS) is None


def test_each_engine_of_a_pair_names_its_process_and_machine(monkeypatch: pytest.MonkeyPatch):
    """So that their clocks are two, and one on one machine, unless the environment says another."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "host.name=node,k8s.pod.name=p")
    for role in ("prefill", "decode"):
        played = VirtualServer(SimulatorSettings()).play(SimulatedLoad(requests=requests(1)))
        sent = export(tuple(records(played)), SimulatorSettings(engine_settings=EngineSettings(kv_role=role)))
        named = {each.key: each.value.string_value for each in sent.resource_spans[0].resource.attributes}
        assert named["service.instance.id"] == f"{role}-{os.getpid()}"
        assert ("node", "p") == (named["host.name"], named["k8s.pod.name"])
