"""Gateways between a client and the engine, found among a trace's spans, and their timings.

Used for runs and for a watch.

A gateway's span is a SERVER's, of another service than the client's and the engine's, and stands above the engine's
span, as the outermost of all where no client sends spans; or it is a call of a model beside the engine's span and
encloses it in time, as where a gateway passes on the trace context of its client. Of a service the outermost such span
counts. One of which only calls of the next server came counts with what they say of the first output. Of a gateway that
the catalogue knows (`scraper/gateways`), spans of other kinds may be its own and its call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from sidelight.recorded.client_spans import CLOCKS_NS, ClientSpan, chain, client_span, encloses
from sidelight.scraper.gateways.catalogue import choice_rules, gateway
from sidelight.scraper.spans.received import ReceivedSpan, attributes_of, sends_body, text_of

MOST_SPANS = 5000  # of a trace in which to look for gateways beside the engine: each request would look at all of them


# How the first output of a gateway is known: its span says so, its call of the next server does, or a span of the first
# part of its reply; "" where none of them does.
FirstBy = Literal["attribute", "inner_call", "body", ""]
FIRST_OUTPUT = ("attribute", "inner_call", "body", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySpan:
    """Timings of one request in a gateway, from the gateway's spans; NaN if unknown.

    service     its `service.name`, "" where it states none
    name        its name in `scraper.gateways`, "" of one without a file there
    whole_s     how long it had the request
    request_s   from its start to its call of the next server: what it did before, such as authentication and routing
    first_s     from its start to its first output, which `first_by` says the source of
    is_beside   its span is a sibling of the engine's, which it encloses in time, not its ancestor
    pair_s      from its start to the begin and end of its call of a prefill engine, and of its call of a decode engine;
                () where it is not known to call two
    """

    service: str
    whole_s: float
    request_s: float
    first_s: float
    first_by: FirstBy
    is_beside: bool = False
    name: str = ""
    pair_s: tuple[float, ...] = ()


class RouterChoice(NamedTuple):
    """A router's choice by its spans: the endpoint, and the part of the prompt that it expects in a cache there."""

    endpoint: str = ""
    expected_ratio: float = math.nan
    chosen_ns: int = 2**63 - 1  # when the span of the endpoint began


NO_CHOICE = RouterChoice()


def note_choice(choice: RouterChoice, span: Span) -> RouterChoice:
    """Return a choice with the statements of one more span.

    Of several endpoints the first counts, as of a prefill.
    """
    rules = choice_rules().get(span.name)
    if rules is None:
        return choice
    stated = attributes_of(span, {rules.endpoint, rules.matched, rules.whole})
    endpoint, begun_ns = text_of(stated.get(rules.endpoint, "")), span.start_time_unix_nano
    if endpoint and begun_ns < choice.chosen_ns:
        choice = choice._replace(endpoint=endpoint, chosen_ns=begun_ns)
    matched, whole = stated.get(rules.matched), stated.get(rules.whole)
    if isinstance(matched, float) and isinstance(whole, float) and 0 <= matched <= whole > 0:
        choice = choice._replace(expected_ratio=matched / whole)
    return choice


def nested(*traces: Sequence[GatewaySpan]) -> tuple[GatewaySpan, ...]:
    """Return the gateways of a request with spans in several traces, outermost first.

    The longest is the outermost. Each service counts once, by its outermost span.
    """
    by_service: dict[str, GatewaySpan] = {}
    for span in sorted((span for spans in traces for span in spans), key=lambda span: -span.whole_s):
        by_service.setdefault(span.service, span)
    return tuple(by_service.values())


def gateways_between(
    spans: Mapping[bytes, ClientSpan],
    bodies: Mapping[bytes, int],
    engine: Collection[bytes],
    client: ClientSpan | None = None,
) -> tuple[GatewaySpan, ...]:
    """Return the gateways of one request, outermost first: the longest.

    spans   of its trace, by their ids; `engine` are the ids of those of its engines
    bodies  when the first part of a reply was sent, by the id of the span that served it, int64 ns Unix
    client  the client's, or the outermost gateway's, which is then one of them; without it the whole trace is the
            request's, and the client's own span is not in it
    """
    inner = [spans[key] for key in engine if key in spans]
    services = {span.service for span in inner}
    if client is not None and not client.serves:
        services.add(client.service)
    leading = _leading(spans, inner, client)
    beside = _beside(spans, inner, client) if len(spans) <= MOST_SPANS else ()
    candidates = [
        span
        for span in (*(spans[key] for key in leading), *beside)
        if span.encloses
        and span.span_id not in engine
        # What a client without a name calls may be its own.
        and (span.any_service or (span.service not in services if span.service else span.serves or client is None))
    ]
    by_service: dict[str, list[ClientSpan]] = {}
    for span in candidates:
        by_service.setdefault(span.service, []).append(span)
    if len(spans) <= MOST_SPANS:
        _add_calls(by_service, spans, inner)
    gateways = [_gateway(group, bodies, leading) for group in by_service.values()]
    ordered = sorted((gateway for gateway in gateways if gateway), key=lambda gateway: -gateway.whole_s)
    return tuple(map(_without_asked, ordered, (*ordered[1:], None)))


def _leading(
    spans: Mapping[bytes, ClientSpan], inner: Sequence[ClientSpan], client: ClientSpan | None
) -> dict[bytes, int]:
    """Return the spans between the client's and the engines', with their height above an engine's.

    A client's span that is a server's is among them, also where no parent ids lead to it.
    """
    leading: dict[bytes, int] = {}
    for span in inner:
        above, _ = chain(spans, span)
        for height, step in enumerate(above):
            if step is client:
                break
            leading.setdefault(step.span_id, height)
    if client is not None and client.serves:
        leading.setdefault(client.span_id, len(leading))
    return leading


def _beside(
    spans: Mapping[bytes, ClientSpan], inner: Sequence[ClientSpan], client: ClientSpan | None
) -> Iterator[ClientSpan]:
    """Yield the model calls of gateways: below the client's span, around the engines' in time."""
    others = {step.span_id for span in inner for step in (span, *chain(spans, span)[0])}
    around = [
        span
        for key, span in spans.items()
        if span.encloses and key not in others and span is not client and all(encloses(span, step) for step in inner)
    ]
    if not around:
        return
    above_calls = {step.span_id for span in around if span.is_call for step in chain(spans, span)[0]}
    for span in around:
        above, is_rooted = chain(spans, span)
        if (
            (span.is_call or (span.serves and span.span_id in above_calls))
            and not any(step in above for step in inner)
            and (client is None or client in above or (not is_rooted and encloses(client, span)))
        ):
            yield span


def _without_asked(outer: GatewaySpan, inner: GatewaySpan | None) -> GatewaySpan:
    """Return a gateway without the time before its call in an inner decision."""
    rules = gateway(inner.name).spans if inner and inner.name else None
    if inner is None or rules is None or not rules.decision or not outer.request_s >= inner.request_s:
        return outer
    return replace(outer, request_s=outer.request_s - inner.request_s)


def _add_calls(
    by_service: Mapping[str, list[ClientSpan]], spans: Mapping[bytes, ClientSpan], inner: Sequence[ClientSpan]
) -> None:
    """Add the calls of known gateways before engine spans, of a pair before the last."""
    begun_ns = [span.start_ns + CLOCKS_NS for span in inner] or [CLOCKS_NS]
    for call in spans.values():
        if not call.gateway or call.serves:
            continue
        # A decision's span is without length, and before all that comes after, whatever the clocks say.
        if call.whole_s and call.start_ns > (max if _is_of_pair(call) else min)(begun_ns):
            continue
        group = by_service.get(call.service, [])
        ids = {span.span_id for span in group}
        if call.span_id not in ids and any(step.span_id in ids for step in chain(spans, call)[0]):
            group.append(call)


def _gateway(
    spans: Sequence[ClientSpan], bodies: Mapping[bytes, int], leading: Mapping[bytes, int]
) -> GatewaySpan | None:
    """Return the gateway of one service's spans, None if they show no timing of it.

    Its own span is the outermost that serves, one above the engine's first. Its call of the next server is the one that
    is nearest to the engine, else the last; where two engines shared the request, the first of both, or of its pair.
    """
    name = next((span.gateway for span in spans if span.gateway), "")
    serving = [span for span in spans if span.serves]
    calls = sorted(
        (span for span in spans if not span.serves),
        key=lambda span: (span.span_id not in leading, leading.get(span.span_id, 0), -span.start_ns),
    )
    timed = next((call for call in calls if call.first_s >= 0), None)
    if not serving:
        if timed is None:
            return None
        outermost = max((call for call in calls if call.first_s >= 0), key=lambda call: call.whole_s)
        return _span(outermost, name, math.nan, outermost.first_s, "attribute", leading)
    outermost = min(serving, key=lambda span: (span.span_id not in leading, span.start_ns))
    pair = _pair(calls)
    request_s = _since(outermost, pair[0].start_ns if pair else _call_ns(calls, leading)) if calls else math.nan
    pair_s = tuple(_since(outermost, at_ns) for call in pair for at_ns in (call.start_ns, call.end_ns))
    for first_s, first_by in _firsts(outermost, serving, timed, bodies):
        if 0 <= first_s <= outermost.whole_s:
            return replace(_span(outermost, name, request_s, first_s, first_by, leading), pair_s=pair_s)
    return replace(_span(outermost, name, request_s, math.nan, "", leading), pair_s=pair_s)


def _pair(calls: Sequence[ClientSpan]) -> Sequence[ClientSpan]:
    """Return the calls of a prefill engine and of a decode engine, in their order; none of other gateways."""
    known = sorted(filter(_is_of_pair, calls), key=lambda call: call.start_ns)
    return known if len(known) == 2 else ()


def _is_of_pair(call: ClientSpan) -> bool:
    rules = gateway(call.gateway).spans if call.gateway else None
    return rules is not None and rules.pair


def _call_ns(calls: Sequence[ClientSpan], leading: Mapping[bytes, int]) -> int:
    """Return the time of the first call of the next server, int64 ns Unix.

    The calls are sorted by their distance from the engine.
    """
    height = leading.get(calls[0].span_id)
    alike = [call.start_ns for call in calls if height is not None and leading.get(call.span_id) == height]
    return min(alike, default=calls[0].start_ns)


def _firsts(
    outermost: ClientSpan, serving: Sequence[ClientSpan], timed: ClientSpan | None, bodies: Mapping[bytes, int]
) -> Iterator[tuple[float, FirstBy]]:
    """Yield the candidates for a gateway's first output, seconds from its start, the best first."""
    for span in serving:
        yield _since(outermost, span.start_ns) + span.first_s, "attribute"
    if timed is not None:
        yield _since(outermost, timed.start_ns) + timed.first_s, "inner_call"
    for span in serving:
        if span.span_id in bodies:
            yield _since(outermost, bodies[span.span_id]), "body"


def _since(span: ClientSpan, at_ns: int) -> float:
    return (at_ns - span.start_ns) / 1e9


def _span(
    span: ClientSpan, name: str, request_s: float, first_s: float, first_by: FirstBy, leading: Mapping[bytes, int]
) -> GatewaySpan:
    return GatewaySpan(
        service=span.service,
        name=name,
        whole_s=span.whole_s,
        request_s=request_s if request_s >= 0 else math.nan,
        first_s=first_s,
        first_by=first_by,
        is_beside=span.span_id not in leading,
    )


def note_body(bodies: dict[bytes, int], received: ReceivedSpan) -> bool:
    """Record the start of a reply's earliest part; return whether the span is a part.

    It is kept by the id of the span that served the reply.
    """
    if not sends_body(received.span):
        return False
    parent, start_ns = received.span.parent_span_id, received.span.start_time_unix_nano
    bodies[parent] = min(start_ns, bodies.get(parent, start_ns))
    return True


@dataclass(slots=True)
class _Trace:
    received_ns: int  # of its first span
    spans: dict[bytes, ClientSpan] = field(default_factory=dict)
    bodies: dict[bytes, int] = field(default_factory=dict)
    engine: set[bytes] = field(default_factory=set)
    choice: RouterChoice = NO_CHOICE


class GatewaySpans:
    """The spans of a run's requests by trace: one request for each trace."""

    def __init__(self) -> None:
        self._traces: dict[bytes, _Trace] = {}

    def add(self, received: ReceivedSpan) -> None:
        """Take in one span of any kind."""
        if received.fault:
            return
        trace = self._traces.setdefault(received.span.trace_id, _Trace(received_ns=received.received_ns))
        if note_body(trace.bodies, received):
            return
        span = client_span(received)
        trace.spans.setdefault(span.span_id, span)
        if received.kind.role == "request":
            trace.engine.add(span.span_id)
        else:
            trace.choice = note_choice(trace.choice, received.span)

    @property
    def choices(self) -> Mapping[str, RouterChoice]:
        """Return the routers' choices that spans state, by hex trace id."""
        chosen = ((trace_id.hex(), trace.choice) for trace_id, trace in self._traces.items())
        return {trace_id: choice for trace_id, choice in chosen if choice != NO_CHOICE}

    def by_trace(self) -> dict[str, tuple[GatewaySpan, ...]]:
        """Return the gateways of each trace that has any, outermost first, by hex trace id."""
        gateways = ((trace_id.hex(), self.of(trace_id)) for trace_id in self._traces)
        return {trace_id: spans for trace_id, spans in gateways if spans}

    def of(self, trace_id: bytes) -> tuple[GatewaySpan, ...]:
        """Return the gateways of a trace so far, outermost first."""
        trace = self._traces.get(trace_id)
        # An engine's spans alone are most traces where no gateway sends any.
        if trace is None or len(trace.spans) == len(trace.engine):
            return ()
        return gateways_between(trace.spans, trace.bodies, trace.engine)

    def forget(self, before_ns: int) -> None:
        """Remove the traces with a first span received before a given time."""
        while self._traces and next(iter(self._traces.values())).received_ns < before_ns:
            del self._traces[next(iter(self._traces))]
