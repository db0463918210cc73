"""Parts of the time with their shares: what a verdict's bar is made of, and a sentence on the largest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, cast

from sidelight.correlator.parts import CAUSES, INNER_PARTS, SPENT, TTFT_PARTS, Part
from sidelight.exporter.report.tables.breakdown import source_words
from sidelight.exporter.summary.breakdown import (
    IN_PREFILL,
    Breakdown,
    E2eBreakdown,
    E2ePart,
    TtftPart,
    is_certain,
    json_name,
    label_of,
)
from sidelight.exporter.summary.tail import MAJORITY, places
from sidelight.exporter.summary.verdict import (
    PartShare,
    Subject,
)
from sidelight.rundir.printable.numbers import percent, spoken

NOTABLE = 0.2  # of the mean: a second part of as much is named too
FEW_REQUESTS = 20  # of fewer, a share of the time is mostly chance
MOSTLY = 0.6  # of a part: what makes up more of it is named in its place
Described = tuple[Part, TtftPart | E2ePart, float]  # a part, its statistics, and its share of the mean


def described_parts(
    breakdown: Breakdown | E2eBreakdown, parts: Sequence[Part], whole: Literal["ttft", "e2e"]
) -> Iterator[Described]:
    for part in parts:
        described = getattr(breakdown, json_name(part))
        if described.mean is not None:
            yield part, described, getattr(described, f"share_of_{whole}") or 0.0


def part_shares(breakdown: Breakdown, described: Iterable[Described]) -> list[PartShare]:
    return [
        PartShare(
            part=cast("Subject", part.name),
            label=label_of(part, breakdown),
            mean_ms=each.mean or 0.0,
            share=share if is_certain(each) else None,
            known_from=source_words(part, each, breakdown),
        )
        for part, each, share in described
    ]


def largest_part(breakdown: Breakdown) -> dict[str, float]:
    """Return the largest part of the mean TTFT with its share; nothing of few requests, or where it is uncertain."""
    described = sorted(described_parts(breakdown, TTFT_PARTS, "ttft"), key=lambda each: -each[2])
    is_known = breakdown.ttft_ms.count >= FEW_REQUESTS and described and is_certain(described[0][1])
    return {described[0][0].name: described[0][2]} if is_known else {}


def largest_share(parts: Sequence[PartShare]) -> PartShare | None:
    return max((part for part in parts if part.share), key=lambda part: part.share or 0.0, default=None)


def spent(
    subject: str, breakdown: Breakdown, described: Sequence[Described], *, is_ttft: bool, large: Sequence[str]
) -> str:
    """Return a sentence on the largest part of the mean; on two where none is most of it or the second is notable."""
    ranked = sorted(described, key=lambda each: -each[2])
    certain = [(share, part.name) for part, each, share in ranked if is_certain(each)]
    if not certain:
        part, each, _ = ranked[0]
        estimate, error = (spoken(value, each.mean) for value in (each.mean, each.error_ms))
        return f"The estimate of {CAUSES[part.name]}, {estimate}, is within its own error of {error}."
    shares = {part.name: share for part, _, share in described}
    where = places({**dict.fromkeys(SPENT), **shares}, breakdown.merged, breakdown.ttft_ms.count)
    for inner in (part for part in INNER_PARTS if part.spent):
        share = getattr(breakdown, json_name(inner)).share_of_ttft or 0.0
        if share > MOSTLY * shares.get(inner.within, 0.0) > 0:
            where[inner.within] = f"{SPENT[inner.within]} ({inner.spent})"
    (share, largest), *others = certain
    is_also = others and (share <= MAJORITY or others[0][0] >= NOTABLE)
    also = f" and {percent(others[0][0])} {where[others[0][1]]}" if is_also else ""
    has_wait = {*large} - {"prefill"} or breakdown.queue_ms.missing == IN_PREFILL
    alone = "" if not is_ttft or has_wait else "; no wait stands out"
    return f"Of the {subject}, {percent(share)} was spent {where[largest]}{also}{alone}."
