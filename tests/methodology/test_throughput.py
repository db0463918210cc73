"""The test of throughput on the simulated engine: what it says of the maximum, and of what makes that the limit."""

from __future__ import annotations

import pytest
from virtual_study import play

from methodology.procedures.throughput import THROUGHPUT
from methodology.study.model import Asked, Parameters
from simulator.settings import EngineSettings


def asked(**differs: object) -> Asked:
    parameters = {"duration": 20.0, "min": 0.01, "max": 10_000.0, "increment": 0.01, "slo": None, **differs}
    return Asked(test="throughput", scale="short", parameters=Parameters(**parameters), seed=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "parameters", "limit", "sentence"),
    [
        (EngineSettings(), {}, "seats", "The engine's places for running requests bind: requests waited in 100 %"),
        (EngineSettings(max_num_seqs=64, kv_blocks=512), {}, "kv_cache", "The KV cache binds: requests waited"),
        (
            EngineSettings(),
            {"concurrency": 8},
            "client",
            "The load generator's requests in flight bind, not the server",
        ),
    ],
    ids=["seats", "kv_cache", "client"],
)
def test_what_binds_is_said(settings: EngineSettings, parameters: dict[str, object], limit: str, sentence: str):
    """By what the engine's page showed of the saturated steps."""
    steps, findings = play(THROUGHPUT, asked(**parameters), settings, parts="none")
    saturated = [each for each in steps if each.step.kind == "saturate"]
    assert limit in {each.outcome.limit for each in saturated}
    assert findings.answer[2].startswith(sentence)
