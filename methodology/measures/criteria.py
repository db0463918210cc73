"""Whether a level of load is sustained by the draft's own criteria, each by itself, beside the verdict on stability."""

from __future__ import annotations

from collections.abc import Sequence

from methodology.study.findings import Quantity
from methodology.study.model import Finished
from methodology.study.quantities import latency, number

LEAST_COMPLETED = 0.9
TIMES_P50 = 10.0
#: What binds, as a sentence begins.
WORDS: dict[str, str] = {
    "seats": "The engine's places for running requests bind",
    "kv_cache": "The KV cache binds",
    "steps": "The engine's computing time binds",
    "client": "The load generator's requests in flight bind, not the server",
    "unknown": "What binds is not known",
}
NOTES = (
    (
        "The draft calls a load sustained whose completions are 90 % of its arrivals, so that an overload of 5 % "
        "passes. Counted in the steady window, that stands beside our verdict; sustainable is here the highest load "
        "that was shown stable."
    ),
    (
        "The draft's P99 above ten times the P50 at lower load does not say which latency: it is the TTFT here, "
        "against the P50 of the lowest level. It decides nothing where that level breaks it already."
    ),
    (
        "Throughput is of tokens that arrived in the steady window (the first tenth and the drain left out), not of "
        "the requests that ended."
    ),
)


def completed_ratio(each: Finished) -> float | None:
    """Return the completions over the arrivals of the steady window."""
    outcome = each.outcome
    if outcome.completed_per_s is None or not outcome.realised_per_s:
        return None
    return outcome.completed_per_s / outcome.realised_per_s


def ttft_ms(each: Finished, name: str) -> float | None:
    """Return a percentile of the TTFT."""
    interval = latency(each.outcome, "ttft", name)
    return interval.estimate if interval else None


def lowest_p50_ms(levels: Sequence[Finished]) -> float | None:
    """Return the TTFT P50 of the lowest level, None where it does not serve: its own P99 exceeds ten times it."""
    if not levels:
        return None
    lowest = min(levels, key=lambda each: each.step.level)
    p50, p99 = ttft_ms(lowest, "p50"), ttft_ms(lowest, "p99")
    return p50 if p50 and p99 and p99 <= TIMES_P50 * p50 else None


def accepts(each: Finished, p50_ms: float | None) -> bool | None:
    """Return whether the draft calls a level sustained, None where nothing was completed or sent."""
    ratio, p99 = completed_ratio(each), ttft_ms(each, "p99")
    if ratio is None:
        return None
    return ratio >= LEAST_COMPLETED and not (p50_ms and p99 and p99 > TIMES_P50 * p50_ms)


def draft_sustainable(levels: Sequence[Finished]) -> Quantity:
    """Return the highest level that the draft's criteria call sustained."""
    p50_ms = lowest_p50_ms(levels)
    accepted = [each.step.level for each in levels if accepts(each, p50_ms)]
    method = "highest level with completions of 90 % of its arrivals, and TTFT P99 up to 10 x the lowest level's P50"
    return number(
        max(accepted, default=None), "requests/s", method=method, missing="no level meets the draft's criteria"
    )
