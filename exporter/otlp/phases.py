"""The phases of a request on our time axis: by the client's stamps, by the engine's, or one behind the other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from sidelight.correlator.breakdown import Parts, network_label
from sidelight.correlator.parts import ENGINE_FRONTEND, INNER_PARTS, OTHER, SHARED_PARTS, STATED_PARTS
from sidelight.loadgen.requests.table.log import RequestLog

_LABELS = {part.name: part.label for part in INNER_PARTS}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanPhase:
    """One stretch of a request by our clock; `placed` says whose stamps its begin is from, or that it is in order."""

    name: str
    start_ns: int
    end_ns: int
    source: str
    placed: str


def phases(requests: RequestLog, parts: Parts, place: int) -> Iterator[SpanPhase]:
    """Yield the known phases of a request; one may have taken no time.

    - with the engine's stamps on our clock its phases end at its first token by those; what is in the engine
      and in neither queue nor prefill is put before both
    - without them the phases follow each other from the submission on, the two ways outside the engine as one
    - parts that the source does not separate are one phase with their names
    """
    source = parts.source[place]
    dispatch_ns, submit_ns = int(requests.dispatch_ns[place]), int(requests.submit_ns[place])
    output_ns, token_ns = int(requests.first_output_ns[place]), int(requests.first_token_ns[place])
    if submit_ns >= 0:
        yield SpanPhase(name="send", start_ns=dispatch_ns, end_ns=submit_ns, source="client", placed="client's stamps")
    if source != "none" and submit_ns >= 0:
        yield from _server_phases(parts, place, submit_ns=submit_ns, output_ns=output_ns)
    if 0 <= output_ns < token_ns:
        yield SpanPhase(
            name="blank output", start_ns=output_ns, end_ns=token_ns, source="client", placed="client's stamps"
        )
    if parts.decode_source[place] == "client":
        yield from _laid([("decode", parts.decode_s[place])], token_ns, "client", "client's stamps")


def _server_phases(parts: Parts, place: int, *, submit_ns: int, output_ns: int) -> Iterator[SpanPhase]:
    source, engine_ns = parts.source[place], int(parts.engine_first_token_ns[place])
    request_s, response_s = parts.request_network_s[place], parts.response_network_s[place]
    stamped = engine_ns >= 0 and math.isfinite(request_s)  # else its stamps are inconsistent
    placed = "engine's stamps" if stamped else "in order"
    label = network_label(parts, np.arange(len(parts)) == place)
    before = [(_LABELS["request_network"], request_s)] if stamped else [(label, parts.network_s[place])]
    yield from _laid(before, submit_ns, source, placed)
    inside = [
        ("gateway", parts.gateway_s[place]),
        (parts.merged[place], _merged_s(parts, place)),
        (ENGINE_FRONTEND.words, parts.engine_frontend_s[place]),
        *((part.words, parts.seconds(part)[place]) for part in STATED_PARTS if part not in SHARED_PARTS),
        ("queue", parts.queue_s[place]),
        ("prefill", parts.prefill_s[place]),
        *((part.words, parts.seconds(part)[place]) for part in SHARED_PARTS),
    ]
    inside_s = sum(time_s for _, time_s in inside if time_s > 0)
    begin_ns = engine_ns - _ns(inside_s) if stamped else submit_ns + _ns(before[0][1])
    inner = list(_laid(inside, begin_ns, source, placed))
    yield from inner
    if stamped and output_ns >= 0:
        yield from _laid([(_LABELS["response_network"], response_s)], output_ns - _ns(response_s), source, placed)
    decode_ns = engine_ns if stamped else output_ns if output_ns >= 0 else inner[-1].end_ns if inner else -1
    if decode_ns >= 0 and parts.decode_source[place] != "client":
        yield from _laid([("decode", parts.decode_s[place])], decode_ns, source, placed)


def _laid(parts: Sequence[tuple[str, float]], begin_ns: int, source: str, placed: str) -> Iterator[SpanPhase]:
    """Yield the known parts as consecutive phases; no gap comes of rounding."""
    passed_s = 0.0
    for name, time_s in parts:
        if time_s >= 0:
            start_ns = begin_ns + _ns(passed_s)
            passed_s += time_s
            yield SpanPhase(name=name, start_ns=start_ns, end_ns=begin_ns + _ns(passed_s), source=source, placed=placed)


def _merged_s(parts: Parts, place: int) -> float:
    """Return the time in `other` that no source separates, s; NaN if there is none."""
    if not parts.merged[place]:
        return math.nan
    known = [parts.seconds(part)[place] for part in INNER_PARTS if part.within == OTHER]
    return float(parts.other_s[place] - sum(time_s for time_s in known if time_s > 0))


def _ns(time_s: float) -> int:
    """Return ns; 0 for what is not known."""
    return round(time_s * 1e9) if math.isfinite(time_s) else 0
