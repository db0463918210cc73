"""Predictions are what the engine shows under another load and other settings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from played_runs import engine, run
from played_twins import truth, twin_of

from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.stats import Missing
from sidelight.sidecar.predict.result import answer
from sidelight.simulator.settings import EngineSettings
from sidelight.twin.engine.steps import StreamedRequests
from sidelight.twin.limits import check_objectives, fewest_replicas, highest_rate, is_met
from sidelight.twin.scenario import Prediction, Scenario, Twin, predict


@pytest.fixture(scope="module")
def twin(light: StreamedRequests) -> Twin:
    return twin_of(light)


def predicted(twin: Twin, scenario: Scenario) -> Prediction:
    shown_fit = predict(twin, scenario)
    assert isinstance(shown_fit, Prediction)
    return shown_fit


@pytest.mark.parametrize(
    ("scenario", "settings"),
    [
        (Scenario(label="light", rate_per_s=1.5), engine()),
        (Scenario(label="busy", rate_per_s=4.5), engine()),
        (Scenario(label="overloaded", rate_per_s=9.0), engine()),
        (Scenario(label="few seats", rate_per_s=3.0, settings={"max-num-seqs": 6}), engine(max_num_seqs=6)),
        (Scenario(label="more seats", rate_per_s=6.0, settings={"max-num-seqs": 32}), engine(max_num_seqs=32)),
        (Scenario(label="two", rate_per_s=8.0, replicas=2), engine()),
    ],
    ids=lambda value: value.label if isinstance(value, Scenario) else "",
)
def test_the_interval_holds_what_other_runs_show(twin: Twin, scenario: Scenario, settings: EngineSettings) -> None:
    prediction = predicted(twin, scenario)
    shown = truth(twin, [settings] * scenario.replicas, scenario.rate_per_s or 0.0)
    assert (prediction.low < shown).all()
    assert (shown < prediction.high).all()
    assert np.abs(np.log(prediction.median / shown))[:, 0].max() < 0.3


def test_the_same_run_is_predicted_alike_each_time(twin: Twin) -> None:
    first, second = (predicted(twin, Scenario(label="", rate_per_s=4.0)) for _ in range(2))
    assert (first.median == second.median).all()
    assert (first.high == second.high).all()


def test_what_binds_is_named(twin: Twin) -> None:
    assert predicted(twin, Scenario(label="", rate_per_s=1.0)).binds == ""
    assert predicted(twin, Scenario(label="", rate_per_s=10.0)).binds == "max-num-seqs"
    scarce = Scenario(label="", rate_per_s=6.0, settings={"max-num-seqs": 64, "kv-blocks": 300})
    assert predicted(twin, scarce).binds == "kv-blocks"


def test_beyond_what_the_run_had_is_said(twin: Twin) -> None:
    assert predicted(twin, Scenario(label="", rate_per_s=1.0)).notes == ()
    many = predicted(twin, Scenario(label="", rate_per_s=12.0, settings={"max-num-seqs": 64}))
    assert many.most_running > 30
    assert "extrapolated" in many.notes[0]


def test_seats_that_did_not_show_are_refused_where_they_matter() -> None:
    unknown = twin_of(run(engine(max_num_seqs=64), count=180, rate_per_s=3.0), seats=None)
    assert unknown.fitted.seats is None
    assert isinstance(predict(unknown, Scenario(label="", rate_per_s=1.5)), Prediction)
    assert isinstance(predict(unknown, Scenario(label="", rate_per_s=9.0)), Missing)
    known = Scenario(label="", rate_per_s=9.0, settings={"max-num-seqs": 64})
    assert isinstance(predict(unknown, known), Prediction)


@pytest.mark.parametrize(
    "settings", [{"kv-blocks": 3}, {"max-num-batched-tokens": 8}, {"max-num-seqs": 4096, "max-num-batched-tokens": 512}]
)
def test_an_engine_that_cannot_be_is_refused(twin: Twin, settings: dict[str, int]) -> None:
    assert isinstance(predict(twin, Scenario(label="", rate_per_s=3.0, settings=settings)), Missing)


def test_too_few_requests_are_refused(twin: Twin) -> None:
    assert isinstance(predict(twin, Scenario(label="", rate_per_s=0.01)), Missing)
    assert isinstance(predict(twin, Scenario(label="", rate_per_s=3.0, replicas=100)), Missing)


def test_gaps_of_a_trace_are_drawn_from_it(light: StreamedRequests) -> None:
    traced = twin_of(light, arrival=None)
    shown, drawn = (predicted(each, Scenario(label="", rate_per_s=3.0)) for each in (twin_of(light), traced))
    assert np.abs(np.log(drawn.median / shown.median)).max() < 0.4
    assert drawn.requests_per_s == pytest.approx(shown.requests_per_s, rel=0.15)


def test_a_closed_loop_serves_what_its_engine_can(twin: Twin) -> None:
    few, many = (predicted(twin, Scenario(label="", concurrency=count)) for count in (4, 16))
    assert few.output_tokens_per_s < many.output_tokens_per_s
    assert few.median[0, 0] < many.median[0, 0]


def test_the_highest_rate_lies_where_the_objective_is_crossed(twin: Twin) -> None:
    objectives = parse_slo("ttft_p99<500ms").objectives
    highest = highest_rate(twin, objectives, Scenario(label=""))
    surely, likely, perhaps = highest.low, highest.estimate, highest.high
    assert surely is not None
    assert likely is not None
    assert perhaps is not None
    assert surely <= likely <= perhaps
    below, above = (truth(twin, [engine()], rate)[0, 2] for rate in (0.8 * surely, 1.3 * perhaps))
    assert below < 500 < above
    replicas = fewest_replicas(twin, objectives, Scenario(label="", rate_per_s=3 * surely), surely)
    assert replicas in {3, 4}
    closed = Scenario(label="", rate_per_s=3 * surely, concurrency=1)
    assert replicas == fewest_replicas(twin, objectives, closed, 3 * surely)


def test_a_rate_without_a_prediction_is_not_surely_missed(twin: Twin) -> None:
    unknown = replace(twin, fitted=replace(twin.fitted, seats=None, most_sequences=4))
    highest = highest_rate(unknown, parse_slo("ttft_p99<90s").objectives, Scenario(label=""))
    assert highest.low is not None
    assert highest.high is None


@pytest.mark.parametrize(("rate", "tokens"), [(1e5, 10), (3.0, 10_000_000)])
def test_a_load_that_would_take_hours_to_play_is_refused(twin: Twin, rate: float, tokens: int) -> None:
    traffic = replace(twin.requests, prompt_tokens=np.full(len(twin.traffic), tokens))
    assert isinstance(predict(replace(twin, traffic=traffic), Scenario(label="", rate_per_s=rate)), Missing)


def test_objectives_are_met_missed_or_open(twin: Twin) -> None:
    prediction = predicted(twin, Scenario(label="", rate_per_s=4.0))
    low, high = prediction.low[0, 2], prediction.high[0, 2]
    for bound_ms, met in ((1.01 * high, True), (0.5 * (low + high), None), (0.99 * low, False)):
        assert is_met(prediction, parse_slo(f"ttft_p99<{bound_ms:.4f}ms").objectives) is met


def test_an_objective_that_no_prediction_has_is_refused() -> None:
    for text in ("error_rate<1%", "ttft_p95<1s", "itl_p99<50ms"):
        with pytest.raises(ConfigurationError) as refused:
            check_objectives(parse_slo(text).objectives)
        assert refused.value.code == "predict.slo"


def test_an_answer_has_the_cost_of_all_replicas(twin: Twin) -> None:
    loads = [Scenario(label="1", rate_per_s=3.0), Scenario(label="2", rate_per_s=3.0, replicas=2)]
    single, pair = answer(twin, loads, run_id="r", slo=None, price=2.0).loads
    assert (single.price_per_h, pair.price_per_h) == (2.0, 4.0)
    assert isinstance(single.output_tokens_per_s, float)
    assert single.million_output_tokens == pytest.approx(1e6 * 2.0 / 3600 / single.output_tokens_per_s)
    refused = answer(replace(twin, duration_s=0.1), loads[:1], run_id="r", slo=None, price=None).loads[0]
    assert refused.refused


def test_steps_by_class_are_not_extrapolated(twin: Twin) -> None:
    """The run says nothing of larger classes."""
    by_class = replace(twin, fitted=replace(twin.fitted, by_size=np.ones(twin.fitted.most_sequences + 1)))
    assert isinstance(predict(by_class, Scenario(label="", rate_per_s=1.0), plays=2), Prediction)
    many = Scenario(label="", rate_per_s=12.0, settings={"max-num-seqs": 64})
    assert isinstance(predict(by_class, many, plays=2), Missing)
