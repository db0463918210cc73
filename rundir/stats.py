"""Statistics of a sample, and the reason that stands where there is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from sidelight.rundir import fields
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import UNSET, Count, doc

OF_VALUES = "unit of the values"
_AS_MANY = 0.02  # by which counts of the same requests may differ: some end at the edges


@dataclass(frozen=True, slots=True)
class Missing:
    """A missing value, with a reason that a reader of the report understands."""

    reason: str


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of single values; null where missing, and `missing` says why."""

    count: Annotated[Count, doc("Number of values.", "values")]
    mean: Annotated[float | None, doc("Arithmetic mean.", OF_VALUES)]
    std: Annotated[float | None, doc("Standard deviation of the sample (ddof 1).", OF_VALUES)]
    min: Annotated[float | None, doc("Smallest value.", OF_VALUES)]
    max: Annotated[float | None, doc("Largest value.", OF_VALUES)]
    p1: Annotated[float | None, doc("1st percentile, by linear interpolation as all percentiles.", OF_VALUES)]
    p5: Annotated[float | None, doc("5th percentile.", OF_VALUES)]
    p10: Annotated[float | None, doc("10th percentile.", OF_VALUES)]
    p25: Annotated[float | None, doc("25th percentile.", OF_VALUES)]
    p50: Annotated[float | None, doc("Median.", OF_VALUES)]
    p75: Annotated[float | None, doc("75th percentile.", OF_VALUES)]
    p90: Annotated[float | None, doc("90th percentile.", OF_VALUES)]
    p95: Annotated[float | None, doc("95th percentile.", OF_VALUES)]
    p99: Annotated[float | None, doc("99th percentile.", OF_VALUES)]
    p99_9: Annotated[float | None, doc("99.9th percentile.", OF_VALUES)]
    missing: fields.Missing = UNSET


def quantiles_of(statistics: type[msgspec.Struct]) -> dict[str, float]:
    """Return the percentiles among a Struct's fields, as quantiles: `p99_9` is 0.999."""
    names = (name for name in statistics.__struct_fields__ if name[0] == "p" and name[1:2].isdigit())
    return {name: float(f"{name[1:].replace('_', '.')}e-2") for name in names}


QUANTILES = quantiles_of(Statistics)
# Those that are null together where there is no value.
STATISTICS = ("mean", "std", "min", "max", *QUANTILES)


def describe(values: npt.ArrayLike, why_empty: str) -> Statistics:
    """Return statistics of the values without NaN; null with `why_empty` if none is left.

    Quantiles by linear interpolation, std of the sample (null for one value).
    """
    flat = known(values)
    if not len(flat):
        return Statistics(count=0, **dict.fromkeys(STATISTICS), missing=why_empty)
    numbers: dict[str, Any] = statistics_of(flat, QUANTILES)
    if len(flat) == 1:
        numbers |= {"std": None, "missing": "std: one value has no spread"}
    elif finite(numbers["std"]) is None:
        numbers |= {"std": None, "missing": "std: the values are too large for it"}
    return Statistics(count=len(flat), **numbers)


def statistics_of(values: Floats, quantiles: Mapping[str, float]) -> dict[str, float]:
    """Return mean, std, min, max and `quantiles` of values, by name.

    There are n > 0 values, none NaN; std has ddof 1 and is NaN of one value. Of equal values the mean is exactly theirs
    and the std 0, without what adding them up rounds off.
    """
    low, high = float(values.min()), float(values.max())
    with np.errstate(over="ignore", invalid="ignore"):
        mean, std = (low, 0.0) if low == high else (float(values.mean()), float(values.std(ddof=1)))
    if not np.isfinite(mean):
        mean = float((values / len(values)).sum())
    return {
        "mean": mean,
        "std": std if len(values) > 1 else math.nan,
        "min": low,
        "max": high,
        **dict(zip(quantiles, np.quantile(values, list(quantiles.values())).tolist(), strict=True)),
    }


def known(values: npt.ArrayLike) -> Floats:
    """Return the values that are not NaN, flat; without a NaN the given ones, not a copy."""
    flat = np.asarray(values, np.float64).ravel()
    missing = np.isnan(flat)
    return flat[~missing] if missing.any() else flat


def finite(value: float) -> float | None:
    """Return a number for strict JSON: null for one that is not finite."""
    return float(value) if np.isfinite(value) else None


def as_many(count: float, expected: float, *, slack: float = 1.0) -> bool:
    """Return whether two counts of requests agree within 2 %, or within a few."""
    return abs(count - expected) <= max(slack, _AS_MANY * expected)
