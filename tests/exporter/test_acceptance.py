"""Speculative decoding within a run: that its acceptance changed is said where it is more than chance."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import summaries

from sidelight.exporter.evaluation.server import acceptance
from sidelight.scraper.window.quantities import Counter, CounterSlice


def counted(values: Sequence[float]) -> Counter:
    """A counter that rose by these values in slices of 2 s."""
    slices = [
        CounterSlice(start_ns=2 * 10**9 * place, end_ns=2 * 10**9 * (place + 1), total=float(value), rate_per_s=0.0)
        for place, value in enumerate(values)
    ]
    return msgspec.structs.replace(summaries.counter(float(sum(values)), 0.0), timeslices=slices)


def said(drafts: Sequence[float], accepted: Sequence[float]) -> list[str]:
    quantities = {"drafts": counted(drafts), "draft_tokens_accepted": counted(accepted)}
    return list(acceptance(summaries.server(**quantities)))


@pytest.mark.parametrize(
    ("lengths", "shown"),
    [
        ((3.07, 2.95, 2.8), "3.07 to 2.80"),
        ((2.0, 2.2, 2.5), "2.00 to 2.50"),
        ((3.0, 2.0, 3.0), ""),
        ((3.0, 3.0, 2.9), ""),
    ],
    ids=["falls", "rises", "comes back", "by too little"],
)
def test_acceptance_that_changes_is_said_with_both_lengths(lengths: tuple[float, ...], shown: str):
    """Thirds of ten slices, 100 drafts each; vllm #41838 saw 3.07 fall to 2.8 within hours."""
    accepted = [100 * (length - 1) for length in lengths for _ in range(10)]
    warnings = said([100.0] * 30, accepted)
    assert ([shown] if shown else []) == [shown for warning in warnings if shown in warning]
    assert len(warnings) == bool(shown)


def test_chance_is_no_change():
    """Of 100 runs of few drafts with one true acceptance hardly any is said to have changed."""
    rng, warned = np.random.default_rng(4), 0
    for _ in range(100):
        drafts = rng.integers(1, 6, 30)
        warned += bool(said(drafts.tolist(), rng.binomial(3 * drafts, 0.5).tolist()))
    assert warned <= 5


def test_a_run_without_speculation_or_of_a_few_slices_says_nothing():
    assert [] == list(acceptance(summaries.server()))
    assert [] == said([100.0] * 11, [250.0] * 5 + [100.0] * 6)
    assert [] == said([0.0] * 30, [0.0] * 30)
