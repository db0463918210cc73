"""Measured part of a recorded run: its window, and the requests and times in it."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.opening import WatchRun
from sidelight.correlator.replay import Replayed
from sidelight.exporter.evaluation.times import Correlated, correlated
from sidelight.exporter.report.heading import urls_of
from sidelight.loadgen.driver import is_closed_loop
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.run import Phase, Run
from sidelight.rundir.columns import Bools, take
from sidelight.scraper.window.window import Window

MOST_SLICES = 20_000  # of a window: eleven hours in slices of two seconds
LEAST_SLICES, SLICES_PER_RECORD = 1_000, 10  # by requests and scrapes: forged stamps are centuries apart


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A run with its measured window, and its measured requests [n] and their times.

    `times` are those of all requests of the run, of which `rows` are the measured ones.
    """

    run: Run
    window: Window
    slice_ns: int
    times: Correlated
    rows: Bools
    requests: RequestLog
    parts: Parts


def measured_run(run: Run) -> MeasuredRun:
    """Return the measured part of a run. Raises ValueError for slices of no duration."""
    window, times, rows = window_of(run), correlated(run), run.requests.phase == "measure"
    return MeasuredRun(
        run=run,
        window=window,
        slice_ns=_slice_ns(run, window),
        times=times,
        rows=rows,
        requests=take(run.requests, rows),
        parts=take(times.parts, rows),
    )


def window_of(run: Run) -> Window:
    """Return the measured window: from the measured phase's start to the end of the last reply that was whole.

    What hung until it was given up does not stretch the window, but a submission does. A run that the user stopped, and
    a scrape: to the phase's own end. One that was cut short: to the last stamp that anything left. One that never came
    to measuring has an empty window at its start. A watch's begins with the first page or span that was kept.
    """
    phase = next((phase for phase in run.phases if phase.name == "measure"), None)
    if phase is None:
        started_ns = int(run.manifest["started_ns"])
        return Window(start_ns=started_ns, end_ns=started_ns)
    if isinstance(run, WatchRun):
        return watched_window(run, run.watched, phase)
    measured = take(run.requests, run.requests.phase == "measure")
    if run.status == "crashed":
        stamps = [measured.end_ns, measured.last_token_ns, *(endpoint.response_ns for endpoint in run.endpoints)]
    else:
        stamps = [measured.end_ns[measured.status == "ok"], measured.dispatch_ns]
    last = [int(column.max(initial=-1)) for column in stamps]
    if phase.end_ns is not None and (run.status == "interrupted" or max(last) < 0):
        last = [phase.end_ns]
    return Window(start_ns=phase.start_ns, end_ns=max(phase.start_ns, *last))


def watched_window(run: Run, watched: Replayed, phase: Phase) -> Window:
    """Return the time that the results of a watch cover: from the first page or span that was kept, to its end."""
    pages = [endpoint.response_ns for endpoint in run.endpoints if len(endpoint.response_ns)]
    first_ns = [int(stamps_ns[0]) for stamps_ns in pages] + ([] if watched.from_ns is None else [watched.from_ns])
    start_ns = max(phase.start_ns, min(first_ns, default=phase.start_ns))
    last_ns = [int(stamps_ns[-1]) for stamps_ns in (*pages, watched.requests.end_ns) if len(stamps_ns)]
    end_ns = max(last_ns, default=start_ns) if phase.end_ns is None else phase.end_ns
    return Window(start_ns=start_ns, end_ns=max(start_ns, end_ns))


def _slice_ns(run: Run, window: Window) -> int:
    """Return the length of a window's slices: as configured, or longer where there would be too many for its records.

    Raises ValueError where that was no time at all.
    """
    asked_ns = int(float(run.manifest["config"]["slice_duration"]) * 1e9)
    if asked_ns <= 0:
        raise ValueError(f"slice_duration of {asked_ns} ns")
    records = len(run.requests) + sum(len(endpoint.response_ns) for endpoint in run.endpoints)
    most = min(MOST_SLICES, LEAST_SLICES + SLICES_PER_RECORD * records)
    return max(asked_ns, -(-(window.end_ns - window.start_ns) // most))


def closed_loop(run: Run) -> bool:
    """Return whether the load was a closed loop: only replies triggered the next requests."""
    config = run.manifest["config"]
    return is_closed_loop(**{name: config.get(name) for name in ("concurrency", "rate", "trace")})


def engine_here(run: Run) -> bool:
    """Return whether the engine ran on the machine of the hardware readings, by its URL."""
    config = run.manifest["config"]
    host = next((urlsplit(url).hostname or "" for url in (*urls_of(config), *(config.get("metrics") or ()))), "")
    return host in ("localhost", "::1", run.manifest.get("host", {}).get("name")) or host.startswith("127.")
