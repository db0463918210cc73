"""Stamps and times of engines' requests from recorded exports, one row a request.

They are read by the descriptions of spans in `engines/*.yaml`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from sidelight.rundir.columns import Floats, Ints, Texts
from sidelight.scraper.engines.catalogue import EngineSpanRules
from sidelight.scraper.spans.log import ExportRecord, SpanLogRecord
from sidelight.scraper.spans.received import (
    BACKWARDS,
    CONFLICTING,
    OFF_CLOCK,
    ReceivedSpan,
    attributes_of,
    machine_of,
    process_of,
    text_of,
)
from sidelight.scraper.spans.request_times import (
    TIMES,
    UNKNOWN,
    InnerTimes,
    SpanRequest,
    Stage,
    role_of,
    times_of,
)

IMPOSSIBLE = "a time that is negative, no number, or several"
PROBE = "a health probe"
# Spans of which the ids are kept, and what their requests say of them.
_WHY = {
    OFF_CLOCK: "was stamped by a clock {minutes:.0f} min off ours",
    BACKWARDS: "ends before it begins, as where a clock is set back",
    CONFLICTING: "came twice, with different contents",
    IMPOSSIBLE: f"states {IMPOSSIBLE}",
}
_DEPTH = 8  # between a stage's span and its request's there is one, of the process

# What spans call the tokens of the prompt and of the output: vLLM and SGLang, then OpenTelemetry's convention.
_INPUT_TOKENS = ("gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens")
_OUTPUT_TOKENS = ("gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")

Key = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpans(InnerTimes):
    """Columns of n spans of requests, in the order in which they came.

    trace_id, span_id       hex
    request_id              the engine's id of the request, "" for none
    clock                   whose clock stamped it: what the sender's resource says of its process, "" for nothing
    machine                 the machine that its sender's resource names, "" where it names none
    engine                  its name in `scraper.engines`
    role                    prefill or decode where the span bears a sign of it (`SpanRole`), else ""
    arrival_ns, end_ns      int64 ns Unix by the engine's clock: when the request arrived and ended there
    queue_s, prefill_s, decode_s  float64, NaN where unknown; ttft_s, e2e_s: from arrival to the first and last token.
                            As the engine states them, to the bit, where it states them itself
    input_tokens, output_tokens  int64, -1 where it does not state them
    fault                   why its times are not used, "" where they are: its ids are here, so that its request can
                            say why, but no times, and -1 for its stamps
    refused                 spans not used, by reason; `repeated` of them were the same span sent again
    """

    trace_id: Texts
    span_id: Texts
    request_id: Texts
    clock: Texts
    machine: Texts
    engine: Texts
    role: Texts
    arrival_ns: Ints
    end_ns: Ints
    queue_s: Floats
    ttft_s: Floats
    prefill_s: Floats
    e2e_s: Floats
    decode_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    fault: Texts
    refused: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.trace_id)


class RequestSpans:
    """The spans of engines' requests as they come, each with the stages below it.

    - a span that came twice counts once; one with a `fault`, an impossible time, or other contents the second time is
      refused, and the ids are kept of those that a request may miss
    - stages belong to the request's span above them; where a parent is missing, to the only request of their trace
    - other spans are passed over, and those of health probes counted
    """

    def __init__(self) -> None:
        self._requests: dict[Key, SpanRequest] = {}
        self._stages: dict[Key, Stage] = {}
        self._parents: dict[Key, bytes] = {}
        self._refused: Counter[str] = Counter()

    def add(self, received: ReceivedSpan) -> None:
        """Add one span."""
        span, kind = received.span, received.kind
        key = (span.trace_id, span.span_id)
        reason = received.fault or ("repeated" if key in self._parents else "")
        if reason == "repeated" and self._differs(key, received):
            reason = CONFLICTING
        if reason:
            self._refused[reason] += 1
        if reason not in ("", *_WHY) or (reason in (BACKWARDS, OFF_CLOCK) and key in self._requests):
            return
        if reason != BACKWARDS:  # the same span may follow as it should be
            self._parents[key] = span.parent_span_id
        if kind.spans is not None:
            request = _request(received, kind.spans)
            self._requests[key] = request.faulty(_why(received, reason)) if reason else request
        elif key in self._requests:
            self._requests[key] = self._requests[key].faulty(_why(received, reason))
        elif reason == CONFLICTING:
            del self._stages[key]
        elif kind.role == "stage" and not reason:
            self._stages[key] = _stage(span)
        elif kind.role == "probe" and not reason:
            self._refused[PROBE] += 1

    def _differs(self, key: Key, received: ReceivedSpan) -> bool:
        """Return whether a span that came again has other contents. By way of another sender it has not."""
        before, stage, spans = self._requests.get(key), self._stages.get(key), received.kind.spans
        if before is None and spans is None:
            return stage is not None and stage != _stage(received.span)
        if before is None or spans is None:
            return True
        again = replace(_request(received, spans), clock=before.clock, machine=before.machine)
        return not before.fault and again != before

    def table(self) -> EngineSpans:
        """Return the spans so far as columns."""
        under = _under(self._requests, self._stages, self._parents)
        rows = [
            (request, role_of(request, under.get(key, ())), times_of(request, under.get(key, ())))
            for key, request in self._requests.items()
        ]
        impossible = Counter({IMPOSSIBLE: sum(times is None for *_, times in rows)})
        known = [
            (request.faulty(_WHY[IMPOSSIBLE]) if times is None else request, role, times or UNKNOWN)
            for request, role, times in rows
        ]
        return _columns(known, self._refused + impossible)


def engine_spans(records: Iterable[SpanLogRecord]) -> EngineSpans:
    """Read the spans of requests out of a span log's records."""
    return request_spans(span for record in records if isinstance(record, ExportRecord) for span in record.spans())


def request_spans(spans: Iterable[ReceivedSpan]) -> EngineSpans:
    """Read the spans of requests out of spans of any kind, as `RequestSpans` does."""
    requests = RequestSpans()
    for span in spans:
        requests.add(span)
    return requests.table()


def _request(received: ReceivedSpan, spans: EngineSpanRules) -> SpanRequest:
    span, times = received.span, spans.times.values()
    signs = (name for role in spans.roles.values() for name in role.values)
    stated = (way.attribute for ways in times for way in ways)
    wanted = {spans.request_id, *stated, *signs, *_INPUT_TOKENS, *_OUTPUT_TOKENS}
    return SpanRequest(
        trace_id=span.trace_id,
        span_id=span.span_id,
        begin_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        engine=received.kind.engine,
        spans=spans,
        attributes=attributes_of(span, wanted),
        clock=process_of(received.resource),
        machine=machine_of(received.resource),
    )


def _stage(span: Span) -> Stage:
    return Stage(name=span.name, begin_ns=span.start_time_unix_nano, end_ns=span.end_time_unix_nano)


def _why(received: ReceivedSpan, reason: str) -> str:
    """Return the reason why a span's times are not used, in words."""
    return _WHY[reason].format(minutes=abs(received.off_clock_s) / 60)


def _under(
    requests: Mapping[Key, SpanRequest], stages: Mapping[Key, Stage], parents: Mapping[Key, bytes]
) -> dict[Key, list[Stage]]:
    """Return the stages of each request's span."""
    if not stages:
        return {}
    in_trace: dict[bytes, list[Key]] = {}
    for key in requests:
        in_trace.setdefault(key[0], []).append(key)
    stages_of: dict[Key, list[Stage]] = {}
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
            stages_of.setdefault(above, []).append(stage)
    return stages_of


def _columns(rows: Sequence[tuple[SpanRequest, str, Mapping[str, float]]], refused: Mapping[str, int]) -> EngineSpans:
    return EngineSpans(
        trace_id=_texts(request.trace_id.hex() for request, *_ in rows),
        span_id=_texts(request.span_id.hex() for request, *_ in rows),
        request_id=_texts(text_of(request.attributes.get(request.spans.request_id, "")) for request, *_ in rows),
        clock=_texts(request.clock for request, *_ in rows),
        machine=_texts(request.machine for request, *_ in rows),
        engine=_texts(request.engine for request, *_ in rows),
        role=_texts(role for _, role, _ in rows),
        arrival_ns=np.fromiter((request.begin_ns for request, *_ in rows), np.int64),
        end_ns=np.fromiter((request.end_ns for request, *_ in rows), np.int64),
        **{f"{name}_s": np.fromiter((times[name] for *_, times in rows), np.float64) for name in TIMES},
        input_tokens=np.fromiter((_tokens(request, _INPUT_TOKENS) for request, *_ in rows), np.int64),
        output_tokens=np.fromiter((_tokens(request, _OUTPUT_TOKENS) for request, *_ in rows), np.int64),
        fault=_texts(request.fault for request, *_ in rows),
        refused=dict(refused),
    )


def _tokens(request: SpanRequest, names: Sequence[str]) -> int:
    """Return the count of tokens under its first stated name, -1 if missing."""
    stated = next((request.attributes[name] for name in names if name in request.attributes), -1.0)
    return int(stated) if isinstance(stated, float) and 0 <= stated < 2**53 else -1


def _texts(values: Iterable[str]) -> Texts:
    return np.fromiter(values, np.object_)
