"""The live page after the load: it shows the report's own numbers until they have been scraped."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.html.data import PageInputs
from sidelight.exporter.html.live import event
from sidelight.exporter.html.page import as_html, as_parts
from sidelight.exporter.prometheus.counts import counted, nothing_counted
from sidelight.exporter.prometheus.page import LivePage
from sidelight.exporter.prometheus.snapshot import ClientCounts, Cumulative, GeneratorCounts, Snapshot
from sidelight.exporter.report.verdict import largest_part, verdict_of
from sidelight.exporter.summary.result import Summary
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.run import Run
from sidelight.rundir.columns import take
from sidelight.scraper.window.quantities import Gauge, quantities_of
from sidelight.scraper.window.window import Window
from sidelight.sidecar.live.quantiles import estimated
from sidelight.sidecar.live.tally import Tally, reported_rates

if TYPE_CHECKING:
    from sidelight.exporter.evaluation.evaluate import Evaluated

INTERVALS = 3  # of the scraper, within which its next scrape should come
UNKNOWN_INTERVAL_S = 5.0  # of a scraper that has come once
LONGEST_S = 60.0
BROWSERS_S = 5.0


def final(latest: Snapshot, run: Run, parts: Parts, summary: Summary) -> Snapshot:
    """Return the last snapshot of a run with the report's numbers. These are the numbers of its requests, its
    objectives, and its quantiles of its engines.
    """
    rows = run.requests.phase == "measure"
    log, measured = take(run.requests, rows), take(parts, rows)
    tally = Tally()
    tally.count(log)
    shown, generator = latest.client or ClientCounts(requests={}), latest.generator or GeneratorCounts()
    sources = () if latest.parts is None else {source for _, source in latest.parts.ttft}
    counts = replace(
        counted(nothing_counted(sources=sources), measured, requests=log),
        ttft_means_s=_means_s(measured),
        largest=largest_part(summary.correlation.breakdown),
        pending=0,
    )
    if latest.parts is not None:
        before = latest.parts
        counts = replace(
            counts,
            ttft={key: _not_below(each, before.ttft.get(key)) for key, each in counts.ttft.items()},
            e2e={key: _not_below(each, before.e2e.get(key)) for key, each in counts.e2e.items()},
            inner={key: _not_below(each, before.inner.get(key)) for key, each in counts.inner.items()},
        )
    client, verdict = _client(tally, log, run, summary, shown), verdict_of(summary)
    served: dict[str, float] = {
        each.name: each.value for each in verdict.figures if each.name == "served" and each.value
    }
    window = Window(start_ns=summary.window.start_ns, end_ns=summary.window.end_ns)
    quantiles = {endpoint.url: estimated(endpoint, window) for endpoint in run.endpoints}
    roles = stated_roles(summary)
    engines = tuple(
        replace(
            engine,
            quantiles=quantiles.get(engine.endpoint, {}),
            highest=_highest(summary, engine.endpoint),
            role=roles.get(engine.endpoint, ""),
        )
        for engine in latest.engines
    )
    return replace(
        latest,
        phase="done",
        client=replace(client, rates={**client.rates, **served}),
        generator=replace(
            generator,
            schedule_lateness=_not_below(tally.lateness, generator.schedule_lateness),
            lateness_quantiles_s=tally.lateness_quantiles_s(),
        ),
        parts=counts,
        engines=engines,
        verdicts=verdicts(summary),
        verdict=verdict,
    )


def stated_roles(summary: Summary) -> dict[str, str]:
    """Return the roles of engines' pages, by URL."""
    return {page.url: page.role or "" for page in summary.server.endpoints}


def _highest(summary: Summary, url: str) -> dict[str, float]:
    """Return the maxima of a page's gauges in the measured window."""
    pages = [page for page in summary.server.endpoints if page.url == url]
    gauges = ((name, shown) for page in pages for name, shown in quantities_of(page) if isinstance(shown, Gauge))
    return {name: gauge.stats.max for name, gauge in gauges if isinstance(gauge.stats.max, float)}


def _means_s(parts: Parts) -> dict[str, float]:
    """Return the mean of each part of the TTFT, which add up to its mean.

    Not from the histograms: these count what stamps that are late by a little made negative as nothing.
    """
    count = np.count_nonzero(parts.covered)
    columns = {part.name: parts.seconds(part)[parts.covered] for part in TTFT_PARTS}
    return {name: float(np.nansum(column) / count) for name, column in columns.items() if np.isfinite(column).any()}


def _client(tally: Tally, log: RequestLog, run: Run, summary: Summary, shown: ClientCounts) -> ClientCounts:
    slo = summary.client.slo
    client = tally.client_counts(
        in_flight=0,
        submitted=int((log.submit_ns >= 0).sum()),
        scheduled=run.scheduled_by("measure"),
        slo=slo,
    )
    return replace(
        client,
        good=None if slo is None else slo.good_requests,
        rates=reported_rates(summary.client),
        output_tokens=max(tally.received, shown.output_tokens or 0),
        ttft=_not_below(tally.ttft, shown.ttft),
        inter_token=_not_below(tally.inter_token, shown.inter_token),
        time_per_output_token=_not_below(tally.tpot, shown.time_per_output_token),
        e2e=_not_below(tally.e2e, shown.e2e),
    )


def _not_below(histogram: Cumulative, shown: Cumulative | None) -> Cumulative:
    """Return a histogram raised to at least the counts and the sum already shown. A counter that falls has begun anew
    for Prometheus.

    Sums round by the order of their values, and the report may estimate a request's parts otherwise.
    """
    if shown is None:
        return histogram
    cumulative = np.maximum(np.cumsum(histogram.counts), np.cumsum(shown.counts))
    counts = tuple(np.diff(cumulative, prepend=0.0).tolist())
    return replace(histogram, counts=counts, sum_s=max(histogram.sum_s, shown.sum_s))


def verdicts(summary: Summary) -> dict[str, bool]:
    """Return the report's verdicts on a run; undecided ones are left out."""
    load, trusted = summary.methodology.stability.verdict, summary.self_check.trusted
    judged = {"load": load == "stable" if load in {"stable", "growing"} else None, "generator": trusted}
    return {of: verdict for of, verdict in judged.items() if verdict is not None}


def recorded(derived: Evaluated) -> PageInputs:
    """Return the recorded data of a run that a page shows beside its summary."""
    run, reuse = derived.run, derived.reuse.requests
    phases = [(phase.name, phase.start_ns, phase.end_ns) for phase in run.phases]
    return PageInputs(requests=run.requests, parts=derived.parts, reuse=reuse, endpoints=run.endpoints, phases=phases)


def final_event(derived: Evaluated) -> bytes:
    """Return the last event for browsers: the report."""
    run = derived.run
    trace_url = str(run.manifest["config"].get("trace_url") or "")
    note = f"The run has ended: this is its report. Its files are in {run.path}."
    return event("final", {"note": note, **as_parts(derived.summary, recorded(derived), trace_url=trace_url)})


def as_page(derived: Evaluated, *, trace_url: str = "") -> str:
    """Return the HTML page of a run."""
    return as_html(derived.summary, recorded(derived), trace_url=trace_url)


def patience_s(scraped_s: Sequence[float]) -> float:
    """Return the time to wait for the next scrape after those at some moments, s. It is three of their intervals, a
    minute at most; 0 where there was none.
    """
    if not scraped_s:
        return 0.0
    intervals_s = [after - before for before, after in pairwise(scraped_s)]
    return min(LONGEST_S, INTERVALS * max(intervals_s, default=UNKNOWN_INTERVAL_S))


async def linger(page: LivePage, final_numbers: Snapshot, most_s: float | None) -> bool:
    """Show the final numbers until they have been scraped once; at most `most_s`, None: as `patience_s` says. Then wait
    until browsers have the end, BROWSERS_S at most.

    Returns whether they were scraped. Ctrl-C ends the wait: the report is written by then.
    """
    wait_s = patience_s(page.scraped_s) if most_s is None else most_s
    page.update(final_numbers)
    page.scraped.clear()
    with suppress(asyncio.CancelledError):
        with suppress(TimeoutError):
            await asyncio.wait_for(page.scraped.wait(), wait_s)
        await page.stream.until_left(BROWSERS_S)
    return page.scraped.is_set()
