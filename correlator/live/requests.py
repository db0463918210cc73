"""The requests of production traffic as they end, with where their waits went: from spans and pages, in the order in
which these came. For a watch while it goes, and for the report of its logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from correlator.live.breakdown import Ended, break_down_ended, estimated
from correlator.live.estimate import EstimateWindow, hold_traced
from correlator.live.traces import TracedRequest
from correlator.live.window import TraceWindow
from loadgen.requests.table import RequestLog

Guard = Callable[[], AbstractContextManager[None]]
Step = Callable[[Sequence[TracedRequest]], None]


class SpanRequests:
    """Owns the windows that requests are made in: `spans`, and `estimates` for those that no engine's span speaks of.

    `guard` decides what becomes of an exception that is a defect of ours: `defective` counts the requests that it
    cost, and it costs no others.
    """

    def __init__(self, guard: Guard) -> None:
        self.spans = TraceWindow(guard=guard)
        self.estimates = EstimateWindow[RequestLog]()
        self._guard = guard
        self._defective = 0

    @property
    def defective(self) -> int:
        """Return how many requests were lost to defects of ours, at least."""
        return self._defective + self.spans.defective

    def clock_moved(self, moved_ns: int) -> None:
        """Go on by a clock that was set by so much, once all that came by the old time has been taken in."""
        self.spans.clock_moved(moved_ns)
        self.estimates.clock_moved(moved_ns)

    def ended(self, now_ns: int, *, all_of_it: bool = False) -> tuple[list[TracedRequest], list[Ended]]:
        """Return the requests whose spans are there by now, each once, and those that were broken down, or cannot be.

        A request is in the second list at once, or up to a minute later where it waited for an estimate.
        """
        finished = [request for request in self.spans.finished(now_ns, all_of_it=all_of_it) if not request.is_late]
        ended: list[Ended] = []
        free: list[TracedRequest] = []
        self.each(lambda requests: free.extend(hold_traced(self.estimates, requests, now_ns)), finished)
        self.each(lambda requests: ended.append(break_down_ended(requests)), free)
        for take in (self.estimates.estimates, self.estimates.leaving):
            with self._guard():
                estimates = take(now_ns, all_of_it=all_of_it)
                ended += [estimated(estimate.requests, estimate.attribution, estimate.parts) for estimate in estimates]
        return finished, ended

    def each(self, step: Step, requests: Sequence[TracedRequest]) -> None:
        """Take a step for all requests at once, or where that fails for each alone; count those it fails for."""
        if requests and not self._succeeds(step, requests):
            self._defective += sum(not self._succeeds(step, [request]) for request in requests)

    def _succeeds(self, step: Step, requests: Sequence[TracedRequest]) -> bool:
        is_lost = True
        with self._guard():
            step(requests)
            is_lost = False
        return not is_lost
