"""What the summary of a watch has that a run's has not: which time it covers, and what was counted since its start."""

from __future__ import annotations

import msgspec

from correlator.replay import Replayed
from exporter.summary.watched import BrokenTraces, SinceStart, WatchedTraffic
from recorded.events import WATCHED
from recorded.run import Phase, Run
from rundir.clock import iso_ms
from scraper.window.window import Window


def watched_window(run: Run, watched: Replayed, phase: Phase) -> Window:
    """Return the time that the results of a watch cover: from the first page or span that was kept, to its end."""
    pages = [endpoint.response_ns for endpoint in run.endpoints if len(endpoint.response_ns)]
    first_ns = [int(stamps_ns[0]) for stamps_ns in pages] + ([] if watched.from_ns is None else [watched.from_ns])
    start_ns = max(phase.start_ns, min(first_ns, default=phase.start_ns))
    last_ns = [int(stamps_ns[-1]) for stamps_ns in (*pages, watched.requests.end_ns) if len(stamps_ns)]
    end_ns = max(last_ns, default=start_ns) if phase.end_ns is None else phase.end_ns
    return Window(start_ns=start_ns, end_ns=max(start_ns, end_ns))


def watched_traffic(run: Run, watched: Replayed, window: Window) -> WatchedTraffic:
    """Return what a watch saw beside its requests."""
    begun_ns = next((phase.start_ns for phase in run.phases), window.start_ns)
    broken = [
        {"service": service, "how": how, "requests": requests} for (service, how), requests in watched.broken.items()
    ]
    counted = next((event.data for event in run.events if event.name == WATCHED), None)
    return WatchedTraffic(
        begun_ns=begun_ns,
        begun=iso_ms(begun_ns),
        shortened=watched.shortened,
        missing=dict(watched.missing),
        engine_spans=watched.engine_spans,
        repeated_spans=watched.repeated,
        evicted_spans=watched.evicted,
        whole_traces=watched.whole,
        broken_traces=msgspec.convert(broken, list[BrokenTraces]),
        left_out_requests=watched.dropped,
        since_start=msgspec.convert(counted, SinceStart | None),
    )
