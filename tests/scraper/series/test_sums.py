"""Which sums of histograms cannot be."""

from __future__ import annotations

import numpy as np

from sidelight.scraper.series.sums import OUTSIDE, sum_fault


def test_a_sum_is_judged_by_buckets_that_hold_more_than_the_largest_number():
    """Without a warning of NumPy: counts times bounds are then infinite."""
    counts = np.array([[0.0, 0.0, 0.0], [1e300, 0.0, 1e300]])
    assert OUTSIDE == sum_fault(np.array([0.0, 5.0]), counts, (1e308, float("inf")))
