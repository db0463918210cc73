"""Guardrail Overhead against guardrails whose delays are set."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_study import assert_reported
from watched_study import Studied, study

from sidelight.methodology.procedures.guardrail import GUARDRAIL
from sidelight.methodology.study.model import Done, Parameters, StudySettings
from sidelight.simulator.settings import EngineSettings, GatewaySettings, SimulatorSettings

INPUT = GatewaySettings(input_s=0.05)
FULL = GatewaySettings(input_s=0.05, hold_tokens=8, hold_s=0.03, refuse_ratio=0.1)


def asked(*names: str, **parameters: Any) -> StudySettings:
    chosen = Parameters(**({"levels": (0.25, 0.5), "duration": 10.0} | parameters))
    options = {"input_tokens": 200, "output_tokens": 64}
    return StudySettings(test="guardrail", scale="short", parameters=chosen, seed=2, options=options, variants=names)


@pytest.fixture(scope="module")
def guarded() -> Studied:
    gateways = {"baseline": GatewaySettings(), "input": INPUT, "full": FULL}
    variants = {
        name: SimulatorSettings(engine_settings=EngineSettings(), gateway=gateway) for name, gateway in gateways.items()
    }
    return study(GUARDRAIL, asked(*gateways), variants=variants)


def test_the_overhead_is_the_delay_that_was_set(guarded: Studied) -> None:
    """Pairs of the same request differ by what the filter took, within 3 ms and 2 %; so does what is outside."""
    assert guarded.value("overhead_ttft_ms_input") == pytest.approx(50.0, abs=3 + 0.02 * 50)
    low, high = guarded.ends("overhead_ttft_ms_input")
    assert low < 50.01  # the median of many pairs is the delay to a rounding
    assert high > 47.0
    outside = guarded.value("outside_engine_p50_ms_input_50") - guarded.value("outside_engine_p50_ms_baseline_50")
    assert outside == pytest.approx(50.0, abs=1.0)
    assert guarded.value("overhead_e2e_ms_full") > 60.0


def test_all_configurations_are_sent_the_same(guarded: Studied) -> None:
    """A level of each has the same requests at the same moments, and each is saturated once, which warms it up."""
    assert guarded.kinds == ["saturate", "level", "level", *["saturated", "level", "level"] * 2]
    sent = {(each.step.variant, each.step.share): data.requests for each, data in guarded.of_kind("level")}
    for share in (0.25, 0.5):
        before, after = sent["baseline", share].submit_ns, sent["full", share].submit_ns
        assert (before - before[0]).tolist() == (after - after[0]).tolist()


def test_refusals_are_those_of_the_filter(guarded: Studied) -> None:
    """As many as the gateway truly refused, a share of all that was sent, and in no latency."""
    sent = [exchange for each, data in guarded.of_kind("level") if each.step.variant == "full"
            for exchange in data.about["truth"]]  # fmt: skip
    refused = sum(exchange.status == 400 for exchange in sent)
    assert 0 < guarded.value("refused_full") == refused
    assert guarded.value("refused_ratio_full") == pytest.approx(refused / len(sent))
    low, high = guarded.ends("refused_ratio_full")
    assert low < FULL.refuse_ratio < high
    assert guarded.value("refused_ratio_baseline") == 0
    assert any("Safety systems refused requests" in note and "full" in note for note in guarded.findings.notes)


def test_each_level_has_requests_enough_to_pair() -> None:
    """At a quarter of the load it lasts longer."""
    wanted = asked("baseline", "input", levels=(0.1, 0.5), duration=1.0, requests=24)
    variants = {name: SimulatorSettings() for name in wanted.variants}
    steps = [each.step for each, _ in study(GUARDRAIL, wanted, variants=variants).of_kind("level")]
    assert all(step.level * (step.duration or 0) >= 24 for step in steps)
    assert {step.share: step.duration for step in steps}[0.1] > 10


def test_a_baseline_is_needed() -> None:
    """Without a configuration that has no guardrails there is nothing to compare with."""
    decided = GUARDRAIL.next_step(asked("input", "full"), [])
    assert isinstance(decided, Done)
    assert "named baseline" in decided.reason


def test_the_minimum_report_is_of_the_configuration_that_the_answer_speaks_of(guarded: Studied) -> None:
    """Its highest level, and its throughput when it is saturated."""
    results = guarded.findings.results
    level = next(each for each, _ in guarded.of_kind("level") if (each.step.variant, each.step.share) == ("full", 0.5))
    assert_reported(guarded.findings, level, "full configuration, 50 % of the capacity of the baseline")
    served = results["max_output_tokens_per_s"]
    assert served.value == results["max_output_tokens_per_s_full"].value
    assert served.at == "full configuration, saturated closed loop"
