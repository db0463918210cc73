"""Advice on a slow TTFT: only from evidence, which is stated before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import UNSET

from sidelight.correlator.parts import ENGINE_FRONTEND, SCHEDULER_INTAKE, TTFT_PARTS
from sidelight.correlator.statistics.queueing import KvLoads, WhileWaiting
from sidelight.exporter.summary.breakdown import Breakdown, is_certain, json_name
from sidelight.exporter.summary.correlation import Correlation
from sidelight.exporter.summary.gateways import GatewaySummary
from sidelight.exporter.summary.result import Summary, generator_held_up, unknown_clock
from sidelight.loadgen.requests.slo.results import ObjectiveResult
from sidelight.loadgen.requests.summary import too_many_failed
from sidelight.rundir.printable.numbers import cell, percent, spoken
from sidelight.scraper.engines.catalogue import EngineLimits, catalogue
from sidelight.scraper.gateways.catalogue import gateway
from sidelight.scraper.window.pools import SlowRank
from sidelight.scraper.window.quantities import GatewayPage

LARGE = 0.4  # of the TTFT: a part with less is not what to work on
LEAST_SCRAPES = 5  # with a waiting request, of which to say why it waited
FULL, ROOM = 0.9, 0.8  # KV cache usage: full above the one, room below the other
AT_MOST = 0.5  # of the scrapes with a waiting request: in as many an engine ran as much as it ever did
MOSTLY = 0.6  # of the slowest waits: what less of it went into does not explain them
LEAST_REQUESTS = 20
LEAST_SLOW = 5  # slowest requests: what fewer were slow of is chance, and the mean says what to work on
STRONG_RHO = 0.7
RARELY_CACHED = 0.05
# What requests failed of, by the kind of error's beginning, and what to do about it.
FAILED_OF = {
    "connect": "find out why the server refuses connections: its log says whether it still runs",
    "reset": "find out what closes connections before replies have ended: the server, or a proxy or balancer before "
    "it; the server's log says whether it ended",
    "timeout": "find out why replies did not end in time: the server's log, its load, or a larger --request-timeout",
    "http_429": "send less, or raise the limit that refuses, of this key or of the engine's queue (HTTP 429)",
    "http_401": "check the key: the server refuses it (HTTP 401)",
    "http_403": "check the key: the server refuses it (HTTP 403)",
    "http_5": "look at the server's log: it answers with an error of its own",
    "http_404": "check --model, --url and --endpoint: the server does not know what was asked for (HTTP 404)",
    "server": "look at the server's log: its replies end with an error of its own",
    "aborted": "look at the server's log: it ended replies itself, with a finish reason of an error",
    "empty": "find out what ends replies without any output: the server, or a proxy or balancer before it, perhaps "
    "because it is overloaded",
    "incomplete": "find out why replies break off, or come as no stream: the log of the server, or of a proxy before "
    "it, may say so",
}
SEND_SPANS = "have the engine send its spans here (--otlp-listen HOST:PORT), to see where the time goes"
NO_SOURCE = f"name the engine's metrics page (--metrics URL), or {SEND_SPANS}"
RUNS_AGAIN = "look at the engine's log for why it ended; it runs again"
CACHEABLE = 128  # prompt tokens: engines cache whole blocks, of 16 to 128 tokens, so that shorter prompts may fill none


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Evidence, "" without any, and the advice that follows, in words; `raises` the limit on running requests."""

    seen: str
    cure: str
    raises: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """Observations that advice on a wait follows from: of a run, or of the last minutes of one that goes on.

    `shares` are those of the parts of slow requests' TTFT where that is known, else of the mean; `prefill` is advice on
    prefill, None without evidence; `wait_ms` is the mean wait by the number of waiting requests, None where not known;
    `loads` are of KV caches from elsewhere, within a queue; `prefill_of_others` is the share of the slowest waits that
    went into others' prompts, None where spans do not say; `put_off` is the share of the waiting requests that an
    engine of several models put off; `slow_rank` waits longer than the others of its engine.
    """

    breakdown: Breakdown
    shares: Mapping[str, float]
    waited: WhileWaiting
    limits: EngineLimits
    preemptions: float = 0.0
    pages: Sequence[GatewayPage] = ()
    gateways: Sequence[GatewaySummary] = ()
    prefill: Advice | None = None
    wait_ms: float | None = None
    loads: KvLoads | None = None
    prefill_of_others: float | None = None
    put_off: float | None = None
    slow_rank: SlowRank | None = None

    @property
    def large(self) -> list[str]:
        """Return the parts to work on, the largest first."""
        certain = (part.name for part in TTFT_PARTS if is_certain(getattr(self.breakdown, json_name(part))))
        large = (name for name in certain if self.shares.get(name, 0.0) >= LARGE)
        return sorted(large, key=lambda name: -self.shares[name])

    def explained(self, *, but: str = "") -> Advice | None:
        """Return advice on the largest of these parts with evidence; None without any."""
        parts = (part for part in self.large if part != but)
        return next(filter(None, (ADVISERS[part](self) for part in parts if part in ADVISERS)), None)


def mean_shares(breakdown: Breakdown) -> dict[str, float]:
    """Return the parts' shares of the mean TTFT."""
    return {part.name: getattr(breakdown, json_name(part)).share_of_ttft or 0.0 for part in TTFT_PARTS}


def observed(summary: Summary) -> Observations:
    """Return the observations of a run."""
    correlation, server = summary.correlation, summary.server
    tail, shares = correlation.tail_attribution, mean_shares(correlation.breakdown)
    if tail.largest and tail.tail and tail.tail["p95"].explained >= LEAST_SLOW:
        shares = {name: share or 0.0 for name, share in tail.tail["p95"].share.items()}
    preempted = server.preemptions.stats.total if server.preemptions else UNSET
    return Observations(
        breakdown=correlation.breakdown,
        shares=shares,
        waited=correlation.evidence.while_waiting,
        limits=EngineLimits() if server.engine is None else catalogue(server.engine.name).limits,
        preemptions=0.0 if preempted is UNSET else preempted,
        pages=server.gateways or (),
        gateways=correlation.gateways,
        prefill=_prefill(summary),
        wait_ms=_wait_ms(summary),
        loads=correlation.evidence.kv_loads or None,
        prefill_of_others=_prefill_of_others(correlation),
        put_off=_put_off(summary),
        slow_rank=next((endpoint.slow_rank for endpoint in server.endpoints if endpoint.slow_rank), None),
    )


def _prefill_of_others(correlation: Correlation) -> float | None:
    waits = [each for each in correlation.work.waits if each.role != "decode"]
    whole_ms = sum(each.wait_ms for each in waits)
    return sum(each.prefill_ms for each in waits) / whole_ms if whole_ms else None


def _put_off(summary: Summary) -> float | None:
    """Return the share of waiting requests put off for a LoRA adapter; None: unknown."""
    server = summary.server
    if not summary.client.models or server.kv_fetch_in_progress or not server.requests_waiting_deferred:
        return None
    waiting = server.requests_waiting.stats.mean if server.requests_waiting else UNSET
    put_off = server.requests_waiting_deferred.stats.mean
    return put_off / waiting if waiting is not UNSET and put_off is not UNSET and waiting else None


def _wait_ms(summary: Summary) -> float | None:
    """Return a request's mean wait in the engine by Little's law: the mean number of waiting ones over their rate."""
    waiting, sent = summary.server.requests_waiting, summary.client.requests.sent
    mean = UNSET if waiting is UNSET else waiting.stats.mean
    return 1e3 * mean * summary.window.duration_s / sent if sent and mean is not UNSET and not summary.watch else None


def advised(summary: Summary) -> Advice:
    """Return the evidence that explains the wait, if any, and one piece of advice.

    A change of the system is advised only where something was seen that explains the largest part of slow requests'
    TTFT, and where the numbers can be trusted. Else the cure is what would tell more, or that nothing stands out.
    """
    first, held_up = _before_any_change(summary), generator_held_up(summary)
    is_known = not summary.correlation.missing and not too_many_failed(summary.client.requests)
    # What pages and spans of the engine say stands, however late the client was.
    explained = None
    if is_known and (held_up or not first):
        explained = observed(summary).explained(but="network" if first else "")
    if explained is None or first:
        return Advice(seen=explained.seen if explained else "", cure=first or _without_evidence(summary))
    return replace(explained, cure=f"{explained.cure}{_less_load(summary)}")


def _before_any_change(summary: Summary) -> str:
    """Return advice that precedes any change: the numbers mean too little, or are good enough. "" for none."""
    client, slo, cause = summary.client, summary.client.slo, summary.self_check.cause
    failed = cure_of_failures(next(iter(client.errors), ""))
    if summary.integrity.state == "damaged":
        return "restore raw/ and manifest.json from a copy, or measure again, before acting on what is left of them"
    if summary.integrity.lost_shares:
        return "measure again: what was sent is not the load that was asked for"
    if not client.requests.ok and not summary.correlation.requests:
        often = "".join(f"; most often: {error}" for error in list(client.errors)[:1])
        return failed or f"find out why no request succeeded (`sidelight doctor` looks at an endpoint{often})"
    if too_many_failed(client.requests):
        often = next(iter(client.errors), "unknown")
        return failed or f"find out why requests failed, most often: {often} (`error` in requests.parquet)"
    if generator_held_up(summary):
        cure = f": {cause.cure[:1].lower()}{cause.cure[1:].rstrip('.')}" if cause else ""
        return f"measure again before changing the system{cure}"
    if (node := unknown_clock(summary)) is not None:
        return (
            "have the engine send its spans, whose durations need no common clock, or keep the clock of node "
            f"{node.node} by NTP or PTP; then measure again"
        )
    good_enough = slo is not None and slo.met and summary.methodology.stability.verdict != "growing"
    return "nothing, every objective was met" if good_enough else ""


def cure_of_failures(kind: str) -> str:
    """Return advice on a kind of error, "" for an unknown one."""
    return next((cure for begin, cure in FAILED_OF.items() if kind.startswith(begin)), "")


def _without_evidence(summary: Summary) -> str:
    """Return advice for a run without evidence that explains the wait.

    Prefill is the engine's work on a request, and no wait: it is only too long where an objective was missed.
    """
    if summary.methodology.stability.verdict == "growing":
        return f"add a replica{_less_load(summary) or '; or send fewer requests/s'}"
    if summary.correlation.missing:
        return _sources(summary)
    large, slo = observed(summary).large, summary.client.slo
    if waits := [part for part in large if part in UNEXPLAINED]:
        return UNEXPLAINED[waits[0]]
    if slo is None:
        return "nothing, if these times are good enough (--slo says what is)"
    return of_missed(large, slo.objectives)


def of_missed(large: Sequence[str], objectives: Sequence[ObjectiveResult]) -> str:
    """Return advice on missed objectives where no wait stands out."""
    if large and any(objective.metric == "ttft" for objective in objectives if not objective.met):
        return MORE_PREFILL
    return "look at what the objective that was not met is about: in the TTFT no wait stands out"


def _sources(summary: Summary) -> str:
    """Return advice on sources of the missing breakdown of the TTFT."""
    if summary.client.ttft_ms.mean is None and not summary.correlation.requests:
        return STATE_FIRST_OUTPUT if summary.watch else "nothing for the TTFT, which only a streamed reply has"
    if summary.config.get("otlp_listen"):
        return "fix what the line above names, and measure again"
    known = summary.server.engine is not None or summary.server.endpoints
    if not known:
        return NO_SOURCE
    engine = summary.server.engine
    ways = () if engine is None else catalogue(engine.name).ways(engine.version)
    if ways and ways[0].enable.startswith("--") and not any(way.name.startswith("spans") for way in ways):
        return f"start the engine with {ways[0].enable}, to see where the time goes: it sends no spans"
    return SEND_SPANS


def _less_load(summary: Summary) -> str:
    """Return advice to stay below the rate that an overloaded system served, "" if unknown."""
    capacity = summary.methodology.stability.capacity_per_s
    return "" if capacity is None else f"; or send less than {cell(capacity)} requests/s"


def advice_on_queue(waited: WhileWaiting, limits: EngineLimits, preemptions: float) -> Advice | None:
    """Return advice on waiting requests: the KV cache was too small, or the limit of running requests was reached."""
    cache = f"more memory to the KV cache{_named(limits.kv_cache)}"
    if preemptions:
        return Advice(
            seen=f"The engine preempted running requests ({preemptions:,.0f} x) because its KV cache was full",
            cure=f"give {cache}, let fewer requests run at once{_named(limits.running)}, or add a replica",
        )
    usage, most = waited.kv_cache_p50, waited.kv_cache_max
    if waited.scrapes < LEAST_SCRAPES or usage is None or most is None:
        return None
    if usage >= FULL or (usage >= ROOM and most >= FULL):
        at_most = "" if usage >= FULL else f", {percent(most)} at most"
        return Advice(
            seen=f"While requests waited, the KV cache was {percent(usage)} full (median{at_most})",
            cure=f"give {cache}, shorten prompts or outputs, or add a replica; more running requests would not fit",
        )
    if most < ROOM and (waited.at_most_ratio or 0.0) >= AT_MOST:
        return Advice(
            seen=(
                f"While requests waited, the engine ran {waited.running_most:g} at once, the most in this run, and the "
                f"KV cache was at most {percent(most)} full: the limit on running requests is the likely reason"
            ),
            cure=f"raise that limit{_named(limits.running)}, since the KV cache has room, or add a replica",
            raises=True,
        )
    return None


def _queue(seen: Observations) -> Advice | None:
    """Return advice on an engine's queue; where loads of KV caches are most of it, on these."""
    queue_ms = seen.breakdown.queue_ms.mean or 0.0
    is_shared = seen.breakdown.decode_queue_ms.mean is not None
    by_loads = None if is_shared else _loads(seen.loads, queue_ms, "the engine's queue")
    by_others = _slow_rank(seen) or _adapters(seen) or _prompts_of_others(seen)
    by_limit = advice_on_queue(seen.waited, seen.limits, seen.preemptions)
    if is_shared and by_limit is not None and by_limit.raises:
        # What a prefill engine finishes within a step is never seen running.
        by_limit = Advice(
            seen="Requests waited in the prefill engine's queue, with room in its KV cache",
            cure="add a prefill engine, or send shorter prompts",
        )
    return by_loads or by_others or by_limit


def _slow_rank(seen: Observations) -> Advice | None:
    """Return advice on a data-parallel rank that waits longer than the others."""
    if (slow := seen.slow_rank) is None:
        return None
    return Advice(
        seen=f"Rank {slow.rank} held requests in its queue for {spoken(slow.queue_ms)} in the mean, the others for "
        f"{spoken(slow.others_ms)} (median)",
        cure=f"spread requests over the ranks by their load, not in turn{_named(seen.limits.balance)}",
    )


def _adapters(seen: Observations) -> Advice | None:
    """Return advice on a queue for places of LoRA adapters."""
    if seen.put_off is None or seen.put_off < AT_MOST:
        return None
    return Advice(
        seen=f"{percent(seen.put_off)} of the waiting requests were put off, as one for a further LoRA adapter is",
        cure=f"let more adapters run together{_named(seen.limits.adapters)}, or give them replicas of their own",
    )


def _prompts_of_others(seen: Observations) -> Advice | None:
    """Return advice on a queue that waits for prefills: more running requests would only share them."""
    if seen.preemptions or (share := seen.prefill_of_others) is None or share < MOSTLY:
        return None
    return Advice(
        seen=f"{percent(share)} of the slowest waits in the engine went into other requests' prompts, by all spans",
        cure="add prefill capacity, or send long prompts to a replica of their own; more running requests would wait "
        "for the same",
    )


def _decode_queue(seen: Observations) -> Advice | None:
    """Return advice on a decode engine's queue, by the loads of KV caches in it."""
    loads, queue_ms = seen.loads, seen.breakdown.decode_queue_ms.mean or 0.0
    if loads is None or (by_loads := _loads(loads, queue_ms, "the decode engine's queue")):
        return by_loads if loads else None
    waited_ms = loads.before_ms + loads.after_ms
    if waited_ms < queue_ms / 2 or loads.load_ms + loads.error_ms > queue_ms / 2:
        return None
    return Advice(
        seen=(
            f"By the decode engine's gauges requests waited {spoken(waited_ms, queue_ms)} for a place in it, and the "
            f"loads of their KV caches took {spoken(loads.load_ms, queue_ms)} (±{spoken(loads.error_ms)})"
        ),
        cure=f"raise its limit on running requests{_named(seen.limits.running)} if memory allows, or add a decode "
        "engine",
    )


def _loads(loads: KvLoads | None, queue_ms: float, queue: str) -> Advice | None:
    if loads is None or not loads.are_most_of(queue_ms):
        return None
    return Advice(
        seen=(
            f"Of {spoken(queue_ms)} in {queue} the loads of KV caches took {spoken(min(loads.load_ms, queue_ms))}, by "
            f"its gauges (±{spoken(loads.error_ms)})"
        ),
        cure="look at the KV connector, and the network or disk that caches are loaded from; more running requests "
        "would not help",
    )


def _merged_queue(seen: Observations) -> Advice | None:
    """Return advice on a queue that no source separates, as llama.cpp's: by the number of requests that waited."""
    other_ms, wait_ms, waited = seen.breakdown.other_ms.mean, seen.wait_ms, seen.waited
    is_separate = seen.breakdown.queue_ms.mean is not None or seen.breakdown.decode_queue_ms.mean is not None
    if is_separate or other_ms is None or wait_ms is None or wait_ms < other_ms / 2:
        return None
    wait = spoken(min(wait_ms, other_ms))
    waits = f"By the number that waited in each scrape, requests waited {wait} in the mean in the engine"
    if waited.scrapes < LEAST_SCRAPES or (waited.at_most_ratio or 0.0) < AT_MOST:
        return Advice(seen=waits, cure=UNEXPLAINED["queue"])
    return Advice(
        seen=f"{waits}, which then ran {waited.running_most:g} at once, the most in this run",
        cure=f"raise its limit on running requests{_named(seen.limits.running)} if memory allows, or add a replica",
        raises=True,
    )


def _prefill(summary: Summary) -> Advice | None:
    """Return advice on prefill: prompts that share a prefix and were not cached, or that are long."""
    server, correlation = summary.server, summary.correlation
    cached = None
    if server.prefix_cache_hits and server.prefix_cache_queries:
        hits, queries = server.prefix_cache_hits.stats.total, server.prefix_cache_queries.stats.total
        cached = hits / queries if hits is not UNSET and queries else None
    tokens = summary.client.input_tokens
    long_enough = tokens.p50 is not None and tokens.p50 >= CACHEABLE
    if summary.workload.shares_prefixes and long_enough and cached is not None and cached < RARELY_CACHED:
        return Advice(
            seen=f"Prompts of this workload share prefixes, but {percent(cached)} of their tokens came from the cache",
            cure="switch prefix caching on, or send requests that share a prefix to the same replica",
        )
    rho = correlation.evidence.prefill_input_tokens_rho
    if rho is None or rho < STRONG_RHO or correlation.requests < LEAST_REQUESTS or tokens.p50 is None:
        return None
    served = "" if cached is None else f", and {percent(cached)} of their tokens came from the prefix cache"
    return Advice(
        seen=f"Prefill grows with the prompt ({tokens.p50:,.0f} tokens at p50, {tokens.p99:,.0f} at p99){served}",
        cure="shorten prompts, put what they share first so that it can be cached, or add prefill capacity",
    )


def _outside(seen: Observations) -> Advice | None:
    """Return advice on time outside the engine: the round trip of the network, or something between."""
    breakdown = seen.breakdown
    outside_ms, round_trip_ms = breakdown.network_ms.mean, breakdown.round_trip_ms.mean
    pages = [page for page in seen.pages if page.queue_ms is not None]
    longest = max(pages, key=lambda page: page.queue_ms or 0.0, default=None)
    if outside_ms is not None and longest is not None and (longest.queue_ms or 0.0) >= outside_ms / 2:
        return Advice(
            seen=(
                f"Outside the engine {spoken(outside_ms, longest.queue_ms)} passed in the mean, and "
                f"{gateway(longest.gateway).title} states a wait of {spoken(longest.queue_ms, outside_ms)} in "
                "its own queue"
            ),
            cure="let the gateway pass on more requests at once, or put more engines behind it",
        )
    rooms = [((passed.at_most_ms or 0.0) - (passed.part_ms or 0.0), passed.service) for passed in seen.gateways]
    room_ms, service = max(rooms, default=(0.0, ""))
    if outside_ms is not None and room_ms >= outside_ms / 2 > 0:
        return Advice(
            seen=(
                f"Of {spoken(outside_ms)} outside the engine, up to "
                f"{spoken(min(room_ms, outside_ms), outside_ms)} passed in gateway "
                f"{service or 'without a service.name'} or between it and the engine"
            ),
            cure="look at that gateway first, and at what it calls the engine through; its spans say no more",
        )
    if outside_ms is None or round_trip_ms is None:
        return None
    if round_trip_ms >= outside_ms / 2:
        return Advice(
            seen=f"Of {spoken(outside_ms)} outside the engine, one TCP round trip takes "
            f"{spoken(round_trip_ms, outside_ms)}",
            cure="move client and server nearer to each other; the engine is not at fault",
        )
    return Advice(
        seen=(
            f"Of {spoken(outside_ms)} outside the engine, a TCP round trip explains "
            f"{spoken(round_trip_ms, outside_ms)}: the rest passes in gateways or proxies, or in HTTP on either side"
        ),
        cure="look at what stands between client and engine; a gateway that sends spans is shown apart "
        "(docs/reference/gateways.md)",
    )


def _gateway(seen: Observations) -> Advice | None:
    """Return advice on the gateway's mean time, by its own spans."""
    if (mean_ms := seen.breakdown.gateway_ms.mean) is None:
        return None
    return Advice(
        seen=f"By its own spans the gateway took {spoken(mean_ms)} in the mean",
        cure="look at the gateway first: authentication, retries, and its own queue",
    )


def _inside(seen: Observations) -> Advice | None:
    """Return advice on time in the engine outside queue and prefill. It is about the API server, or the wait of
    requests for the scheduler to take them in.
    """
    frontend, intake = (getattr(seen.breakdown, json_name(part)) for part in (ENGINE_FRONTEND, SCHEDULER_INTAKE))
    if (intake.share_of_ttft or 0.0) >= LARGE:
        return Advice(
            seen=(
                f"Requests waited {spoken(intake.mean)} in the mean until the engine's scheduler took them in, which "
                "it does only between two of its steps"
            ),
            cure=f"shorten its steps: smaller prefill chunks, fewer running requests{_named(seen.limits.running)}",
        )
    if (frontend.share_of_ttft or 0.0) < LARGE:
        return _merged_queue(seen)
    return Advice(
        seen=(
            f"The engine's API server took {spoken(frontend.mean)} in the mean: it tokenises, waits for the running "
            "step, and sends the output"
        ),
        cure="give the API server more processor time, or more processes",
    )


ADVISERS: dict[str, Callable[[Observations], Advice | None]] = {
    "queue": _queue,
    "decode_queue": _decode_queue,
    "prefill": lambda seen: seen.prefill,
    "network": _outside,
    "gateway": _gateway,
    "other": _inside,
}
# What helps with a part of which nothing was seen that explains it.
UNEXPLAINED = {part.name: part.cure for part in TTFT_PARTS if part.cure}
MORE_PREFILL = "shorten prompts, or add prefill capacity: prefill is most of the TTFT"


# Spans alone do not show whether a reply was streamed; those of Envoy and others never say when it began.
STATE_FIRST_OUTPUT = (
    "have the gateway or the client state its first output, if replies are streamed: no span did "
    "(docs/how-to/gateway-spans.md)"
)


def _named(limit: str) -> str:
    return f" ({limit})" if limit else ""
