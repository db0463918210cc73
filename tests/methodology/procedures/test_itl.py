"""The test of the gaps between tokens: its levels, its tables, and which gaps are of steps with a prefill in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from virtual_study import assert_reported, play, run_step

from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.methodology.measures.gaps import with_prefill
from sidelight.methodology.procedures.itl import ITL
from sidelight.methodology.study.findings import StudyFindings
from sidelight.methodology.study.model import Done, Finished, Parameters, Step, StudySettings
from sidelight.methodology.study.outcome import outcome
from sidelight.methodology.study.planning import decide
from sidelight.simulator.settings import EngineSettings, SimulatorSettings
from sidelight.simulator.virtual import VirtualServer


def asked(**parameters: Any) -> StudySettings:
    known = {"levels": (0.3, 0.8), "requests": 40, "duration": 20.0, "capacity": 5.9}
    return StudySettings(test="itl", scale="short", seed=4, parameters=Parameters(**{**known, **parameters}))


@pytest.fixture(scope="module")
def study() -> tuple[list[Finished], StudyFindings]:
    return play(ITL, asked(), EngineSettings())


def test_levels_are_shares_of_the_capacity_in_an_order_of_chance(study: tuple[list[Finished], StudyFindings]):
    """Each long enough for the requests; the same order for the same seed, another for others."""
    steps = [each.step for each in study[0]]
    assert {each.share: each.level for each in steps} == {0.3: pytest.approx(1.77), 0.8: pytest.approx(4.72)}
    assert all((each.duration or 0) * 0.9 * each.level >= 40 for each in steps)
    orders = set()
    for seed in range(8):
        first = decide(ITL, StudySettings(test="itl", scale="short", seed=seed, parameters=asked().parameters), [])
        assert isinstance(first, Step)
        orders.add(first.share)
    assert orders == {0.3, 0.8}


def test_the_tables_are_those_of_the_draft(study: tuple[list[Finished], StudyFindings]):
    """A column a level; jitter and longest pause by request; the shape with what it rests on."""
    tables = {table.name: table for table in study[1].tables}
    assert [row[0] for row in tables["itl-results"].rows] == [
        "ITL Samples",
        *(f"ITL {name} (ms)" for name in ("P50", "P90", "P95", "P99", "P99.9", "Mean", "Std Dev")),
        "P99/P50 Ratio",
    ]
    assert [column.title for column in tables["itl-results"].columns] == ["Metric", "30 %", "80 %"]
    by_request = {row[0]: row[1:] for row in tables["itl-per-request"].rows}
    assert all(count >= 40 for count in by_request["Requests"])
    assert by_request["Maximum Pause P50 (ms)"][1] > by_request["Jitter P50 (ms)"][1] > 0
    assert [row[1] for row in tables["itl-shape"].rows][1] == "multimodal"
    assert {each.name for each in study[1].plots} == {"itl-cdf"}


def test_the_second_mode_is_of_steps_with_a_prefill(study: tuple[list[Finished], StudyFindings]):
    """Decode steps take about 10 ms, those that also compute a prompt of 128 to 512 tokens about 60."""
    results = study[1].results
    assert results["itl_modes_80"].value == 2
    assert results["itl_of_decode_steps_p99_ms_80"].value < 20 < results["itl_of_prefill_steps_p50_ms_80"].value
    assert "a prefill ran in 100 % of its steps" in study[1].answer[1]


def test_long_gaps_are_known_though_the_load_changes():
    """P99 of a minute has both ends, by its own autocorrelation; that of the median follows the load for longer."""
    results = play(ITL, asked(levels=(0.75,), duration=60.0), EngineSettings())[1].results
    p50, p99 = results["itl_p50_ms_75"], results["itl_p99_ms_75"]
    assert p50.tau is not None
    assert p99.tau is not None
    assert p99.tau < 0.1 * p50.tau
    low, high = p99.ci95 or (None, None)
    assert low is not None
    assert high is not None
    assert 60 < low < high < 130


def test_gaps_with_a_prefill_are_those_that_the_engine_had():
    """By what each of its steps did: at least 99 % of the gaps are put down to the right kind."""
    step = Step(kind="level", label="x", load="open", level=4.5, duration=30.0, seed=2)
    data = run_step(step, VirtualServer(SimulatorSettings(), network_s=0.003), keep_steps=True)
    log, metrics = data.requests, request_metrics(data.requests)
    begin_ns = metrics.itl_end_ns - np.rint(1e6 * metrics.itl_ms).astype(np.int64)
    seen = with_prefill(begin_ns, metrics.itl_end_ns, log.first_token_ns)
    ended_ns = np.array([each.at_ns for each in data.about["steps"]])
    prefilled = np.array([bool(each.first_tokens) for each in data.about["steps"]])
    # Half a round trip after the step; nearest is near enough.
    nearest = np.abs(ended_ns[None, :] - (metrics.itl_end_ns[:, None] - 1_500_000)).argmin(axis=1)
    assert np.mean(seen == prefilled[nearest]) >= 0.99
    assert 0.02 < seen.mean() < 0.3


def in_pairs(log: RequestLog) -> RequestLog:
    """The same requests with two tokens in each chunk."""
    place = np.arange(len(log.chunk_ns)) - np.repeat(log.chunk_start[:-1], np.diff(log.chunk_start))
    even = place % 2 == 0
    starts = np.concatenate([[0], np.cumsum((np.diff(log.chunk_start) + 1) // 2)])
    return replace(log, chunk_ns=log.chunk_ns[even], chunk_chars=log.chunk_chars[even], chunk_start=starts)


def test_chunks_of_several_tokens_have_time_between_chunks():
    """Which is not called an inter-token latency, and the method is stated."""
    step = Step(kind="level", label="x", load="open", level=3, share=0.5, duration=20.0, seed=2)
    data = run_step(step, VirtualServer(SimulatorSettings(), network_s=0.003))
    data = replace(data, requests=in_pairs(data.requests))
    finished = [Finished(number=1, run="steps/1", step=step, outcome=outcome(step, data))]
    findings = ITL.findings(asked(levels=(0.5,)), finished, lambda _: data)
    assert findings.results["time_between_chunks_p50_ms_50"].value == pytest.approx(19, rel=0.3)
    assert not [name for name in findings.results if name.startswith("itl_")]
    assert "Time Between Chunks Results" in [table.title for table in findings.tables]
    assert any(note.startswith("Measurement method: the time between chunks") for note in findings.notes)


def test_short_replies_are_counted_and_left_out():
    """Of replies of 30 tokens nothing is left, and the report says how many requests that were."""
    given = asked(levels=(0.5,), requests=20, duration=5.0)
    options = {"workload": {"classes": [{"name": name, "input": 100, "output": output} for name, output in
                                        (("long", 60), ("short", 30))]}}  # fmt: skip
    mixed = StudySettings(test="itl", scale="short", seed=4, parameters=given.parameters, options=options)
    finished, findings = play(ITL, mixed, EngineSettings())
    counted = findings.results["requests_50"].value
    assert 0 < counted < finished[0].outcome.ok
    assert any("fewer than 50 output tokens" in note and note.startswith("50 %") for note in findings.notes)
    assert any("gaps, of 20 and 1,000" in note for note in findings.notes)


def test_a_study_ends_with_its_levels(study: tuple[list[Finished], StudyFindings]):
    """Each is run once."""
    assert isinstance(decide(ITL, asked(), study[0]), Done)


def test_the_minimum_report_has_the_times_of_the_level_that_the_answer_speaks_of(
    study: tuple[list[Finished], StudyFindings],
):
    """TTFT and TPOT with their intervals, of the highest level; it says which."""
    last = max(study[0], key=lambda each: each.step.level)
    assert_reported(study[1], last, "80 % of the capacity")
    for metric in ("ttft", "tpot"):
        few = study[1].results[f"{metric}_p99_ms"]
        assert (few.value, few.sample) == (None, last.outcome.percentiles[f"{metric}_ms"]["p99"].estimate)
        assert "too few for P99" in few.missing
