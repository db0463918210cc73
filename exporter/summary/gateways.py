"""Each gateway that requests passed on their way to the engine, as objects of `summary.json`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct, UnsetType, structs

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.gateways import GatewayPart
from sidelight.recorded.gateway_spans import FIRST_OUTPUT
from sidelight.rundir.columns import Bools
from sidelight.rundir.fields import UNSET, Amount, Count, doc
from sidelight.scraper.window.quantities import GatewayPage


class PageBesideSpans(Struct, frozen=True, kw_only=True):
    """Own time of a gateway by its page, beside the range that its spans allow."""

    own_ms: Annotated[float, doc("Mean time that it took of a request itself, by its pages.", "ms")]
    own_error_ms: Annotated[Amount, doc("Its standard error, of times that the page rounds.", "ms")]
    low_ms: Annotated[
        float, doc("The least that it can be by its spans: what passed before its call; 0 where they do not say.", "ms")
    ]
    high_ms: Annotated[
        float,
        doc("The most that it can be by its spans, which include the way to the next server and back.", "ms"),
    ]
    apart_ms: Annotated[
        Amount, doc("How far the page's time lies outside of that range; 0 where page and spans agree.", "ms")
    ]


class GatewaySummary(Struct, frozen=True, kw_only=True):
    """One gateway, over the requests with a breakdown and its spans; null where there are none."""

    service: Annotated[str, doc("Its `service.name`; empty where it states none.")]
    requests: Annotated[Count, doc("Requests that passed it.", "requests")]
    part_ms: Annotated[
        float | None,
        doc("Mean of its own part of the TTFT, up to the next gateway or the engine, where known.", "ms"),
    ]
    request_ms: Annotated[float | None, doc("Mean of what passed in it before it called the next server.", "ms")]
    at_most_ms: Annotated[
        float | None,
        doc("Mean of the most that its part can be; null where all of it is known.", "ms"),
    ]
    first_output: Annotated[
        dict[str, int],
        Meta(extra_json_schema={"propertyNames": {"enum": list(FIRST_OUTPUT)}}),
        doc(
            "How its first output is known, by count: an `attribute` or event of its span; its call of the next "
            "server (`inner_call`); a span of its sending (`body`); `unknown`.",
            "requests",
        ),
    ]
    name: Annotated[str | None, doc("Its name in docs/reference/gateways.md; null where it is not one of those.")]
    of_whole_ms: Annotated[
        float | None, doc("Mean of its own part of the whole time, the way to the next server and back included.", "ms")
    ]
    by_page: Annotated[PageBesideSpans | UnsetType, doc("Its own time by its page; absent where no page has it.")] = (
        UNSET
    )


def gateway_summaries(parts: Parts, rows: Bools) -> list[GatewaySummary]:
    """Describe the gateways of some requests [n], outermost first."""
    places: dict[str, list[int]] = {}
    by_service: dict[str, list[GatewayPart]] = {}
    for gateways in parts.gateways[rows].tolist():
        for place, gateway in enumerate(gateways):
            places.setdefault(gateway.service, []).append(place)
            by_service.setdefault(gateway.service, []).append(gateway)
    return [
        _summary(service, by_service[service])
        for service in sorted(by_service, key=lambda service: (np.mean(places[service]), service))
    ]


def _summary(service: str, parts: Sequence[GatewayPart]) -> GatewaySummary:
    counts = Counter[str](part.first_by or "unknown" for part in parts)
    return GatewaySummary(
        service=service,
        requests=len(parts),
        part_ms=_mean_ms([part.part_s for part in parts]),
        request_ms=_mean_ms([part.request_s for part in parts]),
        at_most_ms=_at_most_ms(parts),
        first_output={name: counts[name] for name in FIRST_OUTPUT if counts[name]},
        name=next((part.name for part in parts if part.name), None),
        of_whole_ms=_mean_ms([part.of_whole_s for part in parts]),
    )


def beside_pages(gateways: Sequence[GatewaySummary], pages: Sequence[GatewayPage]) -> list[GatewaySummary]:
    """Return the gateways with their pages' own times beside the range of their spans."""
    return [structs.replace(gateway, by_page=_beside(gateway, pages)) for gateway in gateways]


def _beside(gateway: GatewaySummary, pages: Sequence[GatewayPage]) -> PageBesideSpans | UnsetType:
    telling = [page for page in pages if page.gateway == gateway.name and page.own_ms is not None]
    if not telling:
        return UNSET
    counts = [float(page.request_time.stats.count or 0) if page.request_time else 0.0 for page in telling]
    # Of counts that are near the largest number, the products would not be one.
    own_ms = float(np.average([page.own_ms or 0.0 for page in telling], weights=np.array(counts) / max(counts)))
    low_ms, high_ms = gateway.request_ms or 0.0, gateway.of_whole_ms
    if telling[0].own_until == "first_output":
        low_ms, high_ms = 0.0, gateway.part_ms if gateway.at_most_ms is None else gateway.at_most_ms
    if high_ms is None:
        return UNSET
    return PageBesideSpans(
        own_ms=own_ms,
        own_error_ms=max(page.own_error_ms or 0.0 for page in telling),
        low_ms=low_ms,
        high_ms=high_ms,
        apart_ms=max(0.0, low_ms - own_ms, own_ms - high_ms),
    )


def _at_most_ms(parts: Sequence[GatewayPart]) -> float | None:
    if all(math.isnan(part.at_most_s) for part in parts):
        return None
    return _mean_ms([part.part_s if math.isnan(part.at_most_s) else part.at_most_s for part in parts])


def _mean_ms(values_s: Sequence[float]) -> float | None:
    known = [value_s for value_s in values_s if math.isfinite(value_s)]
    return 1e3 * sum(known) / len(known) if known else None
