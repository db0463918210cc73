"""The live page of a run as it could have been read at any step of it, from what was recorded; sending it elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from correlator.breakdown import Parts
from exporter.prometheus.counts import counted, nothing_counted
from exporter.prometheus.remote_write import write
from exporter.prometheus.snapshot import ClientCounts, EngineCounts, GeneratorCounts, Snapshot
from exporter.summary.result import Summary
from loadgen.requests.slo import parse_slo
from loadgen.requests.table import FirstToken, RequestLog
from rundir.access import Access, masked
from rundir.columns import take
from scraper.series.table import EndpointSeries
from sidecar import VERSION
from sidecar.directory import Run
from sidecar.live.engine import EngineView, known_of
from sidecar.live.final import verdicts
from sidecar.live.tally import Tally, rates_so_far, reported_rates
from sidecar.options.load import tags_of
from sidecar.progress import Progress

STEP_NS = 5_000_000_000
MOST_STEPS = 17_280  # a day


def history(run: Run, parts: Parts, summary: Summary) -> Iterator[tuple[int, Snapshot]]:
    """Give a snapshot each 5 s, and one at the end: what had ended and was scraped by then. Of a run that lasted longer
    than a day, steps are longer.

    `parts` and `summary` are those of the run, so that the last snapshot holds the report's numbers.
    """
    rows = run.requests.phase == "measure"
    log, parts = take(run.requests, rows), take(parts, rows)
    order = np.argsort(log.end_ns, kind="stable")
    order = order[log.end_ns[order] >= 0]
    ends_ns = log.end_ns[order]
    engines = [(endpoint, _view(endpoint)) for endpoint in run.endpoints if len(endpoint.at_ns)]
    slo, config = summary.client.slo, run.manifest["config"]
    tally = Tally(slo=None if slo is None else parse_slo(slo.text))
    counts, done, before_ns = nothing_counted(), 0, -1
    run_id = str(run.manifest["run_id"])
    about, judged = _about(run, [view for _, view in engines]), verdicts(summary)
    labels = {"run_id": run_id, **tags_of(config.get("tag") or ())}
    for at_ns in _moments(run):
        now = int(np.searchsorted(ends_ns, at_ns, side="right"))
        if now > done:
            ended = order[done:now]
            tally.count(take(log, ended))
            counts = counted(counts, take(parts, ended), requests=take(log, ended))
            done = now
        _stream(tally, log, before_ns, at_ns)
        before_ns = at_ns
        begun = [phase.name for phase in run.phases if phase.start_ns <= at_ns]
        yield (
            at_ns,
            Snapshot(
                version=VERSION,
                run_id=run_id,
                labels=labels,
                phase=begun[-1] if begun else "start",
                about=about,
                verdicts=judged if done == len(order) else {},
                client=_client(run, summary, log, tally, at_ns),
                generator=GeneratorCounts(
                    schedule_lateness=tally.lateness, lateness_quantiles_s=tally.lateness_quantiles_s()
                ),
                engines=tuple(_counts(endpoint, view, at_ns) for endpoint, view in engines),
                parts=replace(counts, pending=0),
            ),
        )


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


def _about(run: Run, engines: Sequence[EngineView]) -> dict[str, str]:
    """Return what the live page said of the run."""
    config, target = run.manifest["config"], run.manifest.get("target") or {}
    urls = config.get("url") or [""]
    known = (view.known.engine for view in engines if view.known.engine)
    engine = next(({"engine": engine.name, "version": engine.version or ""} for engine in known), {})
    stated = {"model": target.get("model"), "workload": config.get("workload"), "url": urls[0]}
    return {**{name: str(value or "") for name, value in stated.items()}, **engine}


def _stream(tally: Tally, log: RequestLog, before_ns: int, at_ns: int) -> None:
    """Count what replies that went on at a moment had brought; of their first tokens those since another moment."""
    going_on = take(log, (log.first_token_ns >= 0) & (log.first_token_ns <= at_ns) & (log.end_ns > at_ns))
    first_ns = np.repeat(going_on.first_token_ns, np.diff(going_on.chunk_start))
    streamed = np.count_nonzero((going_on.chunk_ns >= first_ns) & (going_on.chunk_ns <= at_ns))
    new = take(going_on, going_on.first_token_ns > before_ns)
    columns = zip(new.phase, new.index, new.trace_id, new.submit_ns, new.first_token_ns, strict=True)
    tally.begin([FirstToken(*columns_of) for columns_of in columns], streamed=int(streamed))


def _client(run: Run, summary: Summary, log: RequestLog, tally: Tally, at_ns: int) -> ClientCounts:
    """Return what the client had seen by a moment; objectives are the report's once all has ended."""
    submitted = int(np.count_nonzero((log.submit_ns >= 0) & (log.submit_ns <= at_ns)))
    ended = sum(tally.statuses.values())
    window, slo = summary.window, summary.client.slo
    has_ended = at_ns >= window.end_ns and ended == np.count_nonzero(log.end_ns >= 0)
    if not has_ended:
        slo = tally.slo_result((at_ns - window.start_ns) / 1e9)
    client = tally.client_counts(
        in_flight=max(0, submitted - ended),
        scheduled=run.scheduled_by("measure", at_ns),
        submitted=submitted,
        slo=slo,
    )
    elapsed_s = max(0.0, (at_ns - window.start_ns) / 1e9)
    load_s = min(elapsed_s, summary.client.rates.load_s or elapsed_s)
    return replace(
        client, rates=reported_rates(summary.client) if has_ended else rates_so_far(client, elapsed_s, load_s)
    )


def _view(endpoint: EndpointSeries) -> EngineView:
    return EngineView(counts=EngineCounts(endpoint=endpoint.url), known=known_of(endpoint.series))


def _counts(endpoint: EndpointSeries, view: EngineView, at_ns: int) -> EngineCounts:
    """Return what the last page by then showed, nothing before the first."""
    place = int(np.searchsorted(endpoint.response_ns, at_ns, side="right")) - 1
    if place >= 0:
        view.show(endpoint.values[place])
    return view.counts


def write_run(run: Run, parts: Parts, summary: Summary, url: str, access: Access, progress: Progress) -> None:
    """Send the history of a run by remote write and report the outcome; a failing server raises nothing."""
    where = masked(url)
    progress.stage(f"sending the series of the run to {where}")
    sent = asyncio.run(write(history(run, parts, summary), url, access, report=progress.stage))
    if sent.reason:
        progress.warn(
            f"--prometheus-write {where}: {sent.reason}; it took {sent.samples:,} samples; "
            f"`sidelight report {run.path} --prometheus-write URL` sends all again"
        )
    else:
        progress.stage(f"{where} took {sent.samples:,} samples")
