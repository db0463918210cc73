"""The test of capacity on the simulated engine: the most requests in flight that pass, and what makes more fail."""

from __future__ import annotations

import pytest
from virtual_study import assert_reported, play

from sidelight.methodology.procedures.capacity import CAPACITY
from sidelight.methodology.study.findings import StudyFindings
from sidelight.methodology.study.model import Finished, Parameters, StudySettings
from sidelight.simulator.settings import EngineSettings


def played(settings: EngineSettings, **differs: object) -> tuple[list[Finished], StudyFindings]:
    parameters = {
        "min": 4.0, "max": 64.0, "increment": 1.0, "duration": 5.0, "per_slot": 6, "output_tokens": 128,
        "completion": 0.99, "slo": "ttft_p99<500ms", **differs,
    }  # fmt: skip
    asked = StudySettings(
        test="capacity",
        scale="short",
        parameters=Parameters(**parameters),  # type: ignore[arg-type]
        seed=1,
        options={"input_tokens": "64"},
    )
    return play(CAPACITY, asked, settings, parts="none")


@pytest.mark.parametrize(
    ("settings", "differs", "most", "sentence"),
    [
        (
            EngineSettings(),
            {},
            (16, 16),
            "how many requests the engine runs at once: of 32 requests in flight 16 ran at once",
        ),
        (EngineSettings(max_num_seqs=64, kv_blocks=128, max_model_len=2048), {}, (8, 20), "the KV cache: with"),
        (EngineSettings(max_num_seqs=64), {"slo": "tpot_p99<12.5ms"}, (4, 40), "The objective binds"),
        (EngineSettings(), {"max": 6.0}, (6, 6), "not the server: 6 requests in flight never filled the engine"),
        (EngineSettings(oom_at=13), {}, (12, 12), "Memory binds: the engine ran out of it with 13 in flight"),
    ],
    ids=["seats", "kv_cache", "slo", "client", "memory"],
)
def test_the_most_in_flight_and_what_ends_it(
    settings: EngineSettings, differs: dict[str, object], most: tuple[int, int], sentence: str
):
    """By doubling and bisection."""
    _, findings = played(settings, **differs)
    assert most[0] <= (findings.results["max_concurrency"].value or 0) <= most[1]
    assert sentence in findings.answer[-1]


@pytest.mark.parametrize(("least", "which"), [(4.0, "the most that pass"), (20.0, "the lowest level")])
def test_the_minimum_report_has_the_times_and_the_throughput_of_a_level(least: float, which: str):
    """Of the highest that passes, or where none does of the lowest; the throughput is that of the level that served
    most.
    """
    finished, findings = played(EngineSettings(), min=least, max=24.0)
    ttft, most = findings.results["ttft_p50_ms"], findings.results["max_output_tokens_per_s"]
    level = next(each for each in finished if ttft.at.endswith(f"step {each.number}"))
    assert_reported(findings, level, which)
    assert most.value == max(each.outcome.output_tokens_per_s or 0.0 for each in finished)
