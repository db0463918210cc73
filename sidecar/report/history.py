"""The live page of a run as it could have been read at any step of it, from what was recorded; sending it elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np

from correlator.breakdown import Parts
from exporter.prometheus.counts import counted, nothing_counted
from exporter.prometheus.remote_write import write
from exporter.prometheus.snapshot import EngineCounts, GeneratorCounts, PartCounts, Snapshot
from rundir.access import Access, masked
from rundir.columns import take
from scraper.series.table import EndpointSeries
from sidecar import VERSION
from sidecar.directory import Run
from sidecar.live.engine import EngineView, known_of
from sidecar.live.tally import Tally
from sidecar.options.load import tags_of
from sidecar.progress import Progress

STEP_NS = 5_000_000_000
MOST_STEPS = 17_280  # a day


def history(run: Run, parts: Parts) -> Iterator[tuple[int, Snapshot]]:
    """Give a snapshot each 5 s, and one at the end: what had ended and was scraped by then. Of a run that lasted longer
    than a day, steps are longer.

    `parts` are those of the run's requests, so that the last snapshot holds the report's numbers.
    """
    rows = run.requests.phase == "measure"
    log, parts = take(run.requests, rows), take(parts, rows)
    order = np.argsort(log.end_ns, kind="stable")
    order = order[log.end_ns[order] >= 0]
    ends_ns = log.end_ns[order]
    engines = [(endpoint, _view(endpoint)) for endpoint in run.endpoints if len(endpoint.at_ns)]
    tally, counts, done = Tally(), nothing_counted(), 0
    for at_ns in _moments(run):
        now = int(np.searchsorted(ends_ns, at_ns, side="right"))
        if now > done:
            ended = order[done:now]
            tally.count(take(log, ended))
            counts = counted(counts, take(parts, ended), requests=take(log, ended))
            done = now
        in_flight = int(np.count_nonzero((log.submit_ns >= 0) & (log.submit_ns <= at_ns))) - done
        yield at_ns, _snapshot(run, at_ns, tally, max(0, in_flight), counts, engines)


def _moments(run: Run) -> Iterator[int]:
    stamps = [event.at_ns for event in run.events]
    for endpoint in run.endpoints:
        stamps += endpoint.response_ns[:1].tolist() + endpoint.response_ns[-1:].tolist()
    if not stamps:
        return
    first_ns, last_ns = min(stamps), max(*stamps, int(run.requests.end_ns.max(initial=0)))
    step_ns = max(STEP_NS, (last_ns - first_ns) // MOST_STEPS)
    yield from range(first_ns, last_ns, step_ns)
    yield last_ns


def _snapshot(
    run: Run,
    at_ns: int,
    tally: Tally,
    in_flight: int,
    counts: PartCounts,
    engines: Sequence[tuple[EndpointSeries, EngineView]],
) -> Snapshot:
    begun = [phase.name for phase in run.phases if phase.start_ns <= at_ns]
    run_id = str(run.manifest["run_id"])
    return Snapshot(
        version=VERSION,
        run_id=run_id,
        labels={"run_id": run_id, **tags_of(run.manifest["config"].get("tag") or ())},
        phase=begun[-1] if begun else "start",
        client=tally.client_counts(in_flight=in_flight),
        generator=GeneratorCounts(schedule_lateness=tally.lateness),
        engines=tuple(_counts(endpoint, view, at_ns) for endpoint, view in engines),
        parts=counts,
    )


def _view(endpoint: EndpointSeries) -> EngineView:
    return EngineView(counts=EngineCounts(endpoint=endpoint.url), known=known_of(endpoint.series))


def _counts(endpoint: EndpointSeries, view: EngineView, at_ns: int) -> EngineCounts:
    """Return what the last page by then showed, nothing before the first."""
    place = int(np.searchsorted(endpoint.response_ns, at_ns, side="right")) - 1
    if place >= 0:
        view.show(endpoint.values[place])
    return view.counts


def write_run(run: Run, parts: Parts, url: str, access: Access, progress: Progress) -> None:
    """Send the history of a run by remote write and report the outcome; a failing server raises nothing."""
    where = masked(url)
    progress.stage(f"sending the series of the run to {where}")
    sent = asyncio.run(write(history(run, parts), url, access, report=progress.stage))
    if sent.reason:
        progress.warn(
            f"--prometheus-write {where}: {sent.reason}; it took {sent.samples:,} samples; "
            f"`sidelight report {run.path} --prometheus-write URL` sends all again"
        )
    else:
        progress.stage(f"{where} took {sent.samples:,} samples")
