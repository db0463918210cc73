"""Each gateway that requests passed on their way to the engine, as objects of `summary.json`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from correlator.breakdown import Parts
from correlator.gateways import FIRST_OUTPUT, GatewayPart
from rundir.columns import Bools
from rundir.fields import Count, doc


class GatewaySummary(Struct, frozen=True, kw_only=True):
    """One gateway, over the requests with a breakdown in whose traces its spans came; null where it is in none."""

    service: Annotated[str, doc("Its `service.name`; empty where it states none.")]
    requests: Annotated[Count, doc("Requests that passed it.", "requests")]
    part_ms: Annotated[
        float | None,
        doc("Mean of its own part of the TTFT, up to the next gateway inside it or the engine, where known.", "ms"),
    ]
    request_ms: Annotated[float | None, doc("Mean of what passed in it before it called the next server.", "ms")]
    at_most_ms: Annotated[
        float | None, doc("Mean of the most that its part can be, where it does not say its first output.", "ms")
    ]
    first_output: Annotated[
        dict[str, int],
        Meta(extra_json_schema={"propertyNames": {"enum": list(FIRST_OUTPUT)}}),
        doc(
            "How its first output is known, by count: an `attribute` or an event of its span; its call of the next "
            "server (`inner_call`); a span of its sending (`body`); `unknown`.",
            "requests",
        ),
    ]


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
        at_most_ms=_mean_ms([part.at_most_s for part in parts]),
        first_output={name: counts[name] for name in FIRST_OUTPUT if counts[name]},
    )


def _mean_ms(values_s: Sequence[float]) -> float | None:
    known = [value_s for value_s in values_s if math.isfinite(value_s)]
    return 1e3 * sum(known) / len(known) if known else None
