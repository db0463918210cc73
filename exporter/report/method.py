"""How the numbers came about and how far off they may be."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from msgspec import UNSET

from sidelight.correlator.live.reasons import EXPLANATIONS, NOT_COMPARED
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.report.heading import urls_of
from sidelight.exporter.report.load import sustained
from sidelight.exporter.report.tables.percentiles import interval_line
from sidelight.exporter.summary.breakdown import NOT_SEEN, json_name
from sidelight.exporter.summary.correlation import Clock, Correlation, EngineClock
from sidelight.exporter.summary.result import Summary
from sidelight.exporter.summary.tail import in_words
from sidelight.exporter.summary.watched import WatchedTraffic
from sidelight.loadgen.requests.self_check.cause import BUSY_MACHINE
from sidelight.loadgen.requests.self_check.check import SelfCheck
from sidelight.rundir.printable.numbers import agree, count_of, ms, percent

MOST_CLOCKS = 3  # engines named whose clocks are not known


def method(summary: Summary) -> Iterator[str]:
    """Yield the sources of the breakdown, the load generator's error, and the draft's statements. The draft's are given
    only where it was asked.
    """
    if not summary.correlation.missing:
        yield from basis(summary.correlation, summary.client.requests.sent)
        yield from _of_prefill_pool(summary)
    yield from interval_line(summary)
    if summary.watch:
        yield from _unexplained(summary.watch)
        return
    if summary.methodology.stability.verdict is not None:
        yield sustained(summary)
    yield from _error(summary.self_check)
    if summary.client.ttft_ms.count:
        yield "Latencies are as the client saw them: nothing was subtracted, not the network's time either."
    yield from slowed_engine(summary)
    tokenizer, warm_up = summary.workload.tokenizer, summary.methodology.warmup
    if tokenizer is not None and tokenizer.why_not_the_servers:
        yield f"Lengths are in tokens of {tokenizer.name}, not of the server: {tokenizer.why_not_the_servers}."
    if warm_up and warm_up.policy in ("draft", "earlier"):
        yield f"{summary.methodology.draft}: {summary.methodology.missing}. {warm_up.sentence}"


def basis(correlation: Correlation, sent: int = 0) -> Iterator[str]:
    """Yield lines on the sources of the breakdown: those of each request, what is not separated, clocks.

    sent  how many requests there were, with a first token or without
    """
    breakdown = correlation.breakdown
    if breakdown.means_only:
        yield (
            f"Only means are known: over {count_of(correlation.client_requests, 'request')} by the client's count and "
            f"{correlation.server_requests} by the engine's ({breakdown.means_only})."
        )
        if any(getattr(breakdown, json_name(part)).mean_ci90 for part in TTFT_PARTS):
            yield "Behind a mean stands the 90 % interval of what it is over a long time at this load."
        return
    yield _covered(correlation, sent)
    yield from _not_joined(correlation)
    if breakdown.network_ms.missing == NOT_SEEN:
        yield "The TTFT begins at the gateway: its clients sent no spans, and the network before it is not seen."
    for merged, count in breakdown.merged.items():
        whose = "" if count == correlation.requests else f" of {count_of(count, 'request')}"
        yield f"The part `other`{whose} includes {in_words(merged)}: no source separates them."
    if correlation.coverage.trace and correlation.clock.reason != NOT_COMPARED:
        yield from _clocks(correlation.clock)
        if breakdown.network_ms.count and not breakdown.request_network_ms.count:
            yield "No time above depends on the clocks: the time outside the engine is not divided into there and back."


def _of_prefill_pool(summary: Summary) -> Iterator[str]:
    """Yield a prefill engine's means by its page beside a decode engine's replies."""
    breakdown, times = summary.correlation.breakdown, (summary.server.queue_time, summary.server.prefill_time)
    if breakdown.first_step_ms.mean is None or not any("prefill" in merged for merged in breakdown.merged):
        return
    means_ms = [1e3 * time.stats.mean for time in times if time and time.stats.mean is not UNSET]
    if len(means_ms) == len(times):
        queue_ms, prefill_ms = map(ms, means_ms)
        yield f"By its page the prefill engine's queue took {queue_ms} ms of that, its prefill {prefill_ms} ms (means)."


def _unexplained(watch: WatchedTraffic) -> Iterator[str]:
    """Yield the number of watched requests without a breakdown of the TTFT, by reason."""
    for reason, count in watch.missing.items():
        yield f"Without a breakdown of the TTFT: {count:,} ({EXPLANATIONS.get(reason, reason)})."


def _covered(correlation: Correlation, sent: int) -> str:
    """Return from which source the breakdown of how many requests is."""
    requests, coverage, quality = correlation.requests, correlation.coverage, correlation.quality
    ways = (
        (coverage.trace, "matched to engine spans"),
        (coverage.response, "timed by the server's replies or records"),
        (coverage.histogram, "estimated from the engine's histograms"),
        (coverage.none, f"without a breakdown ({next(iter(correlation.none_reasons), 'no reason is known')})"),
    )
    known = [(round(requests * ratio), how) for ratio, how in ways if ratio]
    which = " with a first token" if sent > requests else ""
    which += f" ({correlation.not_ok:,} of which did not end ok)" if correlation.not_ok else ""
    if requests == len(known) == 1:
        whole = f"The one request{which} was {known[0][1]}"
    elif len(known) == 1:
        whole = f"All {requests:,} requests{which} were {known[0][1]}"
    else:
        each = (f"{count:,} {agree(count, 'was', 'were')} {how}" for count, how in known)
        whole = f"Of {requests:,} requests{which}, {', '.join(each)}"
    doubts = (
        (quality.by_time, "by time alone, for want of a common id"),
        (quality.mixed_traffic, "beside other traffic"),
        (quality.prior, "the metrics page was silent"),
    )
    less_sure = "".join(f"; {count:,} of them less surely: {why}" for count, why in doubts if count)
    return f"{whole}{less_sure}."


def _not_joined(correlation: Correlation) -> Iterator[str]:
    """Yield the reasons for estimates where exact times were available: others have them, or spans came.

    A warning says it of those of which times came.
    """
    came = correlation.spans is not None and correlation.spans.spans
    if came or correlation.coverage.trace or correlation.coverage.response:
        for reason, count in correlation.estimated_reasons.items():
            if not any(refusal in reason for refusal in correlation.refused_reasons):
                were = "1 request was" if count == 1 else f"{count} requests were"
                yield f"{were} estimated although spans or timings came{f': {reason}' if reason else ''}."


def _clocks(clock: Clock) -> Iterator[str]:
    """Yield the offset of the engine's clock. Of several engines it is the range, the largest error, and the clocks
    that are not known.
    """
    if not clock.engines:
        yield _clock(clock)
        return
    offsets_ms = [engine.offset_ms for engine in clock.engines.values() if engine.offset_ms is not None]
    if offsets_ms:
        yield (
            f"The clocks of {len(offsets_ms)} engines are from {_beside(min(offsets_ms))} to "
            f"{_beside(max(offsets_ms))}, known within {ms(clock.error_ms)} ms; this is corrected."
        )
    unknown = [f"{name}: {engine.reason}" for name, engine in clock.engines.items() if engine.offset_ms is None]
    for text in unknown[:MOST_CLOCKS]:
        yield f"The clock of an engine cannot be compared with ours: {text}."
    if len(unknown) > MOST_CLOCKS:
        yield f"Nor can those of {len(unknown) - MOST_CLOCKS} more."


def _clock(clock: EngineClock) -> str:
    offset_ms, error_ms = clock.offset_ms, clock.error_ms
    if offset_ms is None or error_ms is None:
        return f"The engine's clock cannot be compared with ours: {clock.reason}."
    if abs(offset_ms) <= error_ms:
        return f"Clock offset to the engine is known within {ms(abs(offset_ms) + error_ms)} ms."
    return f"The engine's clock is {_beside(offset_ms)}, known within {ms(error_ms)} ms; this is corrected."


def _beside(offset_ms: float) -> str:
    return f"{ms(abs(offset_ms))} ms {'behind' if offset_ms > 0 else 'ahead of'} ours"


def _error(check: SelfCheck) -> Iterator[str]:
    """Yield the error of latencies and the lateness of requests, unless an alert states it."""
    if check.statement:
        yield check.statement
    arrivals = check.arrivals
    if arrivals is not None and arrivals.sentence and not arrivals.distorted:
        yield arrivals.sentence


def generator_verdict(summary: Summary) -> str:
    """Return a verdict on the load generator; the error of latencies is given by `method`."""
    check = summary.self_check
    metrics = (("TTFT", check.error_ms.ttft), ("gaps between chunks", check.error_ms.itl))
    doubtful = " and ".join(name for name, bound in metrics if bound.exceeded)
    judged = {
        True: f"The load generator can be trusted: it {check.verdict}.",
        False: f"The load generator is not to be trusted with {doubtful} (see the line with !).",
        None: f"The load generator {check.verdict}.",
    }
    return judged[check.trusted]


def slowed_engine(summary: Summary) -> Iterator[str]:
    """Yield a warning if the engine's machine is ours and busy. No stamp shows how far other work slowed the engine."""
    machine = summary.self_check.machine
    hosts = {urlsplit(url).hostname or "" for url in urls_of(summary.config)}
    is_here = any(host in ("localhost", "::1") or host.startswith("127.") for host in hosts)
    if is_here and machine is not None and (machine.busy_ratio or 0.0) >= BUSY_MACHINE:
        yield (
            f"The engine ran on this machine, which was {percent(machine.busy_ratio)} busy: it may have been slower "
            "than on a machine of its own."
        )
