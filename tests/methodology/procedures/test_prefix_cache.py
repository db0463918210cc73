"""Prefix Cache Effectiveness against an engine whose cache is known."""

from __future__ import annotations

import json
from typing import Any

import pytest
from virtual_study import assert_reported
from watched_study import Studied, records, study

from sidelight.methodology.procedures.prefix_cache import PREFIX_CACHE
from sidelight.methodology.study.model import Done, Parameters, StudySettings
from sidelight.simulator.settings import EngineSettings

SHORT = Parameters(load=0.5, requests=60, duration=10.0)


def asked(**given: Any) -> StudySettings:
    return StudySettings(test="prefix-cache", scale="short", parameters=SHORT, seed=3, **given)


@pytest.fixture(scope="module")
def emulated() -> Studied:
    return study(PREFIX_CACHE, asked())


def test_the_same_requests_are_measured_off_cold_and_warm(emulated: Studied) -> None:
    """Contents and moments are equal in the three steps, and only prefixes are sent before the warm ones."""
    expected = ["saturate", "off", "cold", "saturated-cold", "populate", "warm", "populate", "saturated-warm"]
    assert emulated.kinds == expected
    off, cold, warm = (emulated.of_kind(kind)[0][1].requests.input_tokens.tolist() for kind in ("off", "cold", "warm"))
    assert off == cold == warm
    for _, data in emulated.of_kind("populate"):
        assert data.requests.max_tokens.max() == 1
        assert 512 < data.requests.input_tokens.min() < data.requests.input_tokens.max() <= 1025
    rows = [row[0] for row in emulated.findings.tables[0].rows]
    assert rows == ["Cache Disabled", "Cache (Cold)", "Cache (Warm)"]


def test_hit_rates_are_those_of_the_engine(emulated: Studied) -> None:
    """Nothing is in the cache while it is off; else the rate is what the engine's own records add up to."""
    assert emulated.value("prompt_hit_ratio_off") == 0.0
    for kind in ("cold", "warm"):
        served = records(emulated.of_kind(kind)[0][1])
        cached, prompt = (sum(getattr(each, f"{name}_tokens") for each in served) for name in ("cached", "prompt"))
        assert emulated.value(f"prompt_hit_ratio_{kind}") == pytest.approx(cached / prompt, abs=1e-9)
        assert emulated.value(f"prefix_hit_ratio_{kind}") > emulated.value(f"prompt_hit_ratio_{kind}")
    assert 0.95 < emulated.value("prefix_hit_ratio_warm") < 1.0


def test_the_reduction_is_that_of_the_same_requests(emulated: Studied) -> None:
    """The TTFT falls by what need not be computed, and the saturated engine serves more."""
    low, high = emulated.ends("ttft_reduction_p50_ratio_warm")
    assert 0.5 < low < emulated.value("ttft_reduction_p50_ratio_warm") < high < 1.0
    assert emulated.value("throughput_change_ratio_warm") > 0.2


def test_one_configuration_does_not_meet_the_draft(emulated: Studied) -> None:
    """Salts emulate the configurations, which the notes state as not met."""
    body = json.loads(emulated.of_kind("off")[0][0].step.options["extra_body"])
    assert "{request}" in body["cache_salt"]
    assert any(note.startswith("Not met") for note in emulated.findings.notes)


def test_two_configurations_agree_with_one_that_is_emulated(emulated: Studied) -> None:
    """Of an engine without prefix caching beside another with it, the hit rates are those of the salts."""
    variants = {"off": EngineSettings(prefix_caching=False), "on": EngineSettings()}
    both = study(PREFIX_CACHE, asked(variants=("off", "on")), variants=variants)
    assert [each.step.variant for each in both.finished] == ["off", "off", *["on"] * 6]
    for name in ("prompt_hit_ratio_off", "prompt_hit_ratio_cold", "prefix_hit_ratio_warm"):
        assert both.value(name) == pytest.approx(emulated.value(name), abs=0.001)
    assert not any(note.startswith("Not met") for note in both.findings.notes)


def test_other_configurations_and_workloads_are_refused() -> None:
    """Variants are off and on, and requests must share something."""
    decided = PREFIX_CACHE.next_step(asked(variants=("a", "b")), [])
    assert isinstance(decided, Done)
    assert "off and on" in decided.reason
    decided = PREFIX_CACHE.next_step(asked(options={"workload": "synthetic-uniform"}), [])
    assert isinstance(decided, Done)
    assert "share prefixes" in decided.reason


def test_the_minimum_report_is_of_the_warm_cache(emulated: Studied) -> None:
    """As the answer is: its TTFT and TPOT, and its throughput when it is saturated."""
    results = emulated.findings.results
    assert_reported(emulated.findings, emulated.of_kind("warm")[0][0], "Cache (Warm)")
    assert results["max_output_tokens_per_s"].value == results["max_output_tokens_per_s_warm"].value
