"""How often the intervals of two pools' means hold the truth, by pages alone: two simulated engines in virtual time.

    python benchmarks/pools.py [--runs 200] [--requests 1200] [--per-s 10] [--seed N]

Each run's requests and engines are drawn anew (`tests/virtual_pair.py`); the seed, printed, is fresh where none is
given. The truth is the mean of all runs, of which each is one of many: its own error is a fourteenth of a run's at 200.
Behind a share stands its Wilson interval at 95 %.
"""

from __future__ import annotations

import argparse
import math
import secrets
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np

# This folder last: it has files of our packages' names.
sys.path.append(sys.path.pop(0))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from virtual_pair import poisson_means

from sidelight.correlator.statistics.server_times import ServerMeans

PARTS = ("queue", "prefill", "decode_queue", "first_step")


def held(means: list[ServerMeans], part: str) -> str:
    """Return a row of the table."""
    values_s = np.array([getattr(each, f"{part}_s") for each in means])
    truth_s, nothing = float(values_s.mean()), (math.inf, -math.inf)
    ends_s = np.array([each.ci90_s.get(part, nothing) for each in means])
    stated = np.isfinite(ends_s[:, 0])
    inside = (ends_s[:, 0] <= truth_s) & (truth_s <= ends_s[:, 1])
    size, share = int(stated.sum()), float(inside[stated].mean())
    centre, spread = share + 1.92 / size, 1.96 * math.sqrt(share * (1 - share) / size + 0.96 / size**2)
    low, high = ((centre + sign * spread) / (1 + 3.84 / size) for sign in (-1, 1))
    below, above = (float(np.mean(beyond)) for beyond in (ends_s[stated, 1] < truth_s, ends_s[stated, 0] > truth_s))
    width_ms = 1e3 * float(np.median(ends_s[stated, 1] - ends_s[stated, 0]))
    cells = [f"{1e3 * truth_s:.1f}", f"{1e3 * values_s.std():.1f}", f"{width_ms:.1f}"]
    cells += [f"{100 * share:.1f} ({100 * low:.0f} to {100 * high:.0f})", f"{100 * below:.1f} / {100 * above:.1f}"]
    return f"| {part} | {' | '.join(cells)} | {size} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1200)
    parser.add_argument("--per-s", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    options = parser.parse_args()
    play = partial(poisson_means, requests=options.requests, per_s=options.per_s)
    with ProcessPoolExecutor() as processes:
        means = list(processes.map(play, [(options.seed, number) for number in range(options.runs)], chunksize=4))
    print(f"{options.requests} requests at {options.per_s:g}/s, seed {options.seed}; ms")
    print("| part | mean | its sd by run | width of 90 % | holds the truth, % | too low / high, % | stated |")
    print("|---|---|---|---|---|---|---|")
    for part in PARTS:
        print(held(means, part))


if __name__ == "__main__":
    main()
