"""The part of each wait that passed outside the engine: network, gateway and client.

Over a cell of first tokens that are ours alone, the client's waits less the engine's own TTFT are the network's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from correlator.estimate.assignment import Members
from correlator.estimate.intervals import Cells
from correlator.estimate.waits import Waits
from rundir.columns import Floats

LEAST_CELLS = 3
ASSUMED_S, ASSUMED_SD_S = 0.002, 0.003
LEAST_SD_S = 2e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Network time [m] and its variance, s and s^2. `rest_s` is the mean of what the engine's own TTFT
    holds beside queue and prefill time. `measured`: not merely assumed.
    """

    value_s: Floats
    variance: Floats
    rest_s: float
    measured: bool


def assumed(waits: Waits, rest_s: float) -> Network:
    """Take 2 ms, more or less, for want of the engine's own TTFT."""
    value_s = np.minimum(np.full(len(waits.wait_s), ASSUMED_S), waits.wait_s)
    variance = np.full(len(value_s), ASSUMED_SD_S**2)
    return Network(value_s=value_s, variance=variance, rest_s=rest_s, measured=False)


def measure(waits: Waits, cells: Cells, members: Members, rest_s: float) -> Network:
    """Spread each cell's network time over its members, between 0 and their waits; others have the median.

    `members` are of the requests in `waits`. Assumed where fewer than 3 cells are ours alone.
    """
    alone = (members.strangers == 0) & ~members.contradicts & (cells.count > 0) & ~cells.lost
    cell = np.where((members.cell >= 0) & alone[members.cell], members.cell, -1)
    inside = cell >= 0
    count = np.bincount(cell[inside], minlength=len(cells))
    total = np.bincount(cell[inside], waits.wait_s[inside], minlength=len(cells)) - cells.sums["ttft"]
    rows = np.flatnonzero(count)
    if len(rows) < LEAST_CELLS:
        return assumed(waits, rest_s)
    means = total[rows] / count[rows]
    middle = float(np.median(np.repeat(means, count[rows])))
    spread = 1.4826 * np.median(np.abs(means - middle) * np.sqrt(count[rows]))
    variance = max(float(spread) ** 2, LEAST_SD_S**2)
    own = np.divide(total, count, out=np.full(len(cells), middle), where=count > 0)
    value_s = np.clip(np.where(inside, own[cell], max(middle, 0.0)), 0.0, waits.wait_s)
    left = np.where(inside, 1.0 - 1.0 / np.maximum(count[cell], 1), 1.0)
    return Network(value_s=value_s, variance=variance * left, rest_s=rest_s, measured=True)
