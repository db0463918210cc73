"""Several engines behind one address: which requests ended on which, told by whole numbers where they can tell it.

The cells of all engines are added up. A cell of few requests is taken apart again where its token sums by engine admit
just one division of its members; otherwise it stays together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from correlator.estimate.assignment import Members
from correlator.estimate.intervals import Cells, joined, merge, pick
from rundir.columns import Bools, Indices, Ints

MOST_MEMBERS = 8
MOST_CHANCE = 0.1
TOKENS = ("prompt_tokens", "output_tokens")


def aligned(parts: Sequence[Cells]) -> list[Cells] | None:
    """Cut the cells of engines at common edges: the scrapes of the first to which every other has one near.

    Near is half of the usual distance. None where fewer than two edges are common.
    """
    edges = [np.append(one.start_ns[:1], one.end_ns) for one in parts]
    reach_ns = float(np.median(np.diff(edges[0]))) / 2
    nearest = [_nearest(edges[0], other) for other in edges]
    near = [np.abs(other[place] - edges[0]) <= reach_ns for other, place in zip(edges, nearest, strict=True)]
    kept = np.all(near, axis=0)
    for place in nearest:
        # An edge of another engine serves once.
        kept &= np.append(True, np.diff(place) > 0)
    if kept.sum() < 2:
        return None
    found = []
    for one, place in zip(parts, nearest, strict=True):
        rows = np.arange(place[kept][0], place[kept][-1])
        found.append(merge(pick(one, rows), np.searchsorted(place[kept], rows, side="right") - 1))
    return found


def divided(whole: Cells, parts: Sequence[Cells], members: Members, tokens: Ints) -> tuple[Cells, Members]:
    """Take apart the cells of `pooled(parts)` whose members (tokens[m, 2] of prompt and output) can be told apart.

    Returns the cells that then are, and the members of each.
    """
    groups = _groups(members.cell, len(whole))
    origin: list[tuple[int, int]] = []  # (part, or -1 for all; row)
    cell = np.full(len(members.cell), -1, dtype=np.intp)
    verified = []
    for row in range(len(whole)):
        mine = groups[row]
        found = _division(row, parts, mine, tokens) if members.verified[row] else None
        if found is None:
            cell[mine] = len(origin)
            origin.append((-1, row))
            verified.append(bool(members.verified[row]))
            continue
        for part, share in enumerate(found):
            if len(share):
                cell[mine[share]] = len(origin)
                origin.append((part, row))
                verified.append(True)
    return _gathered(whole, parts, origin), _moved(members, cell, origin, np.array(verified))


def _nearest(edges: Ints, other: Ints) -> Indices:
    after = np.clip(np.searchsorted(other, edges), 1, len(other) - 1)
    return np.where(edges - other[after - 1] < other[after] - edges, after - 1, after).astype(np.intp)


def _groups(cell: Indices, cells: int) -> list[Indices]:
    order = np.argsort(cell, kind="stable")
    bounds = np.searchsorted(cell[order], np.arange(cells + 1))
    return [order[bounds[row] : bounds[row + 1]] for row in range(cells)]


def _division(row: int, parts: Sequence[Cells], mine: Indices, tokens: Ints) -> list[list[int]] | None:
    """Return the one division of members by part, None where there are none, several, or too many to be sure."""
    counts = [int(part.count[row]) for part in parts]
    if len(mine) == 1:  # where the one request was counted
        return [[0] if count else [] for count in counts]
    if not 1 < len(mine) <= MOST_MEMBERS:
        return None
    possible = math.factorial(len(mine)) / math.prod(math.factorial(count) for count in counts)
    ranges = np.ptp(tokens[mine], axis=0) * np.minimum(counts, len(mine) - np.array(counts)).max() + 1.0
    if possible > MOST_CHANCE * float(np.prod(ranges)) ** (len(parts) - 1) and possible > 1:
        return None
    wanted = [[round(float(part.sums[name][row])) for name in TOKENS] for part in parts]
    found = []
    for division in _divisions([tuple(pair) for pair in tokens[mine].tolist()], counts, wanted):
        found.append(division)
        if len(found) > 1:
            return None
    return found[0] if found else None


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


def _gathered(whole: Cells, parts: Sequence[Cells], origin: Sequence[tuple[int, int]]) -> Cells:
    """Return the cells that `origin` names, in its order."""
    sources = [whole, *parts]
    starts = np.cumsum([0, *(len(one) for one in sources)])
    rows = np.array([starts[part + 1] + row for part, row in origin], dtype=np.intp)
    return pick(joined(sources), rows)


def _moved(members: Members, cell: Indices, origin: Sequence[tuple[int, int]], verified: Bools) -> Members:
    rows = np.array([row for _, row in origin], dtype=np.intp)
    return replace(
        members,
        cell=cell,
        strangers=np.where(verified, 0, members.strangers[rows]),
        contradicts=members.contradicts[rows] & ~verified,
        verified=verified,
    )
