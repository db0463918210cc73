"""Attribution of the TTFT's variance and tail to the parts of the wait.

A part's share of the variance is cov(part, T) / var(T): the parts add up to T, so the shares add up to 1. One below 0
belongs to a part that shrinks as T grows. Intervals come from blocks of requests in the order of submission.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct, UnsetType

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.estimate.table import BY_TIME
from sidelight.correlator.parts import OTHER, TTFT_PARTS
from sidelight.correlator.statistics.bootstrap import (
    block_count,
    block_length,
    degrees_of_freedom,
    interval95,
    resampled_sums,
)
from sidelight.rundir.columns import Floats, Indices, Ints, Texts
from sidelight.rundir.fields import NO_UNIT, UNSET, Count, doc
from sidelight.rundir.printable.numbers import count_of
from sidelight.rundir.stats import Missing

PARTS = tuple(part.name for part in TTFT_PARTS)
TAILS = {"p95": 0.95, "p99": 0.99}
MIN_REQUESTS = 20
LEAST_SPREAD_S = 1e-6  # less is rounding, not a wait
# A part that is known of fewer of the requests is merged for all of them; else being known or not would vary it.
LEAST_KNOWN = 0.9
# How slowly a part with less of the variance varies makes no difference to the intervals.
LEAST_COUNTED = 0.02
# The median of fewer requests at one length of the queue is a chance; they count with the next length.
LEAST_AT_LENGTH = 5
# Of the requests that met a shorter queue: of more that queued most of their TTFT, the length separates nothing.
MOST_QUEUED_BELOW = 0.25


_NAMED = Meta(extra_json_schema={"propertyNames": {"enum": list(PARTS)}})
ByPart = Annotated[dict[str, float | None], _NAMED]
IntervalByPart = Annotated[dict[str, tuple[float, float] | None], _NAMED]


class Tail(Struct, frozen=True, kw_only=True):
    """Requests with a TTFT at or above a quantile of all."""

    from_ms: Annotated[float, doc("That quantile.", "ms")]
    requests: Annotated[Count, doc("Requests at or above it.", "requests")]
    explained: Annotated[Count, doc("Those with a breakdown; means and shares are of these.", "requests")]
    estimated: Annotated[Count, doc("Of these, not by the engine's own numbers.", "requests")]
    expected: Annotated[Count, doc("Of these, never observed by the engine.", "requests")]
    mean_ms: Annotated[float | None, doc("Their mean TTFT; null where there is none.", "ms")]
    error_ms: Annotated[float | None, doc("Mean of their standard errors.", "ms")]
    share: Annotated[ByPart, doc("Shares of their mean TTFT; they add up to 1.", NO_UNIT)]
    above_median_ms: Annotated[ByPart, doc("Their mean parts less those of the middle fifth.", "ms")]


class Threshold(Struct, frozen=True, kw_only=True):
    """Number of waiting requests from which on queueing is most of the TTFT.

    The number is that of the last scrape before submission. Numbers seen by fewer than 5 requests count with the next
    below them.
    """

    waiting: Annotated[
        float | None,
        doc(
            "The least number at and above which the median request spent more than half of its TTFT in the "
            "queue; null where there is none, or where over 25 % of requests below it did.",
            "requests",
        ),
    ]
    requests: Annotated[Count, doc("Requests submitted at or above it.", "requests")]
    fewest: Annotated[float | None, doc("The least number seen at all.", "requests")]
    below: Annotated[Count, doc("Requests submitted below it.", "requests")] = 0
    queued_below: Annotated[Count, doc("Of these, those that queued for most of their TTFT.", "requests")] = 0
    missing: Annotated[str | UnsetType, doc("Why it is not known.")] = UNSET


@dataclass(frozen=True, slots=True, kw_only=True)
class TailShares:
    """Shares by part (`PARTS`), None for one that is merged: the gateway into the network, the others into `other`.

    - `variance_share` and `mean_share` (of the mean) each add up to 1; `ci95` are intervals of the former, None with
      fewer than two blocks and a guess with fewer than 10. Blocks are as long as the TTFT or any part with over 2 % of
      its variance wants them. Measured cover of a 95 % interval of the queue's share: AR(1) 93 to 95 %, lognormal AR(1)
      83 to 95 % (10 to 107 blocks), queue at 80 % load 78 to 87 % (5 to 36), tails without a fourth moment or a part
      that drifts through most of the run 58 to 84 %.
    - `requests` have their parts, of `with_ttft`; `mean_s` and `std_s` are of the former, `p50_s` of the latter.
    - `merged` and `quality` count requests with parts by what their columns say.
    """

    requests: int
    with_ttft: int
    blocks: int
    variance_share: ByPart
    ci95: IntervalByPart
    mean_share: ByPart
    merged: dict[str, int]
    quality: dict[str, int]
    mean_s: float
    std_s: float
    p50_s: float
    tails: dict[str, Tail]
    threshold: Threshold


def tail_shares(parts: Parts, submit_ns: Ints, waiting: Floats | Missing) -> TailShares | Missing:
    """Attribute the TTFT [n], its variance and its tail to parts; `waiting` [n] requests at each submission.

    `other` is what the rest leaves of the TTFT. A part that fewer than 9 of 10 requests tell is merged. Deterministic.
    Missing: fewer than 20 requests with parts, or a TTFT that never varied.
    """
    with_ttft = np.isfinite(parts.ttft_s)
    known = with_ttft & (parts.source != "none")
    if known.sum() < MIN_REQUESTS:
        whose = count_of(known.sum(), "request")
        return Missing(f"only {whose} with a TTFT and the parts of it; at least {MIN_REQUESTS} are needed")
    rows = np.flatnonzero(known)[np.argsort(submit_ns[known], kind="stable")]
    ttft_s = parts.ttft_s[rows]
    if np.ptp(ttft_s) < LEAST_SPREAD_S:
        return Missing("the TTFT never varied")
    columns = _columns(parts, rows)
    names = list(columns)
    table = np.column_stack([columns[name] for name in names])
    shares, blocks, intervals = _variance_shares(table, ttft_s)
    return TailShares(
        requests=len(rows),
        with_ttft=int(with_ttft.sum()),
        blocks=blocks,
        variance_share=_named(names, shares),
        ci95=dict.fromkeys(PARTS) | dict(zip(names, intervals, strict=True)),
        mean_share=_named(names, table.mean(axis=0) / ttft_s.mean()),
        merged=_counted(parts.merged[rows]),
        quality=_counted(parts.quality[rows]),
        mean_s=float(ttft_s.mean()),
        std_s=float(ttft_s.std()),
        p50_s=float(np.quantile(parts.ttft_s[with_ttft], 0.5)),
        tails={
            name: _tail(parts, rows, columns, float(np.quantile(parts.ttft_s[with_ttft], q)))
            for name, q in TAILS.items()
        },
        threshold=_threshold(columns.get("queue"), ttft_s, waiting if isinstance(waiting, Missing) else waiting[rows]),
    )


def _columns(parts: Parts, rows: Indices) -> dict[str, Floats]:
    """Return the parts [n] that are known, in the order of `PARTS`; they add up to the TTFT.

    What a request does not tell stands in its `other`; but of its gateway, in its network.
    """
    columns: dict[str, Floats] = {}
    unknown_gateway = np.zeros(len(rows))
    for name in ("gateway", *(name for name in PARTS if name not in ("gateway", OTHER))):
        values = getattr(parts, f"{name}_s")[rows]
        filled = np.nan_to_num(values) + (unknown_gateway if name == "network" else 0.0)
        if np.isfinite(values).mean() >= LEAST_KNOWN:
            columns[name] = filled
        elif name == "gateway":
            unknown_gateway = filled
    ttft_s = parts.ttft_s[rows]
    columns[OTHER] = ttft_s - np.sum(list(columns.values()), axis=0, initial=0.0)
    return {name: columns[name] for name in PARTS if name in columns}


def _moments(table: Floats, ttft_s: Floats) -> Floats:
    """Return the moments [n, 3 + 2 P] of each request: 1, T, T^2, parts, parts times T; about means."""
    parts, whole = table - table.mean(axis=0), (ttft_s - ttft_s.mean())[:, None]
    return np.concatenate([np.ones_like(whole), whole, whole * whole, parts, parts * whole], axis=1)


def _variance_shares(table: Floats, ttft_s: Floats) -> tuple[Floats, int, list[tuple[float, float] | None]]:
    """Return the parts' variance shares [P], the number of blocks, and the shares' intervals.

    The parts are table[n, P].
    """
    moments = _moments(table, ttft_s)
    shares = _shares(moments.sum(axis=0)[None])[0]
    # A slow part behind a fast one shows in the wait's own autocorrelation too late.
    counted = [table[:, at] for at in np.flatnonzero(np.abs(shares) > LEAST_COUNTED)]
    block = max(block_length(column) for column in (ttft_s, *counted))
    blocks = block_count(len(table), block)
    resampled = _shares(resampled_sums(moments, block))
    # What each request adds to the shares, but for a factor.
    influence = moments[:, 3 + len(shares) :] - shares * moments[:, [2]]
    degrees = degrees_of_freedom(influence, block)
    return (
        shares,
        blocks,
        [interval95(float(share), resampled[:, at], blocks, float(degrees[at])) for at, share in enumerate(shares)],
    )


def _shares(sums: Floats) -> Floats:
    """Return the shares cov(part, T) / var(T) [R, P] from sums of moments. The sums are [R, 3 + 2 P]."""
    size, whole, square = (sums[:, [at]] for at in range(3))
    parts, products = np.split(sums[:, 3:], 2, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold a single value
        return np.asarray((products - parts * whole / size) / (square - whole * whole / size))


def _named(names: list[str], shares: Floats) -> dict[str, float | None]:
    return dict.fromkeys(PARTS) | dict(zip(names, shares.tolist(), strict=True))


def _counted(column: Texts) -> dict[str, int]:
    return {str(value): count for value, count in Counter(column.tolist()).most_common() if value}


def _tail(parts: Parts, rows: Indices, columns: Mapping[str, Floats], from_s: float) -> Tail:
    ttft_s = parts.ttft_s[rows]
    inside = ttft_s >= from_s
    low, high = np.quantile(ttft_s, [0.4, 0.6])
    middle = (ttft_s >= low) & (ttft_s <= high)
    parts_of = {name: (column[inside], column[middle]) for name, column in columns.items()}
    explained = int(inside.sum())
    mean_s = float(ttft_s[inside].mean()) if explained else None
    share: dict[str, float | None] = dict.fromkeys(PARTS)
    above_median_ms: dict[str, float | None] = dict.fromkeys(PARTS)
    if mean_s is not None:
        share |= {name: float(here.mean() / mean_s) for name, (here, _) in parts_of.items()}
        above_median_ms |= {name: 1e3 * float(here.mean() - usual.mean()) for name, (here, usual) in parts_of.items()}
    errors, quality = parts.error_s[rows][inside], parts.quality[rows][inside]
    return Tail(
        from_ms=1e3 * from_s,
        requests=int((parts.ttft_s >= from_s).sum()),
        explained=explained,
        estimated=int((~np.isin(quality, ("exact", BY_TIME))).sum()),
        expected=int((quality == "prior").sum()),
        mean_ms=None if mean_s is None else 1e3 * mean_s,
        error_ms=1e3 * float(np.mean(errors)) if explained and np.isfinite(errors).all() else None,
        share=share,
        above_median_ms=above_median_ms,
    )


def _threshold(queue_s: Floats | None, ttft_s: Floats, waiting: Floats | Missing) -> Threshold:
    if queue_s is None:
        return _no_threshold("the queue is not known apart from the rest")
    if isinstance(waiting, Missing):
        return _no_threshold(waiting.reason)
    known = np.isfinite(waiting) & (ttft_s > 0)
    if known.sum() < MIN_REQUESTS:
        return _no_threshold(f"only {count_of(known.sum(), 'request')} with a sample of the queue's length beside")
    length, queue_share = waiting[known], queue_s[known] / ttft_s[known]
    threshold: float | None = None
    pooled = np.zeros(len(length), dtype=np.bool_)
    lengths = np.unique(length)
    for shortest in lengths[::-1].tolist():
        pooled |= length == shortest
        if pooled.sum() < LEAST_AT_LENGTH:
            continue
        if not np.median(queue_share[pooled]) > 0.5:
            break
        threshold = shortest
        pooled[:] = False
    below = queue_share[length < threshold] if threshold is not None else queue_share[:0]
    if (queued := int((below > 0.5).sum())) > MOST_QUEUED_BELOW * len(below):
        fewer = "none" if threshold == 1 else f"fewer than {threshold:g}"
        return _no_threshold(
            f"of {len(below):,} requests before which the last scrape showed {fewer} waiting, {queued:,} queued for "
            "most of their TTFT"
        )
    return Threshold(
        waiting=threshold,
        requests=0 if threshold is None else int((length >= threshold).sum()),
        fewest=float(lengths[0]),
        below=len(below),
        queued_below=queued,
    )


def _no_threshold(reason: str) -> Threshold:
    return Threshold(waiting=None, requests=0, fewest=None, missing=reason)
