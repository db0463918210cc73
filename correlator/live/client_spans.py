"""What a span of a client or a gateway tells of a request: when it began, its first output, its tokens.

Names are those of OpenTelemetry's GenAI and HTTP conventions, and of the two libraries that mark a first chunk by an
event.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from correlator.requests import Columns
from rundir.columns import Ints, Texts
from scraper.spans.log import ExportRecord, SpanLogRecord, fault
from scraper.spans.requests import part_told, plain

OPERATIONS = ("chat", "text_completion", "generate_content")
# Seconds from the span's start. The first is the convention's for spans; the second a metric's name, used on spans.
FIRST_TOKEN_ATTRIBUTES = ("gen_ai.response.time_to_first_chunk", "gen_ai.server.time_to_first_token")
# OpenInference and Envoy AI Gateway; OpenLLMetry, once a chunk; the AI SDK.
FIRST_TOKEN_EVENTS = ("First Token Stream Event", "llm.content.completion.chunk", "ai.stream.firstChunk")
PATHS = ("/chat/completions", "/completions", "/generate", "/generate_stream", "/messages", "/responses")
_PATH_ATTRIBUTES = ("url.path", "url.full", "http.target", "http.url", "http.route")
_ROUNDING_S = 1e-3  # a span's stamps and the times in it are of different clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSpan:
    """One span of any kind, as far as it may be a client's or lead to one.

    span_id, parent_id      bytes; the parent is empty of a root
    encloses                its kind is CLIENT or SERVER: it may be the client's span of an engine's request
    is_call                 it says that it is one call of a model
    is_gateway              it is that of a known gateway (`scraper/engines`)
    start_ns, end_ns        by the clock of whoever sent it; received_ns by ours
    first_s                 seconds from its start to the first output, NaN where it does not tell, or more than it took
    failed                  it ended in an error
    *_tokens                -1 where it does not tell
    server                  http://ADDRESS:PORT of whom it called, empty if it does not tell
    """

    span_id: bytes
    parent_id: bytes
    encloses: bool
    is_call: bool
    is_gateway: bool
    start_ns: int
    end_ns: int
    received_ns: int
    first_s: float
    failed: bool
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    server: str

    @property
    def whole_s(self) -> float:
        """Return how long it took."""
        return (self.end_ns - self.start_ns) / 1e9


def client_span(span: Span, received_ns: int, *, is_gateway: bool) -> ClientSpan:
    """Read a span that keeps OTLP's rules (`scraper.spans.log.fault`)."""
    encloses = span.kind in (Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_SERVER)
    told = {one.key: plain(one.value) for one in span.attributes} if encloses else {}
    return ClientSpan(
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        encloses=encloses,
        is_call=encloses and (is_gateway or _is_call(told)),
        is_gateway=is_gateway,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        received_ns=received_ns,
        first_s=_first_s(span, told),
        failed=span.status.code == Status.STATUS_CODE_ERROR or "error.type" in told,
        input_tokens=_tokens(told.get("gen_ai.usage.input_tokens")),
        output_tokens=_tokens(told.get("gen_ai.usage.output_tokens")),
        cached_tokens=_tokens(told.get("gen_ai.usage.cache_read.input_tokens")),
        server=_server(told),
    )


def _is_call(told: dict[str, str | float]) -> bool:
    """Tell a call of a model from the workflow around it, which may hold several."""
    if "gen_ai.operation.name" in told:
        return told["gen_ai.operation.name"] in OPERATIONS
    # Not urlsplit, which raises for some of what a stranger may send.
    paths = [str(told[name]).partition("?")[0].rstrip("/") for name in _PATH_ATTRIBUTES if name in told]
    return any(path.endswith(PATHS) for path in paths)


def _first_s(span: Span, told: dict[str, str | float]) -> float:
    whole_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    for name in FIRST_TOKEN_ATTRIBUTES:
        stated = told.get(name)
        # What is longer than the whole is no time in seconds: some write milliseconds.
        if isinstance(stated, float) and 0 <= stated <= whole_s + _ROUNDING_S:
            return min(stated, whole_s)
    marks = [event.time_unix_nano for event in span.events if event.name in FIRST_TOKEN_EVENTS]
    first_s = (min(marks) - span.start_time_unix_nano) / 1e9 if marks else math.nan
    return first_s if 0 <= first_s <= whole_s else math.nan


def _tokens(stated: str | float | None) -> int:
    return int(stated) if isinstance(stated, float) and 0 <= stated < 2**53 else -1


def _server(told: dict[str, str | float]) -> str:
    address, port = told.get("server.address"), told.get("server.port")
    if (
        not isinstance(address, str)
        or not 0 < len(address) < 256
        or not isinstance(port, float)
        or not 0 < port < 65536
    ):
        return ""
    return f"http://{f'[{address}]' if ':' in address else address}:{int(port)}"


def columns(spans: Sequence[ClientSpan | None]) -> Columns:
    """Return the spans of clients as columns."""

    def numbers(read: Callable[[ClientSpan], int]) -> Ints:
        return np.array([-1 if one is None else read(one) for one in spans], dtype=np.int64)

    def texts(values: Sequence[str]) -> Texts:
        return np.array(values, dtype=np.object_)

    size = len(spans)
    unknown, untold, unknown_ms = np.full(size, -1, dtype=np.int64), texts([""] * size), np.full(size, math.nan)
    start_ns = numbers(lambda one: one.start_ns)
    first_ns = numbers(lambda one: one.start_ns + round(one.first_s * 1e9) if one.first_s >= 0 else -1)
    return Columns(
        trace_id=texts([str(place) if one else "" for place, one in enumerate(spans)]),
        request_id=untold,
        response_id=untold,
        endpoint_url=texts([one.server if one else "" for one in spans]),
        status=texts(["ok"] * size),
        finish_reason=untold,
        http_status=unknown,
        dispatch_ns=start_ns,
        submit_ns=start_ns,
        first_output_ns=first_ns,
        first_token_ns=first_ns,
        last_token_ns=unknown,
        end_ns=numbers(lambda one: one.end_ns),
        declared_input_tokens=unknown,
        input_tokens=numbers(lambda one: one.input_tokens),
        output_tokens=numbers(lambda one: one.output_tokens),
        cached_tokens=numbers(lambda one: one.cached_tokens),
        chunk_ns=np.zeros(0, dtype=np.int64),
        chunk_start=np.zeros(size + 1, dtype=np.int64),
        server_queue_ms=unknown_ms,
        server_prefill_ms=unknown_ms,
        server_decode_ms=unknown_ms,
        server_ttft_ms=unknown_ms,
        server_e2e_ms=unknown_ms,
    )


def gateway_first_output_s(records: Iterable[SpanLogRecord]) -> dict[str, float]:
    """Return how long gateways took to their first output, s, by trace id in hex; none of traces that do not tell.

    The client is us, so what calls a model in a trace of ours and is no engine's request is a gateway. Of several, one
    behind the other, the longest holds the others.
    """
    longest: dict[str, tuple[float, float]] = {}
    for record in records:
        if not isinstance(record, ExportRecord):
            continue
        for received_ns, scope, span in record.spans():
            told = part_told(span, scope)
            if fault(span, received_ns) or told in ("request", "stage"):
                continue
            call = client_span(span, received_ns, is_gateway=told == "gateway")
            if call.is_call and call.first_s >= 0:
                before = longest.get(span.trace_id.hex(), (0.0, 0.0))
                longest[span.trace_id.hex()] = max(before, (call.whole_s, call.first_s))
    return {trace: first_s for trace, (_, first_s) in longest.items()}
