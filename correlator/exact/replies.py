"""Exact times from the replies themselves, where an engine states them there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sidelight.correlator.exact.table import ALL_TIMES, ExactTimes
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.scraper.engines.catalogue import INNER_TIMES


def by_reply(requests: RequestLog, rows: Sequence[int], why: Sequence[list[str]]) -> Iterator[tuple[int, ExactTimes]]:
    """Give the times that replies state."""
    stated = {name: getattr(requests, f"server_{name}_ms", None) for name in ALL_TIMES}
    columns_ms = {name: column for name, column in stated.items() if column is not None}
    is_stated = ~(np.isnan(columns_ms["queue"]) & np.isnan(columns_ms["prefill"]))
    for row in rows:
        if not is_stated[row]:
            why[row].append("its reply tells neither queue nor prefill")
        else:
            times_s = {name: float(columns_ms[name][row]) / 1e3 for name in columns_ms}
            inner_s = {name: times_s.pop(name) for name in INNER_TIMES if name in times_s}
            stated_s: dict[str, Any] = {f"{name}_s": time_s for name, time_s in times_s.items()}
            yield row, ExactTimes(**stated_s, inner_s=inner_s)
