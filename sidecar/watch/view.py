"""State of a watch, read from its logs. They are tailed, requests are broken down as they end, counts add up.

Everything kept is bounded: the windows of spans, requests and scrapes by their own limits, counts by their labels.
"""

from __future__ import annotations

import resource
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from time import thread_time
from typing import TYPE_CHECKING, Any, Self

from sidelight.correlator.live.breakdown import EndedRequests
from sidelight.correlator.live.reasons import DEFECT, REASONS, Break
from sidelight.correlator.live.requests import SpanRequests
from sidelight.exporter.prometheus.counts import (
    clients_counted,
    counted,
    no_clients_counted,
    nothing_counted,
    without_breakdown,
)
from sidelight.exporter.prometheus.snapshot import REFUSED, PartCounts, SaidVerdict, Snapshot, WatchCounts, said
from sidelight.recorded.failures import ErrorCount
from sidelight.rundir.access import masked
from sidelight.rundir.columns import take
from sidelight.rundir.frames import LogTails
from sidelight.scraper.gateways.catalogue import can_state_more
from sidelight.scraper.series.log import LogReader
from sidelight.sidecar.live.engine import Engines, EngineView
from sidelight.sidecar.live.lately import WINDOW_S, Lately
from sidelight.sidecar.live.sending import Browsers
from sidelight.sidecar.version import VERSION
from sidelight.sidecar.watch.exports import SPANS, Exports
from sidelight.sidecar.watch.objectives import WatchedObjectives
from sidelight.sidecar.watch.panel import EngineState, WatchState
from sidelight.twin.watched import WatchedEngines

if TYPE_CHECKING:
    from sidelight.exporter.summary.verdict import RunVerdict

MOST_GATEWAYS = 20  # said by name
SCRAPES = "scrapes-*.log"
READ_S = 1.0
VERDICT_S = 5.0  # of 20,000 requests it takes 30 ms


class WatchView:
    """View of a watch on its logs, which it tails. A context manager; `poll` and `state` may run in a thread, one call
    at a time.

    It keeps the requests of the last minutes, for `state`. `browsers` have begun, and get rows. A poll reads spans for
    `read_s`, after which what is known by then is shown. A `shard` sees too few of an engine's requests
    for estimates. `objectives` are judged by the last minute, the engine's `twin` by the last minutes.
    """

    def __init__(
        self,
        raw: Path,
        *,
        run_id: str,
        pages: Collection[str] = (),
        browsers: Browsers | None = None,
        read_s: float = READ_S,
        shard: str | None = None,
        objectives: WatchedObjectives | None = None,
        twin: WatchedEngines | None = None,
    ) -> None:
        self._shard = shard
        self._objectives = objectives or WatchedObjectives()
        self._twin = twin or WatchedEngines()
        self._columns = None if browsers is None else browsers.columns
        self._lately = Lately()
        self._engines = Engines(keep_s=WINDOW_S, waiting_s=WINDOW_S)
        self._restarted_ns: dict[str, int] = {}
        self.failures = ErrorCount("what had just come is lost; the watch goes on")
        self._tails = LogTails(raw)
        self._exports = Exports(self._tails, self.failures.guard, read_s=read_s)
        self._run_id = run_id
        self._requests = SpanRequests(self.failures.guard, is_shard=shard is not None)
        self._wanted = frozenset(masked(url) for url in pages)
        self._readers: dict[Path, LogReader] = {}
        self._client = no_clients_counted()
        self._parts = nothing_counted(sources=("trace", "histogram"), reasons=REASONS)
        self._half_known: dict[str, bool] = {}  # gateways that do not say their first output, and whether that was said
        self._said: SaidVerdict | None = None
        self._judged_ns, self._news = -round(VERDICT_S * 1e9), ""
        self._breaks: Mapping[Break, str] = {}
        self._said_breaks: set[Break] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tails.__exit__()

    @property
    def receiver_counts(self) -> dict[str, int]:
        """Return the counts of all receivers."""
        return self._exports.counts()

    @property
    def is_behind(self) -> bool:
        """Whether spans have come that are not read yet."""
        return self._exports.is_behind

    @property
    def parts(self) -> PartCounts:
        """Return the counts by part. Requests lost by a defect of Sidelight are among those without a breakdown."""
        pending = self._requests.pending + self._requests.estimates.sizes["waiting"]
        return replace(without_breakdown(self._parts, DEFECT, self._requests.defective), pending=pending)

    def missed(self, back_ns: int) -> None:
        """Record that there was no receiver until `back_ns`."""
        self._requests.missed(back_ns)

    def scrape_only(self, urls: Collection[str]) -> None:
        """Remove, at the next look, the pages that are no longer scraped."""
        self._wanted = frozenset(masked(url) for url in urls)

    def poll(self, now_ns: int, *, all_of_it: bool = False) -> None:
        """Read new data of the logs, and break down the requests that have ended. With `all_of_it`, those that are left
        are broken down too.

        Where more spans have come than are read in `read_s`, the view `is_behind`: the rest is read by the next polls,
        and until then requests end by when the spans came that were read. What cannot be read or counted is passed
        over, and `failures` counts it.
        """
        if not self._wanted.issuperset(self._engines.views):
            self._engines.keep(self._wanted)
            self._requests.estimates.forget_pages(self._wanted)
        for path, payload in self._tails.news(SCRAPES, in_turn=True):
            with self.failures.guard():
                self._take_page(path, payload)
        known_ns = self._exports.read(now_ns, self._requests.spans.take, all_of_it=all_of_it)
        self._count_ended(known_ns, all_of_it=all_of_it)
        with self.failures.guard():
            self._engines.estimate_quantiles(now_ns - round(WINDOW_S * 1e9), now_ns)

    def _count_ended(self, now_ns: int, *, all_of_it: bool) -> None:
        """Count the requests that have ended."""
        finished, ended = self._requests.ended(now_ns, all_of_it=all_of_it)
        with self.failures.guard():
            clients = [(request.client, request.trace_id.hex()) for request in finished if request.client is not None]
            if clients:
                self._lately.count_clients(len(clients), sum(span.failed for span, _ in clients), now_ns)
                self._objectives.count(clients, now_ns)
                self._client = clients_counted(self._client, clients, now_ns)
        for requests in ended:
            with self.failures.guard():
                self._count_parts(requests, now_ns)
        self._breaks = self._requests.count.breaking(now_ns)
        self._lately.forget(now_ns)
        with self.failures.guard():
            self._parts = replace(self._parts, largest=self._lately.largest(now_ns))

    def fresh_breaks(self) -> list[str]:
        """Return the places where nearly all traces have been breaking for a minute, each once. A place is described in
        a sentence.
        """
        fresh = [text for where, text in self._breaks.items() if where not in self._said_breaks]
        self._said_breaks.update(self._breaks)
        return fresh

    def half_known_gateways(self) -> list[str]:
        """Return gateways' services with spans that could state their first output, but do not. Each is returned
        once.
        """
        fresh = [service for service, is_said in self._half_known.items() if not is_said]
        self._half_known.update(dict.fromkeys(fresh, True))
        return fresh

    def _count_parts(self, ended: EndedRequests, now_ns: int) -> None:
        for gateway in (gateway for row in ended.parts.gateways.tolist() for gateway in row):
            if not gateway.first_by and can_state_more(gateway.name) and len(self._half_known) < MOST_GATEWAYS:
                self._half_known.setdefault(gateway.service, False)
        rows = ended.requests.status != ""  # others are engines' requests without an outermost span
        requests, parts = take(ended.requests, rows), take(ended.parts, rows)
        self._parts = counted(
            self._parts,
            parts,
            whole=take(ended.whole, rows),
            reasons=ended.reason,
            requests=requests,
            engine_only=ended.engine_only,
        )
        self._lately.take(ended, now_ns)
        self._twin.take(ended, now_ns)
        if self._columns is not None:
            self._columns.known(requests, parts)

    def prune(self, now_ns: int, *, keep_s: float, keep_bytes: int) -> None:
        """Delete data that were read and are beyond the limits.

        `now_ns` is by the clock of the view: by one that was set meanwhile, all might be too old.
        """
        self._tails.prune((SPANS, SCRAPES), now_ns=now_ns, keep_s=keep_s, keep_bytes=keep_bytes)

    def since_start(self, *, restarts: int) -> dict[str, Any]:
        """Return the counts since the start, for the summary."""
        parts = self.parts
        return {
            "by_trace": parts.requests["trace"],
            "estimated": parts.requests["histogram"],
            "without_breakdown": parts.requests["none"],
            "missing": {reason: count for reason, count in parts.missing.items() if count},
            "ok": self._client.requests["ok"],
            "failed": self._client.requests["failed"],
            "spans": self.receiver_counts["spans"],
            "receiver_restarts": restarts,
        }

    def verdict(self, now_ns: int, *, stale_s: float) -> RunVerdict:
        """Return the verdict on the last minutes."""
        recent, group = self._lately.recent(now_ns), self._lately.group()
        times_ms = group.breakdown.ttft_ms if group else None
        restarted_ns = self._restarts(now_ns).values()
        waiting = self._engines.gauge("requests_waiting", stale_s, now_ns)
        slo, (finished_per_s, more_per_s) = (
            self._objectives.judge(self._engines.series, now_ns),
            self._engines.flow_per_s(),
        )
        ttft_ms = {"p50": times_ms.p50 if times_ms else None, "p99": times_ms.p99 if times_ms else None}
        ttft_ms |= {
            each.statistic: each.value_ms for each in slo if each.metric == "ttft" and each.statistic in ttft_ms
        }
        return self._lately.verdict(
            self._engines.observed(),
            served_per_s=recent.ended_per_s if recent.clients else finished_per_s,
            more_waiting_per_s=more_per_s,
            ttft_ms=ttft_ms,
            sent=recent.clients,
            failed=recent.failed,
            **self._lately.failing,
            silent=self._engines.silent(stale_s, now_ns),
            ended=recent.clients > recent.failed,
            restarted_s=(now_ns - max(restarted_ns)) / 1e9 if restarted_ns else None,
            waiting=self._engines.waiting_lately(waiting, now_ns),
            means_ms=self._engines.means_ms(),
            objectives=slo,
            when=self._objectives.when,
        )

    def _restarts(self, now_ns: int) -> Mapping[str, int]:
        """Return the moments of engines' restarts in the window, by URL."""
        restarted_ns = {**self._restarted_ns, **self._requests.estimates.restarted_ns()}
        self._restarted_ns = {url: at_ns for url, at_ns in restarted_ns.items() if now_ns - at_ns < WINDOW_S * 1e9}
        return self._restarted_ns

    def judge(self, now_ns: int, *, stale_s: float) -> None:
        """Renew the verdict of the page, at most each VERDICT_S."""
        if now_ns >= self._judged_ns + round(VERDICT_S * 1e9):
            verdict, self._judged_ns = self.verdict(now_ns, stale_s=stale_s), now_ns
            if verdict.state != (self._said.verdict.state if self._said else "not_judged"):
                self._news = f"{verdict.headline} Why: {verdict.why} Do this: {verdict.do}"
            self._said = said(self._said, verdict, now_ns)

    def twin_estimation(self, now_ns: int) -> Callable[[], float]:
        """Return an estimation of headroom and drift by the requests of now.

        It may run beside a poll, and returns the CPU time that it took, s.
        """
        restarted_ns = self._restarts(now_ns).values()
        estimate = self._twin.estimation(
            now_ns,
            engines=sum(bool(engine.counts.engine) for engine in self._engines.views.values()),
            finished_per_s=self._engines.flow_per_s()[0],
            restarted_s=max(restarted_ns) / 1e9 if restarted_ns else None,
        )

        def guarded() -> float:
            begun_s = thread_time()
            with self.failures.guard():
                estimate()
            return thread_time() - begun_s

        return guarded

    def twin_estimates(self) -> dict[str, Any]:
        """Return headroom and changes for the record, empty where nothing is known."""
        return self._twin.estimates()

    @property
    def headroom(self) -> str:
        """Return the headroom in a sentence, "" without one."""
        return self._twin.headroom.text

    @property
    def drift(self) -> list[str]:
        """Return the engine's lasting changes in sentences."""
        return self._twin.said()

    def fresh_changes(self) -> list[str]:
        """Return the engine's lasting changes in sentences, each once."""
        return self._twin.fresh()

    def fresh_verdict(self) -> str:
        """Return the verdict in a line if its state is another than before, once; else ""."""
        news, self._news = self._news, ""
        return news

    def snapshot(self, *, restarts: int, scraper_restarts: int = 0, unwritten: int = 0) -> Snapshot:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return Snapshot(
            version=VERSION,
            run_id=self._run_id,
            phase="watch",
            labels={} if self._shard is None else {"shard": self._shard},
            client=replace(self._client, slo=self._objectives.latest),
            engines=self._engines.counts(),
            parts=self.parts,
            verdict=self._said and self._said.verdict,
            watch=WatchCounts(
                receiver=self.receiver_counts,
                forward_queue=self._exports.queue(),
                restarts=restarts,
                scraper_restarts=scraper_restarts,
                unwritten=unwritten,
                errors=self.failures.count,
                cpu_s=usage.ru_utime + usage.ru_stime,
                sizes=self._requests.sizes,
                repeated=self._requests.spans.repeated,
                evicted=self._requests.spans.evicted,
                probes=self._requests.spans.probes,
                whole_traces=self._requests.count.whole,
                broken_traces=self._requests.count.broken.copy(),
                headroom=self._twin.headroom.ratios,
                drift=self._twin.ratios(),
                drift_since_s=self._twin.since_s(),
                read_to_s=self._exports.read_to_s,
            ),
        )

    def state(self, now_ns: int, *, elapsed_s: float, stale_s: float, restarts: int, receiver_down: str) -> WatchState:
        """Return the state for the terminal. A page without an answer for `stale_s` is silent."""
        self._restarts(now_ns)
        received = self.receiver_counts
        waiting = self._engines.gauge("requests_waiting", stale_s, now_ns)
        return WatchState(
            elapsed_s=elapsed_s,
            recent=self._lately.recent(now_ns),
            verdict=self.verdict(now_ns, stale_s=stale_s),
            engines=[self._engine_state(engine, now_ns, stale_s) for engine in self._engines.views.values()],
            waiting_lately=self._engines.waiting_lately(waiting, now_ns),
            page_means_ms=self._engines.means_ms(),
            headroom=self.headroom,
            drift=self.drift,
            breaks=list(self._breaks.values()),
            awaiting_spans=self._requests.pending,
            awaiting_estimates=self._requests.estimates.sizes["waiting"],
            spans=received["spans"],
            refused=refused(received),
            receiver_restarts=restarts,
            receiver_down=receiver_down,
            errors=self.failures.count,
        )

    def _engine_state(self, engine: EngineView, now_ns: int, stale_s: float) -> EngineState:
        counts = engine.counts
        restarted_ns = self._restarted_ns.get(counts.endpoint)
        ago_s = None if restarted_ns is None else (now_ns - restarted_ns) / 1e9
        return EngineState(
            url=counts.endpoint,
            engine=counts.engine or (counts.gateway.gateway if counts.gateway else ""),
            version=counts.version,
            running=counts.gauges.get("requests_running"),
            waiting=counts.gauges.get("requests_waiting"),
            kv_cache_usage_ratio=counts.gauges.get("kv_cache_usage"),
            silence=engine.silence(stale_s, now_ns),
            restarted_s=ago_s if ago_s is not None and ago_s < WINDOW_S else None,
        )

    def _take_page(self, path: Path, payload: bytes) -> None:
        if path not in self._readers:
            self._readers = {path: LogReader()}  # the file before is read to its end by now
        scrape = self._readers[path].take(payload)
        if scrape is None or scrape.url not in self._wanted:
            return
        engine = self._engines.take(scrape)
        if self._columns is not None:
            self._columns.scraped(scrape, engine.counts.gauges)
        if self._shard is None:
            self._requests.estimates.scraped(scrape)


def refused(received: Mapping[str, int]) -> int:
    return sum(received.get(name, 0) for name in REFUSED)
