"""Load of a run so far: its phases, and the requests that are due, sent and in flight."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from sidelight.rundir.clock import AnchoredClock

if TYPE_CHECKING:
    from sidelight.loadgen.records import WorkerStat
    from sidelight.loadgen.requests.table.fold import RequestFold


class LoadProgress:
    """Phases of a run, by its logs and by the last reports of its workers.

    Phases come one after another, each drained to its end.
    """

    def __init__(self, requests: RequestFold, clock: AnchoredClock, planned_s: float | None) -> None:
        self._requests, self._clock, self._planned_s = requests, clock, planned_s
        self.phase, self.phase_ns = "start", clock.now_ns()
        self._starts_ns: dict[str, int] = {}
        self._ends_ns: dict[str, int] = {}
        self.workers: dict[int, WorkerStat] = {}
        self.worst_delay_ns = 0

    def enter(self, phase: str, start_ns: int | None) -> None:
        """Begin a phase, now or at a moment."""
        self.phase, self.phase_ns = phase, self._clock.now_ns() if start_ns is None else start_ns
        self._starts_ns[phase] = self.phase_ns

    def leave(self) -> None:
        """End the phase: nothing of it is scheduled any more."""
        self._ends_ns[self.phase] = self._clock.now_ns()

    def take(self, stat: WorkerStat) -> None:
        """Add the report of a worker."""
        self.workers[stat.worker] = stat
        self.worst_delay_ns = max(self.worst_delay_ns, stat.loop_delay_ns)

    @property
    def measured_ns(self) -> int | None:
        """Return the start of the measured phase; None before it."""
        return self._starts_ns.get("measure")

    @property
    def measured_s(self) -> float:
        """Return the duration of the measured phase so far, s; 0 before it."""
        return 0.0 if self.measured_ns is None else (self._clock.now_ns() - self.measured_ns) / 1e9

    @property
    def load_s(self) -> float:
        """Return the planned duration of the measured load, s, until the last request is due; 0 if unknown."""
        offsets_ns = self._requests.offsets_ns.get("measure")
        return self._planned_s or (offsets_ns[-1] / 1e9 if offsets_ns else 0.0)

    @property
    def in_flight(self) -> int:
        """Return the number of requests in flight: by the workers' reports, before those by their logs."""
        return sum(stat.in_flight for stat in self.workers.values()) if self.workers else self._requests.in_flight

    def submitted(self, phase: str) -> int:
        """Return the number of requests of a phase that were sent."""
        sent = self._requests.sent
        if phase != self.phase:
            return sent[phase]
        others = sum(count for name, count in sent.items() if name != phase)
        return max(sent[phase], sum(stat.started for stat in self.workers.values()) - others)

    def scheduled(self, phase: str) -> int | None:
        """Return the number of requests of a phase that are due by now; None without a schedule."""
        offsets_ns = self._requests.offsets_ns.get(phase)
        if offsets_ns is None:
            return None
        start_ns = self._starts_ns.get(phase)
        until_ns = self._ends_ns.get(phase, self._clock.now_ns())
        return 0 if start_ns is None else bisect_right(offsets_ns, until_ns - start_ns)
