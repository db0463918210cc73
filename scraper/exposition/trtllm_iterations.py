"""TensorRT-LLM's iteration statistics (`GET /metrics` of trtllm-serve, JSON) as a page of series.

Reading the endpoint clears it, and other readers lose what this one gets: only a target asked for by its whole URL may
be read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from sidelight.scraper.exposition.page import UNREADABLE_JSON, MalformedPage, Page, Series

PREFIX = "trtllm_iteration_"
HELP = "Field of the last iteration record of TensorRT-LLM's statistics."
_DEEPEST = 16  # TensorRT-LLM's have two levels
# The engine adds these up since its start; the rest is of one iteration.
_COUNTERS = frozenset({"kv_cache_stats_reused_blocks", "kv_cache_stats_missed_blocks"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[A-Z]+")


def page(body: bytes) -> Page:
    """Read a list of iteration records; the page is the last record: one series for each number in it.

    - A field's name is that of its path in snake case, after `trtllm_iteration_`: `kvCacheStats.usedNumBlocks` is
      `trtllm_iteration_kv_cache_stats_used_num_blocks`. Units are those of the record (`iter_latency_ms`, bytes).
    - Reused and missed blocks are counters, everything else gauges; text, lists and null are left out.
    - A number beyond float64 is infinite, as text has it.
    - An empty list (nothing was done since the last reading) is a page without series.

    Raises MalformedPage for anything but a JSON list of objects.
    """
    try:
        records = msgspec.json.decode(body)
    except UNREADABLE_JSON as error:
        raise MalformedPage(f"not JSON: {error}", line=1, byte=0) from None
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise MalformedPage("JSON, but no list of iteration records", line=1, byte=0)
    shown = dict(_numbers(records[-1], "", _DEEPEST)) if records else {}
    return Page(series=_series(tuple(shown)), values=np.array(list(shown.values()), dtype=np.float64))


@lru_cache(maxsize=16)
def _series(names: tuple[str, ...]) -> tuple[Series, ...]:
    """Return the same tuple for the same names: that is how an unchanged layout is known."""
    return tuple(
        Series(
            name=PREFIX + name,
            labels=(),
            family=PREFIX + name,
            type="counter" if name in _COUNTERS else "gauge",
            help=HELP,
        )
        for name in names
    )


def _numbers(record: dict[str, Any], before: str, deepest: int) -> Iterator[tuple[str, float]]:
    """Give the numbers of a record by name; of objects below objects, as many levels as `deepest` says."""
    if not deepest:
        raise MalformedPage(f"an iteration record of more than {_DEEPEST} levels", line=1, byte=0)
    for key, value in record.items():
        name = before + "_".join(word.lower() for word in _WORD.findall(key))
        if isinstance(value, dict):
            yield from _numbers(value, f"{name}_", deepest - 1)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, _float(value)


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf
