"""A run while it goes: the logs are tailed, and the functions that derive a finished run are run on what is new.

Requests count when they have ended; in flight and sent are as the workers last reported them, half a second ago at
most.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

import msgspec
import numpy as np

from exporter.prometheus.snapshot import EngineCounts, GeneratorCounts, Snapshot
from loadgen.records import PlannedRequest, RequestPart, WorkerStat, decode_log, decode_planned
from loadgen.requests.table import RequestLog, assemble
from rundir.clock import Clock
from rundir.frames import LogTails
from scraper.series.log import LogReader
from sidecar import VERSION
from sidecar.directory import RAW
from sidecar.live.engine import EngineView
from sidecar.live.tally import Tally
from sidecar.progress import View

if TYPE_CHECKING:
    from sidecar.live.breakdown import LiveParts

RATE_S = 5.0  # the output rate is that of requests that ended this recently


class LiveRun:
    """Owns the tails of a run's logs while it goes. A context manager.

    An endpoint without a page for `stale_s` seconds is said to be silent, and its gauges are not shown.
    """

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        clock: Clock,
        planned_s: float | None,
        stale_s: float,
        loaded: bool = True,
        protocol: str = "chat",
    ) -> None:
        self._run_id = run_id
        self._clock = clock
        self._planned_s = planned_s
        self._stale_s = stale_s
        self._loaded = loaded
        self._protocol = protocol
        self._tails = LogTails(path / RAW)
        self._phase, self._phase_ns = "start", clock.now_ns()
        self._plan: dict[int, PlannedRequest] = {}
        self._open: dict[int, list[RequestPart]] = {}
        self._sent: dict[str, int] = {}
        self._tallies: dict[str, Tally] = {"measure": Tally()}
        self._stats: dict[int, WorkerStat] = {}
        self._worst_delay_ns = 0
        self._engines: dict[str, EngineView] = {}
        self._scrapes = LogReader()
        self._parts: LiveParts | None = None
        self._shown = False  # somebody wants snapshots

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tails.__exit__()

    def enter(self, phase: str) -> None:
        """Begin a phase: the view counts from here."""
        self._phase, self._phase_ns = phase, self._clock.now_ns()
        self._tallies.setdefault(phase, Tally())

    def poll(self) -> None:
        # Requests before plans: what a worker was sent stands in a plan by the time it is in the worker's log.
        parts = [decode_log(payload) for _, payload in self._tails.news("requests-*.log")]
        for _, payload in self._tails.news("plan-*.log"):
            first = decode_planned(payload)
            for planned in (first, *first.turns):
                self._plan[planned.index] = msgspec.structs.replace(planned, body=b"", turns=())
        ended: dict[str, list[int]] = {}
        for record in parts:
            if isinstance(record, WorkerStat):
                self._stats[record.worker] = record
                self._worst_delay_ns = max(self._worst_delay_ns, record.loop_delay_ns)
            elif self._take(record):
                ended.setdefault(self._plan[record.index].phase, []).append(record.index)
        for phase, indices in ended.items():
            self._count(phase, indices)
        for _, payload in self._tails.news("scrapes-*.log"):
            scrape = self._scrapes.take(payload)
            if scrape is None:
                continue
            engine = self._engines.setdefault(scrape.url, EngineView(counts=EngineCounts(endpoint=scrape.url)))
            engine.take(scrape)
            if self._parts is not None:
                self._parts.scraped(scrape)
        if self._parts is not None:
            for _, payload in self._tails.news("spans-*.log"):
                self._parts.spans(payload)
            self._parts.poll(self._clock.now_ns())

    def engines(self) -> set[str]:
        return {engine.known.engine.name for engine in self._engines.values() if engine.known.engine is not None}

    def view(self) -> View:
        tally = self._tallies.get(self._phase, Tally())
        now_ns = self._clock.now_ns()
        ttft_ms = np.array(tally.ttfts_ms)
        tokens = sum(count for end_ns, count in tally.lately if end_ns > now_ns - RATE_S * 1e9)
        elapsed_s = max(0.0, (now_ns - self._phase_ns) / 1e9)
        return View(
            phase=self._phase,
            loaded=self._loaded,
            elapsed_s=elapsed_s,
            planned_s=self._planned_s if self._phase == "measure" else None,
            sent=self._sent.get(self._phase, 0),
            ok=tally.statuses["ok"],
            failed=tally.statuses["failed"] + tally.statuses["refused"],
            in_flight=len(self._open),
            output_tokens_per_s=tokens / min(RATE_S, elapsed_s) if tokens and elapsed_s > 0 else None,
            ttft_p50_ms=float(np.quantile(ttft_ms, 0.5)) if len(ttft_ms) else None,
            ttft_p99_ms=float(np.quantile(ttft_ms, 0.99)) if len(ttft_ms) else None,
            running=self._gauge("requests_running"),
            waiting=self._gauge("requests_waiting"),
            kv_cache_usage_ratio=self._gauge("kv_cache_usage"),
            silent={url: why for url, engine in self._engines.items() if (why := engine.silence(self._stale_s))},
        )

    def snapshot(self) -> Snapshot:
        """Return the measured phase so far for the Prometheus page."""
        self._shown = True
        tally = self._tallies["measure"]
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu = {f"worker-{stat.worker}": stat.cpu_ns / 1e9 for stat in self._stats.values()}
        return Snapshot(
            version=VERSION,
            run_id=self._run_id,
            phase=self._phase,
            client=tally.client_counts(in_flight=len(self._open)),
            generator=GeneratorCounts(
                schedule_lateness=tally.lateness,
                cpu_seconds={**cpu, "conductor": usage.ru_utime + usage.ru_stime},
                loop_delay_max_s=self._worst_delay_ns / 1e9 if self._stats else None,
            ),
            engines=tuple(engine.counts for engine in self._engines.values()),
            parts=None if self._parts is None else self._parts.counts,
        )

    def _take(self, part: RequestPart) -> bool:
        """Keep one part of a request; tell whether it is the last."""
        parts = self._open.setdefault(part.index, [])
        phase = self._plan[part.index].phase
        if not parts:
            self._sent[phase] = self._sent.get(phase, 0) + 1
        parts.append(part)
        return part.last

    def _count(self, phase: str, indices: Sequence[int]) -> None:
        """Read the requests that have ended, all at once: most of the cost is a call's, not a request's."""
        planned = [self._plan.pop(index) for index in indices]
        parts = [part for index in indices for part in self._open.pop(index)]
        tally = self._tallies.setdefault(phase, Tally())
        log = assemble(planned, parts, run_id=self._run_id, protocol=self._protocol)
        tally.count(log)
        if self._shown:
            self._break_down(phase, log)
        while tally.lately and tally.lately[0][0] < self._clock.now_ns() - RATE_S * 1e9:
            tally.lately.popleft()

    def _break_down(self, phase: str, log: RequestLog) -> None:
        if self._parts is None:
            # Not before the first request has ended, which this import would have kept waiting; best in the warm-up.
            from sidecar.live.breakdown import LiveParts  # noqa: PLC0415

            self._parts = LiveParts()
        if phase == "measure":
            self._parts.ended(log, self._clock.now_ns())

    def _gauge(self, quantity: str) -> float | None:
        answering = [engine for engine in self._engines.values() if not engine.silence(self._stale_s)]
        gauges = [engine.counts.gauges for engine in answering if quantity in engine.counts.gauges]
        values = [found[quantity] for found in gauges]
        return (max(values) if quantity == "kv_cache_usage" else sum(values)) if values else None
