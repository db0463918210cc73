"""Estimates of each request's queue and prefill time from scrapes alone, with errors and quality.

Engines that observe both when a request ends show, between two scrapes, how many ended and what their times add up to.
The client knows which of its requests ended there and how long each waited. From both follows each request's share.
Spans and timings in replies are exact where there are any, and take precedence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sidelight.correlator.estimate.assignment import IntervalTotals, Members, assign
from sidelight.correlator.estimate.conditioning import Estimate, estimate_parts, mark_impossible
from sidelight.correlator.estimate.intervals import Observed, ScrapeIntervals, observe, pooled
from sidelight.correlator.estimate.priors import Network, assume_network, measure_network
from sidelight.correlator.estimate.replicas import TOKENS, aligned, divided
from sidelight.correlator.estimate.table import Attribution, nothing, put
from sidelight.correlator.estimate.waits import Waits, read_waits, select
from sidelight.correlator.requests import RequestColumns, route
from sidelight.rundir.columns import Bools, Floats, Indices, texts_of
from sidelight.rundir.stats import Missing
from sidelight.scraper.series.table import EndpointSeries

TIGHT = 3
CLEAR_JITTERS = 3.0
NO_FIRST = "it had no first token to measure a wait by"
NOT_ENDED = "the engine did not end it, so that its histograms do not hold it"
NO_INTERVAL = (
    "no page counted its end: it was broken off, or ended before the first scrape, after the last, or at a restart"
)
NOT_SCRAPED = "the server that it was sent to was not scraped"
APART = "the engines were not scraped at the same times"


def attribute(
    requests: RequestColumns,
    scrapes: Sequence[EndpointSeries],
    observed: Sequence[Observed | Missing] | None = None,
) -> Attribution:
    """Estimate every request's queue and prefill time from the scrapes of one or several engines.

    Over the requests of a scrape interval in which only ours ended, estimates add up to what the engine's sums
    moved by. With several engines, a request belongs to the one whose address it was sent to; where addresses do not
    tell, engines are taken together, and apart again where token sums allow it. Cost: linear in requests and scrapes.

    `observed` is what `observe` returned for each of the scrapes, where the caller has it already.

    Nothing is estimated, with the reason for each request:
    - no engine whose histograms of queue and prefill time are observed at the end of a request;
    - fewer than 5 scrape intervals in which our requests ended;
    - several engines, scraped at different times, and addresses that do not tell them apart.
    """
    table = nothing(len(requests.submit_ns), NOT_SCRAPED)
    observed = [observe(endpoint) for endpoint in scrapes] if observed is None else observed
    usable = np.array([isinstance(engine, Observed) for engine in observed], dtype=np.bool_)
    for rows, members in route(requests.endpoint_url, [endpoint.url for endpoint in scrapes], usable):
        engines = [engine for at in members if isinstance(engine := observed[at], Observed)]
        reasons = dict.fromkeys(reason.reason for at in members if isinstance(reason := observed[at], Missing))
        part = (
            _attributed(requests, rows, engines) if engines else nothing(len(rows), "; ".join(reasons) or NOT_SCRAPED)
        )
        put(table, rows, part)
    return table


def _attributed(requests: RequestColumns, rows: Indices, engines: list[Observed]) -> Attribution:
    if not len(rows):
        return nothing(0, "")
    submit_ns = requests.submit_ns[rows]
    origin_ns = int(submit_ns[submit_ns >= 0].min(initial=np.iinfo(np.int64).max))
    waits = read_waits(requests, rows, origin_ns)
    timed = np.isfinite(waits.wait_s)
    ends = [engine.ends for engine in engines]
    parts = aligned(ends) if len(ends) > 1 else ends
    if parts is None:
        return nothing(len(rows), APART)
    intervals, members = _place_ends(waits, parts, origin_ns, max(engine.stamp_error_s for engine in engines))
    # A request without a first token counts in the sums like an unmatched one: it has no wait to divide.
    silent = np.bincount(members.interval[(members.interval >= 0) & ~timed], minlength=len(intervals))
    members = replace(
        members,
        interval=members.interval[timed],
        clear_s=members.clear_s[timed],
        unmatched=members.unmatched + silent,
    )
    timed_waits = select(waits, timed)
    members = mark_impossible(timed_waits, intervals, members)
    network = _network(timed_waits, engines, intervals, origin_ns)
    never_waiting = all(engine.never_waiting for engine in engines)
    estimates = estimate_parts(
        timed_waits, intervals, members, network, origin_ns=origin_ns, never_waiting=never_waiting
    )
    if isinstance(estimates, Missing):
        return nothing(len(rows), estimates.reason)
    # Without token counts, ranks prove it where there is no other traffic: one engine, and as many ends as ours.
    proven = members.verified | (not members.checked and len(engines) == 1 and members.by_rank)
    return _table(waits, timed, intervals, members, network, estimates, proven)


def _place_ends(
    waits: Waits, parts: list[ScrapeIntervals], origin_ns: int, stamp_error_s: float
) -> tuple[ScrapeIntervals, Members]:
    """Put every request that the engine ended into an interval; the members' columns are of all requests."""
    whole = pooled(parts) if len(parts) > 1 else parts[0]
    tokens = np.column_stack((waits.prompt_tokens, waits.output_tokens))
    ended = np.flatnonzero(waits.ended)
    names = TOKENS if all(name in whole.sums for name in TOKENS) else ()
    members = assign(
        waits.end_s[ended],
        tokens[ended][:, : len(names)],
        _totals(whole, names, origin_ns),
        stamp_error_s=stamp_error_s,
    )
    intervals = whole
    if len(parts) > 1 and names:
        intervals, members = divided(whole, parts, members, tokens[ended])
    interval = np.full(len(waits.end_s), -1, dtype=np.intp)
    clear_s = np.full(len(waits.end_s), -np.inf)
    interval[ended], clear_s[ended] = members.interval, members.clear_s
    return intervals, replace(members, interval=interval, clear_s=clear_s)


def _totals(intervals: ScrapeIntervals, names: Sequence[str], origin_ns: int) -> IntervalTotals:
    columns = [np.rint(intervals.sums[name]) for name in names]
    return IntervalTotals(
        start_s=(intervals.start_ns - origin_ns) / 1e9,
        end_s=(intervals.end_ns - origin_ns) / 1e9,
        lost=intervals.lost,
        count=intervals.count,
        tokens=np.column_stack(columns) if columns else np.zeros((len(intervals), 0)),
    )


def _network(waits: Waits, engines: list[Observed], intervals: ScrapeIntervals, origin_ns: int) -> Network:
    """Estimate the network's time, from the engine's own TTFT if the only engine reports it."""
    counted_ends = ~intervals.lost
    queue_s, prefill_s = intervals.sums["queue"][counted_ends].sum(), intervals.sums["prefill"][counted_ends].sum()
    served_s = float(queue_s + prefill_s) / max(int(intervals.count[counted_ends].sum()), 1)
    firsts = engines[0].firsts
    if len(engines) > 1 or firsts is None:
        return assume_network(waits, max(float(np.mean(waits.wait_s)) - served_s, 0.0) if len(waits.wait_s) else 0.0)
    counted = ~firsts.lost
    ttft_s = float(firsts.sums["ttft"][counted].sum()) / max(int(firsts.count[counted].sum()), 1)
    names = [name for name in ("prompt_tokens",) if name in firsts.sums]
    members = assign(
        waits.first_s,
        waits.prompt_tokens[:, None][:, : len(names)],
        _totals(firsts, names, origin_ns),
        stamp_error_s=engines[0].stamp_error_s,
    )
    return measure_network(waits, firsts, members, max(ttft_s - served_s, 0.0))


def _within_waits(estimates: Estimate, wait_s: Floats) -> tuple[Floats, Floats]:
    """Return parts and standard deviations [m, 3], with queue and prefill limited to the wait.

    Where they are longer than the wait that holds them, because the network is not known exactly, both are reduced in
    proportion; every standard deviation grows by the change.
    """
    served_s = estimates.value[:, :2].sum(axis=1)
    over_s = np.maximum(served_s - wait_s, 0.0)
    give = np.divide(over_s, served_s, out=np.zeros(len(served_s)), where=over_s > 0)
    moved = np.column_stack((estimates.value[:, :2] * give[:, None], over_s))
    value = estimates.value.copy()
    value[:, :2] -= moved[:, :2]
    return value, np.hypot(estimates.sd, moved)


def _table(
    waits: Waits,
    timed: Bools,
    intervals: ScrapeIntervals,
    members: Members,
    network: Network,
    estimates: Estimate,
    proven: Bools,
) -> Attribution:
    table = nothing(len(timed), NO_FIRST)
    rows = np.flatnonzero(timed)
    interval = estimates.interval
    inside = interval >= 0
    members_of = np.bincount(interval[inside], minlength=len(intervals))
    count = np.where(inside, members_of[interval], 0)
    alone = inside & (members.unmatched[interval] == 0) & ~members.inconsistent[interval]
    clear = members.verified[interval] | (members.clear_s > CLEAR_JITTERS * members.jitter_s)
    sums = np.column_stack((intervals.sums["queue"], intervals.sums["prefill"]))[interval]
    wait_s = waits.wait_s[rows]
    exact = alone & (count == 1) & proven[interval] & clear & (sums.sum(axis=1) <= wait_s)
    value, sd = _within_waits(estimates, wait_s)
    value[:, :2] = np.where(exact[:, None], np.maximum(sums, 0.0), value[:, :2])
    sd[:, :2] = np.where(exact[:, None], 0.0, sd[:, :2])
    network_s = np.minimum(network.value_s, np.maximum(wait_s - value[:, :2].sum(axis=1), 0.0))
    columns = {"queue": (value[:, 0], sd[:, 0]), "prefill": (value[:, 1], sd[:, 1])}
    if network.measured:
        columns["network"] = (network_s, np.sqrt(network.variance))
        columns["engine_frontend"] = (wait_s - network_s - value[:, 0] - value[:, 1], sd[:, 2])
    else:
        columns["engine_frontend"] = (wait_s - value[:, 0] - value[:, 1], np.sqrt(sd[:, 2] ** 2 + network.variance))
    for name, (values, errors) in columns.items():
        getattr(table, f"{name}_s")[rows], getattr(table, f"{name}_sd_s")[rows] = values, errors
    quality = np.select(
        [~inside, exact, alone & (count <= TIGHT), alone], ["prior", "exact", "tight", "shared"], "mixed_traffic"
    )
    table.quality[rows] = texts_of(quality)
    table.reason[rows] = texts_of(np.where(inside, "", np.where(waits.ended[rows], NO_INTERVAL, NOT_ENDED)))
    table.interval[rows] = interval
    return table
