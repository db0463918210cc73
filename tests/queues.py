"""Queues in virtual time: requests that arrive at some servers, first come, first served, and when each ended."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """When each request arrived, was begun and ended [n], ascending by arrival."""

    arrived_s: Floats
    begun_s: Floats
    ended_s: Floats

    def waiting(self, *, every_s: float) -> tuple[Floats, Floats]:
        """How many waited, at equal intervals until all had ended."""
        at_s = np.arange(0.0, self.ended_s.max(), every_s)
        begun = np.searchsorted(np.sort(self.begun_s), at_s, side="right")
        return at_s, np.searchsorted(self.arrived_s, at_s, side="right") - begun.astype(np.float64)


def served(arrived_s: Floats, took_s: Floats, *, servers: int) -> Served:
    """Requests at so many servers, each of which has one at a time."""
    free_s = [0.0] * servers
    begun_s = np.empty(len(arrived_s))
    for at, moment_s in enumerate(arrived_s.tolist()):
        begun_s[at] = max(moment_s, heapq.heappop(free_s))
        heapq.heappush(free_s, begun_s[at] + took_s[at])
    return Served(arrived_s=arrived_s, begun_s=begun_s, ended_s=begun_s + took_s)


def loaded(
    load: float, *, seconds: float, per_s: float = 6.0, servers: int = 16, variation: float = 0.4, seed: int = 1
) -> Served:
    """Poisson arrivals at `load` times the capacity of `per_s`; log-normal service times of that variation."""
    random = np.random.default_rng([seed, servers, int(1000 * load), int(seconds)])
    arrived_s = np.sort(random.uniform(0, seconds, random.poisson(load * per_s * seconds)))
    return served(arrived_s, took(random, len(arrived_s), servers / per_s, variation), servers=servers)


def took(random: np.random.Generator, size: int, mean_s: float, variation: float) -> Floats:
    """Log-normal times of this mean and coefficient of variation."""
    spread = np.log1p(variation**2)
    return random.lognormal(np.log(mean_s) - spread / 2, np.sqrt(spread), size)
