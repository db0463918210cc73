"""What happened, where the wait went, and what makes slow requests slow, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from correlator.breakdown import E2E_PARTS, TTFT_PARTS, Part
from exporter.report.format import ms, percent
from exporter.summary.breakdown import Breakdown, E2eBreakdown, json_name, label_of
from exporter.summary.correlation import Correlation
from exporter.summary.result import Summary


def conclusion(summary: Summary) -> Iterator[str]:
    """Yield the sentences."""
    correlation = summary.correlation
    yield answer(correlation)
    if not correlation.missing and not correlation.breakdown.means_only:
        yield correlation.tail_attribution.sentence


def answer(correlation: Correlation) -> str:
    """Return where the mean TTFT went, in a sentence; or why that cannot be said.

    Of replies in one piece, which have no TTFT, where the mean end-to-end time went.
    """
    breakdown = correlation.breakdown
    if not correlation.missing:
        return _shared_out(breakdown, "ttft", TTFT_PARTS, breakdown)
    why = f"Where the TTFT went is not known: {correlation.missing}."
    if correlation.requests or breakdown.e2e.other_ms.mean is None:
        return why
    return f"{why} {_shared_out(breakdown.e2e, 'e2e', E2E_PARTS, breakdown)}"


def _shared_out(
    of: Breakdown | E2eBreakdown, whole: Literal["ttft", "e2e"], parts: Sequence[Part], breakdown: Breakdown
) -> str:
    mean_ms = getattr(of, f"{whole}_ms").mean
    shares = (
        f"{ms(mean_ms * share)} ms ({percent(share)}) {label_of(part, breakdown)}"
        for part in parts
        if (share := getattr(getattr(of, json_name(part)), f"share_of_{whole}")) is not None
    )
    return f"Of a mean {whole.upper()} of {ms(mean_ms)} ms: {', '.join(shares)}."
