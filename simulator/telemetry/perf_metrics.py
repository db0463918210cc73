"""`/perf_metrics` and `/steady_clock_offset` as trtllm-serve has them, with the true stamps of finished requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count

from sidelight.simulator.engine.history import RequestRecord

# A machine's uptime: the clock's zero means nothing to a reader.
_UPTIME_NS = 86_400_123_456_789


class PerfMetrics:
    """The newest records of requests, `kept` of them at most, until somebody takes them; none are kept at 0.

    `clock` is that of the records, int64 ns Unix; the page's stamps are seconds of a clock with another zero.
    """

    def __init__(self, capacity: int, clock: Callable[[], int]) -> None:
        self._records: deque[dict[str, object]] = deque(maxlen=capacity)
        self._clock = clock
        self._zero_ns = clock() - _UPTIME_NS
        self._numbers = count(1)

    def add(self, record: RequestRecord) -> None:
        times = {
            "server_arrival_time": self._s(record.arrival_ns),
            "arrival_time": self._s(record.arrival_ns),
            "first_scheduled_time": self._s(record.scheduled_ns),
            "first_token_time": self._s(record.first_token_ns),
            "server_first_token_time": self._s(record.first_token_ns),
            "last_token_time": self._s(record.finished_ns),
        }
        self._records.append({"request_id": next(self._numbers), "perf_metrics": {"timing_metrics": times}})

    def take(self) -> list[dict[str, object]]:
        """Return the records and forget them."""
        taken = list(self._records)
        self._records.clear()
        return taken

    def exchange(self) -> dict[str, float]:
        """Return two stamps of the clock: when it was asked, and when it answers."""
        receive_s = self._s(self._clock())
        return {"receive_ts": receive_s, "transmit_ts": self._s(self._clock())}

    def _s(self, at_ns: int) -> float:
        return (at_ns - self._zero_ns) / 1e9
