"""Scheduling Fairness: its statistics, and engines whose order of service is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from virtual_study import assert_reported, run_step
from watched_study import study

from sidelight.methodology.measures.fairness import jain, scheduling, starved
from sidelight.methodology.measures.traffic import traffic
from sidelight.methodology.procedures.fairness import FAIRNESS
from sidelight.methodology.study.model import Parameters, Step, StudySettings
from sidelight.methodology.study.outcome import outcome
from sidelight.simulator.settings import EngineSettings, SimulatorSettings
from sidelight.simulator.virtual import VirtualServer


def asked(**given: Any) -> StudySettings:
    chosen = Parameters(load=0.8, duration=20.0, requests=20, mix=0.8)
    return StudySettings(test="fairness", scale="short", parameters=chosen, seed=4, **given)


def test_jains_index_is_one_of_equals_and_least_of_one_that_has_all() -> None:
    """(sum x)^2 / (n sum x^2)."""
    assert jain(np.full(7, 3.0)) == pytest.approx(1.0)
    assert jain(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert jain(np.array([1.0, 3.0])) == pytest.approx(16 / 20)
    assert np.isnan(jain(np.zeros(3)))


def test_starved_requests_wait_over_five_medians() -> None:
    """A median of 0 has no five times."""
    assert starved(np.array([1.0, 1.0, 1.0, 5.0, 5.1])).tolist() == [False] * 4 + [True]
    assert not starved(np.array([0.0, 0.0, 9.0])).any()


def test_classes_are_truncated_and_scaled_to_the_model() -> None:
    """The draft's ranges hold every length, and of a shorter model both classes shrink alike."""
    short, long = traffic(asked()).classes
    assert short["input"]["log-normal"] | {"mu": 0, "sigma": 0} == {
        "mu": 0, "sigma": 0, "min": 64, "max": 256, "truncated": True,
    }  # fmt: skip
    assert (long["output"]["log-normal"]["min"], long["output"]["log-normal"]["max"]) == (256, 1024)
    scaled = traffic(asked(max_model_len=2048))
    assert scaled.classes[1]["input"]["log-normal"]["max"] + scaled.classes[1]["output"]["log-normal"]["max"] <= 1984
    assert scaled.classes[0]["input"]["log-normal"]["max"] == pytest.approx(256 * scaled.scale, abs=0.5)


def test_each_class_alone_offers_the_tokens_of_the_mixed_load() -> None:
    """The same tokens per second, not the same requests."""
    classes = traffic(asked())
    rates = [classes.per_s(at, 2.0) for at in range(2)]
    tokens = [rate * mean for rate, mean in zip(rates, classes.tokens, strict=True)]
    mixed = 2.0 * sum(share * mean for share, mean in zip(classes.shares, classes.tokens, strict=True))
    assert tokens == pytest.approx([mixed, mixed])


@pytest.mark.parametrize(
    ("policy", "first"),
    [("fcfs", ""), ("shortest-first", ""), ("priority", "long")],
    ids=["fcfs", "shortest", "priority"],
)
def test_the_order_of_service_is_recognised(policy: str, first: str) -> None:
    """By who overtakes whom: none, the shorter, or the class that has priority."""
    mapping = traffic(asked()).mapping()
    for each in mapping["classes"]:
        each["body"] = {"priority": 0 if each["name"] == "long" else 1}
    engine = EngineSettings(policy=policy)
    server = VirtualServer(SimulatorSettings(engine_settings=engine), network_s=0.002)
    step = Step(
        kind="mixed", label="mixed", load="open", level=7.0, duration=20.0, seed=1, options={"workload": mapping}
    )
    data = run_step(step, server)
    assert outcome(step, data).ok == len(data.requests)
    prefill_s, ttft_s = data.parts.prefill_s, data.parts.ttft_s
    arrived_s = data.requests.submit_ns / 1e9
    judged = scheduling(
        arrived_s,
        arrived_s + ttft_s - prefill_s,
        data.requests.input_tokens.astype(np.float64),
        np.array([["short", "long"].index(name) for name in data.requests.workload_class.tolist()]),
        ["short", "long"],
    )
    assert (judged.policy, judged.first) == (policy, first), judged.reason


def test_few_that_wait_tell_nothing() -> None:
    """Without a queue there is no order."""
    at_s = np.arange(50.0)
    judged = scheduling(at_s, at_s + 0.01, at_s, np.zeros(50, np.int64), ["a", "b"])
    assert judged.policy == "unknown"
    assert "0 pairs" in judged.reason


def test_a_study_puts_each_class_alone_beside_the_mixed_load() -> None:
    """Medians, inflation and the index are those of the requests that were sent."""
    studied = study(FAIRNESS, asked())
    assert studied.kinds == ["saturate", "alone", "alone", "mixed"]
    assert [row[0] for row in studied.findings.tables[0].rows] == ["short", "long"]
    inflated = np.array([studied.value(f"ttft_inflation_p50_{name}") for name in ("short", "long")])
    ratios = [studied.value(f"ttft_p50_ms_{n}") / studied.value(f"ttft_p50_ms_alone_{n}") for n in ("short", "long")]
    assert inflated.tolist() == pytest.approx(ratios)
    assert studied.value("jain_index") == pytest.approx(jain(inflated))
    low, high = studied.ends("jain_index")
    assert 0.5 <= low < high <= 1.0
    assert_reported(studied.findings, studied.of_kind("mixed")[0][0], "all classes, mixed")


def few_waiting(**given: Any) -> StudySettings:
    parameters = Parameters(duration=20.0, requests=20, mix=0.8, **given)
    return StudySettings(test="fairness", scale="short", parameters=parameters, seed=4)


def test_where_too_few_waited_the_report_says_what_to_do() -> None:
    """A higher load and longer steps; near the capacity longer steps alone."""
    calm = study(FAIRNESS, few_waiting(load=0.1, capacity=8.0))
    assert calm.findings.answer[-2].startswith("By which rule the engine serves is not known: only ")
    assert calm.findings.answer[-1].startswith("To see the rule, run the test again with a load nearer to the capacity")
    assert "(--load, now 10 %) and longer steps (--duration, now " in calm.findings.answer[-1]
    busy = study(FAIRNESS, few_waiting(load=0.95, capacity=0.5))
    assert busy.findings.answer[-1].startswith("To see the rule, run the test again with longer steps (--duration")
