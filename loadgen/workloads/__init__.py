"""What to send, a module a workload: endless, deterministic sequences of requests."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from loadgen.workloads import synthetic_uniform
from loadgen.workloads.request import WorkloadRequest

__all__ = ["NAMES", "UnknownWorkload", "WorkloadRequest", "requests"]

_MAKERS = {synthetic_uniform.NAME: synthetic_uniform.requests}
NAMES: tuple[str, ...] = tuple(_MAKERS)


class UnknownWorkload(ValueError):
    """No workload has this name; the message gives the names there are, and the nearest."""


def requests(name: str, *, seed: int) -> Iterator[WorkloadRequest]:
    """The workload's requests, in order and without end; the same for the same seed. Raises UnknownWorkload at once."""
    if name not in _MAKERS:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.4)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise UnknownWorkload(f"unknown workload {name!r}{hint}; known: {', '.join(NAMES)}")
    return _MAKERS[name](seed=seed)
