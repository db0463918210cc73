"""Predictions of other traffic than the run's are what the engine shows under it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from played_runs import NETWORK_S, arrivals, engine, lengths, simulated, streamed
from played_twins import truth, twin_of

from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.columns import Floats, Ints
from sidelight.rundir.stats import Missing
from sidelight.twin.check import latencies_ms, quantiles_of
from sidelight.twin.engine.play import EngineLoad, play
from sidelight.twin.engine.steps import StreamedRequests
from sidelight.twin.scenario import Prediction, Scenario, Twin, predict
from sidelight.twin.traffic import OtherTraffic

SHARED = "input: 100\noutput: 20\nprefixes: {count: 2, tokens: 500}\n"
SESSIONS = "input: 100\noutput: 20\nturns: 3\n"


@pytest.fixture(scope="module")
def twin(light: StreamedRequests) -> Twin:
    return twin_of(light)


def cached(twin: Twin) -> Twin:
    """Return the twin of a run in which some prompts were in the cache."""
    requests = replace(twin.requests, cached_tokens=twin.requests.prompt_tokens // 2)
    return replace(twin, requests=requests, traffic=requests)


def trace(directory: Path, at_s: Floats, prompts: Ints, outputs: Ints, hash_ids: list[list[int]] | None = None) -> Path:
    """Write a trace in Mooncake's format, and return its path."""
    columns = {"timestamp": (1e3 * at_s).tolist(), "input_length": prompts.tolist(), "output_length": outputs.tolist()}
    columns |= {"hash_ids": hash_ids} if hash_ids else {}
    rows = zip(*columns.values(), strict=True)
    path = directory / "trace.jsonl"
    path.write_text("".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows))
    return path


def test_other_lengths_are_predicted(twin: Twin) -> None:
    other = OtherTraffic(input_tokens="uniform:500-900", output_tokens="40").of(twin)
    assert {40} == set(other.traffic.output_tokens.tolist())
    assert other.traffic.prompt_tokens.min() >= 500
    assert other.rate_per_s == pytest.approx(twin.rate_per_s)
    prediction = predict(other, Scenario(label="", rate_per_s=3.0))
    assert isinstance(prediction, Prediction)
    shown = truth(replace(other, requests=other.traffic), [engine()], 3.0)
    assert (prediction.low < shown).all()
    assert (shown < prediction.high).all()


@pytest.mark.parametrize("budget", [1024, 8192])
def test_a_budget_that_did_not_show_is_refused_where_it_matters(budget: int) -> None:
    """Prompts of up to 300 tokens meet no budget, and those of 3,000 do."""
    prompts, outputs = lengths(180, 0, prompt=100)
    settings = engine(max_num_batched_tokens=budget)
    requests = streamed(
        simulated(settings, np.minimum(prompts, 300), outputs, at_s=arrivals(180, 3.0, 0)),
    )
    twin, long = twin_of(requests), OtherTraffic(input_tokens="3000")
    low, high = twin.fitted.budgets
    assert low <= budget <= high
    assert low < high
    scenario = Scenario(label="", rate_per_s=1.5)
    assert isinstance(predict(twin, scenario), Prediction)
    refused = predict(long.of(twin), scenario)
    assert isinstance(refused, Missing)
    assert "max-num-batched-tokens" in refused.reason
    for known in (predict(long.of(twin_of(requests, budget=budget)), scenario),
                  predict(long.of(twin), replace(scenario, settings={"max-num-batched-tokens": budget}))):  # fmt: skip
        assert isinstance(known, Prediction)
        shown = truth(replace(twin, requests=long.of(twin).traffic), [settings], 1.5)
        assert (known.low < shown).all()
        assert (shown < known.high).all()


def test_requests_are_clipped_to_the_models_length_as_by_run(twin: Twin) -> None:
    other = OtherTraffic(input_tokens="5000", output_tokens="40").of(replace(cached(twin), longest=4096))
    assert {3992} == set(other.traffic.prompt_tokens.tolist())
    assert {40} == set(other.traffic.output_tokens.tolist())
    assert other.notes != OtherTraffic(output_tokens="40").of(replace(twin, longest=4096)).notes


def test_one_length_alone_leaves_the_other(twin: Twin) -> None:
    other = OtherTraffic(input_tokens="70").of(cached(twin)).traffic
    assert set(other.output_tokens.tolist()) == set(twin.requests.output_tokens.tolist())
    assert other.cached_tokens == pytest.approx(35, abs=1)


def test_a_prefix_is_cached_where_the_run_had_cached_ones(twin: Twin, tmp_path: Path) -> None:
    file = tmp_path / "shared.yaml"
    file.write_text(SHARED)
    without, unseen = (replace(twin, has_prefix_cache=has) for has in (False, True))
    for before, expected in ((without, {0}), (unseen, {0, 496}), (cached(twin), {0, 496})):
        other = OtherTraffic(workload=str(file)).of(before)
        assert {600} == set(other.traffic.prompt_tokens.tolist())
        assert {20} == set(other.traffic.output_tokens.tolist())
        assert expected == set(other.traffic.cached_tokens.tolist())
        assert (other.traffic.cached_tokens == 0).sum() == (2 if 496 in expected else len(other.traffic))


def test_a_trace_is_predicted_as_it_came(twin: Twin, tmp_path: Path) -> None:
    """Bursts of 20 at once, every ten seconds."""
    prompts, outputs = lengths(200, 9)
    at_s = 10.0 * (np.arange(200) // 20) + 0.01 * (np.arange(200) % 20)
    other = OtherTraffic(trace=trace(tmp_path, at_s, prompts, outputs)).of(twin)
    prediction = predict(other, Scenario(label="", rate_per_s=other.rate_per_s))
    assert isinstance(prediction, Prediction)
    load = EngineLoad(
        prompt_tokens=prompts, cached_tokens=np.zeros_like(prompts), output_tokens=outputs, arrival_s=at_s + NETWORK_S
    )
    shown = quantiles_of(latencies_ms(load, play(load, engine(), seed=3), np.full(200, NETWORK_S)))
    assert (prediction.low < shown).all()
    assert (shown < prediction.high).all()
    even = predict(replace(other, arrival=twin.arrival), Scenario(label="", rate_per_s=other.rate_per_s))
    assert isinstance(even, Prediction)
    assert even.median[0, 0] < 0.7 * prediction.median[0, 0]


def test_a_trace_at_twice_its_rate_takes_half_its_time(twin: Twin, tmp_path: Path) -> None:
    prompts, outputs = lengths(100, 2, output=20)
    other = OtherTraffic(trace=trace(tmp_path, arrivals(100, 2.0, 1), prompts, outputs)).of(twin)
    for times in (1, 2):
        prediction = predict(other, Scenario(label="", rate_per_s=times * other.rate_per_s))
        assert isinstance(prediction, Prediction)
        assert prediction.requests_per_s == pytest.approx(times * other.rate_per_s, rel=0.05)


def test_a_trace_has_no_more_requests_at_a_higher_rate(twin: Twin, tmp_path: Path) -> None:
    file = trace(tmp_path, np.arange(30.0), np.full(30, 100), np.full(30, 10))
    other = OtherTraffic(trace=file).of(twin)
    scenario = Scenario(label="", rate_per_s=2 * other.rate_per_s)
    assert isinstance(predict(other, scenario), Prediction)
    assert isinstance(predict(other, replace(scenario, replicas=2)), Missing)


def test_equal_blocks_of_a_trace_are_cached(twin: Twin, tmp_path: Path) -> None:
    hash_ids = [[1, 2, 100 + at] for at in range(30)]
    file = trace(tmp_path, np.arange(30.0), np.full(30, 1500), np.full(30, 10), hash_ids)
    assert [0, *[1024] * 29] == OtherTraffic(trace=file).of(cached(twin)).traffic.cached_tokens.tolist()
    with pytest.raises(ConfigurationError, match="share 66 %"):
        OtherTraffic(trace=file).of(twin)


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("sessions.yaml", SESSIONS, "predict.traffic"),
        ("wrong.yaml", "input: many\noutput: 20\n", "workload.distribution"),
        ("none.yaml", None, "file.unreadable"),
        ("few.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 5}\n', "predict.traffic"),
        ("wrong.jsonl", '{"timestamp": "x", "input_length": 5, "output_length": 5}\n', "trace.line"),
        ("none.jsonl", None, "file.unreadable"),
    ],
)
def test_a_file_that_cannot_be_predicted_is_refused(
    twin: Twin, tmp_path: Path, file: str, text: str | None, code: str
) -> None:
    path = tmp_path / file
    if text is not None:
        path.write_text(text)
    other = OtherTraffic(trace=path) if file.endswith("jsonl") else OtherTraffic(workload=str(path))
    with pytest.raises(ConfigurationError) as refused:
        other.of(twin)
    assert code == refused.value.code


@pytest.mark.parametrize(
    ("other", "code"),
    [
        (OtherTraffic(input_tokens="many"), "workload.not-a-number"),
        (OtherTraffic(output_tokens="0"), "workload.out-of-range"),
        (OtherTraffic(workload="nothing"), "workload.unknown"),
        (OtherTraffic(workload="siclait", input_tokens="5"), "option.contradictory"),
        (OtherTraffic(workload="siclait", trace=Path("t")), "option.contradictory"),
    ],
)
def test_options_that_cannot_be_are_refused(twin: Twin, other: OtherTraffic, code: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        other.of(twin)
    assert code == refused.value.code


def test_without_options_the_traffic_is_the_runs(twin: Twin) -> None:
    assert OtherTraffic().of(twin) is twin
    assert OtherTraffic().text == ""
