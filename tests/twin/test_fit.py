"""The fit finds the engine's speed and limits by the client's stamps alone."""

from __future__ import annotations

import numpy as np
import pytest
from played_runs import NETWORK_S, engine, lengths, run, simulated, streamed
from played_twins import GPU, fitted

from sidelight.rundir.stats import Missing
from sidelight.simulator.settings import PROFILES, SpeedProfile
from sidelight.twin.engine.fit import fit
from sidelight.twin.engine.steps import StreamedRequests


@pytest.mark.parametrize("budget", [256, 1024])
@pytest.mark.parametrize(("speed", "rate_per_s"), [(PROFILES["demo"], 3.0), (PROFILES["fast"], 30.0), (GPU, 6.0)])
def test_the_speed_is_found_within_five_percent(speed: SpeedProfile, rate_per_s: float, budget: int) -> None:
    requests = run(engine(speed=speed, max_num_batched_tokens=budget), count=250, rate_per_s=rate_per_s)
    seen = fitted(requests)
    assert seen.speed.step_s == pytest.approx(speed.step_s, rel=0.05)
    assert seen.speed.prefill_token_s == pytest.approx(speed.prefill_token_s, rel=0.05)
    assert seen.speed.jitter_ratio == pytest.approx(speed.jitter_ratio, rel=0.1)
    assert seen.coherence == 1
    # What sequences and their tokens take are hard to part, but together it can.
    sequences, tokens = 8, 4000
    together_s = speed.sequence_s * sequences + speed.kv_token_s * tokens
    assert seen.speed.sequence_s * sequences + seen.speed.kv_token_s * tokens == pytest.approx(together_s, rel=0.1)


def test_the_draws_lie_around_the_speed(light: StreamedRequests) -> None:
    draws = fitted(light).draws
    steps_s = [each.step_s for each in draws]
    assert min(steps_s) < PROFILES["demo"].step_s < max(steps_s)
    assert np.std(steps_s) < 0.02 * PROFILES["demo"].step_s


def test_the_front_end_is_what_the_network_takes(light: StreamedRequests) -> None:
    assert float(np.median(fitted(light).frontend_s)) == pytest.approx(NETWORK_S, abs=0.5e-3)
    rare = run(engine(), count=120, rate_per_s=0.5)
    assert len(fitted(rare).frontend_s) > 20
    assert float(np.median(fitted(rare).frontend_s)) == pytest.approx(NETWORK_S, abs=1e-3)


@pytest.mark.parametrize("seats", [6, 16])
def test_seats_are_known_where_requests_waited_for_them(seats: int) -> None:
    overloaded = run(engine(max_num_seqs=seats), count=200, rate_per_s=9.0)
    assert fitted(overloaded).seats == seats
    prompts, outputs = lengths(150, 2)
    closed = streamed(simulated(engine(max_num_seqs=seats), prompts, outputs, concurrency=30))
    assert fitted(closed).seats == seats


def test_seats_are_unknown_where_none_waited() -> None:
    assert fitted(run(engine(max_num_seqs=64), count=150, rate_per_s=2.0)).seats is None
    prompts, outputs = lengths(150, 2)
    closed = streamed(simulated(engine(max_num_seqs=64), prompts, outputs, concurrency=12))
    assert fitted(closed).seats is None


def test_known_limits_are_taken(light: StreamedRequests) -> None:
    seen = fitted(light, seats=99, budget=1024)
    assert (seen.seats, seen.budget) == (99, 1024)


def test_the_budget_is_found_where_prompts_met_it() -> None:
    small = run(engine(max_num_batched_tokens=256), count=200, rate_per_s=4.0)
    assert fitted(small).budget == 256
    large = run(engine(max_num_batched_tokens=16384), count=200, rate_per_s=4.0)
    assert fitted(large).budget >= large.prompt_tokens.max()


def test_too_little_is_refused(light: StreamedRequests) -> None:
    few = run(engine(), count=10, rate_per_s=3.0)
    assert isinstance(fit(few), Missing)
    prompts, outputs = lengths(40, 2)
    single = streamed(simulated(engine(), prompts, np.ones_like(outputs), concurrency=2))
    assert isinstance(fit(single), Missing)
    assert isinstance(fit(light, until_s=0.5), Missing)
