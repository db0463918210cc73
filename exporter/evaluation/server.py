"""The server's half of a run: what its engines showed, and when nothing was scraped or no span received."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec
import numpy as np

from sidelight.correlator.opening import WatchRun
from sidelight.correlator.requests import address
from sidelight.recorded.errors import DamagedRun
from sidelight.recorded.events import RECEIVER_DIED, RECEIVER_RESTARTED, SCRAPER_DIED, SCRAPER_RESTARTED
from sidelight.recorded.run import Run
from sidelight.scraper.engines.catalogue import catalogue
from sidelight.scraper.engines.recognition import detect
from sidelight.scraper.window.gateways import gateway_pages
from sidelight.scraper.window.pools import Role
from sidelight.scraper.window.summary import Gap, Server, server_summary
from sidelight.scraper.window.window import Window

_LEAST_SLICES = 4  # of each third
_CHANGED, _SURE = 0.05, 3.0
_FULL, _STALLED, _BALANCED = 0.999, 0.1, 0.8


def server_of(run: Run, window: Window, slice_ns: int, roles: Sequence[Role] | None = None) -> Server:
    """Return the summary of the engines' and gateways' pages; for a run without a page, the reason.

    A gateway that was asked says at `/version` its version, and not the engine's.
    """
    target, reason = run.manifest.get("target", {}), run.manifest.get("server_missing")
    gateways = gateway_pages(run.endpoints, window, slice_ns)
    engines = {address(endpoint.url) for endpoint in run.endpoints if detect(endpoint.series)}
    is_gateways = address(target.get("url", "")) in {address(page.url) for page in gateways} - engines
    version = None if is_gateways else target.get("version")
    server = server_summary(run.endpoints, window, slice_ns, roles=roles, engine_version=version, gaps=gaps_of(run))
    if gateways:
        server = msgspec.structs.replace(server, gateways=gateways)
    return msgspec.structs.replace(server, reason=reason) if reason else server


def finished_requests(server: Server) -> float:
    """Return the requests that engines' pages counted in the window, 0 where none does."""
    counted = server.requests_finished
    return float(counted.stats.total or 0.0) if counted else 0.0


def engines_of(run: Run) -> int:
    """Return the number of engines' pages."""
    return sum(detect(endpoint.series) is not None for endpoint in run.endpoints)


def gaps_of(run: Run) -> list[Gap]:
    """Return the gaps of the scraper. Each lasts from the last scrape before the first death to the restart after it,
    however many failed between. A scraper that hangs is noticed late.
    """
    if isinstance(run, WatchRun) and run.shards:
        return sorted(chain.from_iterable(map(gaps_of, run.shards)), key=lambda gap: gap.start_ns)
    gaps = _gaps(run, SCRAPER_DIED, SCRAPER_RESTARTED)
    scrapes_ns = _scrapes_ns(run) if gaps else []
    lasts = (bisect_right(scrapes_ns, gap.start_ns) - 1 for gap in gaps)
    return [
        msgspec.structs.replace(gap, start_ns=scrapes_ns[last]) if last >= 0 else gap
        for gap, last in zip(gaps, lasts, strict=True)
    ]


def _scrapes_ns(run: Run) -> list[int]:
    """Return the ends of scrapes and the starts of failed ones, ascending."""
    scraped = (endpoint.response_ns.tolist() for endpoint in run.endpoints)
    failed = ([request_ns for request_ns, _ in endpoint.failures] for endpoint in run.endpoints)
    return sorted(chain(*scraped, *failed))


def span_gaps_of(run: Run) -> list[Gap]:
    """Return the gaps of a run's span receiver; none for a watch, which notes them itself."""
    return [] if isinstance(run, WatchRun) else _gaps(run, RECEIVER_DIED, RECEIVER_RESTARTED)


def _gaps(run: Run, died: str, restarted: str) -> list[Gap]:
    gaps: list[Gap] = []
    for event in run.events:
        is_open = bool(gaps) and gaps[-1].end_ns is None
        if event.name == died and not is_open:
            gaps.append(Gap(start_ns=event.at_ns, end_ns=None, reason=str(event.data["reason"])))
        elif event.name == restarted and is_open:
            gaps[-1] = msgspec.structs.replace(gaps[-1], end_ns=event.at_ns)
    return gaps


def server_lines(server: Server, models: int) -> Iterator[str]:
    """Return warnings from the engine's pages; `models` is how many were asked."""
    return chain(acceptance(server), slow_ranks(server), feature_lines(server, models))


def acceptance(server: Server) -> Iterator[str]:
    """Yield a warning if the acceptance of speculative decoding changed within the run.

    From its first third to its last by more than chance, as the slices of each third vary, and by more than 5 % of the
    tokens a step.
    """
    drafts, accepted = server.drafts, server.draft_tokens_accepted
    if not drafts or not accepted:
        return
    pairs = [
        (drafted.total, taken.total)
        for drafted, taken in zip(drafts.timeslices, accepted.timeslices, strict=False)
        if isinstance(drafted.total, float) and isinstance(taken.total, float) and drafted.total > 0
    ]
    third = len(pairs) // 3
    if third < _LEAST_SLICES:
        return
    (first, first_error), (last, last_error) = (_ratio(rows) for rows in (pairs[:third], pairs[-third:]))
    change = last - first
    if abs(change) > max(_CHANGED * (1 + first), _SURE * math.hypot(first_error, last_error)):
        how = "fell" if change < 0 else "rose"
        yield (
            f"speculative decoding: acceptance {how} from {1 + first:.2f} to {1 + last:.2f} tokens a step within the "
            "run (its first and last third): with it the time of each output token changes"
        )


def _ratio(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the ratio of two sums with its standard error, by how the pairs vary."""
    drafted, taken = (np.array(column) for column in zip(*pairs, strict=True))
    ratio = float(taken.sum() / drafted.sum())
    spread = float(((taken - ratio * drafted) ** 2).sum()) * len(pairs) / (len(pairs) - 1)
    return ratio, math.sqrt(spread) / float(drafted.sum())


def slow_ranks(server: Server) -> Iterator[str]:
    """Yield a warning for each page with a slow data-parallel rank."""
    for endpoint in server.endpoints:
        if slow := endpoint.slow_rank:
            times = f"{slow.queue_ms / slow.others_ms:.1f} times " if slow.others_ms else "longer than "
            yield (
                f"rank {slow.rank} of {endpoint.url} waited {times}the others' median, all the time: its requests were "
                f"in its queue for {slow.queue_ms:,.0f} ms in the mean, theirs for {slow.others_ms:,.0f} ms"
            )


def feature_lines(server: Server, models: int) -> Iterator[str]:
    """Yield the effects of single features' limits, each with its option; `models` is how many were asked."""
    if server.engine is None:
        return
    limits = catalogue(server.engine.name).limits

    def option(name: str) -> str:
        return f" ({text})" if (text := getattr(limits, name)) else ""

    if refused := server.admission_rejections and server.admission_rejections.stats.total:
        yield (
            f"the engine refused {refused:,.0f} requests for the limit of its queue{option('queue')}: they wait "
            "nowhere; send less, raise it, or add a replica"
        )
    deferred = server.requests_waiting_deferred and server.requests_waiting_deferred.stats.max
    if models > 1 and deferred and not server.kv_fetch_in_progress:
        yield (
            f"up to {deferred:,.0f} requests at once were put off, with {models} models asked: likely for the limit on "
            f"LoRA adapters that run together{option('adapters')}"
        )
    if models > 1 and server.lora_usage and (server.lora_usage.stats.max or 0.0) >= _FULL:
        yield (
            f"all places for LoRA adapters were taken at times{option('adapters')}: a request for another adapter "
            "waits, and has it loaded first"
        )
    if server.host_cache_usage and (server.host_cache_usage.stats.max or 0.0) >= _FULL:
        yield f"the KV cache in host memory was full{option('host_cache')}: what is put there displaces other prompts"
    balance, passes = server.expert_balance, server.expert_passes
    if balance and passes and 0 < (balance.stats.total or 0.0) < _BALANCED * (passes.stats.total or 0.0):
        largest = (passes.stats.total or 0.0) / (balance.stats.total or 1.0)
        yield (
            f"experts were loaded unevenly: the GPU with most had {largest:.2f} times the mean load, and the others "
            f"wait for it in each layer{option('experts')}"
        )
    exposed, idle = server.scheduler_exposed_time, server.scheduler_idle_time
    if exposed and idle and (stalled := (exposed.stats.rate_per_s or 0.0) - (idle.stats.rate_per_s or 0.0)):
        ranks = sum(len(endpoint.ranks or ()) or 1 for endpoint in server.endpoints) or 1
        if stalled / ranks >= _STALLED:
            yield (
                f"for {100 * stalled / ranks:.0f} % of the time batches waited for the engine's scheduler, with no "
                f"forward pass seen{option('scheduler')}"
            )


def require_server(run: Run) -> None:
    """Raise DamagedRun if a complete run lost its scraper or receiver but needs server results. A `scrape`, --metrics
    or --otlp-listen asks for these. A load alone has the client's half, and a watch goes on.
    """
    config = run.manifest["config"]
    is_asked_for = not config.get("url") or config.get("metrics") or config.get("otlp_listen")
    if run.status != "complete" or isinstance(run, WatchRun) or not is_asked_for:
        return
    for who, gaps, what in (
        ("scraper", gaps_of(run), "the server's results end there"),
        ("receiver", span_gaps_of(run), "later requests have no times from spans"),
    ):
        if any(gap.end_ns is None for gap in gaps):
            raise DamagedRun(
                "process.not-restarted", f"{run.path}: the {who} died and could not be started again; {what}"
            )
