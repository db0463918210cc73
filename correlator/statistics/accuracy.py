"""How far estimates from scrapes are off where exact times are known: the method measures itself on the very run."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.estimate.table import Attribution
from sidelight.rundir.columns import Bools, Floats
from sidelight.rundir.fields import NO_UNIT, Count, doc
from sidelight.rundir.stats import Missing

Z90 = 1.6448536
EXACT_S = 0.002  # what is called exact may be off by less
ROUNDING_S = 1e-6


class PartError(Struct, frozen=True, kw_only=True):
    """Errors of the estimates of one part."""

    compared: Annotated[Count, doc("Requests with exact times and an estimate.", "requests")]
    wape: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        doc("Sum of |error| over the sum of the truth; null where that is 0.", NO_UNIT),
    ]
    p95_ms: Annotated[float, Meta(ge=0), doc("95th percentile of |error|.", "ms")]
    covered_90: Annotated[float, Meta(ge=0, le=1), doc("Share of 90 % intervals that hold the truth.", NO_UNIT)]
    exact_but_wrong: Annotated[Count, doc("Values called exact that are off by more than 2 ms.", "requests")]


def agreement(parts: Parts, attribution: Attribution) -> dict[str, PartError] | Missing:
    """Compare estimated with exact queue and prefill times of the requests that have both; rows of both are n."""
    exact = np.isin(parts.source, ("trace", "response"))
    accuracy = {}
    for name in ("queue", "prefill"):
        truth_s = np.where(exact, getattr(parts, f"{name}_s"), np.nan)
        estimate_s, sd_s = getattr(attribution, f"{name}_s"), getattr(attribution, f"{name}_sd_s")
        error_s = np.abs(estimate_s - truth_s)
        known = np.isfinite(error_s)
        if known.any():
            accuracy[name] = _error(error_s[known], truth_s[known], sd_s[known], attribution.quality[known] == "exact")
    if accuracy:
        return accuracy
    if not exact.any():
        return Missing("no request has exact times to measure the estimates by")
    return Missing("; ".join(dict.fromkeys(attribution.reason[exact & (attribution.quality == "none")].tolist())))


def _error(error_s: Floats, truth_s: Floats, sd_s: Floats, exact: Bools) -> PartError:
    whole_s = float(truth_s.sum())
    return PartError(
        compared=len(error_s),
        wape=float(error_s.sum()) / whole_s if whole_s > 0 else None,
        p95_ms=1e3 * float(np.quantile(error_s, 0.95)),
        covered_90=float((error_s <= Z90 * sd_s + ROUNDING_S).mean()),
        exact_but_wrong=int((error_s[exact] > EXACT_S).sum()),
    )
