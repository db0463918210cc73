"""Statements of a gateway's own spans about its part of a request."""

from __future__ import annotations

import math
from collections.abc import Iterator

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.gateways import GatewayPart
from sidelight.correlator.parts import NETWORK, TTFT_PARTS
from sidelight.recorded.client_spans import FIRST_TOKEN_ATTRIBUTES
from sidelight.recorded.gateway_spans import FirstBy, GatewaySpan
from sidelight.sidecar.doctor.lines import HINT, OK, SKIP, WARN, Line
from sidelight.sidecar.doctor.reach import Surroundings, named
from sidelight.sidecar.doctor.trail import Trail
from sidelight.sidecar.run.preparation.target import MOST_NAMED

HOW: dict[FirstBy, str] = {
    "attribute": "an attribute of its span says",
    "inner_call": "its call of the next server says",
    "body": "the span of its reply's first part says",
}


def gateway_lines(trail: Trail, around: Surroundings) -> Iterator[Line]:
    """Yield lines on the gateways with spans, and on their parts of this request. They state how much of its part each
    tells.
    """
    parts = {part.service: part for part in trail.parts.gateways[0]}
    for gateway in trail.gateways:
        yield from _of_gateway(gateway, parts.get(gateway.service), around)
    if not trail.gateways and trail.services:
        came = ", ".join(map(named, trail.services[:MOST_NAMED]))
        wanted = "a SERVER span around the engine's, or around a call of a model"
        yield WARN, f"spans of {came} came in our trace, but none that says what a gateway took: {wanted}"
    elif not trail.gateways:
        yield from _without_span(trail, around)
    yield from _parts(trail.parts)


def _without_span(trail: Trail, around: Surroundings) -> Iterator[Line]:
    known, counts = around.gateway, "its part of each TTFT counts as outside the engine, with the network"
    if known is not None and known.seen.spans == "none":
        why = "" if known.spans_note == "none" else f" ({known.spans_note})"
        yield SKIP, f"no span of the gateway came, and {known.title} sends none{why}: {counts}"
        yield HINT, f"its page has what it says of itself: {known.enable}"
        return
    yield WARN, f"no span of the gateway came: {counts}"
    if trail.absent:
        came = ", ".join(map(named, trail.absent[:MOST_NAMED]))
        yield (
            HINT,
            f"spans of {came} came of other requests: an exporter may lose some after a pause, so run this again",
        )
        return
    where = f"{around.listen} (gRPC) or {around.listen_http} (HTTP/protobuf)"
    generic = f"switch its OpenTelemetry tracing on, to {where}; docs/reference/gateways.md has the settings"
    yield HINT, around.setting("spans", generic)


def _of_gateway(gateway: GatewaySpan, part: GatewayPart | None, around: Surroundings) -> Iterator[Line]:
    came = f"the span of gateway {named(gateway.service)} came"
    bound = "" if part is None or not math.isfinite(part.at_most_s) else f", here at most {_ms(part.at_most_s)}"
    if part is not None and gateway.first_by == "inner_call" and bound:
        known = "its call of the next server says when the first output reached it, not when it passed that on"
        yield OK, f"{came}, and {known}: its part is between {_ms(part.part_s)} and {_ms(part.at_most_s)} here"
        return
    if gateway.first_by:
        yield OK, f"{came}, and {HOW[gateway.first_by]} when its first output left: its part is exact"
        return
    before = "" if math.isnan(gateway.request_s) else "; what it took before its call is exact"
    setting = around.setting("first_output", "")
    text = f"{came}, but does not say when its first output left: its part is known as a bound{bound}{before}"
    yield WARN if setting else OK, text
    if setting:
        yield HINT, setting
    elif around.gateway is None:
        yield HINT, f"{FIRST_TOKEN_ATTRIBUTES[0]} (seconds) on its server span, where it can be set, makes it exact"


def _parts(parts: Parts) -> Iterator[Line]:
    """Yield a line on the parts of this request's TTFT."""
    is_apart = not math.isnan(parts.gateway_s[0])
    labels = {part: NETWORK if part.name == NETWORK and is_apart else part.label for part in TTFT_PARTS}
    known = [(label, float(parts.seconds(part)[0])) for part, label in labels.items()]
    said = ", ".join(f"{label} {_ms(part_s)}" for label, part_s in known if not math.isnan(part_s))
    if said:
        yield OK, f"of this request's TTFT of {_ms(float(parts.ttft_s[0]))}: {said}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
