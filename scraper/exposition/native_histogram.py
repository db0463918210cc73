"""Native (exponential) histograms as cumulative counts at upper bounds, the form in which classic ones are exposed.

Source: https://prometheus.io/docs/specs/native_histograms/ (bucket boundaries, spans, zero bucket).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

MIN_SCHEMA, MAX_SCHEMA = -4, 8
_ROUNDING = 1 + 1e-9  # counts of float histograms are sums of floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The buckets on one side of zero: runs of (gap to the one before, length), and a count for each bucket."""

    spans: tuple[tuple[int, int], ...]
    counts: Sequence[float]


def upper_bound(index: int, schema: int) -> float:
    """Return where the positive bucket `index` ends: 2 ** (index * 2 ** -schema).

    The bucket that would end at 2 ** 1024 ends at the largest float; those beyond end at infinity.
    """
    if schema <= 0:
        exponent, fraction = index << -schema, 1.0
    else:
        exponent, fraction = index >> schema, 2.0 ** ((index & ((1 << schema) - 1)) / (1 << schema))
    try:
        return math.ldexp(fraction, exponent)
    except OverflowError:
        return sys.float_info.max if (fraction, exponent) == (1.0, 1024) else math.inf


def cumulative(
    schema: int, *, positive: Side, negative: Side, zero_threshold: float, zero_count: float, count: float
) -> tuple[tuple[float, ...], list[float]]:
    """Return the upper bounds of the populated buckets, ascending, and the counts of all observations up to each.

    The last bound is +Inf and its count is `count`, in which observations that are not a number stand as well. A
    bucket without observations is left out, so at any bound that is not there the count is that at the next lower one.
    Raises `ValueError` for an unknown schema, spans that do not fit the counts, a negative count, and buckets that
    hold more than `count`.
    """
    if not MIN_SCHEMA <= schema <= MAX_SCHEMA:
        raise ValueError(f"a native histogram of schema {schema}, which is none of {MIN_SCHEMA} to {MAX_SCHEMA}")
    held = [(upper_bound(index, schema), n) for index, n in _indexed(positive)]
    held += [(-upper_bound(index - 1, schema), n) for index, n in _indexed(negative)]
    held.append((zero_threshold, zero_count))
    if any(not n >= 0 for _, n in held) or math.isnan(zero_threshold):
        raise ValueError("a native histogram with a negative count")
    at: dict[float, float] = {}
    for bound, n in sorted(held):
        if n > 0 and bound < math.inf:
            at[bound] = at.get(bound, 0) + n
    counts = list(accumulate(at.values()))
    if sum(n for _, n in held) > count * _ROUNDING:
        raise ValueError("a native histogram whose buckets hold more than its count")
    return (*at, math.inf), [*counts, count]


def _indexed(side: Side) -> Iterator[tuple[int, float]]:
    if sum(length for _, length in side.spans) != len(side.counts):
        raise ValueError("a native histogram whose spans do not fit its counts")
    index = place = 0
    for number, (gap, length) in enumerate(side.spans):
        if number and gap < 0:
            raise ValueError("a native histogram whose spans overlap")
        index += gap
        for n in side.counts[place : place + length]:
            yield index, n
            index += 1
        place += length
