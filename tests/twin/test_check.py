"""The twin refuses where its model is not the engine's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from played_runs import arrivals, engine, lengths, run, simulated, streamed

from sidelight.rundir.columns import concat
from sidelight.rundir.stats import Missing
from sidelight.twin.check import Misfit, engine_of, misfit, refusal
from sidelight.twin.engine.fit import EngineFit, fit
from sidelight.twin.engine.steps import StreamedRequests


def refused(requests: StreamedRequests) -> str:
    shown_fit = fit(requests, seats=16)
    assert isinstance(shown_fit, EngineFit)
    missed = misfit(requests, shown_fit, engine_of(shown_fit))
    assert isinstance(missed, Misfit)
    return refusal(requests, shown_fit, missed)


def test_an_engine_as_the_model_has_it_is_taken(light: StreamedRequests) -> None:
    assert refused(light) == ""


def test_the_misfit_is_small_where_the_model_holds(light: StreamedRequests) -> None:
    shown_fit = fit(light)
    assert isinstance(shown_fit, EngineFit)
    missed = misfit(light, shown_fit, engine_of(shown_fit))
    assert isinstance(missed, Misfit)
    assert missed.worst < 0.1
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


def test_steps_by_class_of_batch_are_refused(light: StreamedRequests) -> None:
    shown_fit = fit(light)
    assert isinstance(shown_fit, EngineFit)
    classes = replace(shown_fit, residuals=np.where(shown_fit.sequences == 8, 0.3, 0.0))
    missed = misfit(light, shown_fit, engine_of(shown_fit))
    assert isinstance(missed, Misfit)
    assert "8 sequences" in refusal(light, classes, missed)
    assert "missed" in refusal(light, shown_fit, replace(missed, logs=missed.logs + 0.4))


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
