"""What is read of requests, whoever made the table: a run's log, or the spans of clients."""

from __future__ import annotations

from dataclasses import dataclass

from loadgen.requests.table import RequestLog
from rundir.columns import Floats, Ints, Texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Spans of clients as columns of a request log: what `join`, `parts` and `attribute` ask for.

    Where there is no span, stamps are -1. Each request is a trace of its own here: one trace may hold several.
    """

    trace_id: Texts
    request_id: Texts
    response_id: Texts
    endpoint_url: Texts
    status: Texts
    finish_reason: Texts
    http_status: Ints
    dispatch_ns: Ints
    submit_ns: Ints
    first_output_ns: Ints
    first_token_ns: Ints
    last_token_ns: Ints
    end_ns: Ints
    declared_input_tokens: Ints
    input_tokens: Ints
    output_tokens: Ints
    cached_tokens: Ints
    chunk_ns: Ints
    chunk_start: Ints
    server_queue_ms: Floats
    server_prefill_ms: Floats
    server_decode_ms: Floats
    server_ttft_ms: Floats
    server_e2e_ms: Floats


Requests = RequestLog | Columns
