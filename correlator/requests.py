"""What is read of requests, whoever made the table: a run's log, or the spans of clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from correlator.live.client_spans import ClientSpan
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
