"""Guardrail Overhead against guardrails whose delays are set."""

from __future__ import annotations

from typing import Any

import pytest
from watched_study import Studied, study

from methodology.procedures.guardrail import GUARDRAIL
from methodology.study.model import Asked, Done, Parameters
from simulator.settings import EngineSettings, GatewaySettings, SimulatorSettings

INPUT = GatewaySettings(input_s=0.05)
FULL = GatewaySettings(input_s=0.05, hold_tokens=8, hold_s=0.03, refuse_ratio=0.1)


def asked(*names: str, **parameters: Any) -> Asked:
    chosen = Parameters(**({"levels": (0.25, 0.5), "duration": 10.0} | parameters))
    options = {"input_tokens": 200, "output_tokens": 64}
    return Asked(test="guardrail", scale="short", parameters=chosen, seed=2, options=options, variants=names)


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
    assert low < 50.0 < high + 3
    outside = guarded.value("outside_engine_p50_ms_input_50") - guarded.value("outside_engine_p50_ms_baseline_50")
    assert outside == pytest.approx(50.0, abs=1.0)
    assert guarded.value("overhead_e2e_ms_full") > 60.0


def test_all_configurations_are_sent_the_same(guarded: Studied) -> None:
    """A level of each has the same requests at the same moments, and each is saturated once."""
    assert guarded.kinds == ["saturate", "level", "level", *["level", "level", "saturated"] * 2]
    sent = {(each.step.variant, each.step.share): data.requests for each, data in guarded.of_kind("level")}
    for share in (0.25, 0.5):
        before, after = sent["baseline", share].submit_ns, sent["full", share].submit_ns
        assert (before - before[0]).tolist() == (after - after[0]).tolist()


def test_refusals_are_counted_and_in_no_latency(guarded: Studied) -> None:
    """The filter refuses some prompts, which the notes say."""
    refused = sum(
        int((data.requests.status == "refused").sum())
        for each, data in guarded.of_kind("level")
        if each.step.variant == "full"
    )
    assert 0 < guarded.value("refused_full") == refused
    assert guarded.value("refused_baseline") == 0
    assert any("refused" in note for note in guarded.findings.notes)


def test_a_baseline_is_needed() -> None:
    """Without a configuration that has no guardrails there is nothing to compare with."""
    decided = GUARDRAIL.next_step(asked("input", "full"), [])
    assert isinstance(decided, Done)
    assert "named baseline" in decided.reason
