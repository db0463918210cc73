"""Timings and token counts of requests from the spans of clients and gateways.

Names are those of OpenTelemetry's GenAI and HTTP conventions, and of the two libraries that mark a first chunk by an
event. What kind of span it is, `scraper.spans.received` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from sidelight.loadgen.requests.table.log import RequestLog, unknown_requests
from sidelight.rundir.columns import Ints, Texts
from sidelight.scraper.gateways.catalogue import gateway
from sidelight.scraper.spans.received import ReceivedSpan, SpanKind, attributes_of

# Seconds from the span's start. The first is the convention's for spans; the second a metric's name, used on spans.
FIRST_TOKEN_ATTRIBUTES = ("gen_ai.response.time_to_first_chunk", "gen_ai.server.time_to_first_token")
# OpenInference and Envoy AI Gateway; OpenLLMetry, once a chunk; the AI SDK.
FIRST_TOKEN_EVENTS = ("First Token Stream Event", "llm.content.completion.chunk", "ai.stream.firstChunk")
# Counts by the convention's names, then by its earlier ones.
_TOKENS = {
    "input": ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens"),
    "output": ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens"),
    "cached": ("gen_ai.usage.cache_read.input_tokens",),
    "reasoning": ("gen_ai.usage.reasoning.output_tokens",),
}
_LONGEST_KIND = 60
_LONGEST_ID = 256
# No span comes before its end, and exporters keep few for longer: of another, the clock is another one.
EARLY_S, LATE_S = 1.0, 60.0
CLOCKS_NS = 50_000_000  # by which clocks of a request's services may differ, and one span still enclose another
_DEPTH = 32
_ROUNDING_S = 1e-3  # a span's stamps and the times in it are of different clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSpan:
    """A span of any kind that may be a client's or lead to one.

    span_id, parent_id      bytes; the parent is empty of a root
    service                 whose it is, "" where that is not stated
    encloses                its kind is CLIENT or SERVER: it may be the client's span of an engine's request; or it is
                            of a gateway that the catalogue knows (`scraper/gateways`), of any kind
    serves                  it is a server's of these, or a known gateway's own
    gateway                 that gateway's name, "" of any other span; `any_service`: whatever its service is called
    is_call                 it says that it is one call of a model
    start_ns, end_ns        by the clock of the sender; received_ns by ours. Of a span that ends as a gateway lets its
                            request go on, both are its end
    first_s                 seconds from its start to the first output, NaN where it does not tell, or more than it took
    error                   its error.type where it ended in an error, "error" where it does not say which, else ""
    *_tokens                -1 where it does not tell
    server                  http://ADDRESS:PORT of whom it called, empty if it does not tell
    response_id             the id of the reply, empty if it does not tell
    """

    span_id: bytes
    parent_id: bytes
    service: str
    encloses: bool
    serves: bool
    gateway: str
    any_service: bool
    is_call: bool
    start_ns: int
    end_ns: int
    received_ns: int
    first_s: float
    error: str
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    server: str
    response_id: str

    @property
    def failed(self) -> bool:
        """Return whether the span ended in an error."""
        return bool(self.error)

    @property
    def whole_s(self) -> float:
        """Return the span's duration in seconds."""
        return (self.end_ns - self.start_ns) / 1e9


def client_span(received: ReceivedSpan) -> ClientSpan:
    """Return a span that has no `fault` as a ClientSpan."""
    span, kind = received.span, received.kind
    is_gateway = kind.role in ("gateway", "gateway_call")
    serves = kind.role == "gateway" or (span.kind == Span.SPAN_KIND_SERVER and not is_gateway)
    encloses = serves or is_gateway or span.kind == Span.SPAN_KIND_CLIENT
    attributes = attributes_of(span) if encloses else {}
    return ClientSpan(
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        service=received.service,
        encloses=encloses,
        serves=serves,
        gateway=kind.engine if is_gateway else "",
        any_service=kind.any_service,
        is_call=encloses and kind.is_call,
        start_ns=span.end_time_unix_nano if kind.at_end else span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        received_ns=received.received_ns,
        first_s=_first_s(span, attributes, kind),
        error=_error(span, attributes),
        **{f"{name}_tokens": _tokens(attributes, names) for name, names in _TOKENS.items()},
        server=_server(attributes),
        response_id=_short(attributes.get("gen_ai.response.id")),
    )


def chain(spans: Mapping[bytes, ClientSpan], span: ClientSpan) -> tuple[list[ClientSpan], bool]:
    """Return the ancestors of a span, nearest first, and whether they reach a root span."""
    above: list[ClientSpan] = []
    parent = span.parent_id
    while parent and len(above) < _DEPTH:
        span_above = spans.get(parent)
        if span_above is None or span_above in above:
            return above, False
        above.append(span_above)
        parent = span_above.parent_id
    return above, not parent


def encloses(outer: ClientSpan, inner: ClientSpan) -> bool:
    """Return whether a span encloses another in time, within the tolerance between clocks."""
    return outer.start_ns - CLOCKS_NS <= inner.start_ns and inner.end_ns <= outer.end_ns + CLOCKS_NS


def _first_s(span: Span, attributes: dict[str, str | float], kind: SpanKind) -> float:
    """Return the seconds from a span's start to its first output, NaN if unknown.

    Read from an attribute, else from an event.
    """
    whole_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    for name in FIRST_TOKEN_ATTRIBUTES:
        stated = attributes.get(name)
        # A time longer than the whole span is not in seconds: some clients write milliseconds.
        if isinstance(stated, float) and 0 <= stated <= whole_s + _ROUNDING_S:
            return min(stated, whole_s)
    if kind.first_output is not None:
        stated_s = kind.first_output.seconds(attributes.get(kind.first_output.attribute))
        if stated_s is not None and 0 <= stated_s <= whole_s + _ROUNDING_S:
            return min(stated_s, whole_s)
    if kind.role == "gateway" and (rules := gateway(kind.engine).spans) is not None and rules.late_events:
        return math.nan
    marks = [event.time_unix_nano for event in span.events if event.name in FIRST_TOKEN_EVENTS]
    first_s = (min(marks) - span.start_time_unix_nano) / 1e9 if marks else math.nan
    return first_s if 0 <= first_s <= whole_s else math.nan


def _error(span: Span, attributes: dict[str, str | float]) -> str:
    """Return the error type of a span, "" if it did not fail."""
    if span.status.code != Status.STATUS_CODE_ERROR and "error.type" not in attributes:
        return ""
    kind = "".join(letter for letter in str(attributes.get("error.type", "")) if letter.isprintable() and letter != ":")
    return kind[:_LONGEST_KIND] or "error"


def _short(stated: str | float | None) -> str:
    return stated if isinstance(stated, str) and len(stated) <= _LONGEST_ID else ""


def _tokens(attributes: Mapping[str, str | float], names: Sequence[str]) -> int:
    stated = next((attributes[name] for name in names if name in attributes), None)
    return int(stated) if isinstance(stated, float) and 0 <= stated < 2**53 else -1


def _server(attributes: dict[str, str | float]) -> str:
    address, port = attributes.get("server.address"), attributes.get("server.port")
    if (
        not isinstance(address, str)
        or not 0 < len(address) < 256
        or not isinstance(port, float)
        or not 0 < port < 65536
    ):
        return ""
    return f"http://{f'[{address}]' if ':' in address else address}:{int(port)}"


def request_log(spans: Sequence[ClientSpan | None], trace_ids: Sequence[bytes]) -> RequestLog:
    """Return the request log of client spans as a table.

    A request without a span has its trace id only.
    Stamps are the client's, and by our clock where its span ended in the future, or over LATE_S before it came: its
    clock is then another one, and it is taken to have ended when it came.
    """

    def numbers(read: Callable[[ClientSpan], int]) -> Ints:
        return np.array([-1 if span is None else read(span) for span in spans], dtype=np.int64)

    def texts(values: Sequence[str]) -> Texts:
        return np.array(values, dtype=np.object_)

    size = len(spans)
    first_ns = numbers(
        lambda span: span.start_ns + _moved_ns(span) + round(span.first_s * 1e9) if span.first_s >= 0 else -1
    )
    tokens = numbers(lambda span: span.output_tokens)
    return replace(
        unknown_requests(size),
        index=np.arange(size),
        phase=texts(["measure"] * size),
        endpoint_url=texts([span.server if span else "" for span in spans]),
        trace_id=texts([trace_id.hex() for trace_id in trace_ids]),
        response_id=texts([span.response_id if span else "" for span in spans]),
        status=texts(["" if span is None else "failed" if span.error else "ok" for span in spans]),
        error=texts(
            [f"{span.error}: the client's span ended in an error" if span and span.error else "" for span in spans]
        ),
        submit_ns=numbers(lambda span: span.start_ns + _moved_ns(span)),
        first_output_ns=first_ns,
        first_token_ns=first_ns,
        end_ns=numbers(lambda span: span.end_ns + _moved_ns(span)),
        input_tokens=numbers(lambda span: span.input_tokens),
        output_tokens=tokens,
        output_tokens_source=texts(["usage" if count >= 0 else "" for count in tokens.tolist()]),
        cached_tokens=numbers(lambda span: span.cached_tokens),
        reasoning_tokens=numbers(lambda span: span.reasoning_tokens),
    )


def _moved_ns(span: ClientSpan) -> int:
    """Return the correction from a client's stamps to our clock, ns."""
    return ahead_ns(span.end_ns, span.received_ns)


def ahead_ns(end_ns: int, received_ns: int) -> int:
    """Return the offset of our clock ahead of the sender's, ns; 0 if they may agree.

    Estimated from a span's end and its arrival: if the clocks disagree, the span is taken to have arrived at its end.
    """
    late_ns = received_ns - end_ns
    return 0 if -EARLY_S <= late_ns / 1e9 <= LATE_S else late_ns
