"""Changes that last are noticed, and chance is not taken for one."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_runs import arrivals, lengths
from played_twins import fitted, slowing

from sidelight.rundir.columns import Floats
from sidelight.rundir.stats import Missing
from sidelight.twin.drift import (
    LEAST_MINUTES,
    LEAST_VALUES,
    MINUTE_S,
    Baseline,
    EngineHistory,
    Minutes,
    baseline_of,
    begun,
    between,
    continued,
    drift_of,
    history_of,
    mean_of,
    ratio_of,
    said,
    split_mean,
)
from sidelight.twin.engine.fit import EngineFit
from sidelight.twin.engine.spans import SpannedRequests

DAY = 24 * 60
NOON_S = 1_767_268_800.0  # 12:00 UTC
RATE_PER_S, CHANGED_S, ENDED_S = 2.5, 5400.0, 6600.0


def of_means(mean: Floats) -> Minutes:
    return Minutes(at_s=MINUTE_S * np.arange(len(mean)), mean=mean)


def noise(count: int, seed: int, *, sd: float = 0.01, alike: float = 0.6) -> Floats:
    """Return minutes that are like those before them."""
    random = np.random.default_rng(seed)
    values = np.empty(count)
    value = 0.0
    for at, fresh in enumerate(random.normal(0, sd * (1 - alike**2) ** 0.5, count)):
        value = alike * value + fresh
        values[at] = value
    return values


def known(minutes: Minutes) -> Baseline:
    baseline = baseline_of(minutes)
    assert isinstance(baseline, Baseline)
    return baseline


@pytest.mark.parametrize("alike", [0.0, 0.6])
def test_a_month_without_a_change_has_no_alarm(alike: float) -> None:
    """At the end of each minute of three months of minutes, independent or like their neighbours."""
    alarms = 0
    for month in range(3):
        baseline = known(of_means(noise(60, 10 + month, alike=alike)))
        values = noise(30 * DAY, 20 + month, alike=alike)
        alarms += sum(drift_of(of_means(values[at : at + DAY]), baseline) is not None for at in range(0, 29 * DAY, 720))
    assert alarms == 0


@pytest.mark.parametrize(("log", "sd"), [(0.05, 0.01), (-0.05, 0.01), (0.2, 0.04)])
def test_a_change_is_dated_and_measured(log: float, sd: float) -> None:
    """Within ten minutes in nine of ten draws; the interval holds it, and the begin is right within minutes."""
    held, began = [], []
    for seed in range(40):
        values = noise(DAY, seed, sd=sd)
        values[600:] += log
        drift = drift_of(of_means(values[: 600 + 10]), known(of_means(noise(240, 100 + seed, sd=sd))))
        if drift is not None:
            held.append(drift.low < np.exp(log) < drift.high)
            began.append(drift.since_s / MINUTE_S - 600)
    assert len(held) >= 36
    assert np.mean(held) > 0.8
    assert np.abs(np.median(began)) <= 1
    assert np.mean(np.abs(began) <= 10) > 0.85


def test_a_change_that_has_ended_is_none() -> None:
    values = noise(400, 1)
    values[100:200] += 0.1
    baseline = known(of_means(noise(240, 2)))
    assert drift_of(of_means(values[:150]), baseline) is not None
    assert drift_of(of_means(values), baseline) is None


def test_a_minute_far_off_is_no_change() -> None:
    values = noise(200, 1)
    values[150] += 3.0
    assert drift_of(of_means(values), known(of_means(noise(240, 2)))) is None


def test_the_last_minutes_have_a_ratio_without_a_change_too() -> None:
    baseline = known(of_means(noise(240, 2)))
    ratio = ratio_of(of_means(noise(100, 3)), baseline)
    assert ratio is not None
    assert ratio.low < 1 < ratio.high
    assert ratio_of(of_means(np.full(4, np.nan)), baseline) is None


def test_few_minutes_are_no_baseline() -> None:
    assert isinstance(baseline_of(of_means(np.zeros(LEAST_MINUTES - 1))), Missing)
    assert known(of_means(np.zeros(LEAST_MINUTES))).sd > 0


@given(st.floats(-1, 1), st.floats(-1, 1), st.integers(0, 100))
@settings(deadline=None)
def test_two_causes_are_separated_by_their_shares(rest: float, cause: float, seed: int) -> None:
    share = np.random.default_rng(seed).uniform(0.0, 0.9, 50)
    assert split_mean(rest * (1 - share) + cause * share, share) == pytest.approx((rest, cause), abs=1e-9)


def test_few_values_have_no_mean() -> None:
    """Of shares that are alike the mean is of the rest, and the cause is not known."""
    few = np.ones(LEAST_VALUES - 1)
    assert np.isnan([mean_of(few), *split_mean(few, few)]).all()
    alike = split_mean(np.full(50, 0.1), np.full(50, 0.01))
    assert alike[0] == pytest.approx(0.1)
    assert np.isnan(alike[1])


def traffic(*, slower: float = 1.0, longer: float = 1.0, cached: tuple[float, float] = (0.0, 0.0)) -> SpannedRequests:
    """Return requests of an engine that changes at CHANGED_S.

    It becomes slower, its prompts longer, or another share of them is `cached`.
    """
    at_s = arrivals(round(ENDED_S * RATE_PER_S), RATE_PER_S, 3)
    prompts, outputs = lengths(len(at_s), 5)
    prompts = np.where(at_s >= CHANGED_S, (longer * prompts).astype(np.int64), prompts)
    shares = np.where(at_s < CHANGED_S, *cached)
    hits = (shares * prompts).astype(np.int64)
    return slowing(at_s, prompts, outputs, changed_s=CHANGED_S, slower=slower, seats=32, cached=hits)


def followed(requests: SpannedRequests, until_s: float) -> EngineHistory:
    """Return the history of an engine as a watch has it, which looks each minute at the last five."""
    history = begun(fitted(between(requests, 0.0, 900.0)[0]), NOON_S + 900)
    for now_s in np.arange(960.0, until_s, 60.0).tolist():
        some, since_s = between(requests, now_s - 300, now_s)
        history = continued(history, some, NOON_S + since_s, NOON_S + now_s)
    return history


def test_an_engine_that_becomes_slower_is_dated_at_equal_batch() -> None:
    """By 7 %, within ten minutes; the hour before had no change, and another restart is none of it."""
    history = followed(traffic(slower=1.07), CHANGED_S + 600)
    change = history.changes({})["step"]
    assert 1.05 < change.low < 1.07 < change.high < 1.09
    assert change.since_s == pytest.approx(NOON_S + CHANGED_S, abs=120)
    assert history.changes({}).keys() <= {"step", "prefill"}
    assert history.ratios()["step"].low > 1.02
    words = said("step", change, NOON_S)
    assert re.match(r"Since 20\d\d-\d\d-\d\d 13:\d\d UTC ", words)
    assert "take 7" in words
    assert words.endswith("the engine did not restart.")
    assert said("step", change, change.since_s + 30).endswith("the engine restarted then.")


def test_longer_prompts_are_of_the_traffic() -> None:
    """The steps of the same batch take what they took."""
    changes = followed(traffic(longer=1.6), ENDED_S).changes({})
    assert changes.keys() == {"prompt_tokens"}
    assert changes["prompt_tokens"].ratio == pytest.approx(1.6, rel=0.1)
    assert "the traffic" in said("prompt_tokens", changes["prompt_tokens"], None)


def test_a_cache_that_hits_less_is_said() -> None:
    """Of equal prompts, 70 % are computed where it was 40 %; a token of them takes what it took."""
    changes = followed(traffic(cached=(0.6, 0.3)), ENDED_S).changes({})
    assert changes.keys() == {"computed"}
    assert changes["computed"].ratio == pytest.approx(0.7 / 0.4, rel=0.05)
    assert said("computed", changes["computed"], None).endswith("the prefix cache has less of them.")


def test_a_recorded_watch_is_a_baseline() -> None:
    """A slower engine differs from it from its first minutes on."""
    recorded = history_of(between(traffic(), 0.0, CHANGED_S)[0], NOON_S)
    assert isinstance(recorded, EngineHistory)
    later = replace(recorded, until_s=NOON_S + CHANGED_S)
    slow = traffic(slower=1.07)
    for now_s in np.arange(CHANGED_S + 360, ENDED_S, 60.0).tolist():
        some, since_s = between(slow, now_s - 300, now_s)
        later = continued(later, some, NOON_S + since_s, NOON_S + now_s)
    assert later.changes({})["step"].ratio == pytest.approx(1.07, rel=0.02)
    assert isinstance(history_of(between(traffic(), 0.0, 1800.0)[0], NOON_S), Missing)


def test_a_change_goes_on_when_its_begin_is_no_longer_held() -> None:
    """Minutes of a day are held; a change the other way is another."""
    slow = of_means(np.full(60, 0.05))
    history = EngineHistory(
        fitted=cast("EngineFit", None),
        until_s=0.0,
        minutes={"step": slow},
        baselines={"step": Baseline(mean=0.0, sd=0.01, blocks=9)},
    )
    before = history.changes({})
    later = replace(history, minutes={"step": replace(slow, at_s=slow.at_s + DAY * MINUTE_S)})
    assert later.changes(before)["step"].since_s == before["step"].since_s
    faster = replace(later, minutes={"step": replace(later.minutes["step"], mean=-slow.mean)})
    assert faster.changes(before)["step"].since_s == DAY * MINUTE_S
