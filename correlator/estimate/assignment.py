"""Assignment of our requests' ends to scrape intervals, checked by counts and tokens.

Both are whole numbers. If the engine counted as many requests as ours that ended, there is no other traffic, and the
order of ends alone decides; otherwise the time of each end does, moved by one lag for the whole run. Either way an
interval whose token sums are not those of its members is inconsistent. A local search then exchanges requests between
neighbouring intervals until the sums agree. The same serves first tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sidelight.rundir.columns import Bools, Floats, Indices, Ints

LAGS_S = np.arange(-20, 501) / 1e3
LEAST_JITTER_S = 0.002
MOST_INCONSISTENT = 0.5
# Of the search: what an inconsistent interval costs, in units of the jitter that a member is away from its interval.
INCONSISTENT_COST = 12.0
REACH = 2  # intervals that an exchange spans
NEAREST = 48  # members of an interval that are tried, those closest to the other interval first
ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalTotals:
    """Totals that C intervals must add up to: counts and token sums [C, K].

    `start_s` and `end_s` are the intervals' edges, `lost` marks those that are lost.
    """

    start_s: Floats
    end_s: Floats
    lost: Bools
    count: Ints
    tokens: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """For each of m events its interval (-1: none), and what is known of each of C intervals.

    unmatched       requests that the interval counted beyond its members: mixed traffic
    inconsistent    more members than were counted, or token sums that they cannot have
    verified        no unmatched requests, and the token sums are the members'
    clear_s         how far each event is from the edges of its interval, negative outside
    by_rank         the order decided, not the time
    checked         there were token counts to compare
    """

    interval: Indices
    unmatched: Ints
    inconsistent: Bools
    verified: Bools
    clear_s: Floats
    jitter_s: float
    by_rank: bool
    checked: bool


def assign(at_s: Floats, tokens: Ints, totals: IntervalTotals, *, stamp_error_s: float) -> Members:
    """Put events (at_s[m], tokens[m, K], -1 where unknown) into intervals.

    By rank where the totals agree and no interval is lost, else by time; where ranks leave more intervals inconsistent
    than times do, times are taken. An interval of which some member's tokens are unknown is not checked, and none is
    where tokens leave more than half of the intervals inconsistent even so.
    """
    without_tokens = replace(totals, tokens=totals.tokens[:, :0])
    known = tokens[:, : totals.tokens.shape[1]].astype(np.float64)
    checked = known.shape[1] > 0 and bool((tokens >= 0).all(axis=1).any())
    members = _assign(at_s, known if checked else known[:, :0], totals if checked else without_tokens, stamp_error_s)
    if checked and members.inconsistent.sum() > MOST_INCONSISTENT * (totals.count > 0).sum():
        # Client and engine count tokens differently, as with another tokenizer between them: they prove nothing.
        members = _assign(at_s, known[:, :0], without_tokens, stamp_error_s)
    return replace(members, checked=checked)


def _assign(at_s: Floats, tokens: Floats, totals: IntervalTotals, stamp_error_s: float) -> Members:
    at_s = at_s - find_lag(at_s, totals)
    timed = _members(_by_time(at_s, totals), at_s, tokens, totals, stamp_error_s, by_rank=False)
    count = int(totals.count.sum())
    # What ended before the first scrape or after the last is in no interval.
    among = np.flatnonzero((at_s > totals.start_s[0]) & (at_s <= totals.end_s[-1]))
    among = np.arange(len(at_s)) if count == len(at_s) else among
    if totals.lost.any() or count != len(among) or not count:
        return timed
    interval = np.full(len(at_s), -1, dtype=np.intp)
    interval[among[np.argsort(at_s[among], kind="stable")]] = np.repeat(np.arange(len(totals.count)), totals.count)
    ranked = _members(interval, at_s, tokens, totals, stamp_error_s, by_rank=True)
    return ranked if ranked.inconsistent.sum() <= timed.inconsistent.sum() else timed


def find_lag(at_s: Floats, totals: IntervalTotals) -> float:
    """Return the delay, in s, of events behind the intervals that counted them.

    It is searched on a grid of 1 ms from -20 ms to 0.5 s. It minimises the sum over intervals of |count - events|; of a
    flat minimum the middle is taken.
    """
    ordered = np.sort(at_s)
    usable = ~totals.lost
    cost = np.empty(len(LAGS_S))
    for place, lag_s in enumerate(LAGS_S):
        events = np.searchsorted(ordered, totals.end_s + lag_s, side="right")
        events -= np.searchsorted(ordered, totals.start_s + lag_s, side="right")
        cost[place] = np.abs(totals.count - events)[usable].sum()
    best = np.flatnonzero(cost == cost.min())
    breaks = np.flatnonzero(np.diff(best) > 1)
    runs = np.split(best, breaks + 1)
    longest = max(runs, key=len)
    return float(LAGS_S[longest[len(longest) // 2]])


def _by_time(at_s: Floats, totals: IntervalTotals) -> Indices:
    place = np.minimum(np.searchsorted(totals.end_s, at_s, side="left"), len(totals.end_s) - 1)
    inside = (at_s <= totals.end_s[place]) & (at_s > totals.start_s[place])
    return np.where(inside, place, -1).astype(np.intp)


def _members(
    interval: Indices, at_s: Floats, tokens: Floats, totals: IntervalTotals, stamp_error_s: float, *, by_rank: bool
) -> Members:
    outside = -_clear_s(interval, at_s, totals)
    outside = outside[(outside > 0) & (interval >= 0)]
    jitter_s = max(LEAST_JITTER_S, stamp_error_s, float(np.median(outside)) if len(outside) else 0.0)
    unknown = (tokens < 0).any(axis=1)
    if tokens.shape[1]:
        unchecked = totals.lost | _holding(interval[unknown], totals)
        search = replace(totals, lost=unchecked)
        interval = exchange_requests(interval, at_s, tokens, search, jitter_s, moves=not by_rank)
    unmatched = totals.count - np.bincount(interval[interval >= 0], minlength=len(totals.count))
    residual = totals.tokens.copy()
    np.subtract.at(residual, interval[interval >= 0], tokens[interval >= 0])
    unchecked = _holding(interval[unknown], totals)
    inconsistent = np.where(unchecked, unmatched < 0, inconsistent_intervals(unmatched, residual))
    return Members(
        # What a lost interval counted is not known: a request that ended in it is in no interval.
        interval=np.where((interval >= 0) & totals.lost[interval], -1, interval),
        unmatched=np.where(totals.lost, 0, np.maximum(unmatched, 0)),
        inconsistent=inconsistent & ~totals.lost,
        verified=(unmatched == 0) & ~inconsistent & ~totals.lost & ~unchecked & (tokens.shape[1] > 0),
        clear_s=_clear_s(interval, at_s, totals),
        jitter_s=jitter_s,
        by_rank=by_rank,
        checked=bool(tokens.shape[1]),
    )


def _holding(interval: Indices, totals: IntervalTotals) -> Bools:
    return np.bincount(interval[interval >= 0], minlength=len(totals.count)) > 0


def _clear_s(interval: Indices, at_s: Floats, totals: IntervalTotals) -> Floats:
    inside_s = np.minimum(at_s - totals.start_s[interval], totals.end_s[interval] - at_s)
    return np.where(interval >= 0, inside_s, -np.inf)


def inconsistent_intervals(unmatched: Ints, residual: Floats) -> Bools:
    """Return where unmatched[..., C] requests cannot account for the tokens residual[..., C, K].

    Each unmatched request has at least one token of each kind; where there is none, nothing may be left.
    """
    nothing_left = np.abs(residual) < 0.5
    enough = residual > unmatched[..., None] - 0.5
    fits = np.asarray(np.where(unmatched[..., None] == 0, nothing_left, enough).all(axis=-1), dtype=np.bool_)
    return (unmatched < 0) | ~fits


@dataclass(frozen=True, slots=True, kw_only=True)
class _SearchState:
    """The state of the search: the members of each interval, and what these leave of its token sums [C, K]."""

    at_s: Floats
    tokens: Floats
    totals: IntervalTotals
    jitter_s: float
    members: list[list[int]]
    residual: Floats

    def unmatched(self, interval: int) -> int:
        return int(self.totals.count[interval]) - len(self.members[interval])


def exchange_requests(
    interval: Indices, at_s: Floats, tokens: Floats, totals: IntervalTotals, jitter_s: float, *, moves: bool
) -> Indices:
    """Return better intervals [m] for events at at_s[m] with tokens[m, K]; -1 stays. `moves`: counts may change too.

    The cheapest exchange of each inconsistent interval with a neighbour is made while it saves something.
    """
    members: list[list[int]] = [[] for _ in totals.count]
    for event, place in enumerate(interval.tolist()):
        if place >= 0:
            members[place].append(event)
    residual = totals.tokens.copy()
    np.subtract.at(residual, interval[interval >= 0], tokens[interval >= 0])
    state = _SearchState(at_s=at_s, tokens=tokens, totals=totals, jitter_s=jitter_s, members=members, residual=residual)
    placed = interval.copy()
    for _ in range(ROUNDS):
        unmatched = totals.count - np.array([len(part) for part in members])
        tasks = np.flatnonzero(inconsistent_intervals(unmatched, residual) & ~totals.lost)
        if not sum(_improve(state, placed, task, moves=moves) for task in tasks.tolist()):
            break
    return placed


def _improve(state: _SearchState, placed: Indices, here: int, *, moves: bool) -> bool:
    """Make the best exchange of an interval with a neighbour, if one saves anything."""
    best = (-1e-6, -1, -1, -1)
    for there in range(max(0, here - REACH), min(len(state.members), here + REACH + 1)):
        if there != here and not state.totals.lost[there]:
            saved, give, take = _cheapest(state, here, there, moves=moves)
            best = min(best, (saved, there, give, take))
    _, there, give, take = best
    if there < 0:
        return False
    for source, target, event in ((here, there, give), (there, here, take)):
        if event >= 0:
            state.members[source].remove(event)
            state.members[target].append(event)
            state.residual[source] += state.tokens[event]
            state.residual[target] -= state.tokens[event]
            placed[event] = target
    return True


def _cheapest(state: _SearchState, here: int, there: int, *, moves: bool) -> tuple[float, int, int]:
    """Return the cost change of the best exchange of two intervals, and its events (-1: none)."""
    gives = _nearest(state, state.members[here], there)
    takes = _nearest(state, state.members[there], here)
    if moves:
        gives, takes = [*gives, -1], [*takes, -1]
    if not gives or not takes:
        return 0.0, -1, -1
    give, take = np.array(gives), np.array(takes)
    moved = _tokens_of(state, give)[:, None, :] - _tokens_of(state, take)[None, :, :]
    change = (give >= 0).astype(np.int64)[:, None] - (take >= 0).astype(np.int64)[None, :]
    pair = np.array([here, there])
    sign = np.array([1, -1])
    unmatched = np.array([state.unmatched(here), state.unmatched(there)])
    now = inconsistent_intervals(unmatched, state.residual[pair]).sum()
    then = inconsistent_intervals(
        unmatched + change[..., None] * sign, state.residual[pair] + moved[:, :, None, :] * sign[:, None]
    ).sum(axis=-1)
    cost = INCONSISTENT_COST * (then - now)
    cost = cost + (_distance(state, give, there) - _distance(state, give, here))[:, None]
    cost = cost + (_distance(state, take, here) - _distance(state, take, there))[None, :]
    row, column = np.unravel_index(int(np.argmin(cost)), cost.shape)
    return float(cost[row, column]), int(give[row]), int(take[column])


def _nearest(state: _SearchState, members: Sequence[int], interval: int) -> list[int]:
    if len(members) <= NEAREST:
        return list(members)
    away = _distance(state, np.array(members), interval)
    return [members[place] for place in np.argsort(away, kind="stable")[:NEAREST].tolist()]


def _tokens_of(state: _SearchState, events: Ints) -> Floats:
    return np.where(events[:, None] >= 0, state.tokens[events], 0.0)


def _distance(state: _SearchState, events: Ints, interval: int) -> Floats:
    """Return the distance of events from an interval, in units of the jitter; 0 for -1."""
    at_s = state.at_s[events]
    outside = np.maximum(state.totals.start_s[interval] - at_s, at_s - state.totals.end_s[interval])
    return np.where(events >= 0, np.maximum(outside, 0.0) / state.jitter_s, 0.0)
