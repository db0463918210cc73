"""How sure the TTFT's percentiles are, in a sentence."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import summaries

from sidelight.correlator.load.stability import Verdict
from sidelight.correlator.statistics.intervals import quantiles
from sidelight.correlator.statistics.percentiles import QUANTILES, PercentileIntervals
from sidelight.exporter.report.tables.percentiles import interval_line
from sidelight.exporter.summary.result import Summary


def summary_of(requests: int, verdict: Verdict = "stable") -> Summary:
    """The summary of requests whose TTFT was 1, 2, ... ms, in no order."""
    values = np.random.default_rng(1).permutation(np.arange(1.0, requests + 1))
    intervals = PercentileIntervals(**dict(zip(QUANTILES, quantiles(values, list(QUANTILES.values())), strict=True)))
    whole = summaries.summary(summaries.correlated())
    stability = msgspec.structs.replace(whole.methodology.stability, verdict=verdict)
    return msgspec.structs.replace(
        whole,
        methodology=msgspec.structs.replace(whole.methodology, stability=stability, percentiles={"ttft_ms": intervals}),
    )


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        (5000, ["TTFT with 95 % confidence: p50 2,", " to 2,", "p95 4,7", "p99 4,9"]),
        (1000, ["p50 4", " to 5", "p95 9", "p99 at least 9", "; too few requests for an upper bound", "least: p99 2,"]),
        (30, ["p50 15.5 ms in the sample, p95 at least ", " in the sample)", "least: p50 230, p95 2,300, p99 12,000."]),
    ],
)  # fmt: skip
def test_a_percentile_has_an_interval_or_a_bound(requests: int, words: list[str]):
    """And how many requests a bound would need."""
    (line,) = interval_line(summary_of(requests))
    for word in words:
        assert word in line
    assert line.count("requests to say") <= 1


def test_percentiles_of_a_load_that_was_not_sustained_have_none():
    """They depend on how long the load lasted: an interval of them would be of nothing."""
    assert [] == list(interval_line(summary_of(5000, "growing")))
