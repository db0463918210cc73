"""LoRA adapters of the simulated engine: who may run beside whom, what waits, and what the server says of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from simulated_load import ask, client_of, samples_of

from sidelight.simulator.settings import PROFILES, EngineSettings, SettingsError, SimulatorSettings
from sidelight.simulator.telemetry.truth import TruthLog, line
from sidelight.simulator.virtual import Played, SimulatedLoad, VirtualServer

DEFERRED = ("vllm:num_requests_waiting_by_reason", frozenset({("reason", "deferred")}))


def played(max_loras: int, *, lora_load_s: float = 0.0, places: int = 4) -> Played:
    """Requests of the base model and of three adapters in turn, all at once."""
    settings = EngineSettings(
        speed=replace(PROFILES["fast"], jitter_ratio=0.0),
        max_loras=max_loras,
        lora_load_s=lora_load_s,
        max_num_seqs=places,
    )
    sent = [replace(ask(f"{at}", 20, 10, token=300 + at), adapter=("", "a", "b", "c")[at % 4]) for at in range(24)]
    return VirtualServer(SimulatorSettings(engine_settings=settings)).play(
        SimulatedLoad(requests=sent, offsets_ns=[0] * len(sent)), scrape_s=0.001, keep_steps=True
    )


@pytest.mark.parametrize("max_loras", [1, 2, 3])
def test_no_more_adapters_run_at_once_than_have_a_place(max_loras: int):
    """And all end; the base model needs no place."""
    result = played(max_loras)
    records = [each.record for each in result.exchanges if each.record is not None]
    assert [10] * 24 == [record.output_tokens for record in records]
    stamps = sorted({stamp for record in records for stamp in (record.scheduled_ns, record.finished_ns)})
    beside = [
        {record.adapter for record in records if record.scheduled_ns <= stamp < record.finished_ns} - {""}
        for stamp in stamps
    ]
    assert max(map(len, beside)) == max_loras


def test_those_put_off_are_passed_and_counted():
    """Requests of the adapter that runs, and of the base model, pass them; the page counts them as deferred."""
    result = played(1)
    records = [each.record for each in result.exchanges if each.record is not None]
    order = sorted(records, key=lambda record: record.scheduled_ns)
    assert [f"cmpl-{at}" for at in (0, 1, 4, 5)] == [record.request_id for record in order[:4]]
    put_off = max(step.put_off for step in result.steps)
    assert put_off == max(samples_of(page.body)[DEFERRED] for page in result.pages) > 0
    assert 0 == max(step.put_off for step in played(3).steps)


def test_an_adapter_that_is_not_held_is_loaded_within_the_step():
    """Three of them once each, where all have a place."""
    plain, loaded = played(3, places=24), played(3, lora_load_s=0.5, places=24)
    longest = [max(step.at_ns - step.begin_ns for step in result.steps) for result in (plain, loaded)]
    assert longest[1] - longest[0] == pytest.approx(1.5e9, abs=1e6)


async def test_an_adapter_is_asked_for_as_a_model():
    """It is listed with its parent, named in the reply and in the truth; other models are unknown."""
    truth = TruthLog(None)
    async with client_of(SimulatorSettings(lora_modules=("a", "b")), truth=truth) as client:
        async with client.get("/v1/models") as response:
            models = (await response.json())["data"]
        assert [("sim-llama", None), ("a", "sim-llama"), ("b", "sim-llama")] == [
            (model["id"], model["parent"]) for model in models
        ]
        body = {"prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        async with client.post("/v1/completions", json=body | {"model": "b"}) as response:
            assert "b" == (await response.json())["model"]
        async with client.post("/v1/completions", json=body | {"model": "c"}) as response:
            assert 404 == response.status
    assert "b" == json.loads(line(truth.records[-1]))["adapter"]


def test_what_cannot_be():
    with pytest.raises(SettingsError, match=r"^--max-loras 0"):
        EngineSettings(max_loras=0)
    with pytest.raises(SettingsError, match=r"^--lora-modules: not with --engine trtllm"):
        SimulatorSettings(engine="trtllm", lora_modules=("a",))
