"""Times of a request as its spans state them: in attributes of its own, or as stages below it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING

from sidelight.scraper.engines.catalogue import INNER_TIMES, EngineSpanRules, SpanTime

# One may be what is left of another before it.
TIMES = ("queue", "ttft", "prefill", "e2e", "decode", *INNER_TIMES)
UNKNOWN: Mapping[str, float] = dict.fromkeys(TIMES, math.nan)
_OVERLAP_S = 0.010  # by which a stage of one process may begin before that of another ends which it follows
# A Duration of Rust as its {:?} shows it.
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|ms|µs|ns)")
_UNIT_S = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}

if TYPE_CHECKING:
    from sidelight.rundir.columns import Floats

    class InnerTimes:
        """A column in s of each of `INNER_TIMES`, NaN where unknown: base of the tables that have them."""

        router_s: Floats
        decode_queue_s: Floats
        first_step_s: Floats

else:
    InnerTimes = make_dataclass(
        "InnerTimes", [(f"{name}_s", "Floats") for name in INNER_TIMES], frozen=True, slots=True, kw_only=True
    )


# Both without the message: a span of Protobuf would hold on to the whole export that it came in.
@dataclass(frozen=True, slots=True, kw_only=True)
class SpanRequest:
    """A request by its own span; `fault` says why its times are not used."""

    trace_id: bytes
    span_id: bytes
    begin_ns: int
    end_ns: int
    engine: str
    spans: EngineSpanRules
    attributes: Mapping[str, str | float]
    clock: str
    machine: str = ""
    fault: str = ""

    def faulty(self, fault: str) -> SpanRequest:
        """Return it without its stamps and times."""
        return replace(self, begin_ns=-1, end_ns=-1, fault=fault)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A stage of a request, by its span."""

    name: str
    begin_ns: int
    end_ns: int


def times_of(request: SpanRequest, stages: Sequence[Stage]) -> Mapping[str, float] | None:
    """Return a request's times in s, NaN where its spans do not state one; None where they state an impossible one."""
    if request.fault:
        return UNKNOWN
    known: dict[str, float] = {}
    for name in TIMES:
        known[name] = math.nan
        for way in request.spans.times.get(name, ()):
            stated = _time(request, stages, way)
            if stated is None:
                continue
            if not 0 <= stated < math.inf:
                return None
            rest = stated - known[way.less] if way.less else stated
            if rest >= 0:  # a part longer than its whole says nothing of the other part
                known[name] = rest
                break
    return known


def role_of(request: SpanRequest, stages: Sequence[Stage]) -> str:
    """Return the role of an engine in a request, "" without a sign of one."""
    names = {stage.name for stage in stages}
    for role, sign in request.spans.roles.items():
        if any(request.attributes.get(name) == value for name, value in sign.values.items()):
            return role
        if not names.isdisjoint(sign.stages):
            return role
    return ""


def _time(request: SpanRequest, stages: Sequence[Stage], way: SpanTime) -> float | None:
    if way.lasts:
        is_stated = all(request.attributes.get(name) == value for name, value in way.lasts.items())
        return (request.end_ns - request.begin_ns) / 1e9 if is_stated else None
    return _stated(request, way.attribute) if way.attribute else _staged(stages, way)


def _stated(request: SpanRequest, attribute: str) -> float | None:
    value = request.attributes.get(attribute)
    if isinstance(value, str):
        parts = _DURATION.fullmatch(value)
        return float(parts[1]) * _UNIT_S[parts[2]] if parts else None
    return value


def _staged(stages: Sequence[Stage], way: SpanTime) -> float | None:
    if way.after:
        return _between(stages, way)
    if way.sum:
        lasted = {stage.name: stage.end_ns - stage.begin_ns for stage in reversed(stages) if stage.name in way.sum}
        return sum(lasted.values()) / 1e9 if lasted else None
    begins = [stage.begin_ns for stage in stages if stage.name in way.begin]
    if not begins:
        return None
    begin_ns = min(begins)
    ends = [stage.end_ns for stage in stages if stage.name == way.end]
    ends = [end_ns for end_ns in ends if end_ns >= begin_ns]
    return (min(ends) - begin_ns) / 1e9 if ends else None


def _between(stages: Sequence[Stage], way: SpanTime) -> float | None:
    ends = [stage.end_ns for stage in stages if stage.name == way.after]
    begins = [stage.begin_ns for stage in stages if stage.name == way.until]
    if not ends or not begins:
        return None
    between_s = (min(begins) - min(ends)) / 1e9
    return max(between_s, 0.0) if between_s >= -_OVERLAP_S else None
