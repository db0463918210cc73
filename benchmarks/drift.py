"""How soon a watch says that its engine became slower, and how often it says so where it did not.

    PYTHONPATH=tests python benchmarks/drift.py --hours 30 --slower 1.05

Virtual traffic at 5 requests/s, with a day that goes from half of that to one and a half; requests are followed as a
watch follows them, each minute. Printed are the changes that are said: in which minute, of what, since when, by how
much. With --slower the engine takes so much longer from two thirds of the time on, without it nothing changes.
"""

from __future__ import annotations

import argparse

import numpy as np
from played_runs import lengths
from played_twins import slowing

from sidelight.rundir.columns import Floats, take
from sidelight.twin.drift import begun, between, continued, said
from sidelight.twin.engine.fit import EngineFit, fit
from sidelight.twin.engine.spans import SpannedRequests

RATE_PER_S, DAY_S, SWING = 5.0, 86_400.0, 0.5
FIRST_S, LOOK_S, WINDOW_S = 900.0, 60.0, 300.0


def arrivals(hours: float, seed: int) -> Floats:
    """Return Poisson arrivals whose rate swings by the day."""
    random = np.random.default_rng(seed)
    most_per_s = RATE_PER_S * (1 + SWING)
    at_s = np.cumsum(random.exponential(1 / most_per_s, round(1.1 * most_per_s * hours * 3600)))
    rate_per_s = RATE_PER_S * (1 + SWING * np.sin(2 * np.pi * at_s / DAY_S))
    here: Floats = at_s[(random.random(len(at_s)) < rate_per_s / most_per_s) & (at_s < hours * 3600)]
    return here


def traffic(hours: float, slower: float, seed: int) -> SpannedRequests:
    """Return the requests of an engine that is slower from two thirds of the time on."""
    at_s = arrivals(hours, seed)
    prompts, outputs = lengths(len(at_s), seed)
    return slowing(at_s, prompts, outputs, changed_s=2400 * hours, slower=slower, seats=64, seed=seed)


def main() -> None:
    """Print what is said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=6.0)
    parser.add_argument("--slower", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    for seed in range(asked.seeds):
        requests = traffic(asked.hours, asked.slower, seed)
        fitted = fit(between(requests, 0.0, FIRST_S)[0])
        if not isinstance(fitted, EngineFit):
            raise SystemExit(fitted.reason)
        history, before = begun(fitted, FIRST_S), set[str]()
        for now_s in np.arange(FIRST_S + LOOK_S, asked.hours * 3600, LOOK_S).tolist():
            near = slice(*np.searchsorted(requests.submit_s, [now_s - WINDOW_S, now_s]).tolist())
            some, since_s = between(take(requests, near), now_s - WINDOW_S, now_s)
            history = continued(history, some, since_s, now_s)
            changes = history.changes()
            for part in changes.keys() - before:
                print(f"seed {seed}, minute {now_s / 60:.0f}: {said(part, changes[part], None)}")
            before = set(changes)
        print(f"seed {seed}: {len(requests)} requests in {asked.hours:g} h")


if __name__ == "__main__":
    main()
