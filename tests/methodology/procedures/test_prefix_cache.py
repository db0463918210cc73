"""Prefix Cache Effectiveness against an engine whose cache is known."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest
from virtual_study import play

from methodology.procedures.prefix_cache import PREFIX_CACHE
from methodology.study.model import Asked, Done, Findings, Finished, Parameters, Reader, StepData
from simulator.settings import EngineSettings

SHORT = Parameters(load=0.5, requests=60, duration=10.0)


def asked(**given: Any) -> Asked:
    return Asked(test="prefix-cache", scale="short", parameters=SHORT, seed=3, **given)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Studied:
    """A study, its steps by kind, and their data."""

    steps: dict[str, Finished]
    data: dict[str, StepData]
    findings: Findings
    kinds: list[str]

    def value(self, name: str) -> float:
        value = self.findings.results[name].value
        assert value is not None, name
        return value


def study(given: Asked, **settings: Any) -> Studied:
    data: dict[str, StepData] = {}

    def findings(given: Asked, finished: Sequence[Finished], read: Reader) -> Findings:
        data.update({each.step.kind: read(each) for each in finished})
        return PREFIX_CACHE.findings(given, finished, read)

    finished, results = play(dataclasses.replace(PREFIX_CACHE, findings=findings), given, EngineSettings(), **settings)
    steps = {each.step.kind: each for each in finished}
    return Studied(steps=steps, data=data, findings=results, kinds=[each.step.kind for each in finished])


@pytest.fixture(scope="module")
def emulated() -> Studied:
    return study(asked())


def test_the_same_requests_are_measured_off_cold_and_warm(emulated: Studied) -> None:
    """Contents and moments are equal in the three steps, and only prefixes are sent before the warm ones."""
    expected = ["saturate", "off", "cold", "saturated-cold", "populate", "warm", "populate", "saturated-warm"]
    assert emulated.kinds == expected
    lengths = [emulated.data[kind].requests.input_tokens.tolist() for kind in ("off", "cold", "warm")]
    assert lengths[0] == lengths[1] == lengths[2]
    sent = emulated.data["populate"].requests
    assert sent.max_tokens.max() == 1
    assert 512 < sent.input_tokens.min() < sent.input_tokens.max() <= 1025
    assert [row[0] for row in emulated.findings.tables[0].rows] == ["Cache Disabled", "Cache (Cold)", "Cache (Warm)"]


def test_hit_rates_are_those_of_the_engine(emulated: Studied) -> None:
    """Nothing is found with the cache off; else both rates are what the engine's own records add up to."""
    assert emulated.value("prompt_hit_ratio_off") == 0.0
    for kind in ("cold", "warm"):
        records = [each.record for each in emulated.data[kind].about["truth"]]
        cached, prompt = (sum(getattr(each, f"{name}_tokens") for each in records) for name in ("cached", "prompt"))
        assert emulated.value(f"prompt_hit_ratio_{kind}") == pytest.approx(cached / prompt, abs=1e-9)
        assert emulated.value(f"prefix_hit_ratio_{kind}") > emulated.value(f"prompt_hit_ratio_{kind}")
    assert 0.95 < emulated.value("prefix_hit_ratio_warm") < 1.0


def test_the_reduction_is_that_of_the_same_requests(emulated: Studied) -> None:
    """The TTFT falls by what need not be computed, and the saturated engine serves more."""
    low, high = emulated.findings.results["ttft_reduction_p50_ratio_warm"].ci95 or (None, None)
    assert low is not None
    assert high is not None
    assert 0.5 < low < emulated.value("ttft_reduction_p50_ratio_warm") < high < 1.0
    assert emulated.value("throughput_change_ratio_warm") > 0.2


def test_one_configuration_does_not_meet_the_draft(emulated: Studied) -> None:
    """Salts emulate the configurations, which the notes state as not met."""
    body = json.loads(emulated.steps["off"].step.options["extra_body"])
    assert "{request}" in body["cache_salt"]
    assert any(note.startswith("Not met") for note in emulated.findings.notes)


def test_two_configurations_are_off_and_on() -> None:
    """Variants are off and on; others are refused."""
    decided = PREFIX_CACHE.next_step(asked(variants=("a", "b")), [])
    assert isinstance(decided, Done)
    assert "off and on" in decided.reason
    decided = PREFIX_CACHE.next_step(asked(options={"workload": "synthetic-uniform"}), [])
    assert isinstance(decided, Done)
    assert "share prefixes" in decided.reason
