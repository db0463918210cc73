"""Exact times from the replies themselves, where an engine states them there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from correlator.exact.table import ALL_TIMES, ExactTimes
from loadgen.requests.table import RequestLog
from scraper.engines.catalogue import INNER_TIMES


def by_reply(requests: RequestLog, rows: Sequence[int], why: Sequence[list[str]]) -> Iterator[tuple[int, ExactTimes]]:
    """Give the times that replies state."""
    stated = {name: getattr(requests, f"server_{name}_ms", None) for name in ALL_TIMES}
    columns_ms = {name: column for name, column in stated.items() if column is not None}
    for row in rows:
        times_s = {name: float(columns_ms[name][row]) / 1e3 for name in columns_ms}
        if np.isnan(times_s["queue"]) and np.isnan(times_s["prefill"]):
            why[row].append("its reply tells neither queue nor prefill")
        else:
            inner_s = {name: times_s.pop(name) for name in INNER_TIMES if name in times_s}
            stated_s: dict[str, Any] = {f"{name}_s": time_s for name, time_s in times_s.items()}
            yield row, ExactTimes(**stated_s, inner_s=inner_s)
