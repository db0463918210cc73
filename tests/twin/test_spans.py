"""The fit by first and last tokens alone, as spans of requests state them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from played_runs import arrivals, engine, lengths, run, simulated
from played_twins import GPU, fitted, spanned, truth, twin_of
from processes import Ended
from watched_traffic import watched_directory

from sidelight.rundir.stats import Missing
from sidelight.simulator.settings import PROFILES, SpeedProfile
from sidelight.twin.check import engine_of, misfit, refusal
from sidelight.twin.engine.fit import fit
from sidelight.twin.engine.spans import SpannedRequests
from sidelight.twin.engine.steps import StreamedRequests
from sidelight.twin.scenario import Prediction, Scenario, predict


@pytest.fixture(scope="module")
def few(light: StreamedRequests) -> SpannedRequests:
    return spanned(light)


@pytest.mark.parametrize("budget", [256, 1024])
@pytest.mark.parametrize(("speed", "rate_per_s"), [(PROFILES["demo"], 3.0), (PROFILES["fast"], 30.0), (GPU, 6.0)])
def test_the_speed_is_found_without_the_stamps_of_tokens(speed: SpeedProfile, rate_per_s: float, budget: int) -> None:
    seen = fitted(spanned(run(engine(speed=speed, max_num_batched_tokens=budget), count=250, rate_per_s=rate_per_s)))
    assert seen.speed.step_s == pytest.approx(speed.step_s, rel=0.02)
    assert seen.speed.prefill_token_s == pytest.approx(speed.prefill_token_s, rel=0.02)
    assert seen.speed.jitter_ratio == pytest.approx(speed.jitter_ratio, rel=0.6)
    sequences, tokens = 8, 4000
    together_s = speed.sequence_s * sequences + speed.kv_token_s * tokens
    assert seen.speed.sequence_s * sequences + seen.speed.kv_token_s * tokens == pytest.approx(together_s, rel=0.05)
    assert float(np.median(seen.frontend_s)) == pytest.approx(0.004, abs=2e-3)


def test_seats_and_budget_show_in_spans() -> None:
    overloaded = spanned(run(engine(), count=250, rate_per_s=5.0))
    assert fitted(overloaded).seats == 16
    small = spanned(run(engine(max_num_batched_tokens=256), count=200, rate_per_s=4.0))
    assert fitted(small).budget == 256


@pytest.mark.parametrize("rate_per_s", [1.5, 4.5, 9.0])
def test_the_interval_holds_what_other_runs_show(few: SpannedRequests, rate_per_s: float) -> None:
    twin = twin_of(few)
    prediction = predict(twin, Scenario(label="", rate_per_s=rate_per_s))
    assert isinstance(prediction, Prediction)
    shown = truth(twin, [engine()], rate_per_s)
    assert (prediction.low < shown).all()
    assert (shown < prediction.high).all()


def test_an_engine_that_becomes_slower_is_refused() -> None:
    slower = spanned(run(engine(drift_per_h=99.0), count=240, rate_per_s=1.5))
    shown_fit = fitted(slower)
    missed = misfit(slower, shown_fit, engine_of(shown_fit))
    assert isinstance(missed, Missing) or "changed" in refusal(slower, shown_fit)


def test_counts_that_cannot_be_take_no_memory(few: SpannedRequests) -> None:
    absurd = replace(few, output_tokens=few.output_tokens * 10**12)
    assert fit(absurd) is not None


def test_a_watch_is_predicted_from(sidelight: Callable[..., Ended], tmp_path: Path) -> None:
    prompts, outputs = lengths(180, 0)
    exchanges = simulated(engine(), prompts, outputs, at_s=arrivals(180, 3.0, 0))
    watch = watched_directory(tmp_path / "watch", exchanges)
    ended = sidelight("predict", watch, "--rate", "x1.5", "--known", "max-num-seqs=16", "--json")
    assert ended.code == 0, ended.err
    predicted = json.loads(ended.out)
    assert predicted["fit"]["step_ms"] == pytest.approx(8.0, rel=0.02)
    assert predicted["fit"]["prefill_token_us"] == pytest.approx(150.0, rel=0.03)
    ended = sidelight("predict", watched_directory(tmp_path / "few", exchanges[:10]))
    assert ended.err.rstrip().endswith("[predict.refused]")
