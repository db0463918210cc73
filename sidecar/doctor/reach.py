"""Passage of the trace header and X-Request-Id to the engine, and the gateway's missing settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from sidelight.scraper.engines import recognition as engines
from sidelight.scraper.gateways.catalogue import GatewayEntry
from sidelight.sidecar.doctor.lines import ASK_ENGINE, HINT, OK, SKIP, WAIT_LONGER, WARN, Line
from sidelight.sidecar.doctor.trail import Trail
from sidelight.sidecar.run.preparation.preflight import ProbeReply

Missing = Literal["trace", "spans", "first_output", "delivery"]

CONTINUE = "let the gateway pass on the headers traceparent and tracestate, and begin no trace of its own"
SAMPLE = "let the gateway sample every trace, or decide as its caller did (a parent-based sampler)"
UNSAMPLED = "the gateway marks the trace as not sampled, or a cache or another engine answered"


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Facts known beside the request itself.

    engine  its name in `scraper.engines`, where a page or the list of models says so; its version, as it says it
    gateway what the catalogue has of it, where it is known which one it is
    direct  the trails of the same request, sent to the engines themselves
    listen  where spans are received by gRPC, HOST:PORT; listen_http by HTTP/protobuf
    """

    engine: str | None
    version: str
    gateway: GatewayEntry | None
    direct: Sequence[Trail]
    listen: str
    listen_http: str

    def setting(self, missing: Missing, otherwise: str) -> str:
        """Return the gateway's setting for a missing feature. It is that for any gateway where none is known."""
        switch = getattr(self.gateway.switches, missing) if self.gateway else ""
        if not self.gateway or not switch:
            return otherwise
        return f"{self.gateway.title}: {switch.replace('HOST:4317', self.listen)}"


def direct_lines(trail: Trail, around: Surroundings) -> Iterator[Line]:
    """Yield lines on the engine's span of a request without the gateway."""
    if trail.by == "trace":
        yield OK, f"{engine_title(trail)}'s span came of a request without the gateway: its tracing is on"
    else:
        yield WARN, "no span of the engine came of a request without the gateway: its tracing is off, or sent elsewhere"
        yield HINT, _tracing(around)
        yield HINT, WAIT_LONGER


def trace_lines(trail: Trail, around: Surroundings) -> Iterator[Line]:
    """Yield lines on the trace of the engine's span, and its meaning for the header."""
    title = engine_title(trail)
    if trail.engine is None:
        yield from _without_span(trail, around)
    elif trail.by == "trace":
        yield OK, f"the trace header reached the engine: {title}'s span came in our trace"
        if trail.begun_by is None:
            yield HINT, "the span above it did not come: what is between us and the engine sends its spans elsewhere"
    else:
        known = {"request id": "known by its id", "time": "the only one at the time of our request"}[trail.by]
        by_id = trail.by == "request id"
        if trail.is_root:
            text = f"the trace header did not reach the engine: {title}'s span ({known}) is the first of its own trace"
        else:
            begun = "the span above it did not come"
            if trail.begun_by is not None:
                begun = f"{named(trail.begun_by)} began that trace"
            text = f"a new trace began behind the gateway: {title}'s span ({known}) has another trace id, and {begun}"
        if by_id and not trail.is_root:
            yield OK, f"{text}; a run joins its requests by their ids"
            return
        yield WARN, text
        joined = "joins requests by their ids" if by_id else "has only the time to join requests by"
        yield HINT, f"a run then {joined}; {around.setting('trace', CONTINUE)}"


def request_id_lines(answer: ProbeReply, trail: Trail) -> Iterator[Line]:
    """Yield a line on the passage of our X-Request-Id to the engine, if known."""
    unknown = "whether X-Request-Id reached the engine, nothing tells"
    if trail.bears_request_id or _holds(answer.reply.response_id, answer.request_id):
        yield OK, "X-Request-Id reached the engine"
    elif trail.engine is None:
        yield SKIP, f"{unknown}: no span of the engine came"
    elif not _reads_request_id(trail):
        yield SKIP, f"{unknown}: {engine_title(trail)} does not use it"
    else:
        text = f"X-Request-Id did not reach the engine: {engine_title(trail)}'s span bears another id"
        if trail.by == "trace":
            yield SKIP, f"{text}; that costs nothing while the trace header reaches it"
        else:
            yield WARN, text
            yield HINT, "let the gateway pass on the header X-Request-Id: it joins requests where no trace does"


def engine_title(trail: Trail) -> str:
    """Return the title of the engine that sent the span."""
    return engines.catalogue(trail.engine.kind.engine).title if trail.engine else "the engine"


def named(service: str) -> str:
    """Return a service as it is named in a sentence."""
    return service or "a service without a service.name"


def _without_span(trail: Trail, around: Surroundings) -> Iterator[Line]:
    others = f" ({trail.unrelated} of other requests did)" if trail.unrelated else ""
    text = f"no span of the engine came of the request through the gateway{others}"
    if trail.candidates > 1:
        yield WARN, f"{text}; {trail.candidates} of those are of its time, and nothing tells whether one is its own"
        yield HINT, f"try again while nobody else sends requests; {around.setting('trace', CONTINUE)}"
    elif trail.unrelated or any(direct.engine for direct in around.direct):
        yield WARN, f"{text}: {UNSAMPLED}"
        yield HINT, SAMPLE
    elif around.direct:
        yield (
            WARN,
            f"{text} either: what the gateway does with the trace header shows only when the engine's tracing is on",
        )
    else:
        yield (
            WARN,
            f"{text}: the engine's tracing is off or sent elsewhere, or the gateway marks the trace as not sampled",
        )
        yield HINT, _tracing(around)
        yield HINT, WAIT_LONGER
        yield HINT, ASK_ENGINE


def _tracing(around: Surroundings) -> str:
    """Return the settings that make an engine send spans."""
    here = f"spans are received at {around.listen} here"
    if around.engine is None:
        return f"docs/reference/engines.md has each engine's switch for spans; {here}"
    known = engines.catalogue(around.engine)
    enable = known.tracing(around.version)
    if known.spans_switch(around.version) is None:
        return enable
    return f"{enable.replace('HOST:4317', around.listen)}; {here}"


def _reads_request_id(trail: Trail) -> bool:
    """Return whether an engine makes its id of a request from the X-Request-Id."""
    spans = trail.engine.kind.spans if trail.engine else None
    return spans is not None and any("{request}" in form and form != "{request}" for form in spans.ids)


def _holds(response_id: str, request_id: str) -> bool:
    """Return whether a reply's id holds our request's. A gateway may change its thirteenth digit of sixteen."""
    return request_id[:14] in response_id and request_id[15:] in response_id
