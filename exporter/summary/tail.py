"""What makes the TTFT vary and its tail long, as an object of `summary.json`, and in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct, UnsetType

from correlator.estimate.table import QUALITIES
from correlator.statistics.tail import PARTS, TAILS, ByPart, IntervalByPart, Tail, TailShares, Threshold
from rundir.fields import NO_UNIT, UNSET, Count, doc
from rundir.stats import Missing

REST = "the engine outside queue and prefill"
# Below that, the 99th percentile of a run is its slowest request.
LEAST_FOR_P99 = 100
FEW_REQUESTS = 10  # a statement that rests on fewer says on how many
HARDLY_RATIO = 1.25


class TailAttribution(Struct, frozen=True, kw_only=True):
    """Which part the TTFT, its variance and its tail are made of; only `missing` and the sentence where not known."""

    missing: Annotated[str | UnsetType, doc("Why it is not known.")] = UNSET
    requests: Annotated[Count | UnsetType, doc("Requests with a breakdown.", "requests")] = UNSET
    with_ttft: Annotated[Count | UnsetType, doc("Requests with a first token.", "requests")] = UNSET
    blocks: Annotated[
        Count | UnsetType, doc("Blocks that the intervals rest on; below 10 they are a guess.", "blocks")
    ] = UNSET
    variance_share: Annotated[ByPart | UnsetType, doc("cov(part, TTFT) / var(TTFT); they add up to 1.", NO_UNIT)] = (
        UNSET
    )
    ci95: Annotated[IntervalByPart | UnsetType, doc("95 % intervals of these shares.", NO_UNIT)] = UNSET
    mean_share: Annotated[ByPart | UnsetType, doc("Shares of the mean TTFT; they add up to 1.", NO_UNIT)] = UNSET
    merged: Annotated[
        dict[str, int] | UnsetType, doc("What `other` includes for want of a source, by count.", "requests")
    ] = UNSET
    quality: Annotated[
        dict[str, int] | UnsetType,
        Meta(extra_json_schema={"propertyNames": {"enum": list(QUALITIES)}}),
        doc("How certain the parts are, by count.", "requests"),
    ] = UNSET
    mean_ms: Annotated[float | UnsetType, doc("Mean TTFT of the requests with a breakdown.", "ms")] = UNSET
    std_ms: Annotated[float | UnsetType, doc("Its standard deviation.", "ms")] = UNSET
    p50_ms: Annotated[float | UnsetType, doc("Median TTFT of all requests.", "ms")] = UNSET
    tail: Annotated[
        dict[str, Tail] | UnsetType,
        Meta(extra_json_schema={"propertyNames": {"enum": list(TAILS)}}),
        doc("The slowest requests, at and above a percentile."),
    ] = UNSET
    threshold: Annotated[
        Threshold | UnsetType, doc("From how many waiting requests on queueing is most of the median TTFT.")
    ] = UNSET
    sentence: Annotated[str, Meta(min_length=1), doc("The answer in a sentence.")]


def tail_attribution(attribution: TailShares | Missing) -> TailAttribution:
    """Return the object with its sentence; where nothing is known, only that and `missing`."""
    if isinstance(attribution, Missing):
        return TailAttribution(missing=attribution.reason, sentence=sentence(attribution))
    return TailAttribution(
        requests=attribution.requests,
        with_ttft=attribution.with_ttft,
        blocks=attribution.blocks,
        variance_share=attribution.variance_share,
        ci95=attribution.ci95,
        mean_share=attribution.mean_share,
        merged=attribution.merged,
        quality=attribution.quality,
        mean_ms=1e3 * attribution.mean_s,
        std_ms=1e3 * attribution.std_s,
        p50_ms=1e3 * attribution.p50_s,
        tail=attribution.tails,
        threshold=attribution.threshold,
        sentence=sentence(attribution),
    )


def sentence(attribution: TailShares | Missing) -> str:
    """Say in one sentence what the slow requests' TTFT is; what is estimated, merged or not known is called so.

    Slow are those at and above p99, of fewer than 100 requests p95. Where that is within 1.25 times the median, the
    sentence is of the mean.
    """
    if isinstance(attribution, Missing):
        return f"What makes slow requests slow is not known: {attribution.reason}."
    label = "p99" if attribution.with_ttft >= LEAST_FOR_P99 else "p95"
    tail = attribution.tails[label]
    names = part_names(attribution.mean_share, name_of_rest(attribution.merged, attribution.requests))
    p50_ms = 1e3 * attribution.p50_s
    if 0 < tail.from_ms <= HARDLY_RATIO * p50_ms:
        ratio = f"{label} is {tail.from_ms / p50_ms:.2f} times p50"
        name, share = ranked(attribution.mean_share)[0]
        estimated = attribution.requests - attribution.quality.get("exact", 0)
        trust = _trust(
            attribution.requests, attribution.with_ttft, estimated, attribution.quality.get("prior", 0), None
        )
        return f"TTFT hardly varies ({ratio}); {names[name]} is {percent(share)} of it{trust}."
    if 2 * tail.explained < tail.requests:
        return (
            f"What the {label} TTFT is made of is not known: {tail.explained} of the {tail.requests} requests there "
            "have a breakdown."
        )
    error = tail.error_ms / tail.mean_ms if tail.error_ms is not None and tail.mean_ms else None
    trust = _trust(tail.explained, tail.requests, tail.estimated, tail.expected, error)
    (name, share), *others = ranked(tail.share)
    if share > 0.5:
        start = _start(attribution.threshold) if name == "queue" else ""
        return f"{label} TTFT is {names[name]}: {percent(share)} of it{start}{trust}."
    largest = [f"{names[part]} is {percent(ratio)}" for part, ratio in [(name, share), *others[:1]]]
    return f"No part is most of the {label} TTFT: {', '.join(largest)}{trust}."


def ranked(shares: Mapping[str, float | None]) -> list[tuple[str, float]]:
    """Return the parts whose share is known, largest first."""
    known = [(name, share) for name in PARTS if (share := shares[name]) is not None]
    return sorted(known, key=lambda pair: -pair[1])


def part_names(shares: Mapping[str, float | None], rest: str) -> dict[str, str]:
    """Return what each part is called in a sentence; `rest` is the name of `other`.

    Without a gateway's part, what is outside the engine may be a gateway's as well as the network's.
    """
    outside = "time outside the engine" if shares.get("gateway") is None else "time outside engine and gateway"
    return {"network": outside, "gateway": "the gateway", "queue": "queueing", "prefill": "prefill", "other": rest}


def name_of_rest(merged: Mapping[str, int], requests: int) -> str:
    """Name `other`: what stands merged in it, where it does so for more than a tenth of the requests."""
    if 10 * sum(merged.values()) <= requests:
        return REST
    return f"what no source separates ({'; '.join(merged)})"


def percent(ratio: float) -> str:
    """Return whole percent; what is not all is never called 100 %."""
    return "over 99 %" if 0.995 <= ratio < 1 - 1e-9 else f"{100 * ratio:z.0f} %"


def _start(threshold: Threshold) -> str:
    """Say from which length of the queue on queueing dominates, nothing where that is not known or never."""
    if threshold.waiting is None or threshold.fewest is None:
        return ""
    if threshold.waiting <= threshold.fewest:
        return f", at every length of the queue seen (waiting >= {threshold.fewest:g})"
    return f", starting when waiting > {threshold.waiting - 1:g}"


def _trust(explained: int, requests: int, estimated: int, expected: int, error_ratio: float | None) -> str:
    """Say how many of the requests are spoken of, how many of these are estimated, and how well."""
    words = []
    if explained < requests:
        words.append(f"of {explained} of {requests} requests")
    elif requests < FEW_REQUESTS:
        words.append(f"the slowest {requests} requests" if requests > 1 else "the slowest request")
    if estimated:
        words.append("estimated" if estimated == explained else f"estimated for {estimated} of {explained} requests")
    if expected:
        words.append(f"{expected} of them never observed")
    if estimated and error_ratio is not None:
        words.append(f"standard error at most {100 * error_ratio:.1f} %")
    return f" ({', '.join(words)})" if words else ""
