"""Which of our requests ended in which cell, checked by counts and tokens, which are whole numbers.

If the engine counted as many requests as ours that ended, nobody else is on it, and the order of ends alone decides;
otherwise the time of each end does, moved by one lag for the whole run. Either way a cell whose token sums are not
those of its members contradicts, and `exchange` mends what it can. The same serves first tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from correlator.estimate.exchange import Whole, contradicting, exchanged
from rundir.columns import Bools, Floats, Indices, Ints

LAGS_S = np.arange(-20, 501) / 1e3
LEAST_JITTER_S = 0.002
MOST_CONTRADICT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """For each of m events its cell (-1: none), and what is known of each of C cells.

    `strangers` are requests that the cell counted beyond its members. `contradicts`: more members than were counted, or
    token sums that they cannot have. `verified`: no strangers, and the token sums are the members'. `clear_s` is how
    far each event is from the edges of its cell, negative outside. `by_rank`: the order decided, not the time.
    `checked`: there were token counts to compare.
    """

    cell: Indices
    strangers: Ints
    contradicts: Bools
    verified: Bools
    clear_s: Floats
    jitter_s: float
    by_rank: bool
    checked: bool


def assign(at_s: Floats, tokens: Ints, whole: Whole, *, stamp_error_s: float) -> Members:
    """Put events (at_s[m], tokens[m, K], -1 where unknown) into cells.

    By rank where the totals agree and no cell is lost, else by time; where ranks contradict in more cells than times
    do, times are taken. A cell of which some member's tokens are unknown is not checked, and none is where tokens
    contradict in more than half of the cells even so.
    """
    checked = min(tokens.shape[1], whole.tokens.shape[1]) > 0 and bool((tokens >= 0).all(axis=1).any())
    own = tokens[:, : whole.tokens.shape[1]].astype(np.float64)
    found = _assign(at_s, own if checked else own[:, :0], whole if checked else _without_tokens(whole), stamp_error_s)
    if checked and found.contradicts.sum() > MOST_CONTRADICT * (whole.count > 0).sum():
        # Client and engine count tokens differently, as with another tokenizer between them: they prove nothing.
        found = _assign(at_s, own[:, :0], _without_tokens(whole), stamp_error_s)
    return replace(found, checked=checked)


def _without_tokens(whole: Whole) -> Whole:
    return replace(whole, tokens=whole.tokens[:, :0])


def _assign(at_s: Floats, tokens: Floats, whole: Whole, stamp_error_s: float) -> Members:
    at_s = at_s - find_lag(at_s, whole)
    timed = _members(_by_time(at_s, whole), at_s, tokens, whole, stamp_error_s, by_rank=False)
    total = int(whole.count.sum())
    # What ended before the first scrape or after the last is in no cell.
    among = np.flatnonzero((at_s > whole.start_s[0]) & (at_s <= whole.end_s[-1]))
    among = np.arange(len(at_s)) if total == len(at_s) else among
    if whole.lost.any() or total != len(among) or not total:
        return timed
    cell = np.full(len(at_s), -1, dtype=np.intp)
    cell[among[np.argsort(at_s[among], kind="stable")]] = np.repeat(np.arange(len(whole.count)), whole.count)
    ranked = _members(cell, at_s, tokens, whole, stamp_error_s, by_rank=True)
    return ranked if ranked.contradicts.sum() <= timed.contradicts.sum() else timed


def find_lag(at_s: Floats, whole: Whole) -> float:
    """Return by how much events come after the cells that counted them, on a grid of 1 ms from -20 ms to 0.5 s.

    It minimises the sum over cells of |count - events|; of a flat minimum the middle is taken.
    """
    ordered = np.sort(at_s)
    kept = ~whole.lost
    cost = np.empty(len(LAGS_S))
    for place, lag_s in enumerate(LAGS_S):
        events = np.searchsorted(ordered, whole.end_s + lag_s, side="right")
        events -= np.searchsorted(ordered, whole.start_s + lag_s, side="right")
        cost[place] = np.abs(whole.count - events)[kept].sum()
    best = np.flatnonzero(cost == cost.min())
    breaks = np.flatnonzero(np.diff(best) > 1)
    runs = np.split(best, breaks + 1)
    longest = max(runs, key=len)
    return float(LAGS_S[longest[len(longest) // 2]])


def _by_time(at_s: Floats, whole: Whole) -> Indices:
    found = np.minimum(np.searchsorted(whole.end_s, at_s, side="left"), len(whole.end_s) - 1)
    inside = (at_s <= whole.end_s[found]) & (at_s > whole.start_s[found])
    return np.where(inside, found, -1).astype(np.intp)


def _members(
    cell: Indices, at_s: Floats, tokens: Floats, whole: Whole, stamp_error_s: float, *, by_rank: bool
) -> Members:
    outside = -_clear_s(cell, at_s, whole)
    outside = outside[(outside > 0) & (cell >= 0)]
    jitter_s = max(LEAST_JITTER_S, stamp_error_s, float(np.median(outside)) if len(outside) else 0.0)
    unknown = (tokens < 0).any(axis=1)
    if tokens.shape[1]:
        blind = whole.lost | _holding(cell[unknown], whole)
        cell = exchanged(cell, at_s, tokens, replace(whole, lost=blind), jitter_s, moves=not by_rank)
    strangers = whole.count - np.bincount(cell[cell >= 0], minlength=len(whole.count))
    residual = whole.tokens.copy()
    np.subtract.at(residual, cell[cell >= 0], tokens[cell >= 0])
    blind = _holding(cell[unknown], whole)
    contradicts = np.where(blind, strangers < 0, contradicting(strangers, residual))
    return Members(
        # What a lost cell counted is not known: whoever ended in it is in no cell.
        cell=np.where((cell >= 0) & whole.lost[cell], -1, cell),
        strangers=np.where(whole.lost, 0, np.maximum(strangers, 0)),
        contradicts=contradicts & ~whole.lost,
        verified=(strangers == 0) & ~contradicts & ~whole.lost & ~blind & (tokens.shape[1] > 0),
        clear_s=_clear_s(cell, at_s, whole),
        jitter_s=jitter_s,
        by_rank=by_rank,
        checked=bool(tokens.shape[1]),
    )


def _holding(cell: Indices, whole: Whole) -> Bools:
    return np.bincount(cell[cell >= 0], minlength=len(whole.count)) > 0


def _clear_s(cell: Indices, at_s: Floats, whole: Whole) -> Floats:
    return np.where(cell >= 0, np.minimum(at_s - whole.start_s[cell], whole.end_s[cell] - at_s), -np.inf)
