"""Matching of the engine's records to requests by time alone.

It serves engines that report exact times without any id. A record fits a request that it lies within: it arrived after
it was sent, and its first and last token were before the client had them. Of those, the ways there and back decide:
they are much alike for all requests, and how far a pair is from them, in units of their spread, is its cost. A pair
counts only where nothing else comes close, and where it is nearer than records of other clients come by chance: its own
may be lost.

A record is a row of TensorRT-LLM's `/perf_metrics`, or a span whose trace and ids are of no request (`span_matching`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sidelight.correlator.exact.table import TIMES, ExactTimes
from sidelight.correlator.requests import address
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Bools, Floats, Ints, Texts
from sidelight.rundir.stats import Missing
from sidelight.scraper.perf_metrics import Timings

# How far from the usual ways a pair may be, at most and at least; in between it is as far as chance lets it.
MOST_COST = 28.0
LEAST_COST = 6.0
MOST_WAY_S = 1.0
LEAST_REQUESTS = 12  # whose ways tell what is usual, and how often chance would do
SLACK_NS = 2_000_000  # both clocks tick; stamps are of the same moment to less
_LEAST_SPREAD_S = 0.3e-3
_FIRST_SPREAD_S = 2e-3
_FREEDOM = 3.0  # of Student's t: ways have long tails
_ROUNDS = 4
_BLOCK = 2**20
TOO_FEW = f"fewer than {LEAST_REQUESTS} requests tell what ways are usual"


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Settings for a join by time: the records' name in reasons, and their interchangeability.

    alike_s         records whose queue, prefill and decode differ by less may stand for each other
    margin          by how much less a pair must cost than any other: the odds are e^margin to 1
    chance_ratio    of the pairs that count, the greatest share that may be the record of another client in place of one
                    that was lost
    clock_is_known  stamps are by our clock, to `error_ns`; else by one that is off by no more than that
    """

    name: str
    plural: str
    alike_s: float
    margin: float
    chance_ratio: float
    clock_is_known: bool


# Margin: at 1 in 1,000 for each that is just so, far fewer than 0.5 % of all are wrong.
PERF_METRICS = Records(
    name="record of /perf_metrics",
    plural="records of /perf_metrics",
    alike_s=1.5e-3,  # below what is asked of values that are called exact: which of the two it is does not matter
    margin=7.0,
    chance_ratio=0.002,
    clock_is_known=True,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """The record of each of n requests.

    row           place in `timings`, -1 for none
    reason        why there is none; "" where there is one, and of requests that did not end well
    ambiguous     which requests have none although one fits
    """

    timings: Timings
    row: Ints
    reason: Texts
    ambiguous: Bools


class _Pairs(NamedTuple):
    """Columns of n requests and records that may belong together; ways [n, 3] in s: in, out, and from end to end."""

    request: Ints
    record: Ints
    ways_s: Floats
    cost: Floats


def matched(requests: RequestLog, timings: Timings, of: Records = PERF_METRICS) -> Matched:
    """Find the record of each request that ended well.

    - one record to one request; those of other clients stay without
    - of a page whose host is that of requests, records are theirs alone
    - two records that are alike, as `of` has it, may stand for each other
    """
    size = len(requests.trace_id)
    usable = (requests.status == "ok") & (requests.submit_ns >= 0) & (requests.end_ns >= 0)
    unfit = f"no {of.name} {'fits it' if len(timings) else 'came'}"
    reason = np.where(usable, unfit, "").astype(np.object_)
    groups: list[_Pairs] = []
    may_have = np.zeros(size, dtype=np.bool_)
    for places, records in _groups(requests, timings, usable):
        pairs = _costed(_pairs(requests, timings, places, records), of)
        if isinstance(pairs, Missing):
            reason[places] = pairs.reason
        else:
            groups.append(pairs)
            may_have[places] = True
    row = np.full(size, -1, dtype=np.int64)
    ambiguous = np.zeros(size, dtype=np.bool_)
    if groups:
        pairs = _Pairs(*(np.concatenate(column) for column in zip(*groups, strict=True)))
        best = _greedy(pairs, size, len(timings))
        reason[pairs.request[best]] = f"a {of.name} fits it, but so would one by chance"
        ambiguous[pairs.request[best]] = True
        best = best[pairs.cost[best] <= _most_cost(pairs, best, timings, of, int(may_have.sum()))]
        records_too, requests_too = _rivals(pairs, best, timings, of, size)
        for pair in best.tolist():
            place = pairs.request[pair]
            if records_too[place]:
                reason[place] = f"{records_too[place] + 1} {of.plural} fit it"
            elif requests_too[place]:
                reason[place] = f"its {of.name} fits {requests_too[place] + 1} requests"
            else:
                row[place], reason[place], ambiguous[place] = pairs.record[pair], "", False
    return Matched(timings=timings, row=row, reason=reason, ambiguous=ambiguous)


def by_record(
    matched: Matched | None, rows: Sequence[int], why: Sequence[list[str]]
) -> Iterator[tuple[int, ExactTimes]]:
    """Give the times of the records that fit; their stamps are by our clock as far as the engine's could be read."""
    if matched is None:
        return
    timings = matched.timings
    for row in rows:
        place = int(matched.row[row])
        if place < 0:
            why[row].append(matched.reason[row])
            continue
        times_s: dict[str, Any] = {f"{name}_s": float(getattr(timings, f"{name}_s")[place]) for name in TIMES}
        arrival_ns, end_ns = int(timings.arrival_ns[place]), int(timings.last_token_ns[place])
        yield row, ExactTimes(**times_s, arrival_ns=arrival_ns, end_ns=end_ns, clock=timings.url[place])


def _groups(requests: RequestLog, timings: Timings, usable: Bools) -> Iterator[tuple[Ints, Ints]]:
    """Give the requests that may be of each page's engine, and its records.

    They are the requests to the page's address; else, as behind a gateway, those to an address without a page.
    """
    urls = sorted(set(timings.url.tolist()))
    pages = {address(url) for url in urls}
    places = [address(url) for url in requests.endpoint_url.tolist()]
    elsewhere = np.array([place not in pages for place in places], dtype=np.bool_)
    for url in urls:
        here = np.array([place == address(url) for place in places], dtype=np.bool_)
        yield np.flatnonzero(usable & (here if here.any() else elsewhere)), np.flatnonzero(timings.url == url)


def _pairs(requests: RequestLog, timings: Timings, places: Ints, records: Ints) -> _Pairs:
    """Return who fits within whom, and the ways; a block of pairs at a time, since most do not."""
    places = places[np.argsort(requests.submit_ns[places], kind="stable")]
    submit_ns = requests.submit_ns[places]
    slack_ns = timings.error_ns[records] + SLACK_NS
    arrival_ns = timings.arrival_ns[records]
    first = np.searchsorted(submit_ns, arrival_ns - round(MOST_WAY_S * 1e9) - slack_ns)
    many = np.searchsorted(submit_ns, arrival_ns + slack_ns, side="right") - first
    blocks = np.flatnonzero(np.diff(np.cumsum(many) // _BLOCK, prepend=0))
    client_tokens = np.column_stack(
        [requests.input_tokens, np.where(requests.output_tokens_source == "usage", requests.output_tokens, -1)]
    )
    fitting = []
    for rows in np.split(np.arange(len(records)), blocks):
        record = np.repeat(rows, many[rows])
        begin = np.repeat(np.cumsum(many[rows]) - many[rows], many[rows])
        request = places[first[record] + np.arange(len(record)) - begin]
        slack_s = slack_ns[record] / 1e9
        record = records[record]
        output_ns = requests.first_output_ns[request]
        ways_s = (
            np.column_stack(
                [
                    timings.arrival_ns[record] - requests.submit_ns[request],
                    output_ns - timings.first_token_ns[record],
                    requests.end_ns[request] - timings.last_token_ns[record],
                ]
            )
            / 1e9
        )
        ways_s[output_ns < 0, 1] = np.nan
        fits = ~((ways_s < -slack_s[:, None]) | (ways_s > MOST_WAY_S + slack_s[:, None])).any(axis=1)
        # There and back together, whatever the engine's clock: what a record lies within lasted longer.
        both_s = ways_s[:, :1] + ways_s[:, 1:]
        fits &= ~((both_s < -2e-9 * SLACK_NS) | (both_s > 2 * MOST_WAY_S)).any(axis=1)
        if timings.tokens is not None:
            counted, stated = client_tokens[request], timings.tokens[record]
            fits &= ~((counted >= 0) & (stated >= 0) & (counted != stated)).any(axis=1)
        fitting.append((request[fits], record[fits], ways_s[fits]))
    request, record, ways_s = (np.concatenate(column) for column in zip(*fitting, strict=True))
    return _Pairs(request, record, ways_s, np.zeros(len(request)))


def _costed(pairs: _Pairs, of: Records) -> _Pairs | Missing:
    """Return the pairs near the usual network delays, with their costs, or a reason.

    The reason says why no delay is usual. It begins where most pairs are: those that do not belong together lie
    scattered. Then what is usual is what is so of pairs that prefer each other.
    """
    if not len(pairs.request):
        return Missing(TOO_FEW)
    usual_s, spread_s = _densest(pairs.ways_s), np.full(3, _FIRST_SPREAD_S)
    for _ in range(_ROUNDS):
        cost = _cost(pairs.ways_s, usual_s, spread_s)
        best = _mutual(pairs, cost)
        best = best[cost[best] <= MOST_COST]
        if len(best) < LEAST_REQUESTS:
            return Missing(TOO_FEW)
        usual_s = _median(pairs.ways_s[best])
        spread_s = np.maximum(_LEAST_SPREAD_S, 1.4826 * _median(np.abs(pairs.ways_s[best] - usual_s)))
    if not of.clock_is_known and _repeats(pairs, usual_s, spread_s):
        return Missing(f"{of.plural} would fit as well by another setting of the engine's clock")
    cost = _cost(pairs.ways_s, usual_s, spread_s)
    near = cost <= MOST_COST + of.margin
    return _Pairs(pairs.request[near], pairs.record[near], pairs.ways_s[near], cost[near])


def _repeats(pairs: _Pairs, usual_s: Floats, spread_s: Floats) -> bool:
    """Return whether another clock offset fits half as many requests, as under even load.

    A clock that is set otherwise makes all ways in longer, and all ways out shorter by as much.
    """
    moved_s = pairs.ways_s[:, 0] - usual_s[0]
    set_back_s = np.column_stack([np.full(len(moved_s), usual_s[0]), pairs.ways_s[:, 1:] + moved_s[:, None]])
    fits = _cost(set_back_s, usual_s, spread_s) <= LEAST_COST
    cell = (moved_s[fits] // (8 * spread_s[0])).astype(np.int64)
    # A request counts once in a cell, however many records fit it there.
    cells, request = np.unique(np.column_stack([cell, pairs.request[fits]]), axis=0).T
    here = (cells == 0) | (cells == -1)
    elsewhere = np.unique(cells[~here], return_counts=True)[1]
    return 2 * int(elsewhere.max(initial=0)) >= len(np.unique(request[here]))


def _densest(ways_s: Floats) -> Floats:
    """Return the middle of the cell that most pairs are in; of several, that of the shortest ways."""
    cells = np.nan_to_num(ways_s // _FIRST_SPREAD_S).astype(np.int64)
    cells -= cells.min(axis=0)
    name = np.ravel_multi_index(tuple(cells.T), tuple(cells.max(axis=0) + 1))
    _, first, place, count = np.unique(name, return_index=True, return_inverse=True, return_counts=True)
    best = np.lexsort((cells[first].sum(axis=1), -count))[0]
    return _median(ways_s[place == best])


def _median(ways_s: Floats) -> Floats:
    """Return the median of each way, 0 for one that is unknown in all pairs."""
    known_s = [way_s[np.isfinite(way_s)] for way_s in ways_s.T]
    return np.array([np.median(way_s) if len(way_s) else 0.0 for way_s in known_s])


def _cost(ways_s: Floats, usual_s: Floats, spread_s: Floats) -> Floats:
    """Return the costs of network delays by how unlikely they are; an unknown one costs as much as one a spread off."""
    off = np.nan_to_num((ways_s - usual_s) / spread_s, nan=1.0)
    return np.asarray((_FREEDOM + 1) / 2 * np.log1p(off**2 / _FREEDOM).sum(axis=1), dtype=np.float64)


def _mutual(pairs: _Pairs, cost: Floats) -> Ints:
    """Return the pairs that are the best of their request and of their record."""
    order = np.argsort(cost, kind="stable")
    of_request = order[np.unique(pairs.request[order], return_index=True)[1]]
    of_record = order[np.unique(pairs.record[order], return_index=True)[1]]
    return np.asarray(np.intersect1d(of_request, of_record), dtype=np.int64)


def _greedy(pairs: _Pairs, requests: int, records: int) -> Ints:
    """Select pairs in order of cost so that no two share a request or record."""
    free_request, free_record = [True] * requests, [True] * records
    order = np.argsort(pairs.cost, kind="stable")
    order = order[pairs.cost[order] <= MOST_COST]
    taken = []
    for pair, request, record in zip(
        order.tolist(), pairs.request[order].tolist(), pairs.record[order].tolist(), strict=True
    ):
        if free_request[request] and free_record[record]:
            free_request[request] = free_record[record] = False
            taken.append(pair)
    return np.array(taken, dtype=np.int64)


def _most_cost(pairs: _Pairs, best: Ints, timings: Timings, of: Records, requests: int) -> float:
    """Return the highest cost at which pairs are accepted; -inf accepts none, where there are too few to tell.

    It depends on how easily another client's record fits a request that lost its own: as easily as it fits a request
    that has its own.
    """
    of_request = np.full(pairs.request.max(initial=-1) + 1, -1, dtype=np.int64)
    of_request[pairs.request[best]] = best
    is_owned = np.isin(np.arange(len(timings)), pairs.record[best])
    best_of_request = of_request[pairs.request]
    alike = _alike(timings, of, pairs.record, pairs.record[best_of_request])
    foreign = (best_of_request >= 0) & ~is_owned[pairs.record] & ~alike
    nearest = np.full(len(of_request), np.inf)
    np.minimum.at(nearest, pairs.request[foreign], pairs.cost[foreign])
    nearest = np.sort(nearest[pairs.request[best[pairs.cost[best] <= LEAST_COST]]])
    for most in np.arange(MOST_COST, LEAST_COST - 1, -1.0).tolist():
        had = int((pairs.cost[best] <= most).sum())
        chance = (np.searchsorted(nearest, most, side="right") + 0.5) / (len(nearest) + 1)
        if (requests - had + 0.5) * chance <= of.chance_ratio * had:
            return float(most)
    return -math.inf


def _rivals(pairs: _Pairs, best: Ints, timings: Timings, of: Records, size: int) -> tuple[Ints, Ints]:
    """Count the rivals of each request's [n] own pair: other records, and other requests for its record.

    - not another record that is alike, nor one that fits another request far better
    - not another request that has a record that is alike, or one that fits it far better
    """
    of_request, of_record = np.full(size, -1, dtype=np.int64), np.full(len(timings), -1, dtype=np.int64)
    of_request[pairs.request[best]], of_record[pairs.record[best]] = best, best
    best_of_request, best_of_record = of_request[pairs.request], of_record[pairs.record]
    # What a pair costs more than that of its request, and of its record; a lot where there is none.
    more = np.where(best_of_request >= 0, pairs.cost - pairs.cost[best_of_request], -np.inf)
    more_of_record = np.where(best_of_record >= 0, pairs.cost - pairs.cost[best_of_record], -np.inf)
    alike = (best_of_request >= 0) & _alike(timings, of, pairs.record, pairs.record[best_of_request])
    other = best_of_request != best_of_record
    records = other & (best_of_request >= 0) & (more < of.margin) & ~alike & (more_of_record < of.margin)
    requests = other & (best_of_record >= 0) & (more_of_record < of.margin) & ~alike & (more < of.margin)
    owner = pairs.request[best_of_record]
    return np.bincount(pairs.request[records], minlength=size), np.bincount(owner[requests], minlength=size)


def _alike(timings: Timings, of: Records, left: Ints, right: Ints) -> Bools:
    """Return a mask [n] of the record pairs that may stand for each other."""
    apart_s = [
        np.abs(column[left] - column[right]) for column in (timings.queue_s, timings.prefill_s, timings.decode_s)
    ]
    return np.asarray(np.max(apart_s, axis=0) < of.alike_s, dtype=np.bool_)
