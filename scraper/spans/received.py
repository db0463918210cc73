"""A span as it was received: what it is and what is wrong with it, asked once for all who read it.

Engines and gateways are recognised by their YAML files, a call of a model by OpenTelemetry's GenAI and HTTP
conventions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Literal

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from sidelight.scraper.engines.catalogue import EngineSpanRules, SpanMatch, catalogue, engine_names
from sidelight.scraper.gateways.catalogue import FirstOutput, gateway, gateway_names

MAX_ATTRIBUTES = 1024  # OpenTelemetry's own limit is 128
OFF_CLOCK_S = 600.0  # no exporter keeps a span for so long: its clock is another one
OFF_CLOCK = "stamped by another clock than ours"
BACKWARDS = "an end before its start"  # as where its sender's clock is set back meanwhile
CONFLICTING = "the same ids with other contents"
OPERATIONS = ("chat", "text_completion", "generate_content")
PATHS = ("/chat/completions", "/completions", "/generate", "/generate_stream", "/messages", "/responses")
_OPERATION = "gen_ai.operation.name"
_PATH_ATTRIBUTES = ("url.path", "url.full", "http.target", "http.url", "http.route")
_GATEWAY_PATHS = (*_PATH_ATTRIBUTES, "uri")  # of gateways that are known, what Rust's `tracing` calls it too
_EVENT = "asgi.event.type"
_LONGEST_NAME = 80
_INSTANCE = "service.instance.id"  # OpenTelemetry's SDKs of late make one up for each process
_PLACE = ("k8s.pod.name", "container.id", "host.name", "process.pid", "vllm.process_id")
_MACHINE = ("host.id", "k8s.node.name", "host.name")  # whose processes run by one clock
_SENDER = frozenset((_INSTANCE, *_PLACE, *_MACHINE))
_MOST_SHARING = 1000
_NO_TRACE = bytes(16)
_NO_SPAN = bytes(8)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanKind:
    """The kind of a span.

    role          an engine's `request`; a `stage` of one; the own span of a `gateway` that the catalogue knows, or its
                  call of the next server (`gateway_call`); another `call` of a model; a health `probe` that an engine
                  served like a request; or `other`
    engine        the name of a request's engine, or of a gateway; `spans` is how an engine's spans tell times
    is_call       it says that it is one call of a model, by whichever client or server
    tells_all     it is a request whose times the span itself tells, without its stages
    ends_prefill  it is the stage that ends a prefill: with its request's span, the times up to then are known
    ends_step     so too of a decode engine's first step
    is_shared     it is a stage that only engines that share a request have
    first_output  of a gateway: its attribute with the time to its first output
    any_service   of a gateway: its service's name may be the client's or the engine's
    at_end        of a gateway's call: it begins where the span ends
    """

    role: Literal["request", "gateway", "gateway_call", "stage", "call", "probe", "other"]
    engine: str = ""
    spans: EngineSpanRules | None = None
    is_call: bool = False
    tells_all: bool = False
    ends_prefill: bool = False
    ends_step: bool = False
    is_shared: bool = False
    first_output: FirstOutput | None = None
    any_service: bool = False
    at_end: bool = False


_CALL, _PROBE = SpanKind(role="call", is_call=True), SpanKind(role="probe")
OTHER = SpanKind(role="other")
_Matched = tuple[SpanMatch, tuple[SpanKind, SpanKind]]
_KINDS = {
    "internal": Span.SPAN_KIND_INTERNAL,
    "server": Span.SPAN_KIND_SERVER,
    "client": Span.SPAN_KIND_CLIENT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceivedSpan:
    """One span with its arrival (int64 ns Unix by our clock) and its sender; `fault` is that of the function.

    `service` is the sender's `service.name`, "" where it states none of its own.
    """

    received_ns: int
    span: Span
    kind: SpanKind
    fault: str
    resource: Resource
    service: str = ""

    @property
    def process(self) -> str:
        """Return an identifier of the sender's process, its service where nothing else is stated."""
        return process_of(self.resource) or self.service

    @property
    def off_clock_s(self) -> float:
        """Return the lead of the sender's clock over ours, s, accurate to seconds.

        It is derived from the span's end and its arrival.
        """
        return (self.span.end_time_unix_nano - self.received_ns) / 1e9

    @property
    def request_id(self) -> str:
        """Return the engine's id of its request, "" where it states none."""
        name = self.kind.spans.request_id if self.kind.spans else ""
        stated = (attribute.value.string_value for attribute in self.span.attributes if attribute.key == name)
        return next(stated, "")


def received_spans(export: ExportTraceServiceRequest, received_ns: int) -> Iterator[ReceivedSpan]:
    """Yield each span of an export."""
    for sender in export.resource_spans:
        service = service_of(sender.resource)
        for scope in sender.scope_spans:
            for span in scope.spans:
                yield received(span, scope.scope.name, received_ns, sender.resource, service)


def received(span: Span, scope: str, received_ns: int, resource: Resource, service: str = "") -> ReceivedSpan:
    """Return a span as received; `scope` is the name of its scope."""
    return ReceivedSpan(
        received_ns=received_ns,
        span=span,
        kind=classify(span, scope),
        fault=fault(span, received_ns),
        resource=resource,
        service=service,
    )


def service_of(resource: Resource) -> str:
    """Return the service name of a span's sender, "" if unstated or an SDK's default."""
    names = (attribute.value.string_value for attribute in resource.attributes if attribute.key == "service.name")
    name = next(names, "")[:_LONGEST_NAME]
    return "" if name.startswith("unknown_service") else name


def process_of(resource: Resource) -> str:
    """Return an identifier of a sender's process, or at least its machine. Its clock may differ from that of others."""
    stated = dict(_sender(resource))
    place = "/".join(stated[key] for key in _PLACE if stated.get(key))
    return (stated.get(_INSTANCE) or place)[:_LONGEST_NAME]


def machine_of(resource: Resource) -> str:
    """Return the name of a sender's machine, "" where its resource states none."""
    stated = dict(_sender(resource))
    return next((stated[key] for key in _MACHINE if stated.get(key)), "")[:_LONGEST_NAME]


def bare_resource(resource: Resource) -> Resource:
    """Return a resource with the sender's process and machine alone, one object a sender."""
    return _bare_resource(tuple(_sender(resource)))


@lru_cache(maxsize=_MOST_SHARING)
def _bare_resource(stated: tuple[tuple[str, str], ...]) -> Resource:
    return Resource(attributes=[KeyValue(key=key, value=AnyValue(string_value=text)) for key, text in stated])


def _sender(resource: Resource) -> Iterator[tuple[str, str]]:
    for attribute in resource.attributes:
        if attribute.key in _SENDER:
            yield attribute.key, text_of(plain(attribute.value))


class SharingProcesses:
    """Processes of engines that share requests, as a prefill and a decode pod.

    No span of vLLM says that there is another engine: it is known by those requests whose spans came.
    """

    def __init__(self) -> None:
        self._known: set[str] = set()

    def is_half(self, processes: Collection[str]) -> bool:
        """Return whether a request probably lacks a span of another process."""
        if len(processes) > 1 and len(self._known) < _MOST_SHARING:
            self._known.update(processes)
        return len(processes) == 1 and self._known.issuperset(processes)


def sends_body(span: Span) -> bool:
    """Return whether a span is a server's sending of a reply's part.

    ASGI's instrumentation makes them.
    """
    return span.name.endswith("http send") and any(
        attribute.key == _EVENT and attribute.value.string_value == "http.response.body"
        for attribute in span.attributes
    )


def classify(span: Span, scope: str) -> SpanKind:
    """Return the kind of a span.

    It is an engine's by its catalogue, else a stage by name, else a gateway's by its catalogue, else a call by its
    attributes.
    """
    for matches, kind in _requests():
        if any(_matches(span, scope, match) for match in matches):
            return _PROBE if kind.spans is not None and _is_probe(span, kind.spans) else kind
    if span.name in _stages():
        return _stages()[span.name]
    is_call = _is_call(span)
    by_name, by_scope = _gateways()
    for match, kinds in (*by_name.get(span.name, ()), *by_scope):
        if _matches(span, scope, match):
            # One of its own of which no path is stated is taken for a call.
            return kinds[is_call or (kinds[0].role == "gateway" and _calls_model(span, _GATEWAY_PATHS) is not False)]
    return _CALL if is_call else OTHER


def fault(span: Span, received_ns: int) -> str:
    """Return the reason why a span cannot be used, '' if it can.

    It came at `received_ns`. A span with a fault is counted, but not read.

    - ids that are not 16 and 8 bytes, or all zero
    - an end before the start, or no stamps at all
    - more than MAX_ATTRIBUTES attributes
    - OFF_CLOCK: an end more than OFF_CLOCK_S from when it came
    """
    if len(span.trace_id) != 16 or span.trace_id == _NO_TRACE:
        return "no valid trace id"
    if len(span.span_id) != 8 or span.span_id == _NO_SPAN:
        return "no valid span id"
    if len(span.parent_span_id) not in (0, 8):
        return "no valid parent span id"
    # No column can hold more than int64, and there is not such a year.
    if not 0 < span.start_time_unix_nano <= span.end_time_unix_nano < 2**63:
        return BACKWARDS
    if len(span.attributes) > MAX_ATTRIBUTES:
        return f"more than {MAX_ATTRIBUTES} attributes"
    off_ns = span.end_time_unix_nano - received_ns
    return OFF_CLOCK if abs(off_ns) / 1e9 > OFF_CLOCK_S else ""


def plain(value: AnyValue) -> str | float:
    """Return a number as a float, anything else as a text."""
    kind = value.WhichOneof("value")
    if kind in ("int_value", "double_value"):
        return float(getattr(value, kind))
    return value.string_value


def text_of(value: str | float) -> str:
    """Return a plain value as text."""
    return f"{value:.0f}" if isinstance(value, float) else value


def attributes_of(span: Span, wanted: Collection[str] | None = None) -> dict[str, str | float]:
    """Return a span's attributes by key, all or the wanted; one that came twice with several values has none.

    OTLP has each key once: it is then no number, or an empty text.
    """
    stated: dict[str, str | float] = {}
    for attribute in span.attributes:
        if wanted is None or attribute.key in wanted:
            value = plain(attribute.value)
            before = stated.setdefault(attribute.key, value)
            if before != value:
                stated[attribute.key] = "" if isinstance(before, str) and isinstance(value, str) else math.nan
    return stated


@cache
def _requests() -> tuple[tuple[tuple[SpanMatch, ...], SpanKind], ...]:
    """Return the span conditions and kinds of the engines' catalogues, read once."""
    kinds = []
    for name in engine_names():
        spans = catalogue(name).spans
        if spans is not None:
            staged = any(way.stages for ways in spans.times.values() for way in ways)
            kind = SpanKind(role="request", engine=name, spans=spans, is_call=True, tells_all=not staged)
            kinds.append((spans.match, kind))
    return tuple(kinds)


@cache
def _gateways() -> tuple[Mapping[str, Sequence[_Matched]], Sequence[_Matched]]:
    """Return the span conditions of the gateways' catalogues, by span name and of any name.

    Own spans come before calls. With each are the kinds of a span that does not call a model and of one that does.
    """
    by_name: dict[str, list[_Matched]] = {}
    by_scope: list[_Matched] = []
    for name in gateway_names():
        spans = gateway(name).spans
        if spans is None:
            continue
        serving = SpanKind(role="gateway", engine=name, first_output=spans.first_output, any_service=spans.any_service)
        call = replace(serving, role="gateway_call", first_output=None)
        decision = replace(call, at_end=True)
        for matches, kind in ((spans.serving, serving), (spans.call, call), (spans.decision, decision)):
            for match in matches:
                group = by_name.setdefault(match.name, []) if match.name else by_scope
                group.append((match, (kind, replace(kind, is_call=True))))
    return by_name, by_scope


@cache
def _stages() -> Mapping[str, SpanKind]:
    catalogues = [kind.spans for _, kind in _requests() if kind.spans is not None]
    ways = [(name, way) for spans in catalogues for name, ways in spans.times.items() for way in ways]
    names = {name for _, way in ways for name in way.stages}
    shared = {name for spans in catalogues for role in spans.roles.values() for name in role.stages}
    last, of_step = ({way.end for time, way in ways if time == wanted} for wanted in ("prefill", "first_step"))
    return {
        name: SpanKind(role="stage", ends_prefill=name in last, ends_step=name in of_step, is_shared=name in shared)
        for name in names | shared
    }


def _matches(span: Span, scope: str, match: SpanMatch) -> bool:
    if (match.name and span.name != match.name) or not scope.startswith(match.scope):
        return False
    if match.kind and span.kind != _KINDS[match.kind]:
        return False
    if not match.attributes and not match.values:
        return True
    shown = {attribute.key: attribute.value.string_value for attribute in span.attributes}
    return all(name in shown for name in match.attributes) and all(
        shown.get(name) == value for name, value in match.values.items()
    )


def _is_probe(span: Span, spans: EngineSpanRules) -> bool:
    return bool(spans.probe_ids) and any(
        attribute.key == spans.request_id and attribute.value.string_value.startswith(spans.probe_ids)
        for attribute in span.attributes
    )


def _is_call(span: Span) -> bool:
    """Return whether a span is a call of a model, not the workflow around it.

    A workflow may hold several calls.
    """
    return span.kind in (Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_SERVER) and bool(_calls_model(span, _PATH_ATTRIBUTES))


def _calls_model(span: Span, paths: tuple[str, ...]) -> bool | None:
    """Return whether a span is a call of a model, by its operation, else path.

    None where it states neither.
    """
    shown = {
        attribute.key: str(plain(attribute.value))
        for attribute in span.attributes
        if attribute.key in (_OPERATION, *paths)
    }
    if _OPERATION in shown:
        return shown[_OPERATION] in OPERATIONS
    # Not urlsplit, which raises for some of what a sender may write.
    return any(path.partition("?")[0].rstrip("/").endswith(PATHS) for path in shown.values()) if shown else None
