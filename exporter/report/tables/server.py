"""Tables of the engine's pages in the measured window, and their correlation with the TTFT."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from sidelight.correlator.load.reuse import PrefixReuse
from sidelight.correlator.statistics.association import Association
from sidelight.exporter.document import BLANK, Block, Cell, Prose, numbers, table
from sidelight.exporter.summary.correlation import TimePercentiles
from sidelight.exporter.summary.result import Summary
from sidelight.rundir.printable.numbers import cell, count_of, ms, percent
from sidelight.scraper.engines.catalogue import FEATURES
from sidelight.scraper.gateways.catalogue import UNITS_S
from sidelight.scraper.window.quantities import Counter, Gauge, Histogram, Range, SampleStatistics
from sidelight.scraper.window.summary import Server

WIDE = 0.2
LEAST_SHOWN_MS = 0.01  # the last digit of a table
HISTOGRAM_ROWS = (
    ("queue_time", "queue time"),
    ("prefill_time", "prefill time"),
    ("decode_time", "decode time"),
    ("ttft", "TTFT"),
    ("inter_token_latency", "ITL"),
    ("e2e_latency", "E2E"),
)
BY_BUCKETS = (
    "Percentiles of the engine's times are estimated from histogram buckets (low-high where these are wide), and may "
    "lie above the longest time of any request."
)
CLIENT_EYES = {"queue_time": "queue_ms", "prefill_time": "prefill_ms"}
GAUGE_ROWS = (
    ("requests_running", "requests running"),
    ("requests_waiting", "requests waiting"),
    ("kv_cache_usage", "KV cache usage"),
)
COUNTER_ROWS = (
    ("prompt_tokens", "prompt tokens"),
    ("generation_tokens", "generation tokens"),
    ("requests_finished", "requests finished"),
    ("preemptions", "preemptions"),
    ("prefix_cache_queries", "prefix cache queries"),
    ("prefix_cache_hits", "prefix cache hits"),
)


LEAST_ELSEWHERE = 0.02  # of the prompts: of less the way of routing is not worth a word


def reuse_lines(reuse: PrefixReuse | UnsetType) -> Iterator[str]:
    """Yield a sentence on prompts' tokens in caches, and on the causes of others."""
    total = reuse.total if reuse else UNSET
    if not reuse or not total or not total.prompt_tokens:
        return
    sizes = {
        "were in no prompt answered before": total.new_tokens,
        "had been computed by another endpoint alone (routing)": total.elsewhere_tokens,
        "had been computed by the same endpoint, which did not find them (eviction)": total.evicted_tokens,
    }
    causes = (f"{percent(tokens / total.prompt_tokens)} {what}" for what, tokens in sizes.items() if tokens)
    hits = f"{percent(total.cached_tokens / total.prompt_tokens)} of the prompts' tokens were found in prefix caches"
    yield f"{'; '.join((hits, *causes))}."
    if reuse.expected:
        expected, asked = reuse.expected, count_of(reuse.expected.requests, "request")
        tokens = f"{expected.expected_tokens:,} tokens in a cache ({asked}), and {expected.cached_tokens:,} were there"
        yield f"The router expected {tokens}."
    if len(reuse.endpoints) > 1 and total.elsewhere_tokens >= LEAST_ELSEWHERE * total.prompt_tokens:
        yield "Routing by prefix would find those of other endpoints, at the price of less even load."


# Of what a feature's counter is shown as a share.
SHARES_OF = {"mm_cache_hits": "mm_cache_queries", "expert_balance": "expert_passes"} | dict.fromkeys(
    ("prefix_cache_hits_host", "prefix_cache_hits_disk", "prefix_cache_hits_remote"), "prefix_cache_queries"
)


def server_section(summary: Summary) -> Iterator[Block]:
    """Yield the engine's quantities; percentiles that the client's requests resolve better are taken from them."""
    server, engine = summary.server, summary.server.engine
    if engine is None:
        if server.endpoints or not summary.client.requests.sent:  # else the conclusion says it
            yield from (Prose(f"Server: {server.reason}", "warning"), BLANK)
        return
    rows = [*_times(summary), *_gauges(server), *_counters(server), *_features(server)]
    if rows:
        title = f"Server: {engine.name} {engine.version or ''}".rstrip()
        columns = (*numbers("count", show=cell), *numbers("mean", "p50", "p99", "max"))
        yield table(title, columns, rows)
        if any(getattr(server, key) for key, _ in HISTOGRAM_ROWS):
            yield Prose(BY_BUCKETS, "note")
        yield from _ranks(server)
        yield from (Prose(line, "note") for line in reuse_lines(summary.correlation.evidence.reuse))
    elif summary.window.duration_s:
        yield from (Prose(f"Server: {engine.name}, no scrape within the measured window", "warning"), BLANK)


def _ranks(server: Server) -> Iterator[Block]:
    """Yield a table of the data-parallel ranks of each page that keeps them apart."""
    for endpoint in server.endpoints:
        if ranks := endpoint.ranks:
            rows = [(rank.rank, rank.requests, rank.queue_ms, rank.running, rank.waiting) for rank in ranks]
            yield table("Ranks", numbers("requests", "queue mean, ms", "running", "waiting", show=cell), rows)


def _times(summary: Summary) -> Iterator[tuple[Cell, ...]]:
    for key, label in HISTOGRAM_ROWS:
        histogram: Histogram | UnsetType = getattr(summary.server, key)
        if histogram and not isinstance(histogram.stats.mean, UnsetType):
            by_client = getattr(summary.correlation.server_percentiles, CLIENT_EYES.get(key, ""), None)
            estimates = (
                _seen(by_client, name)
                if by_client and by_client.source == "client spans"
                else _estimate(histogram, name)
                for name in ("p50", "p99")
            )
            yield f"{label}, ms", histogram.stats.count or 0, 1e3 * histogram.stats.mean, *estimates


def _gauges(server: Server) -> Iterator[tuple[Cell, ...]]:
    for key, label in GAUGE_ROWS:
        gauge: Gauge | UnsetType = getattr(server, key)
        if gauge and gauge.stats.mean is not UNSET:
            values = (_known(gauge.stats, name) for name in ("mean", "p50", "p99", "max"))
            yield label, "", *(gauge_cell(key, value) for value in values)


def _counters(server: Server) -> Iterator[tuple[Cell, ...]]:
    for key, label in COUNTER_ROWS:
        counter: Counter | UnsetType = getattr(server, key)
        if counter and not isinstance(counter.stats.total, UnsetType):
            yield label, counter.stats.total
    drafted, accepted = (
        each.stats.total if each else UNSET for each in (server.draft_tokens, server.draft_tokens_accepted)
    )
    if drafted and not isinstance(accepted, UnsetType):
        yield "draft tokens", drafted
        yield "draft tokens accepted", accepted, percent(accepted / drafted)
        drafts = server.drafts.stats.total if server.drafts else UNSET
        if drafts:
            yield "tokens a step", "", f"{1 + accepted / drafts:.2f}"


def _features(server: Server) -> Iterator[tuple[Cell, ...]]:
    """Yield the features above zero; summary.json has all that a page shows."""
    deferred = server.requests_waiting_deferred
    is_one_reason = not (deferred and deferred.stats.max)  # then all that wait do for capacity
    for name in FEATURES:
        if name == "requests_waiting_capacity" and is_one_reason:
            continue
        shown: Histogram | Gauge | Counter | UnsetType = getattr(server, name)
        label = name.replace("kv", "KV").replace("lora", "LoRA").replace("mm", "multi-modal").replace("_", " ")
        if isinstance(shown, Counter) and shown.stats.total:
            whole = getattr(server, SHARES_OF.get(name, ""), UNSET)
            share = (percent(shown.stats.total / total),) if whole and (total := whole.stats.total) else ()
            yield (f"{label}, s" if shown.unit == "seconds" else label), shown.stats.total, *share
        elif isinstance(shown, Gauge) and shown.stats.max:
            values = [_known(shown.stats, statistic) for statistic in ("mean", "p50", "p99", "max")]
            if shown.unit == "seconds":
                yield f"{label}, ms", "", *(ms(None if value is None else 1e3 * value) for value in values)
            else:
                yield label, "", *((percent if shown.unit == "ratio" else cell)(value) for value in values)
        elif isinstance(shown, Histogram) and shown.stats.count and shown.stats.mean:
            estimates = (_estimate(shown, statistic) for statistic in ("p50", "p99"))
            yield f"{label}, ms", shown.stats.count, 1e3 * UNITS_S[shown.unit] * shown.stats.mean, *estimates


def gauge_cell(name: str, value: float | None) -> str:
    """Return a value of a gauge as a table shows it: of the KV cache in percent."""
    return percent(value) if name == "kv_cache_usage" else cell(value)


def _known(of: SampleStatistics | Range, name: str) -> float | None:
    """Return a number, None where it is absent."""
    number = getattr(of, name)
    return None if number is UNSET else float(number)


def _estimate(histogram: Histogram, name: str) -> str:
    """Return a percentile in ms, with its 90 % interval if that is wide. Only the interval's end is given where the
    value is lost in it.
    """
    value, interval = _known(histogram.stats, name), (histogram.intervals or {}).get(name, Range())
    if value is None:
        return "-"
    low, high, unit_ms = _known(interval, "low"), _known(interval, "high"), 1e3 * UNITS_S[histogram.unit]
    low_ms, high_ms = -math.inf if low is None else unit_ms * low, math.inf if high is None else unit_ms * high
    if name in (histogram.unresolved or ()):
        return f"≤ {cell(high_ms)}" if math.isfinite(high_ms) else f"≥ {cell(max(low_ms, 0.0))}"
    return _between(unit_ms * value, low_ms, high_ms)


def _seen(percentiles: TimePercentiles, name: str) -> str:
    """Return a percentile in ms of the client's requests, in the format of `_estimate`."""
    value_ms, interval = getattr(percentiles, name), (percentiles.intervals or {}).get(name)
    if value_ms is None or interval is None or interval.low is None or interval.high is None:
        return ms(value_ms)
    return _between(value_ms, interval.low, interval.high)


def _between(value_ms: float, low_ms: float, high_ms: float) -> str:
    if high_ms < LEAST_SHOWN_MS:
        return ms(value_ms)
    return f"{cell(low_ms)}-{cell(high_ms)}" if high_ms - low_ms > WIDE * value_ms else ms(value_ms)


def association_line(associations: Sequence[Association]) -> Iterator[str]:
    """Yield the quantities with a significant rank correlation with the TTFT, the strongest first; nothing without
    any.
    """
    significant = {
        association.server: association.rho_lag0
        for association in associations
        if association.rho_lag0 is not None and _significant(association)
    }
    ranked = sorted(significant.items(), key=lambda pair: -abs(pair[1]))
    if ranked:
        shown = ", ".join(f"{dict(GAUGE_ROWS).get(name, name.replace('_', ' '))} {rho:.2f}" for name, rho in ranked)
        yield (
            f"Rank correlation of TTFT with what the last scrape before submission showed: {shown}. Others are not "
            "significant."
        )


def _significant(association: Association) -> bool:
    """Return whether the 95 % interval of the correlation excludes zero."""
    ci95 = association.ci95_lag0
    return ci95 is not None and not ci95[0] <= 0 <= ci95[1]
