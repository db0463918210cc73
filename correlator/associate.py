"""How client latency moves with server load: rank correlation over a range of lags, with an interval.

Spearman's rho of two series that are sampled in time. Neighbours in time resemble each other, so the interval counts
effective, not nominal, samples: n_eff = n (1 - r_x r_y) / (1 + r_x r_y), with r the autocorrelation of the ranks at
lag one (Bayley and Hammersley 1946, first term), and Fisher's z with the standard error sqrt(1.06 / (n_eff - 3)) for
ranks (Fieller, Hartley and Pearson 1957).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Stamps = npt.NDArray[np.int64]

LAGS_S = tuple(float(x) for x in np.round(np.arange(-2.0, 2.01, 0.25), 2))
MIN_PAIRS = 10
Z95 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Association:
    """One client measure against one server measure at the lag of greatest |rho|, and at lag zero.

    The best lag is a chosen maximum: its interval is optimistic. `ci95` is None where fewer than four effective samples
    are left.
    """

    client: str
    server: str
    lag_s: float
    rho: float
    ci95: tuple[float, float] | None
    rho_lag0: float | None
    pairs: int


def associate(
    *, client: str, at_ns: Stamps, values: Floats, server: str, gauge_ns: Stamps, gauge: Floats
) -> Association | str:
    """Correlate a client measure [n], one value a request at its submission, with a gauge [t] sampled by scrapes.

    The gauge is read by its last sample at or before `at_ns + lag`. NaN on either side drops the pair. Returns the
    reason where there is no answer: fewer than 10 pairs, or a side that never changes.
    """
    order = np.argsort(at_ns, kind="stable")
    stamps, measured = at_ns[order], values[order]
    by_lag = {lag_s: _paired(stamps + int(lag_s * 1e9), measured, gauge_ns, gauge) for lag_s in LAGS_S}
    rhos = {lag_s: rho for lag_s, (x, y) in by_lag.items() if (rho := spearman(x, y)) is not None}
    if not rhos:
        return _why_not(*by_lag[0.0])
    lag_s = max(rhos, key=lambda lag: (abs(rhos[lag]), -abs(lag)))
    x, y = by_lag[lag_s]
    return Association(
        client=client,
        server=server,
        lag_s=lag_s,
        rho=rhos[lag_s],
        ci95=_interval(rhos[lag_s], x, y),
        rho_lag0=rhos.get(0.0),
        pairs=len(x),
    )


def spearman(x: Floats, y: Floats) -> float | None:
    """Return Spearman's rho of two equally long series, ties at their mean rank; None below 10 pairs or if a side is
    constant.
    """
    if len(x) < MIN_PAIRS:
        return None
    a, b = ranks(x), ranks(y)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return None if scale == 0 else max(-1.0, min(1.0, float(a @ b) / scale))


def ranks(values: Floats) -> Floats:
    """Return ranks from 1, ties at the mean of the ranks they share."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    return np.asarray(mean_rank[inverse], dtype=np.float64)


def _paired(at_ns: Stamps, values: Floats, gauge_ns: Stamps, gauge: Floats) -> tuple[Floats, Floats]:
    if len(gauge_ns) == 0:
        return values[:0], values[:0]
    last = np.searchsorted(gauge_ns, at_ns, side="right") - 1
    seen = np.where(last >= 0, gauge[np.maximum(last, 0)], np.nan)
    # Past the last scrape the gauge is unknown, not unchanged.
    seen = np.where(at_ns > gauge_ns[-1], np.nan, seen)
    usable = np.isfinite(seen) & np.isfinite(values)
    return values[usable], seen[usable]


def _why_not(x: Floats, y: Floats) -> str:
    if len(x) < MIN_PAIRS:
        return f"only {len(x)} requests have a gauge sample beside them; at least {MIN_PAIRS} are needed"
    return "the gauge never changed" if np.ptp(y) == 0 else "the client measure never changed"


def _interval(rho: float, x: Floats, y: Floats) -> tuple[float, float] | None:
    product = _autocorrelation(ranks(x)) * _autocorrelation(ranks(y))
    effective = len(x) * min(1.0, (1 - product) / (1 + product))
    if effective <= 3:
        return None
    centre = math.atanh(max(-0.999999, min(0.999999, rho)))
    half = Z95 * 1.03 / math.sqrt(effective - 3)
    return math.tanh(centre - half), math.tanh(centre + half)


def _autocorrelation(values: Floats) -> float:
    centred = values - values.mean()
    total = float(centred @ centred)
    return 0.0 if total == 0 else float(centred[:-1] @ centred[1:]) / total
