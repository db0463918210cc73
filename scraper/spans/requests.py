"""From recorded exports to one row an engine's request: its stamps and times, by what `engines/*.yaml` say of spans."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from rundir.columns import Bools, Floats, Ints, Texts
from scraper.engines.catalogue import ENGINES, SpanMatch, Spans, SpanTime, catalogue
from scraper.spans.log import OFF_CLOCK, ExportRecord, SpanLogRecord, fault, off_clock_s

TIMES = ("queue", "ttft", "prefill", "e2e", "decode")  # one may be told as the rest of another before it
IMPOSSIBLE = "a time that is negative or no number"
_DEPTH = 8  # between a stage's span and its request's there is one, of the process
# A Duration of Rust as its {:?} shows it.
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|ms|µs|ns)")
_INSTANCE = "service.instance.id"  # OpenTelemetry's SDKs of late make one up for each process
_PLACE = ("k8s.pod.name", "container.id", "host.name", "process.pid", "vllm.process_id")
_LONGEST_NAME = 80
_UNIT_S = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}

Key = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpans:
    """Columns of n spans of requests, in the order in which they came.

    trace_id, span_id       hex
    request_id              the engine's id of the request, "" for none
    clock                   whose clock stamped it: what the sender's resource tells of its process, "" for nothing
    engine                  its name in ENGINES
    is_gateway              the span is that of a gateway before the engine: it has stamps, but no times of an engine
    arrival_ns, end_ns      int64 ns Unix by the engine's clock: when the request arrived and ended there
    queue_s, prefill_s, decode_s  float64, NaN where it does not tell; ttft_s, e2e_s: from arrival to the first and last
                            token. As the engine states them, to the bit, where it states them itself
    off_clock_s             by how much its clock is off ours, s, of a span that is refused for that, else NaN: its ids
                            stand here, so that its request is told why, but none of its times, and -1 for its stamps
    refused                 spans not used, by reason; `repeated` of them were the same span sent again
    """

    trace_id: Texts
    span_id: Texts
    request_id: Texts
    clock: Texts
    engine: Texts
    is_gateway: Bools
    arrival_ns: Ints
    end_ns: Ints
    queue_s: Floats
    ttft_s: Floats
    prefill_s: Floats
    e2e_s: Floats
    decode_s: Floats
    off_clock_s: Floats
    refused: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.trace_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    span: Span
    engine: str
    spans: Spans
    attributes: Mapping[str, str | float]
    clock: str
    off_clock_s: float


def engine_spans(records: Iterable[SpanLogRecord]) -> EngineSpans:
    """Read the spans of requests out of a span log's records, as `request_spans` does, and whose clocks they bear."""
    exports = (record for record in records if isinstance(record, ExportRecord))
    return _read((one.received_ns, scope, span, resource) for one in exports for resource, scope, span in one.sent())


def request_spans(spans: Iterable[tuple[int, str, Span]]) -> EngineSpans:
    """Read the spans of requests, each with when it came and its scope; spans that tell none are passed over.

    - a span that came twice counts once; one with a `fault` or that tells an impossible time is refused
    - stages belong to the request's span above them; where a parent is missing, to the only request of their trace
    """
    return _read((*one, Resource()) for one in spans)


def _read(spans: Iterable[tuple[int, str, Span, Resource]]) -> EngineSpans:
    requests: dict[Key, _Request] = {}
    stages: dict[Key, Span] = {}
    parents: dict[Key, bytes] = {}
    refused: Counter[str] = Counter()
    for received_ns, scope, span, resource in spans:
        key = (span.trace_id, span.span_id)
        reason = fault(span, received_ns) or ("repeated" if key in parents else "")
        if reason:
            refused[reason] += 1
        if reason not in ("", OFF_CLOCK):
            continue
        parents[key] = span.parent_span_id
        known = _told_by(span, scope)
        if known is not None:
            engine, told = known
            wanted = {told.request_id, *(way.attribute for ways in told.times.values() for way in ways)}
            requests[key] = _Request(
                span=span,
                engine=engine,
                spans=told,
                attributes={one.key: plain(one.value) for one in span.attributes if one.key in wanted},
                clock=_clock(resource),
                off_clock_s=off_clock_s(span, received_ns) if reason else math.nan,
            )
        elif not reason and span.name in _stage_names():
            stages[key] = span
    under = _under(requests, stages, parents)
    rows = [(request, _times(request, under.get(key, ()))) for key, request in requests.items()]
    refused[IMPOSSIBLE] += sum(times is None for _, times in rows)
    return _columns([(request, times) for request, times in rows if times is not None], +refused)


def _clock(resource: Resource) -> str:
    """Return what tells a process, or at least its machine, from others: its clock may be its own."""
    told = {one.key: _text(plain(one.value)) for one in resource.attributes if one.key in (_INSTANCE, *_PLACE)}
    place = "/".join(told[key] for key in _PLACE if told.get(key))
    return (told.get(_INSTANCE) or place)[:_LONGEST_NAME]


def whole_request(span: Span, scope: str) -> bool:
    """Tell whether a span by itself tells the times of an engine's request; `scope` is the name of its scope."""
    known = _told_by(span, scope)
    if known is None or known[1].is_gateway:
        return False
    return not any(way.begin for ways in known[1].times.values() for way in ways)


def part_told(span: Span, scope: str) -> Literal["request", "gateway", "stage", ""]:
    """Tell whether a span is an engine's request, that of a gateway before it, a stage of one, or none of these."""
    known = _told_by(span, scope)
    if known is not None:
        return "gateway" if known[1].is_gateway else "request"
    return "stage" if span.name in _stage_names() else ""


def ends_prefill(span: Span) -> bool:
    """Tell whether a span is the stage that ends a prefill: with its request's span, the times up to then are told."""
    return span.name in _last_stages()


@cache
def _catalogues() -> tuple[tuple[str, Spans], ...]:
    return tuple((name, spans) for name in ENGINES if (spans := catalogue(name).spans) is not None)


@cache
def _stage_names() -> frozenset[str]:
    ways = [way for _, spans in _catalogues() for ways in spans.times.values() for way in ways]
    return frozenset(name for way in ways for name in (*way.begin, way.end) if name)


@cache
def _last_stages() -> frozenset[str]:
    return frozenset(way.end for _, spans in _catalogues() for way in spans.times.get("prefill", ()) if way.end)


def _told_by(span: Span, scope: str) -> tuple[str, Spans] | None:
    """Return the engine whose request a span tells, if any, and how its spans tell it."""
    return next((known for known in _catalogues() if any(_matches(span, scope, one) for one in known[1].match)), None)


def _matches(span: Span, scope: str, match: SpanMatch) -> bool:
    if (match.name and span.name != match.name) or not scope.startswith(match.scope):
        return False
    if not match.attributes and not match.values:
        return True
    shown = {one.key: one.value.string_value for one in span.attributes}
    return all(name in shown for name in match.attributes) and all(
        shown.get(name) == value for name, value in match.values.items()
    )


def plain(value: AnyValue) -> str | float:
    """Return a number as a float, anything else as a text."""
    kind = value.WhichOneof("value")
    if kind in ("int_value", "double_value"):
        return float(getattr(value, kind))
    return value.string_value


def _under(
    requests: Mapping[Key, _Request], stages: Mapping[Key, Span], parents: Mapping[Key, bytes]
) -> dict[Key, list[Span]]:
    """Return the stages of each request's span."""
    if not stages:
        return {}
    in_trace: dict[bytes, list[Key]] = {}
    for key in requests:
        in_trace.setdefault(key[0], []).append(key)
    found: dict[Key, list[Span]] = {}
    for key, stage in stages.items():
        above = key
        for _ in range(_DEPTH):
            above = (above[0], parents.get(above, b""))
            if above in requests:
                break
        alone = in_trace.get(key[0], ())
        if above not in requests and len(alone) == 1:
            above = alone[0]
        if above in requests:
            found.setdefault(above, []).append(stage)
    return found


def _times(request: _Request, stages: Sequence[Span]) -> dict[str, float] | None:
    """Return a request's times in s, NaN where its spans do not tell one; nothing where they tell the impossible."""
    if not math.isnan(request.off_clock_s):
        return dict.fromkeys(TIMES, math.nan)
    known: dict[str, float] = {}
    for name in TIMES:
        known[name] = math.nan
        for way in request.spans.times.get(name, ()):
            stated = _stated(request, way.attribute) if way.attribute else _staged(stages, way)
            if stated is None:
                continue
            if not 0 <= stated < math.inf:
                return None
            rest = stated - known[way.less] if way.less else stated
            if rest >= 0:  # a part longer than its whole tells nothing of the other part
                known[name] = rest
                break
    return known


def _stated(request: _Request, attribute: str) -> float | None:
    value = request.attributes.get(attribute)
    if isinstance(value, str):
        parts = _DURATION.fullmatch(value)
        return float(parts[1]) * _UNIT_S[parts[2]] if parts else None
    return value


def _staged(stages: Sequence[Span], way: SpanTime) -> float | None:
    begins = [stage.start_time_unix_nano for stage in stages if stage.name in way.begin]
    if not begins:
        return None
    begin_ns = min(begins)
    ends = [stage.end_time_unix_nano for stage in stages if stage.name == way.end]
    ends = [end_ns for end_ns in ends if end_ns >= begin_ns]
    return (min(ends) - begin_ns) / 1e9 if ends else None


def _columns(rows: Sequence[tuple[_Request, dict[str, float]]], refused: Mapping[str, int]) -> EngineSpans:
    spans = [request.span for request, _ in rows]
    off_clock_s = np.fromiter((request.off_clock_s for request, _ in rows), np.float64)
    used = np.isnan(off_clock_s)
    return EngineSpans(
        trace_id=_texts(span.trace_id.hex() for span in spans),
        span_id=_texts(span.span_id.hex() for span in spans),
        request_id=_texts(_text(request.attributes.get(request.spans.request_id, "")) for request, _ in rows),
        clock=_texts(request.clock for request, _ in rows),
        engine=_texts(request.engine for request, _ in rows),
        is_gateway=np.fromiter((request.spans.is_gateway for request, _ in rows), np.bool_),
        arrival_ns=np.where(used, np.fromiter((span.start_time_unix_nano for span in spans), np.int64), -1),
        end_ns=np.where(used, np.fromiter((span.end_time_unix_nano for span in spans), np.int64), -1),
        **{f"{name}_s": np.fromiter((times[name] for _, times in rows), np.float64) for name in TIMES},
        off_clock_s=off_clock_s,
        refused=dict(refused),
    )


def _text(told: str | float) -> str:
    return f"{told:.0f}" if isinstance(told, float) else told


def _texts(values: Iterable[str]) -> Texts:
    return np.fromiter(values, np.object_)
