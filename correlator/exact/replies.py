"""Exact times from the replies themselves, where an engine states them there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from correlator.exact.table import ALL_TIMES, ExactTimes
from loadgen.requests.table import RequestLog


def by_reply(requests: RequestLog, rows: Sequence[int], why: Sequence[list[str]]) -> Iterator[tuple[int, ExactTimes]]:
    """Give the times that replies state."""
    for row in rows:
        times_s: dict[str, Any] = {
            f"{name}_s": float(getattr(requests, f"server_{name}_ms")[row]) / 1e3 for name in ALL_TIMES
        }
        if np.isnan(times_s["queue_s"]) and np.isnan(times_s["prefill_s"]):
            why[row].append("its reply tells neither queue nor prefill")
        else:
            yield row, ExactTimes(**times_s)
