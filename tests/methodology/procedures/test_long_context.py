"""The test of long contexts: its lengths, and how the TTFT grows with them by the engine's own model of a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from virtual_study import assert_reported, play

from sidelight.methodology.procedures.long_context import LONG_CONTEXT
from sidelight.methodology.study.findings import StudyFindings
from sidelight.methodology.study.model import Done, Finished, Parameters, StudySettings
from sidelight.methodology.study.planning import decide
from sidelight.simulator.settings import EngineSettings, SpeedProfile

NETWORK_S = 0.002
# A prompt of n tokens in one chunk takes 20 ms + 60 us n; decoding is fast.
SPEED = SpeedProfile(step_s=0.02, prefill_token_s=60e-6, sequence_s=0.0, kv_token_s=0.0, jitter_ratio=0.03)
ENGINE = EngineSettings(speed=SPEED, max_num_batched_tokens=8192, max_model_len=8192)


def asked(**parameters: Any) -> StudySettings:
    known = {"lengths": (512, 1024, 2048, 4096), "requests": 10, "output_tokens": 16, "concurrency": 1}
    return StudySettings(
        test="long-context", scale="short", seed=4, parameters=Parameters(**{**known, **parameters}), max_model_len=8192
    )


@pytest.fixture(scope="module")
def study() -> tuple[list[Finished], StudyFindings]:
    return play(LONG_CONTEXT, asked(), ENGINE, network_s=NETWORK_S)


def truth_ms(tokens: float) -> float:
    return 1e3 * (SPEED.step_s + SPEED.prefill_token_s * tokens + NETWORK_S)


def test_lengths_ascend_one_request_at_a_time(study: tuple[list[Finished], StudyFindings]):
    """With the workload's structure and the stated output."""
    steps = [each.step for each in study[0][1:]]
    assert [each.options["input_tokens"] for each in steps] == ["512", "1024", "2048", "4096"]
    assert {(each.load, each.level, each.requests, each.options["workload"]) for each in steps} == {
        ("closed", 1, 10, "long-context")
    }


def test_the_minimum_report_is_of_the_longest_input(study: tuple[list[Finished], StudyFindings]):
    """And says so; of ten requests it is that of this sample."""
    assert_reported(study[1], study[0][-1], "4,096 input tokens")


def test_short_contexts_warm_the_system_up(study: tuple[list[Finished], StudyFindings]):
    """As the draft has it: its 100 requests are 10,000 output tokens, four at once, and no result is of them."""
    step = study[0][0].step
    assert (step.kind, step.level, step.warm_up) == ("warm-up", 4, "draft")
    assert (step.options["input_tokens"], step.options["output_tokens"]) == ("256", "100")
    assert not any("256" in name for name in study[1].results)


def test_times_are_those_of_the_engine(study: tuple[list[Finished], StudyFindings]):
    """Mean TTFT and time per token at each length; the prefill alone is without network."""
    for length in (512, 4096):
        results = {name: study[1].results[f"{name}_{length}"].value for name in
                   ("ttft_mean_ms", "ttft_ms_per_1k_tokens", "prefill_mean_ms", "output_tokens_per_s")}  # fmt: skip
        assert results["ttft_mean_ms"] == pytest.approx(truth_ms(length), rel=0.03)
        assert results["ttft_ms_per_1k_tokens"] == pytest.approx(1e3 * truth_ms(length) / length, rel=0.03)
        assert results["prefill_mean_ms"] == pytest.approx(truth_ms(length) - 1e3 * NETWORK_S, rel=0.03)
        assert results["output_tokens_per_s"] > 0


def test_the_exponent_and_the_model_are_those_of_the_engine(study: tuple[list[Finished], StudyFindings]):
    """k within 0.03 of that of its closed form at these lengths, which is affine; the prefill's is larger."""
    lengths = [512, 1024, 2048, 4096]
    k = study[1].results["scaling_exponent"]
    truth = np.polyfit(np.log(lengths), np.log([truth_ms(each) for each in lengths]), 1)[0]
    low, high = k.ci95 or (None, None)
    assert k.value == pytest.approx(truth, abs=0.03)
    assert low is not None
    assert high is not None
    assert low <= truth <= high
    assert study[1].results["prefill_scaling_exponent"].value > k.value
    models = next(table for table in study[1].tables if table.name == "scaling-models")
    assert models.rows[0][0] == "affine"
    assert "Best fit: Affine (R^2 = 0.99" in study[1].answer[2]


def test_the_table_is_that_of_the_draft(study: tuple[list[Finished], StudyFindings]):
    """A row a length; throughput is named by the concurrency that it is of."""
    table = study[1].tables[0]
    assert [column.title for column in table.columns[:6]] == [
        "Context (tokens)", "Requests", "TTFT Mean (ms)", "TTFT P50 (ms)", "TTFT P95 (ms)", "ms/1K tokens",
    ]  # fmt: skip
    assert [row[0] for row in table.rows] == [512, 1024, 2048, 4096]
    assert any("at concurrency 1" in column.title for column in table.columns)


def test_lengths_beyond_the_model_are_skipped_by_name():
    """With the output that has to fit too; where none fits, the test cannot be done."""
    findings = play(LONG_CONTEXT, asked(lengths=(512, 8192), requests=3), ENGINE)[1]
    assert any(note.startswith("Skipped: 8192 tokens") for note in findings.notes)
    assert findings.results["scaling_exponent"].value is None
    ended = decide(LONG_CONTEXT, asked(lengths=(8192,)), [])
    assert isinstance(ended, Done)
    assert not ended.complete
    assert "8192" in ended.reason


def test_without_a_page_the_prefill_is_not_known():
    """Everything else is."""
    findings = play(LONG_CONTEXT, asked(requests=3), ENGINE, scrape_s=None, parts="none")[1]
    assert findings.results["prefill_scaling_exponent"].value is None
    assert findings.results["prefill_scaling_exponent"].missing
    assert findings.results["scaling_exponent"].value is not None
