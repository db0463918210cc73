"""The twin refuses where its model is not the engine's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from played_runs import arrivals, engine, lengths, run, simulated, streamed

from sidelight.rundir.columns import Floats, concat
from sidelight.rundir.stats import Missing
from sidelight.twin.check import Misfit, engine_of, misfit, observed_ms, refusal, replayed
from sidelight.twin.engine.fit import EngineFit, fit
from sidelight.twin.engine.steps import EngineSteps, StreamedRequests, steps_of


def refused(requests: StreamedRequests) -> str:
    shown_fit = fit(requests, seats=16)
    assert isinstance(shown_fit, EngineFit)
    missed = misfit(requests, shown_fit, engine_of(shown_fit))
    assert isinstance(missed, Misfit)
    return refusal(requests, shown_fit) or missed.refusal


def test_an_engine_as_the_model_has_it_is_taken(light: StreamedRequests) -> None:
    assert refused(light) == ""


def test_the_misfit_is_small_where_the_model_holds(light: StreamedRequests) -> None:
    shown_fit = fit(light)
    assert isinstance(shown_fit, EngineFit)
    missed = misfit(light, shown_fit, engine_of(shown_fit))
    assert isinstance(missed, Misfit)
    assert missed.worst[0] < 0.1
    assert missed.requests > 50


def test_an_engine_that_becomes_slower_is_refused() -> None:
    assert "changed" in refused(run(engine(drift_per_h=99.0), count=240, rate_per_s=1.5))


def test_two_engines_behind_one_address_are_refused() -> None:
    prompts, outputs = lengths(240, 1)
    at_s = arrivals(240, 6.0, 1)
    halves = [
        streamed(simulated(engine(seed=half), prompts[half::2], outputs[half::2], at_s=at_s[half::2]))
        for half in (0, 1)
    ]
    first = at_s[:2] - at_s[0]
    both = concat([replace(each, submit_s=each.submit_s + by, token_s=each.token_s + by)
                   for each, by in zip(halves, first, strict=True)])  # fmt: skip
    order = np.argsort(both.submit_s, kind="stable")
    assert "of one engine" in refused(_ordered(both, order))


def test_tokens_in_groups_are_refused(light: StreamedRequests) -> None:
    # Of every three tokens the last two come with the first.
    lengths_of = np.diff(light.start)
    firsts = np.concatenate(
        [np.arange(0, count, 3) + start for start, count in zip(light.start[:-1], lengths_of, strict=True)]
    )
    grouped = replace(
        light, token_s=light.token_s[firsts], start=np.cumsum([0, *(-(-count // 3) for count in lengths_of)])
    )
    assert "tokens in the mean" in refused(grouped)


def by_class(requests: StreamedRequests, least: int, factor: float) -> StreamedRequests:
    """Return a run on an engine whose steps of at least so many sequences take longer."""
    steps = steps_of(requests)
    size = steps.decodes + np.bincount(steps.first, minlength=len(steps.end_s))
    return _stretched(requests, steps, np.where((size >= least) & steps.is_whole, factor, 1.0))


def _stretched(requests: StreamedRequests, steps: EngineSteps, factors: Floats) -> StreamedRequests:
    """Return a run with its time stretched in each step."""
    longer_s = (factors - 1) * np.diff(steps.end_s, prepend=0.0)
    known_s, added_s = np.concatenate([[0.0], steps.end_s]), np.concatenate([[0.0], np.cumsum(longer_s)])

    def stretched(at_s: Floats) -> Floats:
        return at_s + np.interp(at_s, known_s, added_s)

    return replace(requests, submit_s=stretched(requests.submit_s), token_s=stretched(requests.token_s))


def test_steps_by_class_of_batch_are_fitted(light: StreamedRequests) -> None:
    """Beyond the batches that the run had, there is no prediction."""
    stepped = by_class(light, 8, 1.4)
    of_line, of_classes = fit(light), fit(stepped, seats=16)
    assert isinstance(of_line, EngineFit)
    assert isinstance(of_classes, EngineFit)
    assert of_line.by_size is None
    assert of_classes.by_size is not None
    longer = [of_classes.by_size[n] * steps_ms(of_classes, n) / steps_ms(of_line, n) for n in (3, 5, 9, 11)]
    assert longer == pytest.approx([1.0, 1.0, 1.4, 1.4], rel=0.06)
    missed = misfit(stepped, of_classes, engine_of(of_classes))
    assert isinstance(missed, Misfit)
    assert "" == (refusal(stepped, of_classes) or missed.refusal)
    assert "missed" in replace(missed, logs=missed.logs + 0.4).refusal


def test_what_delays_decodes_by_chance_does_not_lengthen_prefills(light: StreamedRequests) -> None:
    steps = steps_of(light)
    delayed = np.random.default_rng(0).random(len(steps.end_s)) < 0.25
    delayed &= steps.is_whole & (np.bincount(steps.first, minlength=len(steps.end_s)) == 0)
    unsteady = _stretched(light, steps, np.where(delayed, 1.8, 1.0))
    fitted = fit(unsteady, seats=16)
    assert isinstance(fitted, EngineFit)
    assert fitted.factors is not None
    assert np.mean(fitted.factors.decode) > 1.1
    assert np.mean(fitted.factors.prefill) == pytest.approx(1.0, abs=0.04)
    played = np.median([replayed(unsteady, engine_of(fitted), fitted, seed=seed) for seed in range(3)], axis=0)
    middle = np.median(played / observed_ms(unsteady), axis=1)
    assert middle == pytest.approx(1.0, abs=0.04)


def steps_ms(shown_fit: EngineFit, sequences: int) -> float:
    """Return the fitted time of a step of decodes of 400 tokens."""
    speed = shown_fit.speed
    return 1e3 * (speed.step_s + sequences * (speed.sequence_s + 400 * speed.kv_token_s))


def test_a_test_that_is_not_possible_says_so(light: StreamedRequests) -> None:
    shown_fit = fit(light)
    assert isinstance(shown_fit, EngineFit)
    late = replace(light, submit_s=light.submit_s * 1e-3)  # all are sent before the cut
    assert isinstance(misfit(late, shown_fit, engine_of(shown_fit)), Missing)


def _ordered(requests: StreamedRequests, order: np.ndarray) -> StreamedRequests:
    pieces = [requests.token_s[requests.start[at] : requests.start[at + 1]] for at in order]
    return replace(
        requests,
        **{
            name: getattr(requests, name)[order]
            for name in ("submit_s", "prompt_tokens", "cached_tokens", "output_tokens")
        },
        token_s=np.concatenate(pieces),
        start=np.cumsum([0, *map(len, pieces)]),
    )
