"""How the numbers came about and how far off they may be."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import asdict

from exporter.report.format import ms, percent
from exporter.summary.correlation import Clock, Correlation, EngineClock, EstimateAccuracy
from exporter.summary.result import Summary
from loadgen.requests.self_check import SelfCheck

MOST_CLOCKS = 3  # engines named whose clocks are not known


def method(summary: Summary) -> Iterator[str]:
    """Yield what the numbers rest on, the load generator's own error, and the draft's verdict."""
    if not summary.correlation.missing:
        yield from basis(summary.correlation)
    yield _generator(summary.self_check)
    compliance = summary.methodology
    warm_up = compliance.warmup.sentence if compliance.warmup else ""
    yield f"{compliance.draft}: {compliance.missing}. {warm_up}".rstrip()


def basis(correlation: Correlation) -> Iterator[str]:
    """Yield in lines what the table rests on: requests by source, how certain estimates are, what is merged, clocks."""
    requests, breakdown = correlation.requests, correlation.breakdown
    if breakdown.means_only:
        yield (
            f"Means of {correlation.client_requests} requests by the client's count and {correlation.server_requests} "
            f"by the engine's; not by request: {breakdown.means_only}."
        )
        return
    failed = f", {correlation.not_ok} of which did not succeed" if correlation.not_ok else ""
    yield f"Over {requests} requests{failed}: {', '.join(_covered(correlation))}."
    yield from _not_joined(correlation)
    for merged, count in breakdown.merged.items():
        yield f"other includes {merged} for {count} requests: no source separates them."
    if correlation.clock.pairs:
        yield from _clocks(correlation.clock)
    yield from _measured(correlation.estimate_accuracy)


def _covered(correlation: Correlation) -> Iterator[str]:
    """Name the sources with how many requests each covers, and how certain the estimates are."""
    requests, coverage, quality = correlation.requests, correlation.coverage, correlation.quality
    if coverage.trace:
        yield f"{round(requests * coverage.trace)} by the engine's spans"
    if coverage.response:
        yield f"{round(requests * coverage.response)} by the engine's replies or records"
    if coverage.histogram:
        joined = round(requests * (coverage.trace + coverage.response))
        counts = asdict(quality) | {"exact": quality.exact - joined}
        flags = ", ".join(f"{count} {name}" for name, count in counts.items() if count and name != "none")
        yield f"{round(requests * coverage.histogram)} estimated from scrapes ({flags})"
    if coverage.none:
        why = next(iter(correlation.none_reasons), "no reason was given")
        yield f"{round(requests * coverage.none)} not known ({why})"


def _not_joined(correlation: Correlation) -> Iterator[str]:
    """Yield why requests are estimated where exact times were to be had: others have them, or spans came."""
    came = correlation.spans is not None and correlation.spans.spans
    if came or correlation.coverage.trace or correlation.coverage.response:
        for reason, count in correlation.estimated_reasons.items():
            yield f"Estimated, not joined: {count} ({reason})."


def _clocks(clock: Clock) -> Iterator[str]:
    """Yield how far off the engine's clock is; of several the range, the largest error, and which are not known."""
    if not clock.engines:
        yield _clock(clock)
        return
    offsets_ms = [engine.offset_ms for engine in clock.engines.values() if engine.offset_ms is not None]
    if offsets_ms:
        yield (
            f"The clocks of {len(offsets_ms)} engines are from {_beside(min(offsets_ms))} to "
            f"{_beside(max(offsets_ms))}, with an error of {ms(clock.error_ms)} ms at most; this is corrected."
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
        return f"The engine's clock agrees with ours within {ms(abs(offset_ms) + error_ms)} ms."
    return f"The engine's clock is {_beside(offset_ms)}, with an error of {ms(error_ms)} ms; this is corrected."


def _beside(offset_ms: float) -> str:
    return f"{ms(abs(offset_ms))} ms {'behind' if offset_ms > 0 else 'ahead of'} ours"


def _measured(accuracy: EstimateAccuracy) -> Iterator[str]:
    parts = {"queue": accuracy.queue, "prefill": accuracy.prefill}
    known = {name: error for name, error in parts.items() if error}
    if known:
        errors = " and ".join(f"{ms(error.p95_ms)} ms ({name})" for name, error in known.items())
        covered = " and ".join(percent(error.covered_90) for error in known.values())
        yield (
            f"Estimates from scrapes alone would be off by p95 {errors}; their 90 % intervals hold {covered} of the "
            f"exact times of {max(error.compared for error in known.values())} requests."
        )


def _generator(check: SelfCheck) -> str:
    late_ms, cpu = check.schedule_lateness_ms.p99, check.cpu_ratio.max
    late = f"submissions late by p99 {ms(late_ms)} ms" if late_ms is not None else ""
    busy = f"busiest process {percent(cpu)} of a core" if cpu is not None else ""
    facts = ", ".join(fact for fact in (late, busy) if fact)
    return f"The load generator {check.verdict}{f': {facts}' if facts else ''}."
