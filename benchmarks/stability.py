"""How often `correlator.load.stability.verdict` is right: queues in virtual time, by realised load.

`python benchmarks/stability.py [SEEDS]`: the table of docs/reference/metrics/methodology.md: per cent of runs called
stable, undecided and growing. Queues of 1, 4, 16 and 64 servers that can serve 6 requests/s, log-normal service times
of variation 0.3 and 1, Poisson arrivals at 50 to 150 % of that.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np

# This folder last: it has a file of the package's name.
sys.path.append(sys.path.pop(0))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from queues import loaded

from sidelight.correlator.load.stability import verdict

PER_S = 6.0
LOADS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2, 1.5)
EDGES = (0.0, 0.85, 0.95, 1.03, 1.1)
VERDICTS = ("stable", "undecided", "growing")


def rows(seconds: float, seeds: int) -> dict[bool, list[Counter[str | None]]]:
    """Return the verdicts without and with a page, by realised load."""
    found: dict[bool, list[Counter[str | None]]] = {page: [Counter() for _ in EDGES] for page in (False, True)}
    for servers, variation, load, seed in product((1, 4, 16, 64), (0.3, 1.0), LOADS, range(seeds)):
        queue = loaded(load, seconds=seconds, per_s=PER_S, servers=servers, variation=variation, seed=seed)
        place = int(np.searchsorted(EDGES, len(queue.arrived_s) / (PER_S * seconds), side="right")) - 1
        page = queue.waiting(every_s=1.0)
        for shown, (at_s, waiting) in ((False, ([], [])), (True, page)):
            found[shown][place][verdict(at_s, waiting, queue.arrived_s, queue.ended_s).verdict] += 1
    return found


def main() -> None:
    """Print the table."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 32
    for seconds in (20, 60, 180):
        for page, counters in rows(seconds, seeds).items():
            cells = [" / ".join(f"{100 * cell[name] / cell.total():.0f}" for name in VERDICTS) for cell in counters]
            print(f"| {seconds} s | {'client and page' if page else 'client'} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
