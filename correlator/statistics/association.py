"""How client latency moves with server load: rank correlations over a range of lags, with intervals.

Spearman's rho of what each request met on its way: its latency, and the engine's load at its submission or a while
before or after. Requests that follow one another resemble each other, so that intervals come from resampling blocks of
them (`correlator.statistics.bootstrap`), on Fisher's z of the ranks' correlation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from sidelight.correlator.statistics.bootstrap import block_count, block_length, interval95, resampled_sums
from sidelight.correlator.statistics.server_load import server_loads
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir import fields
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import NO_UNIT, UNSET, Count, doc
from sidelight.rundir.printable.numbers import count_of
from sidelight.rundir.stats import Missing
from sidelight.scraper.series.table import EndpointSeries

LAGS_S = tuple(float(x) for x in np.arange(-16, 17) / 2)
MIN_PAIRS = 10
# A lag that loses more of the pairs than this is another part of the run, and no candidate for the best.
LEAST_PAIRS = 0.75
LEAST_KNOWN = 0.9
LARGEST_RHO = 0.999999
NOTHING_LEFT = 1e-9
_AT_ONCE = 1 << 23  # moments of pairs in memory
AtLag = Callable[[float], Floats]  # from a lag, s, to what each request met then [n]


Rho = Annotated[float, Meta(ge=-1, le=1)]
Interval95 = Annotated[
    tuple[float, float] | None,
    doc("Its 95 % interval; null with fewer than two blocks, a guess with fewer than 10.", NO_UNIT),
]


class Association(Struct, frozen=True, kw_only=True):
    """One client measure against one server quantity: without lag, and at the lag of greatest |rho|."""

    client: Annotated[str, doc("The client's measure.")]
    server: Annotated[str, doc("The engine's quantity.")]
    combined: Annotated[
        str,
        doc(
            "Of which engines the quantity is: one, own (each request's), sum, max or ratio over several; empty: "
            "not known."
        ),
    ] = ""
    lag_s: Annotated[
        float | None, doc("Lag of the greatest |rho|; above 0 it is the quantity after submission.", "s")
    ] = None
    rho: Annotated[Rho | None, doc("Rank correlation at that lag, a maximum and so optimistic.", NO_UNIT)] = None
    ci95: Interval95 = None
    rho_lag0: Annotated[Rho | None, doc("Rank correlation at submission.", NO_UNIT)] = None
    ci95_lag0: Interval95 = None
    partial_rho: Annotated[
        Rho | None, doc("Rank correlation at submission, once the ranks of `given` are regressed out.", NO_UNIT)
    ] = None
    ci95_partial: Interval95 = None
    given: Annotated[tuple[str, ...], doc("What partial_rho holds constant.")] = ()
    pairs: Annotated[Count, doc("Requests with both at submission.", "requests")] = 0
    blocks: Annotated[Count, doc("Blocks that the intervals rest on.", "blocks")] = 0
    missing: fields.Missing = UNSET


def associations(
    requests: RequestLog, measures: Mapping[str, Floats], endpoints: Sequence[EndpointSeries]
) -> list[Association]:
    """Correlate client measures (by name, [n], NaN where unknown) with each quantity of `server_load.QUANTITIES`.

    The quantity is that of the last scrape at or before submission + lag, lags -8 to 8 s by 0.5 s. Only ranks count,
    so the unit of a measure does not; ties share their mean rank. NaN on either side drops the pair. No answer, and the
    reason: an engine that does not tell, fewer than 10 pairs, or a side that never changes. Deterministic. Cost:
    n log n for each measure, quantity and lag.
    """
    order = np.argsort(requests.submit_ns, kind="stable")
    order = order[requests.submit_ns[order] >= 0]
    loads = server_loads(requests, endpoints)
    submit_ns = requests.submit_ns
    # Each quantity [n] at a lag, requests in the order of submission: at all lags they would be 264 bytes a request.
    lagged = {
        name: lambda lag_s, load=load: load.at(submit_ns + int(lag_s * 1e9))[order]
        for name, load in loads.items()
        if not isinstance(load, Missing)
    }
    tokens = {
        name: np.where(column >= 0, column, np.nan)[order]
        for name, column in (("input_tokens", requests.input_tokens), ("output_tokens", requests.output_tokens))
    }
    results: list[Association] = []
    for client, values in measures.items():
        # How long a reply becomes is not known at its first token, and cannot have delayed it.
        controls = {name: column for name, column in tokens.items() if client != "ttft_ms" or name == "input_tokens"}
        known = _associated(client, values[order], lagged, controls)
        for server, load in loads.items():
            if isinstance(load, Missing):
                results.append(Association(client=client, server=server, missing=load.reason))
            else:
                results.append(replace(known[server], combined=load.combined))
    return results


def ranks(values: Floats) -> Floats:
    """Return ranks from 1, ties at the mean of the ranks they share."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(counts) - (counts - 1) / 2
    return np.asarray(mean_rank[inverse], dtype=np.float64)


def rank_correlation(x: Floats, y: Floats) -> float | None:
    """Return Spearman's rho of two columns [n], NaN where unknown; None below 10 pairs or if a side is constant."""
    return _rho(_ranked(x, y))


def _associated(
    client: str, measured: Floats, lagged: Mapping[str, AtLag], tokens: Mapping[str, Floats]
) -> dict[str, Association]:
    zero = {name: at_lag(0.0) for name, at_lag in lagged.items()}
    best = {name: _best(measured, at_lag) for name, at_lag in lagged.items()}
    given: dict[str, tuple[str, ...]] = {}
    tables: dict[tuple[str, str], Floats] = {}
    for name, lag_s in best.items():
        if lag_s is not None:
            others = {other: values for other, values in zero.items() if other != name}
            left, given[name] = _left_over(measured, zero[name], {**others, **tokens})
            tables[name, "best"] = _ranked(measured, lagged[name](lag_s))
            tables[name, "zero"] = _ranked(measured, zero[name])
            tables[name, "partial"] = left
    block = block_length(measured[np.isfinite(measured)])
    rhos = {key: _rho(table) for key, table in tables.items()}
    intervals = _intervals(tables, rhos, block)
    by_server = {}
    for name, lag_s in best.items():
        pairs = _ranked(measured, zero[name])
        count = int(np.isfinite(pairs[:, 0]).sum())
        known = Association(client=client, server=name, pairs=count)
        if lag_s is None:
            by_server[name] = replace(known, missing=_why_not(measured, zero[name]))
            continue
        by_server[name] = replace(
            known,
            lag_s=lag_s,
            rho=rhos[name, "best"],
            ci95=intervals[name, "best"],
            rho_lag0=rhos[name, "zero"],
            ci95_lag0=intervals[name, "zero"],
            partial_rho=rhos[name, "partial"],
            ci95_partial=intervals[name, "partial"],
            given=given[name],
            blocks=block_count(count, block),
        )
    return by_server


def _best(measured: Floats, at_lag: AtLag) -> float | None:
    """Return the lag of the greatest |rho|, s, the nearest to 0 among equals; None for no rho."""
    pairs, rhos, of_all = {}, {}, ranks(measured[np.isfinite(measured)])
    for lag_s in LAGS_S:
        values = at_lag(lag_s)
        usable = np.isfinite(values) & np.isfinite(measured)
        pairs[lag_s] = int(usable.sum())
        of_usable = of_all if pairs[lag_s] == len(of_all) else ranks(measured[usable])
        rhos[lag_s] = _rho(np.column_stack((of_usable, ranks(values[usable]))))
    least = LEAST_PAIRS * max(pairs.values())
    known = {lag_s: abs(rho) for lag_s, rho in rhos.items() if rho is not None and pairs[lag_s] >= least}
    return max(known, key=lambda lag_s: (known[lag_s], -abs(lag_s))) if known else None


def _why_not(measured: Floats, values: Floats) -> str:
    usable = np.isfinite(measured) & np.isfinite(values)
    if usable.sum() < MIN_PAIRS:
        return (
            f"only {count_of(usable.sum(), 'request')} with both a value and a sample; at least {MIN_PAIRS} are needed"
        )
    return "the quantity never changed" if np.ptp(values[usable]) == 0 else "the client measure never changed"


def _ranked(x: Floats, y: Floats) -> Floats:
    """Return both sides' ranks [n, 2] among the pairs, NaN where there is none."""
    usable = np.isfinite(x) & np.isfinite(y)
    both = np.full((len(x), 2), np.nan)
    if usable.any():
        both[usable, 0], both[usable, 1] = ranks(x[usable]), ranks(y[usable])
    return both


def _left_over(x: Floats, y: Floats, others: Mapping[str, Floats]) -> tuple[Floats, tuple[str, ...]]:
    """Return both sides' rank residuals [n, 2] after regressing out controls, and the controls' names.

    A quantity that is unknown for more than a tenth of the pairs, or never changes, cannot be a control. All NaN where
    too few pairs are left, or where the controls leave nothing of a side.
    """
    nothing = np.full((len(x), 2), np.nan)
    usable = np.isfinite(x) & np.isfinite(y)
    if not usable.any():
        return nothing, ()
    given = tuple(
        name
        for name, values in others.items()
        if np.isfinite(values[usable]).mean() >= LEAST_KNOWN and np.nanmin(values[usable]) < np.nanmax(values[usable])
    )
    for name in given:
        usable &= np.isfinite(others[name])
    if usable.sum() < MIN_PAIRS + len(given):
        return nothing, given
    sides = np.column_stack([ranks(side[usable]) for side in (x, y)])
    controls = np.column_stack([np.ones(len(sides)), *(ranks(others[name][usable]) for name in given)])
    left = sides - controls @ np.linalg.lstsq(controls, sides)[0]
    if (left.var(axis=0) > NOTHING_LEFT * sides.var(axis=0)).all():
        nothing[usable] = left
    return nothing, given


def _rho(table: Floats) -> float | None:
    """Return the correlation of two sides [n, 2]; None below 10 pairs or if a side is constant."""
    pairs = table[np.isfinite(table[:, 0])]
    if len(pairs) < MIN_PAIRS:
        return None
    a, b = (pairs[:, side] - pairs[:, side].mean() for side in (0, 1))
    scale = math.sqrt(float(a @ a) * float(b @ b))
    return None if scale == 0 else max(-1.0, min(1.0, float(a @ b) / scale))


def _intervals(
    tables: Mapping[tuple[str, str], Floats], rhos: Mapping[tuple[str, str], float | None], block: int
) -> dict[tuple[str, str], tuple[float, float] | None]:
    """Return the intervals of correlations, all of them from the same resamples; None for no correlation."""
    intervals: dict[tuple[str, str], tuple[float, float] | None] = {}
    for (key, table), sums in zip(tables.items(), _resampled_moments(list(tables.values()), block), strict=True):
        rho = rhos[key]
        if rho is None:
            intervals[key] = None
            continue
        size, a, b, aa, bb, ab = sums.T
        with np.errstate(divide="ignore", invalid="ignore"):  # a resample may hold a single value
            resampled = (ab - a * b / size) / np.sqrt((aa - a * a / size) * (bb - b * b / size))
            z = np.arctanh(np.clip(resampled, -LARGEST_RHO, LARGEST_RHO))
        blocks = block_count(int(np.isfinite(table[:, 0]).sum()), block)
        interval = interval95(math.atanh(max(-LARGEST_RHO, min(LARGEST_RHO, rho))), z, blocks)
        # A perfect correlation is perfect in every resample.
        intervals[key] = (
            None if interval is None else (min(math.tanh(interval[0]), rho), max(math.tanh(interval[1]), rho))
        )
    return intervals


def _resampled_moments(tables: Sequence[Floats], block: int) -> Iterator[Floats]:
    """Yield the sums [R, 6] of the moments of each table's resamples; all have the same pairs."""
    at_once = max(1, _AT_ONCE // (6 * len(tables[0]))) if tables and len(tables[0]) else 1
    for begin in range(0, len(tables), at_once):
        moments = np.concatenate([_moments(table) for table in tables[begin : begin + at_once]], axis=1)
        sums = resampled_sums(moments, block)
        yield from (sums[:, column : column + 6] for column in range(0, moments.shape[1], 6))


def _moments(table: Floats) -> Floats:
    """Return the moments [n, 6] of each pair: the count, both sides about their means, their squares, their product;
    else 0.
    """
    usable = np.isfinite(table[:, 0])
    moments = np.zeros((len(table), 6))
    if usable.any():
        a, b = (table[usable] - table[usable].mean(axis=0)).T
        moments[usable] = np.column_stack((np.ones(len(a)), a, b, a * a, b * b, a * b))
    return moments
