"""Statistics of a sample, and the reason that stands where there is none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rundir.columns import Floats

QUANTILES = {
    "p1": 0.01,
    "p5": 0.05,
    "p10": 0.10,
    "p25": 0.25,
    "p50": 0.50,
    "p75": 0.75,
    "p90": 0.90,
    "p95": 0.95,
    "p99": 0.99,
    "p99_9": 0.999,
}


@dataclass(frozen=True, slots=True)
class Missing:
    """A value that cannot be known, with the reason in words a reader of the report understands."""

    reason: str


def describe(values: npt.ArrayLike, why_empty: str) -> dict[str, float] | Missing:
    """Return statistics of the values that are not NaN; Missing, and `why_empty`, when there is none.

    Quantiles by linear interpolation, std of the sample (NaN for one value).
    """
    flat = known(values)
    if not len(flat):
        return Missing(why_empty)
    return {
        "count": len(flat),
        "mean": float(flat.mean()),
        "std": float(flat.std(ddof=1)) if len(flat) > 1 else float("nan"),
        "min": float(flat.min()),
        "max": float(flat.max()),
        **dict(zip(QUANTILES, np.quantile(flat, list(QUANTILES.values())).tolist(), strict=True)),
    }


def stats_json(stats: dict[str, float] | Missing) -> dict[str, Any]:
    """Return statistics for strict JSON: null where missing, and `missing` says why."""
    if isinstance(stats, Missing):
        names = ["mean", "std", "min", "max", *QUANTILES]
        return {"count": 0, **dict.fromkeys(names), "missing": stats.reason}
    return stats if stats["count"] > 1 else {**stats, "std": None, "missing": "std: one value has no spread"}


def known(values: npt.ArrayLike) -> Floats:
    """Return the values that are not NaN, flat."""
    flat = np.asarray(values, np.float64).ravel()
    return flat[~np.isnan(flat)]


def finite(value: float) -> float | None:
    """Return a number for strict JSON: null for what is none."""
    return float(value) if np.isfinite(value) else None
