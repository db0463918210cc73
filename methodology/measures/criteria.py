"""Verdict on a level of load by the draft's own criteria, beside the stability verdict.

Each criterion is judged by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sidelight.methodology.study.findings import ResultQuantity
from sidelight.methodology.study.model import Finished
from sidelight.methodology.study.quantities import latency, number
from sidelight.methodology.study.saturation import Capacity, load_of
from sidelight.rundir.printable.numbers import figure

LEAST_COMPLETED = 0.9
TIMES_P50 = 10.0
LIMITS = {
    "seats": "how many requests the engine runs at once",
    "kv_cache": "the KV cache",
    "steps": "the engine's computing time",
    "client": "the load generator's requests in flight, not the server",
}
#: What limits a system, as a sentence begins.
WORDS = {name: f"The limit is {what}" for name, what in LIMITS.items()} | {"unknown": "The limit is not known"}
NOTES = (
    (
        "The draft calls a load sustained whose completions are 90 % of its arrivals, so that an overload of 5 % "
        "passes. Counted in the steady window, that stands beside our verdict; sustainable is here the highest load "
        "that was shown stable."
    ),
    (
        "The draft's P99 above ten times the P50 at lower load does not say which latency: it is the TTFT here, "
        "against the P50 of the lowest level. Where the P99 of the lowest level itself exceeds ten times its P50, this "
        "criterion is not applied."
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
    return latency(each.outcome, "ttft", name).estimate


def lowest_p50_ms(levels: Sequence[Finished], limit: Capacity) -> float | None:
    """Return the TTFT P50 of the lowest level, None where it does not serve: its own P99 exceeds ten times it."""
    if not levels:
        return None
    lowest = min(levels, key=lambda each: load_of(each, limit))
    p50, p99 = ttft_ms(lowest, "p50"), ttft_ms(lowest, "p99")
    return p50 if p50 and p99 and p99 <= TIMES_P50 * p50 else None


def refusals(each: Finished, p50_ms: float | None) -> list[str] | None:
    """Return the draft's criteria that a level fails, None where nothing was completed or sent."""
    ratio, p99 = completed_ratio(each), ttft_ms(each, "p99")
    if ratio is None:
        return None
    said = (
        [f"it completed {ratio:.3g} of its arrivals, less than {LEAST_COMPLETED:g}"] if ratio < LEAST_COMPLETED else []
    )
    if p50_ms and p99 and p99 > TIMES_P50 * p50_ms:
        said.append(
            f"the TTFT P99 of its requests, {p99:,.0f} ms, is more than ten times {p50_ms:,.0f} ms, the P50 of the "
            "lowest level"
        )
    return said


def accepts(each: Finished, p50_ms: float | None) -> bool | None:
    """Return whether the draft calls a level sustained, None where nothing was completed or sent."""
    reasons = refusals(each, p50_ms)
    return None if reasons is None else not reasons


def draft_sustainable(levels: Sequence[Finished], limit: Capacity) -> ResultQuantity:
    """Return the highest load that the draft's criteria call sustained."""
    p50_ms = lowest_p50_ms(levels, limit)
    accepted = [load_of(each, limit) for each in levels if accepts(each, p50_ms)]
    method = "highest load with completions of 90 % of its arrivals, and TTFT P99 up to 10 x the lowest level's P50"
    return number(
        max(accepted, default=None), "requests/s", method=method, missing="no level meets the draft's criteria"
    )


def acceptance(each: Finished, limit: Capacity, accepted: ResultQuantity, p50_ms: float | None) -> Iterator[str]:
    """Yield sentences on the draft's acceptance: of this level, else why not, and the highest load that it accepts."""
    load, most, reasons = load_of(each, limit), accepted.value, refusals(each, p50_ms)
    if reasons:
        lower = "no level" if most is None else f"up to {figure(most)} requests/s"
        yield f"The draft would not accept {figure(load)} requests/s: {', and '.join(reasons)}; it accepts {lower}."
    elif reasons is not None:
        higher = f", and up to {figure(most)}" if most is not None and most > load else ""
        yield f"The draft would accept {figure(load)} requests/s, too{higher}."
