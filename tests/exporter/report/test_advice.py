"""What the report says to do: one line in every case, and no change of the system without evidence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import summaries
from msgspec import UNSET, UnsetType

from sidelight.correlator.parts import TTFT_PARTS
from sidelight.correlator.statistics.queueing import NEVER_WAITED, KvLoads, WhileWaiting
from sidelight.correlator.statistics.tail import Tail
from sidelight.exporter.report.advice import MORE_PREFILL, STATE_FIRST_OUTPUT, UNEXPLAINED, Advice, advised
from sidelight.exporter.summary.breakdown import json_name
from sidelight.exporter.summary.correlation import Evidence
from sidelight.exporter.summary.gateways import GatewaySummary
from sidelight.exporter.summary.result import Summary
from sidelight.exporter.summary.slowest import EngineWait, EngineWork
from sidelight.loadgen.requests.slo.results import ObjectiveResult, SloResult
from sidelight.scraper.window.pools import SlowRank
from sidelight.scraper.window.quantities import GatewayPage
from sidelight.scraper.window.summary import DetectedEngine, Endpoint, Scrapes, Server

replace = msgspec.structs.replace
SEATS = WhileWaiting(
    scrapes=20, running_p50=8.0, running_most=8.0, at_most_ratio=0.9, kv_cache_p50=0.1, kv_cache_max=0.2
)
RUST = DetectedEngine(name="vllm", version="0.33.0 (Rust frontend 0.3.1)", detected_by="metric vllm:some")
NEVER = WhileWaiting(missing=NEVER_WAITED)


def made_of(
    part: str,
    *,
    waiting: WhileWaiting = NEVER,
    rho: float | None = None,
    loads: KvLoads | UnsetType = UNSET,
    by_prompts: float = 0.0,
    **sections: Any,
) -> Summary:
    """Return a run whose TTFT is 90 % one part, with this evidence."""
    correlation = summaries.correlated()
    shares = {json_name(ttft_part): 0.9 if ttft_part.name == part else 0.02 for ttft_part in TTFT_PARTS}
    parts = {name: replace(getattr(correlation.breakdown, name), share_of_ttft=share) for name, share in shares.items()}
    correlation = replace(
        correlation,
        breakdown=replace(correlation.breakdown, **parts | sections.pop("breakdown", {})),
        gateways=sections.pop("gateways", []),
        work=EngineWork(coverage=1.0, waits=[wait(by_prompts)] if by_prompts else []),
        evidence=Evidence(while_waiting=waiting, prefill_input_tokens_rho=rho, kv_loads=loads),
    )
    return replace(summaries.summary(correlation), **sections)


def wait(by_prompts: float) -> EngineWait:
    """Return a wait of 2 s of which that share went into other requests' prompts."""
    return EngineWait(
        request_id="r", trace_id="", engine="e", role="", wait_ms=2000.0, itself_ms=0.0, prefill_ms=2000.0 * by_prompts,
        decode_ms=2000.0 * (1 - by_prompts), idle_ms=0.0, prefills=9, decodes=4, largest=[],
    )  # fmt: skip


def known(name: str, mean_ms: float, share: float) -> Any:
    return replace(getattr(summaries.correlated().breakdown, name), mean=mean_ms, share_of_ttft=share)


def engine(**quantities: Any) -> Server:
    return summaries.server(**quantities)


TOKENS = {"client": replace(summaries.client(), input_tokens=summaries.BLOCK)}
HITS = {"prefix_cache_hits": summaries.counter(10.0, 1.0), "prefix_cache_queries": summaries.counter(1000.0, 100.0)}
UNCACHED = {"server": engine(**HITS), "workload": replace(summaries.workload(), shares_prefixes=True)}
HAPROXY = GatewayPage(
    url="http://p/metrics",
    gateway="haproxy",
    detected_by="metric some",
    own_ms=None,
    own_error_ms=None,
    own_until=None,
    queue_ms=4.0,
    queue_error_ms=0.5,
)
BOUNDED = GatewaySummary(
    service="envoy",
    requests=9,
    part_ms=0.2,
    request_ms=0.2,
    at_most_ms=5.0,
    first_output={"unknown": 9},
    name="envoy",
    of_whole_ms=5.0,
)
SLOW = Endpoint(
    url="http://e/metrics",
    engine="vllm",
    scrapes=Scrapes(ok=9, failed=0, failures={}),
    slow_rank=SlowRank(rank="3", queue_ms=410.0, others_ms=100.0),
)
PUT_OFF = engine(requests_waiting=summaries.gauge(mean=10.0), requests_waiting_deferred=summaries.gauge(mean=8.0))
FINE = "nothing, if these times are good enough (--slo says what is)"
SOURCES = (
    "name the engine's metrics page (--metrics URL), or have the engine send its spans here (--otlp-listen HOST:PORT), "
    "to see where the time goes"
)
OBJECTIVE = ObjectiveResult(
    text="ttft_p99<1ms", metric="ttft", statistic="p99", unit="ms", bound=1.0, value=24.0, bound_ms=1.0, value_ms=24.0,
    count=4, requests=4, failed_requests=0, left_out_requests=0, met=False,
)  # fmt: skip
SHORT = replace(summaries.BLOCK, p50=127.0)  # no whole block of 128 tokens to cache


@pytest.mark.parametrize(
    ("summary", "seen", "cure"),
    [
        (
            made_of("queue", waiting=SEATS),
            "the engine ran 8 at once, the most in this run, and the KV cache was at most 20 % full",
            "raise that limit (--max-num-seqs), since the KV cache has room, or add a replica",
        ),
        (
            made_of("queue", waiting=replace(SEATS, kv_cache_p50=0.97, kv_cache_max=1.0)),
            "the KV cache was 97 % full",
            "give more memory to the KV cache (--gpu-memory-utilization)",
        ),
        (
            made_of("queue", waiting=replace(SEATS, kv_cache_p50=0.88, kv_cache_max=0.99)),
            "the KV cache was 88 % full (median, 99 % at most)",
            "give more memory to the KV cache (--gpu-memory-utilization)",
        ),
        (
            made_of("queue", waiting=SEATS, server=engine(preemptions=summaries.counter(12.0, 1.0))),
            "The engine preempted running requests (12 x)",
            "let fewer requests run at once (--max-num-seqs)",
        ),
        (
            made_of(
                "queue", waiting=SEATS, server=PUT_OFF, client=replace(summaries.client(), models=dict.fromkeys("ab"))
            ),
            "80 % of the waiting requests were put off, as one for a further LoRA adapter is",
            "let more adapters run together (--max-loras)",
        ),
        (
            made_of("queue", waiting=SEATS, by_prompts=0.7),
            "70 % of the slowest waits in the engine went into other requests' prompts, by all spans",
            "add prefill capacity, or send long prompts to a replica of their own",
        ),
        (
            made_of("queue", waiting=SEATS, by_prompts=0.5),
            "the limit on running requests is the likely reason",
            "raise that limit (--max-num-seqs), since the KV cache has room, or add a replica",
        ),
        (
            made_of("queue", waiting=SEATS, server=replace(engine(), endpoints=[SLOW])),
            "Rank 3 held requests in its queue for 410 ms in the mean, the others for 100 ms (median)",
            "spread requests over the ranks by their load, not in turn",
        ),
        (
            made_of("prefill", rho=0.9, **TOKENS),
            "Prefill grows with the prompt (180 tokens at p50, 1,234 at p99)",
            "shorten prompts",
        ),
        (
            made_of("prefill", **UNCACHED, **TOKENS),
            "share prefixes, but 1 % of their tokens came from the cache",
            "switch prefix caching on",
        ),
        (
            made_of("network", breakdown={"round_trip_ms": known("round_trip_ms", 0.1, 0.0)}),
            "a TCP round trip explains 0.1 ms",
            "look at what stands between client and engine",
        ),
        (
            made_of("network", breakdown={"round_trip_ms": known("round_trip_ms", 4.0, 0.8)}),
            "one TCP round trip takes 4 ms",
            "nearer to each other",
        ),
        (
            made_of("network", server=replace(engine(), gateways=[HAPROXY])),
            "Outside the engine 5 ms passed in the mean, and HAProxy states a wait of 4 ms in its own queue",
            "let the gateway pass on more requests at once",
        ),
        (
            made_of("network", gateways=[BOUNDED]),
            "Of 5 ms outside the engine, up to 4.8 ms passed in gateway envoy or between it and the engine",
            "look at that gateway first, and at what it calls the engine through",
        ),
        (
            made_of("gateway", breakdown={"gateway_ms": known("gateway_ms", 90.0, 0.9)}),
            "By its own spans the gateway took 90 ms",
            "look at the gateway first",
        ),
        (
            made_of("other", breakdown={"engine_frontend_ms": known("engine_frontend_ms", 150.0, 0.8)}),
            "The engine's API server took 150 ms",
            "give the API server more processor time",
        ),
        (
            made_of("other", breakdown={"scheduler_intake_ms": known("scheduler_intake_ms", 150.0, 0.8)}),
            "Requests waited 150 ms in the mean until the engine's scheduler took them in",
            "shorten its steps",
        ),
    ],
    ids=[
        "seats",
        "cache",
        "cache full at times",
        "preempted",
        "adapters",
        "prompts of others",
        "seats beside prompts",
        "a slow rank",
        "long prompts",
        "not cached",
        "proxy",
        "far away",
        "queue",
        "bounded",
        "gateway",
        "frontend",
        "intake",
    ],
)
def test_advice_follows_from_evidence_that_stands_before_it(summary: Summary, seen: str, cure: str):
    advice = advised(summary)
    assert seen in advice.seen
    assert cure in advice.cure


@pytest.mark.parametrize(
    ("summary", "action"),
    [
        (made_of("queue"), UNEXPLAINED["queue"]),
        (made_of("queue", waiting=replace(SEATS, scrapes=4)), UNEXPLAINED["queue"]),
        (made_of("queue", waiting=replace(SEATS, at_most_ratio=0.3)), UNEXPLAINED["queue"]),
        (made_of("queue", waiting=replace(SEATS, kv_cache_p50=0.5, kv_cache_max=0.85)), UNEXPLAINED["queue"]),
        (made_of("queue", waiting=replace(SEATS, kv_cache_p50=None, kv_cache_max=None)), UNEXPLAINED["queue"]),
        (made_of("prefill"), FINE),
        (made_of("prefill", rho=0.3, **TOKENS), FINE),
        (made_of("prefill", **UNCACHED, client=replace(summaries.client(), input_tokens=SHORT)), FINE),
        (made_of("network"), UNEXPLAINED["network"]),
        (made_of("other"), UNEXPLAINED["other"]),
        (made_of("none"), FINE),
        (summaries.summary(summaries.uncorrelated("no page"), summaries.NO_SERVER), SOURCES),
        (
            summaries.summary(summaries.uncorrelated("no queue"), replace(summaries.server(), engine=RUST)),
            "start the engine with --enable-per-request-metrics, to see where the time goes: it sends no spans",
        ),
    ],
    ids=[
        "nothing seen",
        "four scrapes",
        "seldom the most",
        "cache nearly full",
        "cache not known",
        "prefill alone",
        "not by length",
        "too short to cache",
        "no round trip",
        "not the API server",
        "no part is large",
        "no breakdown",
        "no spans to send",
    ],
)
def test_without_evidence_the_action_claims_no_cause(summary: Summary, action: str):
    """One line all the same: what would tell more, or that nothing stands out."""
    assert Advice(seen="", cure=action) == advised(summary)


NO_QUEUE = {
    "queue_ms": replace(summaries.correlated().breakdown.queue_ms, mean=None, share_of_ttft=None),
    "other_ms": known("other_ms", 800.0, 0.9),
}
NO_CACHE = replace(SEATS, kv_cache_p50=None, kv_cache_max=None)


@pytest.mark.parametrize(
    ("mean_waiting", "waiting", "seen", "cure"),
    [
        (7.0, NO_CACHE, "waited 700 ms in the mean in the engine, which then ran 8", "raise its limit on running"),
        (9.0, NO_CACHE, "waited 800 ms in the mean in the engine, which then ran 8", "raise its limit on running"),
        (7.0, replace(NO_CACHE, at_most_ratio=0.3), "waited 700 ms in the mean in the engine", UNEXPLAINED["queue"]),
        (3.0, NO_CACHE, "", UNEXPLAINED["other"]),
    ],
    ids=["places", "more than the part", "places were free", "too short a wait"],
)
def test_a_queue_that_no_source_separates_is_known_by_the_number_that_waited(
    mean_waiting: float, waiting: WhileWaiting, seen: str, cure: str
):
    """As llama.cpp's: 100 requests in 10 s, of which 7 waited at a time, waited 0.7 s each (Little's law)."""
    server = engine(requests_waiting=summaries.gauge(count=40, mean=mean_waiting))
    advice = advised(made_of("other", waiting=waiting, breakdown=NO_QUEUE, server=server))
    assert seen in advice.seen
    assert bool(seen) == bool(advice.seen)
    assert cure in advice.cure


def test_the_wait_in_a_decode_engine_is_not_in_what_else_a_request_waited_for():
    """By replies alone of two engines: those that wait may be loading, and the rest is the prefill engine's."""
    server = engine(requests_waiting=summaries.gauge(count=40, mean=7.0))
    both = NO_QUEUE | {"decode_queue_ms": known("queue_ms", 200.0, 0.4)}
    assert UNEXPLAINED["other"] in advised(made_of("other", waiting=SEATS, breakdown=both, server=server)).cure


def test_numbers_that_mean_nothing_are_measured_again_first():
    """Before any change of the system: the load generator was held up, records are lost, or nothing succeeded. What
    the engine's page said stands, however late the load generator was.
    """
    wanted = made_of("queue", waiting=SEATS)
    error = wanted.self_check.error_ms
    off = replace(error, ttft=replace(error.ttft, p99=900.0, limit=1.0))
    slow = replace(wanted, self_check=replace(wanted.self_check, error_ms=off))
    damaged = replace(wanted, integrity=replace(wanted.integrity, state="damaged"))
    failed = summaries.summary(replace(summaries.uncorrelated("no request succeeded"), requests=0))
    counts = replace(failed.client.requests, ok=0, failed=failed.client.requests.sent)
    errors = {"HTTP 401": 9, "timeout": 1}
    failed = replace(failed, client=replace(failed.client, requests=counts, errors=errors))
    advices = [advised(run) for run in (slow, damaged, failed)]
    assert "the limit on running requests is the likely reason" in advices[0].seen
    assert ["", ""] == [each.seen for each in advices[1:]]
    actions = [each.cure for each in advices]
    assert "measure again before changing the system" in actions[0]
    assert "restore raw/ and manifest.json" in actions[1]
    assert (
        "find out why no request succeeded (`sidelight doctor` looks at an endpoint; most often: HTTP 401)"
        in (actions[2])
    )


@pytest.mark.parametrize(
    ("loads_ms", "cure"),
    [
        ((5.0, 190.0, 15.0), "look at the KV connector"),
        ((120.0, 20.0, 60.0), "raise its limit on running requests (--max-num-seqs)"),
        ((1.0, 30.0, 2.0), UNEXPLAINED["decode_queue"]),
        ((60.0, 105.0, 40.0), UNEXPLAINED["decode_queue"]),
    ],
)
def test_a_decode_engines_queue_is_its_loads_or_its_places(loads_ms: tuple[float, float, float], cure: str):
    """Of 200 ms: a load of a KV cache is in it, and gives no cause to run more requests."""
    before_ms, load_ms, after_ms = loads_ms
    loads = KvLoads(before_ms=before_ms, load_ms=load_ms, error_ms=12.0, after_ms=after_ms)
    queue = replace(known("queue_ms", 200.0, 0.9), source="trace", error_ms=0.0, count=4)
    run = made_of("none", waiting=SEATS, loads=loads, breakdown={"decode_queue_ms": queue})
    assert cure in advised(run).cure


def test_a_prefill_engine_is_asked_for_no_more_running_requests():
    """What it finishes within a step is never seen running: a busy one shows 1, the most in the run."""
    shared = {name: known("queue_ms", ms, share) for name, ms, share in
              (("queue_ms", 800.0, 0.8), ("decode_queue_ms", 20.0, 0.02))}  # fmt: skip
    assert "add a prefill engine" in advised(made_of("queue", waiting=SEATS, breakdown=shared)).cure


def test_a_load_within_one_engines_queue_is_no_reason_to_run_more_requests():
    """As of a cache that is offloaded: every place is taken while it is loaded."""
    queue = {"queue_ms": known("queue_ms", 200.0, 0.9)}
    loads = KvLoads(before_ms=1.0, load_ms=150.0, error_ms=12.0, after_ms=0.0)
    assert "look at the KV connector" in advised(made_of("queue", waiting=SEATS, loads=loads, breakdown=queue)).cure
    few = KvLoads(before_ms=1.0, load_ms=20.0, error_ms=12.0, after_ms=0.0)
    assert "raise that limit" in advised(made_of("queue", waiting=SEATS, loads=few, breakdown=queue)).cure


def test_the_second_part_is_worked_on_where_nothing_explains_the_largest():
    """As queueing beside prefill that is a little larger: a wait stands out."""
    shares = {"prefill_ms": known("prefill_ms", 90.0, 0.45), "queue_ms": known("queue_ms", 88.0, 0.44)}
    assert UNEXPLAINED["queue"] == advised(made_of("none", breakdown=shares)).cure
    assert "raise that limit" in advised(made_of("none", waiting=SEATS, breakdown=shares)).cure


@pytest.mark.parametrize(("slow", "cure"), [(4, "look at the gateway first"), (5, UNEXPLAINED["network"])])
def test_a_few_slow_requests_do_not_say_what_to_work_on(slow: int, cure: str):
    """The mean does, until five were slow: here a gateway in the mean, the network in the slowest."""
    share = dict.fromkeys((part.name for part in TTFT_PARTS), 0.0) | {"network": 0.9, "gateway": 0.1}
    slowest = Tail(
        from_ms=900.0, requests=slow, explained=slow, estimated=0, expected=0, mean_ms=950.0, error_ms=0.0,
        share=share, above_median_ms=share,
    )  # fmt: skip
    run = made_of("gateway", breakdown={"gateway_ms": known("gateway_ms", 90.0, 0.9)})
    tail = replace(run.correlation.tail_attribution, largest="network", tail={"p95": slowest})
    advice = advised(replace(run, correlation=replace(run.correlation, tail_attribution=tail)))
    assert cure in advice.cure


def test_a_watch_without_a_first_output_wants_it_stated():
    """Its replies may be streamed: spans as Envoy's do not say when they began. A run knows that they were not."""
    run = summaries.summary(replace(summaries.uncorrelated("no request with a first token ended"), requests=0))
    run = replace(run, client=replace(run.client, ttft_ms=replace(summaries.BLOCK, mean=None)))
    assert advised(run).cure.startswith("nothing for the TTFT")
    assert STATE_FIRST_OUTPUT == advised(replace(run, watch=summaries.WATCH)).cure


def test_an_overloaded_system_is_to_be_sent_less_than_it_served():
    wanted = made_of("queue", waiting=SEATS)
    stability = replace(wanted.methodology.stability, verdict="growing", capacity_per_s=3.08)
    action = advised(replace(wanted, methodology=replace(wanted.methodology, stability=stability))).cure
    assert action.endswith("add a replica; or send less than 3.08 requests/s")


def test_an_overloaded_system_without_evidence_needs_more_capacity_or_less_load():
    wanted = made_of("prefill")
    stability = replace(wanted.methodology.stability, verdict="growing", capacity_per_s=3.08)
    overloaded = replace(wanted, methodology=replace(wanted.methodology, stability=stability))
    assert "add a replica; or send less than 3.08 requests/s" == advised(overloaded).cure


def test_objectives_decide_what_is_good_enough():
    """What met them needs no change, unless requests piled up; prefill is too long only where one was missed."""
    wanted = made_of("queue", waiting=SEATS)
    met = SloResult(text="ttft_p99<1s", met=True, good_requests=100, undetermined_requests=0, objectives=[])
    good = replace(wanted, client=replace(wanted.client, slo=met))
    assert "nothing, every objective was met" == advised(good).cure
    stability = replace(wanted.methodology.stability, verdict="growing", capacity_per_s=3.08)
    assert advised(replace(good, methodology=replace(good.methodology, stability=stability))).seen
    missed = replace(met, met=False, objectives=[OBJECTIVE])
    client = replace(wanted.client, slo=missed)
    assert MORE_PREFILL == advised(made_of("prefill", client=client)).cure
