"""Several engines behind one address: which requests ended on which engine, where token sums decide it.

The intervals of all engines are added up. An interval of few requests is taken apart again where its token sums by
engine admit just one division of its members; otherwise it stays together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np

from sidelight.correlator.estimate.assignment import Members
from sidelight.correlator.estimate.intervals import ScrapeIntervals, joined, merge, pick
from sidelight.rundir.columns import Bools, Indices, Ints

MOST_MEMBERS = 8
MOST_CHANCE = 0.1
TOKENS = ("prompt_tokens", "output_tokens")


def aligned(parts: Sequence[ScrapeIntervals]) -> list[ScrapeIntervals] | None:
    """Cut the intervals of engines at common edges: the scrapes of the first to which every other has one near.

    Near is half of the usual distance. None where fewer than two edges are common.
    """
    edges = [np.append(part.start_ns[:1], part.end_ns) for part in parts]
    reach_ns = float(np.median(np.diff(edges[0]))) / 2
    nearest = [_nearest(edges[0], other) for other in edges]
    near = [np.abs(other[place] - edges[0]) <= reach_ns for other, place in zip(edges, nearest, strict=True)]
    common = np.all(near, axis=0)
    for place in nearest:
        # An edge of another engine serves once.
        common &= np.append(True, np.diff(place) > 0)
    if common.sum() < 2:
        return None
    cut = []
    for part, place in zip(parts, nearest, strict=True):
        rows = np.arange(place[common][0], place[common][-1])
        cut.append(merge(pick(part, rows), np.searchsorted(place[common], rows, side="right") - 1))
    return cut


def divided(
    whole: ScrapeIntervals, parts: Sequence[ScrapeIntervals], members: Members, tokens: Ints
) -> tuple[ScrapeIntervals, Members]:
    """Divide the intervals of `pooled(parts)` among the parts where the division is unique.

    It is unique where the members' tokens allow just one. `tokens` [m, 2] are of prompt and output. Returns the
    resulting intervals and their members.
    """
    groups = _groups(members.interval, len(whole))
    origin: list[tuple[int, int]] = []  # (part, or -1 for all; row)
    interval = np.full(len(members.interval), -1, dtype=np.intp)
    verified = []
    for row in range(len(whole)):
        group = groups[row]
        division = _division(row, parts, group, tokens) if members.verified[row] else None
        if division is None:
            interval[group] = len(origin)
            origin.append((-1, row))
            verified.append(bool(members.verified[row]))
            continue
        for part, share in enumerate(division):
            if len(share):
                interval[group[share]] = len(origin)
                origin.append((part, row))
                verified.append(True)
    return _gathered(whole, parts, origin), _regrouped(members, interval, origin, np.array(verified))


def _nearest(edges: Ints, other: Ints) -> Indices:
    after = np.clip(np.searchsorted(other, edges), 1, len(other) - 1)
    return np.where(edges - other[after - 1] < other[after] - edges, after - 1, after).astype(np.intp)


def _groups(interval: Indices, intervals: int) -> list[Indices]:
    order = np.argsort(interval, kind="stable")
    bounds = np.searchsorted(interval[order], np.arange(intervals + 1))
    return [order[bounds[row] : bounds[row + 1]] for row in range(intervals)]


def _division(row: int, parts: Sequence[ScrapeIntervals], group: Indices, tokens: Ints) -> list[list[int]] | None:
    """Return the unique division of members by part, or None.

    None: there is no division, there are several, or too many are possible to be sure.
    """
    counts = [int(part.count[row]) for part in parts]
    if len(group) == 1:  # where the one request was counted
        return [[0] if count else [] for count in counts]
    if not 1 < len(group) <= MOST_MEMBERS:
        return None
    possible = math.factorial(len(group)) / math.prod(math.factorial(count) for count in counts)
    ranges = np.ptp(tokens[group], axis=0) * np.minimum(counts, len(group) - np.array(counts)).max() + 1.0
    if possible > MOST_CHANCE * float(np.prod(ranges)) ** (len(parts) - 1) and possible > 1:
        return None
    wanted = [[round(float(part.sums[name][row])) for name in TOKENS] for part in parts]
    divisions = list(islice(_divisions([tuple(pair) for pair in tokens[group].tolist()], counts, wanted), 2))
    return divisions[0] if len(divisions) == 1 else None


def _divisions(tokens: list[tuple[int, ...]], counts: list[int], wanted: list[list[int]]) -> Iterator[list[list[int]]]:
    """Give every division of the members that fits counts and sums, depth first."""
    shares: list[list[int]] = [[] for _ in counts]
    left = [list(sums) for sums in wanted]

    def place(member: int) -> Iterator[list[list[int]]]:
        if member == len(tokens):
            if not any(value for sums in left for value in sums):
                yield [list(share) for share in shares]
            return
        for part, share in enumerate(shares):
            after = [have - token for have, token in zip(left[part], tokens[member], strict=True)]
            if len(share) < counts[part] and min(after) >= 0:
                share.append(member)
                before, left[part] = left[part], after
                yield from place(member + 1)
                left[part] = before
                share.pop()

    yield from place(0)


def _gathered(
    whole: ScrapeIntervals, parts: Sequence[ScrapeIntervals], origin: Sequence[tuple[int, int]]
) -> ScrapeIntervals:
    """Return the intervals that `origin` names, in its order."""
    sources = [whole, *parts]
    starts = np.cumsum([0, *(len(source) for source in sources)])
    rows = np.array([starts[part + 1] + row for part, row in origin], dtype=np.intp)
    return pick(joined(sources), rows)


def _regrouped(members: Members, interval: Indices, origin: Sequence[tuple[int, int]], verified: Bools) -> Members:
    rows = np.array([row for _, row in origin], dtype=np.intp)
    return replace(
        members,
        interval=interval,
        unmatched=np.where(verified, 0, members.unmatched[rows]),
        inconsistent=members.inconsistent[rows] & ~verified,
        verified=verified,
    )
