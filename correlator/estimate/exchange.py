"""Exchanging requests between neighbouring cells until their token sums, which are whole numbers, agree.

A local search: what contradicts costs CONTRADICTION, a member away from its cell costs that distance in units of the
jitter, and the cheapest exchange of each contradicting cell with a neighbour is made while it saves something.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rundir.columns import Bools, Floats, Indices, Ints

CONTRADICTION = 12.0
REACH = 2  # cells that an exchange spans
NEAREST = 48  # members of a cell that are tried, those closest to the other cell first
ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """What C cells must add up to: counts, and token sums [C, K]; their edges in s, and those that are lost."""

    start_s: Floats
    end_s: Floats
    lost: Bools
    count: Ints
    tokens: Floats


def contradicting(strangers: Ints, residual: Floats) -> Bools:
    """Tell which cells cannot be: strangers[..., C] requests are to account for the tokens residual[..., C, K].

    A stranger has at least one token of each kind; where there is none, nothing may be left.
    """
    nothing_left = np.abs(residual) < 0.5
    enough = residual > strangers[..., None] - 0.5
    fits = np.asarray(np.where(strangers[..., None] == 0, nothing_left, enough).all(axis=-1), dtype=np.bool_)
    return (strangers < 0) | ~fits


def exchanged(cell: Indices, at_s: Floats, tokens: Floats, whole: Whole, jitter_s: float, *, moves: bool) -> Indices:
    """Return better cells [m] for events at at_s[m] with tokens[m, K]; -1 stays. `moves`: counts may change too."""
    members: list[list[int]] = [[] for _ in whole.count]
    for event, place in enumerate(cell.tolist()):
        if place >= 0:
            members[place].append(event)
    residual = whole.tokens.copy()
    np.subtract.at(residual, cell[cell >= 0], tokens[cell >= 0])
    board = _Board(at_s=at_s, tokens=tokens, whole=whole, jitter_s=jitter_s, members=members, residual=residual)
    placed = cell.copy()
    for _ in range(ROUNDS):
        strangers = whole.count - np.array([len(part) for part in members])
        tasks = np.flatnonzero(contradicting(strangers, residual) & ~whole.lost)
        if not sum(_improve(board, placed, task, moves=moves) for task in tasks.tolist()):
            break
    return placed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Board:
    at_s: Floats
    tokens: Floats
    whole: Whole
    jitter_s: float
    members: list[list[int]]
    residual: Floats

    def strangers(self, cell: int) -> int:
        return int(self.whole.count[cell]) - len(self.members[cell])


def _improve(board: _Board, placed: Indices, one: int, *, moves: bool) -> bool:
    """Make the best exchange of a cell with a neighbour, if one saves anything."""
    best = (-1e-6, -1, -1, -1)
    for other in range(max(0, one - REACH), min(len(board.members), one + REACH + 1)):
        if other != one and not board.whole.lost[other]:
            saved, give, take = _cheapest(board, one, other, moves=moves)
            best = min(best, (saved, other, give, take))
    _, other, give, take = best
    if other < 0:
        return False
    for source, target, who in ((one, other, give), (other, one, take)):
        if who >= 0:
            board.members[source].remove(who)
            board.members[target].append(who)
            board.residual[source] += board.tokens[who]
            board.residual[target] -= board.tokens[who]
            placed[who] = target
    return True


def _cheapest(board: _Board, one: int, other: int, *, moves: bool) -> tuple[float, int, int]:
    """Return what the best exchange of two cells changes in cost, and whom they give (-1: nobody)."""
    gives = _nearest(board, board.members[one], other)
    takes = _nearest(board, board.members[other], one)
    if moves:
        gives, takes = [*gives, -1], [*takes, -1]
    if not gives or not takes:
        return 0.0, -1, -1
    give, take = np.array(gives), np.array(takes)
    moved = _tokens_of(board, give)[:, None, :] - _tokens_of(board, take)[None, :, :]
    change = (give >= 0).astype(np.int64)[:, None] - (take >= 0).astype(np.int64)[None, :]
    pair = np.array([one, other])
    sign = np.array([1, -1])
    strangers = np.array([board.strangers(one), board.strangers(other)])
    now = contradicting(strangers, board.residual[pair]).sum()
    then = contradicting(
        strangers + change[..., None] * sign, board.residual[pair] + moved[:, :, None, :] * sign[:, None]
    ).sum(axis=-1)
    cost = CONTRADICTION * (then - now)
    cost = cost + (_distance(board, give, other) - _distance(board, give, one))[:, None]
    cost = cost + (_distance(board, take, one) - _distance(board, take, other))[None, :]
    row, column = np.unravel_index(int(np.argmin(cost)), cost.shape)
    return float(cost[row, column]), int(give[row]), int(take[column])


def _nearest(board: _Board, members: Sequence[int], cell: int) -> list[int]:
    if len(members) <= NEAREST:
        return list(members)
    away = _distance(board, np.array(members), cell)
    return [members[place] for place in np.argsort(away, kind="stable")[:NEAREST].tolist()]


def _tokens_of(board: _Board, events: Ints) -> Floats:
    return np.where(events[:, None] >= 0, board.tokens[events], 0.0)


def _distance(board: _Board, events: Ints, cell: int) -> Floats:
    """Return how far events are outside a cell, in units of the jitter; nobody is nowhere outside."""
    at_s = board.at_s[events]
    outside = np.maximum(board.whole.start_s[cell] - at_s, at_s - board.whole.end_s[cell])
    return np.where(events >= 0, np.maximum(outside, 0.0) / board.jitter_s, 0.0)
