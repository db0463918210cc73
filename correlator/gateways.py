"""Gateways' parts of each request's TTFT, or of its whole time.

They come from the gateway's own clock and the engine's durations, so that no clock is compared with another. Which
spans are gateways' is left to `recorded.gateway_spans`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sidelight.correlator.exact.table import SLACK_S
from sidelight.recorded.gateway_spans import FirstBy, GatewaySpan
from sidelight.rundir.columns import Floats, Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPart:
    """Part of a request's time that one gateway took, s: `part_s`, of it `request_s` before its call; NaN where
    unknown.

    Where its first output is not known, `part_s` is what it took before its call; where that call says it, what it took
    up to the first output that came to it. `at_most_s` is then the most that it can have taken, if it passed on each
    piece of the reply as it came; in the second case only where it is over SLACK_S more. `of_whole_s` is what it took
    of the whole time, the way to the next server and back included; `name` is as of `GatewaySpan`.
    """

    service: str
    part_s: float
    request_s: float
    at_most_s: float
    first_by: FirstBy
    of_whole_s: float = math.nan
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayColumns:
    """The gateways of n requests, outermost first, and their sums: float64 s [n], NaN where unknown."""

    gateways: Texts  # each a tuple of GatewayPart
    gateway_s: Floats
    gateway_request_s: Floats
    gateway_at_most_s: Floats


def gateway_columns(
    gateways: Sequence[tuple[GatewaySpan, ...]], *, engine_ttft_s: Floats, engine_e2e_s: Floats, outside_s: Floats
) -> GatewayColumns:
    """Return the gateways' parts [n] of requests, each request's gateways outermost first.

    Of requests whose `engine_ttft_s` is NaN while `engine_e2e_s` is not, such as replies in one piece, their parts are
    those of the whole time. `outside_s` is what passed outside the engine: gateways that state more of it, or less than
    nothing, by over SLACK_S, are not believed.
    """
    size = len(gateways)
    parts = np.empty(size, dtype=np.object_)
    parts.fill(())
    sums = np.full((3, size), np.nan)
    for row in (row for row, spans in enumerate(gateways) if spans):
        ttft_s, e2e_s, most_s = float(engine_ttft_s[row]), float(engine_e2e_s[row]), float(outside_s[row])
        if math.isnan(most_s):
            continue
        candidates = (
            _of_wholes(gateways[row], e2e_s) if math.isnan(ttft_s) else _of_firsts(gateways[row], ttft_s, e2e_s)
        )
        taken_s = _sum([part.part_s for part in candidates])
        if not candidates or taken_s > most_s + SLACK_S:
            continue
        parts[row] = tuple(_capped(part, most_s) for part in candidates)
        outermost = parts[row][0]
        sums[:, row] = taken_s, _sum([part.request_s for part in candidates]), outermost.at_most_s
    return GatewayColumns(gateways=parts, gateway_s=sums[0], gateway_request_s=sums[1], gateway_at_most_s=sums[2])


def _of_firsts(spans: Sequence[GatewaySpan], ttft_s: float, e2e_s: float) -> list[GatewayPart]:
    """Return each gateway's part of a TTFT: its first output less that of the next inner one that is known.

    What those in between, without a first output, took before their calls is theirs.
    """
    parts: list[GatewayPart] = []
    inner_first_s, between_s = ttft_s, 0.0
    for span, of_whole_s in reversed(list(zip(spans, _own_wholes(spans, e2e_s), strict=True))):
        part_s, most_s = span.first_s - inner_first_s - between_s, span.whole_s - e2e_s
        if part_s >= -SLACK_S:
            inner_first_s, between_s = span.first_s, 0.0
            is_bounded = span.first_by == "inner_call" and most_s > part_s + SLACK_S
            parts.append(_part(span, part_s, most_s if is_bounded else math.nan, span.first_by, of_whole_s))
        else:  # not known, or less than was inside it: what it sent was no output of the engine's
            between_s += span.request_s if span.request_s >= 0 else 0.0
            parts.append(_part(span, span.request_s, most_s if most_s >= 0 else math.inf, "", of_whole_s))
    return parts[::-1]


def _of_wholes(spans: Sequence[GatewaySpan], e2e_s: float) -> list[GatewayPart]:
    """Return each gateway's part of the whole time; empty where one was done before the next inner one."""
    parts_s = _own_wholes(spans, e2e_s)
    if not all(part_s >= -SLACK_S for part_s in parts_s):
        return []
    return [_part(span, part_s, math.nan, span.first_by, part_s) for span, part_s in zip(spans, parts_s, strict=True)]


def _own_wholes(spans: Sequence[GatewaySpan], e2e_s: float) -> list[float]:
    """Return each gateway's excess of time over the next inner gateway, or the engine."""
    inner_s = [*(span.whole_s for span in spans[1:]), e2e_s]
    return [span.whole_s - within_s for span, within_s in zip(spans, inner_s, strict=True)]


def _part(span: GatewaySpan, part_s: float, at_most_s: float, first_by: FirstBy, of_whole_s: float) -> GatewayPart:
    return GatewayPart(
        service=span.service,
        part_s=part_s,
        request_s=span.request_s,
        at_most_s=at_most_s,
        first_by=first_by,
        of_whole_s=of_whole_s,
        name=span.name,
    )


def _capped(part: GatewayPart, most_s: float) -> GatewayPart:
    """Return a part with its bound limited to the time outside the engine.

    The bound is never less than the known part.
    """
    if math.isnan(part.at_most_s):
        return part
    known_s = 0.0 if math.isnan(part.part_s) else part.part_s
    return replace(part, at_most_s=max(min(part.at_most_s, most_s), known_s))


def _sum(values_s: Sequence[float]) -> float:
    """Return the sum of the known values, NaN if all are unknown."""
    known = [value_s for value_s in values_s if not math.isnan(value_s)]
    return sum(known) if known else math.nan
