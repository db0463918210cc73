"""The live page of a run at any step of it, from recorded data."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

import numpy as np

from sidelight.correlator.breakdown import Parts
from sidelight.exporter.prometheus.counts import counted, nothing_counted
from sidelight.exporter.prometheus.remote_write import STEP_S
from sidelight.exporter.prometheus.snapshot import (
    ClientCounts,
    EngineCounts,
    EngineQuantiles,
    GeneratorCounts,
    Snapshot,
)
from sidelight.exporter.summary.result import Summary
from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.loadgen.requests.table.fold import InFlightRequest
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.directory import MANIFEST
from sidelight.recorded.run import Run
from sidelight.rundir.columns import take
from sidelight.rundir.printable.text import LONGEST_WORD
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import Window
from sidelight.sidecar.live.engine import EngineView, about_engine, known_of, stated
from sidelight.sidecar.live.final import final, stated_roles, verdicts
from sidelight.sidecar.live.quantiles import MOST_SCRAPES, estimated, scrapes_of
from sidelight.sidecar.live.tally import Tally, rates_so_far, reported_rates
from sidelight.sidecar.options.checks import recorded_tags
from sidelight.sidecar.version import VERSION

STEP_NS = round(STEP_S * 1e9)
MOST_STEPS = 17_280  # a day


def history(
    run: Run, parts: Parts, summary: Summary, *, after_ns: int | None = None, sent_ns: int = 0
) -> Iterator[tuple[int, Snapshot]]:
    """Yield a snapshot each 5 s, and one at the end. A snapshot has the requests that had ended and the pages scraped
    by then; with `after_ns`, only later ones are yielded; the last is later than `sent_ns`. Of a run that lasted longer
    than a day, steps are longer.

    `parts` and `summary` are those of the run: the last snapshot holds the report's numbers, as the live page does.
    """
    rows = run.requests.phase == "measure"
    log, measured = take(run.requests, rows), take(parts, rows)
    order = np.argsort(log.end_ns, kind="stable")
    order = order[log.end_ns[order] >= 0]
    ends_ns = log.end_ns[order]
    engines = [(endpoint, _view(endpoint)) for endpoint in run.endpoints if len(endpoint.at_ns)]
    slo = summary.client.slo
    tally = Tally(slo=None if slo is None else parse_slo(slo.text))
    counts, done, before_ns = nothing_counted(), 0, -1
    run_id = str(run.manifest["run_id"])
    about, judged = _about(run, [view for _, view in engines]), verdicts(summary)
    labels = {"run_id": run_id, **recorded_tags(run.manifest["config"].get("tag") or (), run.path / MANIFEST)}
    moments = list(_moments(run, after_ns, sent_ns))
    quantiles = _Quantiles(start_ns=summary.window.start_ns, roles=stated_roles(summary))
    for at_ns in moments:
        now = int(np.searchsorted(ends_ns, at_ns, side="right"))
        if now > done:
            ended = order[done:now]
            tally.count(take(log, ended))
            counts = counted(counts, take(measured, ended), requests=take(log, ended))
            done = now
        _stream(tally, log, before_ns, at_ns)
        before_ns = at_ns
        begun = [phase.name for phase in run.phases if phase.start_ns <= at_ns]
        shown = Snapshot(
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
            engines=quantiles.added(
                stated([_at(endpoint, view, at_ns) for endpoint, view in engines], _version(run)), run.endpoints, at_ns
            ),
            parts=replace(counts, pending=0),
        )
        yield at_ns, final(shown, run, parts, summary) if at_ns == moments[-1] else shown


@dataclass(slots=True, kw_only=True)
class _Quantiles:
    """Quantiles of engines since the start of the measured phase. They are estimated anew once the phase is a fifth
    longer. `roles` are the engines', by the whole run.
    """

    start_ns: int
    roles: Mapping[str, str]
    due_ns: int = 0
    latest: Mapping[str, EngineQuantiles] = field(default_factory=dict)

    def added(
        self, engines: Sequence[EngineCounts], endpoints: Sequence[EndpointSeries], at_ns: int
    ) -> tuple[EngineCounts, ...]:
        """Return engines with their roles, and their quantiles at a moment, or shortly before."""
        if at_ns >= max(self.due_ns, self.start_ns + STEP_NS):
            self.due_ns = at_ns + (at_ns - self.start_ns) // 5
            window = Window(start_ns=self.start_ns, end_ns=at_ns)
            until = {each.url: scrapes_of(each, each.response_ns <= at_ns) for each in endpoints}
            self.latest = {
                url: estimated(endpoint, window, most_scrapes=MOST_SCRAPES) for url, endpoint in until.items()
            }
        return tuple(
            replace(engine, quantiles=self.latest.get(engine.endpoint, {}), role=self.roles.get(engine.endpoint, ""))
            for engine in engines
        )


def _moments(run: Run, after_ns: int | None, sent_ns: int) -> Iterator[int]:
    stamps = [event.at_ns for event in run.events]
    for endpoint in run.endpoints:
        stamps += endpoint.response_ns[:1].tolist() + endpoint.response_ns[-1:].tolist()
    if not stamps:
        return
    first_ns, last_ns = min(stamps), max(*stamps, int(run.requests.end_ns.max(initial=0)))
    step_ns = max(STEP_NS, (last_ns - first_ns) // MOST_STEPS)
    yield from range(first_ns if after_ns is None else max(first_ns, after_ns) + step_ns, last_ns, step_ns)
    yield max(last_ns, max(after_ns or 0, sent_ns) + 1_000_000)  # samples are of whole ms


def _about(run: Run, engines: Sequence[EngineView]) -> dict[str, str]:
    """Return the live page's description of the run."""
    config, target = run.manifest["config"], run.manifest.get("target") or {}
    urls = config.get("url") or [""]
    stated = {"model": target.get("model"), "workload": config.get("workload"), "url": urls[0]}
    return {
        **{name: str(value or "")[:LONGEST_WORD] for name, value in stated.items()},
        **about_engine(engines, _version(run)),
    }


def _version(run: Run) -> str:
    """Return the version that the engine said at `/version`."""
    return str((run.manifest.get("target") or {}).get("version") or "")


def _stream(tally: Tally, log: RequestLog, before_ns: int, at_ns: int) -> None:
    """Count the tokens of replies in progress at a moment. Of their first tokens, those since `before_ns` are
    counted.
    """
    going_on = take(log, (log.first_token_ns >= 0) & (log.first_token_ns <= at_ns) & (log.end_ns > at_ns))
    first_ns = np.repeat(going_on.first_token_ns, np.diff(going_on.chunk_start))
    streamed = np.count_nonzero((going_on.chunk_ns >= first_ns) & (going_on.chunk_ns <= at_ns))
    new = take(going_on, going_on.first_token_ns > before_ns)
    columns = zip(new.phase, new.index, new.trace_id, new.submit_ns, new.first_token_ns, strict=True)
    tally.begin([InFlightRequest(*columns_of) for columns_of in columns], streamed=int(streamed))


def _client(run: Run, summary: Summary, log: RequestLog, tally: Tally, at_ns: int) -> ClientCounts:
    """Return the client's counts at a moment; objectives are the report's once all has ended."""
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


def _at(endpoint: EndpointSeries, view: EngineView, at_ns: int) -> EngineView:
    """Return a page's view at a moment, with the scrapes up to it counted. It shows the last page by then, nothing
    before the first.
    """
    pages = int(np.searchsorted(endpoint.response_ns, at_ns, side="right"))
    if pages:
        view.show(endpoint.values[pages - 1])
        request_ns, response_ns = int(endpoint.request_ns[pages - 1]), int(endpoint.response_ns[pages - 1])
        view.counts = replace(
            view.counts, last_scrape_duration_s=(response_ns - request_ns) / 1e9, last_answer_s=response_ns / 1e9
        )
    failed = bisect_right(endpoint.failures, at_ns, key=itemgetter(0))
    view.counts = replace(view.counts, scrapes={"ok": pages, "failed": failed})
    return view
