"""Where the TTFT went, for people: the table, the answer in a sentence, and what both rest on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from msgspec.structs import asdict
from rich.table import Table
from rich.text import Text

from correlator.breakdown import E2E_PARTS, INNER_PARTS, TTFT_PARTS, Part
from exporter.report.format import ms, percent, table
from exporter.summary.breakdown import Breakdown, E2eBreakdown, TtftPart, json_name
from exporter.summary.correlation import Clock, Correlation, EngineClock, EstimateAccuracy
from rundir.stats import Statistics

BAR = 8
SOURCES = {
    "trace": "engine's spans",
    "response": "replies, records",
    "histogram": "estimate",
    "mixed": "several",
    "client": "client",
}
MOST_CLOCKS = 3  # engines named whose clocks are not known
LEAST_SHARE = 0.001  # of TTFT: less of it has no line within other


def answer(correlation: Correlation) -> str:
    """Return where the mean TTFT went, in a sentence; or why that cannot be said.

    Of replies in one piece, which have no TTFT, where the mean end-to-end time went.
    """
    breakdown = correlation.breakdown
    if not correlation.missing:
        return _shared_out(breakdown, "ttft", TTFT_PARTS)
    why = f"Where the TTFT went is not known: {correlation.missing}."
    if correlation.requests or breakdown.e2e.other_ms.mean is None:
        return why
    return f"{why} {_shared_out(breakdown.e2e, 'e2e', E2E_PARTS)}"


def _shared_out(breakdown: Breakdown | E2eBreakdown, whole: Literal["ttft", "e2e"], parts: Sequence[Part]) -> str:
    mean_ms = getattr(breakdown, f"{whole}_ms").mean
    shares = (
        f"{ms(mean_ms * share)} ms ({percent(share)}) {part.label}"
        for part in parts
        if (share := getattr(getattr(breakdown, json_name(part)), f"share_of_{whole}")) is not None
    )
    return f"Of a mean {whole.upper()} of {ms(mean_ms)} ms: {', '.join(shares)}."


def breakdown_table(correlation: Correlation) -> Table:
    """Return the parts of the TTFT over the requests that know them, each with its share, source and error.

    A row within another makes that up; its share is of TTFT too.
    """
    shown = table("Where the TTFT went", "mean ms", "p50", "p99", "share", "", "source", "error ms", label_width=18)
    breakdown = correlation.breakdown
    sources = {**SOURCES, "histogram": "engine's sums"} if breakdown.means_only else SOURCES
    for part in TTFT_PARTS:
        described: TtftPart = getattr(breakdown, json_name(part))
        if described.mean is None:
            continue
        shown.add_row(*_row(part.label, described, sources))
        for inner in (inner for inner in INNER_PARTS if inner.within == part.name):
            described = getattr(breakdown, json_name(inner))
            share = described.share_of_ttft
            if share is not None and (part.name == "network" or share > LEAST_SHARE):
                shown.add_row(*_row(f"  {inner.label}", described, sources, bar=False), style="dim")
    shown.add_row(Text("TTFT", style="bold"), *_times(breakdown.ttft_ms), "100 %", "", "client")
    if breakdown.send_ms.mean is not None:
        shown.add_row("connect and send", *_times(breakdown.send_ms), "", "", "before TTFT", style="dim")
    return shown


def group_tables(correlation: Correlation) -> Iterator[Table]:
    """Yield the mean parts by workload class, and by the URL that was asked, where there are several."""
    for groups, title in ((correlation.classes, "class"), (correlation.urls, "URL")):
        if not groups:
            continue
        known = [part for part in TTFT_PARTS if getattr(correlation.breakdown, json_name(part)).mean is not None]
        labels = (part.label for part in known)
        shown = table(f"Where the TTFT went, by {title}, mean ms", "requests", "TTFT", *labels)
        for label, group in groups.items():
            means = (getattr(group.breakdown, name).mean for name in ("ttft_ms", *map(json_name, known)))
            shown.add_row(label, f"{group.requests:,}", *map(ms, means))
        yield shown


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


def _row(label: str, part: TtftPart, sources: Mapping[str, str], *, bar: bool = True) -> tuple[str | Text, ...]:
    share, error_ms = part.share_of_ttft, part.error_ms
    drawn = Text("█" * max(0, round(BAR * (share or 0.0))) if bar else "", style="cyan")
    certainty = "" if error_ms is None else "exact" if error_ms == 0 else f"± {ms(error_ms)}"
    return label, *_times(part), percent(share), drawn, sources[part.source or ""], certainty


def _times(part: Statistics) -> tuple[str, ...]:
    return tuple(map(ms, (part.mean, part.p50, part.p99)))
