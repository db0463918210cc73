"""Tail attribution: causes of varying and slow TTFT, as an object of `summary.json`, and in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct, UnsetType

from sidelight.correlator.estimate.table import QUALITIES
from sidelight.correlator.parts import ENGINE_FRONTEND, OUTSIDE_ENGINE, SPENT, UNDIVIDED_SPENT
from sidelight.correlator.statistics.tail import PARTS, TAILS, ByPart, IntervalByPart, Tail, TailShares, Threshold
from sidelight.rundir.fields import NO_UNIT, UNSET, Count, doc
from sidelight.rundir.printable.numbers import agree, count_of, percent_of_all
from sidelight.rundir.stats import Missing

# Below that, the 99th percentile of a run is its slowest request.
LEAST_FOR_P99 = 100
HARDLY_RATIO = 1.25
MAJORITY = 0.5  # of a TTFT: a part with more of it is named alone


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
    largest: Annotated[str | UnsetType, doc("The part that the sentence names first.")] = UNSET
    sentence: Annotated[str, Meta(min_length=1), doc("The answer in a sentence.")]


def tail_attribution(attribution: TailShares | Missing) -> TailAttribution:
    """Return the object with its sentence; where nothing is known, only that and `missing`."""
    text, largest = sentence(attribution)
    if isinstance(attribution, Missing):
        return TailAttribution(missing=attribution.reason, sentence=text)
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
        largest=largest or UNSET,
        sentence=text,
    )


def sentence(attribution: TailShares | Missing) -> tuple[str, str]:
    """Return a sentence on slow requests' largest part of the TTFT, and that part's name.

    Slow are those at and above p99, of fewer than 100 requests p95. Where that is within 1.25 times the median, the
    sentence is of the mean. What is estimated or merged is called so; the part is "" where nothing is known.
    """
    if isinstance(attribution, Missing):
        return f"What makes slow requests slow is not known: {attribution.reason}.", ""
    label, slowest = ("p99", "1 %") if attribution.with_ttft >= LEAST_FOR_P99 else ("p95", "5 %")
    tail = attribution.tails[label]
    where = places(attribution.mean_share, attribution.merged, attribution.requests)
    p50_ms = 1e3 * attribution.p50_s
    if 0 < tail.from_ms <= HARDLY_RATIO * p50_ms:
        largest, share = ranked(attribution.mean_share)[0]
        ratio = f"{label} is {tail.from_ms / p50_ms:.2f} times p50"
        return f"TTFT hardly varies ({ratio}): {percent_of_all(share)} of it is spent {where[largest]}.", largest
    if 2 * tail.explained < tail.requests:
        has = agree(tail.explained, "has", "have")
        return f"Of the slowest {slowest}, only {tail.explained:,} of {tail.requests:,} requests {has} a breakdown.", ""
    (largest, share), *others = ranked(tail.share)
    spent = f"{percent_of_all(share)} of their TTFT {where[largest]}"
    if share <= MAJORITY and others:
        second, share = others[0]
        spent += f" and {percent_of_all(share)} {where[second]}"
    return f"The slowest {slowest} ({_spoken_of(tail)}) spent {spent}.", largest


def ranked(shares: Mapping[str, float | None]) -> list[tuple[str, float]]:
    """Return the parts with a known share, largest first."""
    known = [(name, share) for name in PARTS if (share := shares[name]) is not None]
    return sorted(known, key=lambda pair: -pair[1])


def places(shares: Mapping[str, float | None], merged: Mapping[str, int], requests: int) -> dict[str, str]:
    """Return for each part where it was spent, as words of a sentence.

    Without a gateway's part, what is outside the engine may be a gateway's as well as the network's. Of `other`, what
    stands merged in it for more than a tenth of the requests.
    """
    where = dict(SPENT)
    if shares.get("gateway") is None:
        where["network"] = OUTSIDE_ENGINE
    if shares.get("first_step") is not None and shares.get("queue") is None and shares.get("decode_queue") is None:
        where |= UNDIVIDED_SPENT
    if 10 * sum(merged.values()) > requests:
        where["other"] = f"in {' or in '.join(map(in_words, merged))} (together: no source separates them)"
    return where


def in_words(merged: str) -> str:
    """Return the parts merged in another, in words that need no glossary."""
    return merged.replace(ENGINE_FRONTEND.words, f"the {ENGINE_FRONTEND.label}")


def _spoken_of(tail: Tail) -> str:
    """Return the number of requests in a tail, and of those with a breakdown. It says whether these are estimated."""
    count = count_of(tail.requests, "request")
    known = f", {tail.explained:,} of them with a breakdown" if tail.explained < tail.requests else ""
    estimated = (
        "" if not tail.estimated else ", estimated" if tail.estimated == tail.explained else ", partly estimated"
    )
    return f"{count}{known}{estimated}"
