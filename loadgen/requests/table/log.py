"""`RequestLog`: the columnar record of every request and every chunk."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from sidelight.rundir.columns import Bools, Floats, Ints, OnDemand, Texts, ragged

STATUSES = ("ok", "failed", "refused", "left", "cancelled", "in_flight")
NO_ERRORS = ("ok", "left")  # of these
DTYPES = {"Ints": np.int64, "Floats": np.float64, "Texts": np.object_, "Bools": np.bool_}  # of a column, by its type


@dataclass(frozen=True, kw_only=True)
class RequestLog(OnDemand):
    """Columns of n requests that were dispatched, by ascending index.

    Stamps (`_ns`) and counts are int64, -1 where missing; texts are object arrays of str, "" where there is none.

    held_ns                for how long the cap on requests in flight held a request back; 0 without a cap
    end_ns                 when the request ended; of a reply that was cut off behind its [DONE], when that was read
    chunk_ns, chunk_start  content stamps of request i: chunk_ns[chunk_start[i]:chunk_start[i + 1]]
    chunk_chars            characters of content in each of those chunks
    chunk_choice           of a reply of several choices, the choice of each of those chunks; of others nothing
    choices                choices that the model generated something for
    output_span_ns         of several choices: from the first to the last output of each, added up
    declared_input_tokens  what the plan wanted, in the declared tokenizer; input_tokens and output_tokens: server usage
    output_tokens_source   usage; timings: without usage, what the server's own timings count (llama.cpp's predicted_n);
                           estimate: with neither, a quarter of the characters of a whole reply (asiai, M4);
                           contradicted: by a usage that is not used; "" for none
    cached_tokens          prompt tokens that the server found in its prefix cache
    unseen_tokens          output tokens of reasoning that the usage states and no event brought
    reasoning_tokens       output tokens of reasoning, by the server's usage
    first_visible_ns       the first token that is not reasoning: of text, or of a call of a tool
    usage_*                what the server's usage stated, and what contradicts it as `kind: numbers`, several joined
                           by "; ": a count that is contradicted is -1 in the columns above
    retried                it was sent twice: the kept connection of the first time ended before any byte of a reply;
                           stamps are of the second time
    session, turn          -1 and 0 of a request that belongs to no session
    first_kind             what the first token was: content, reasoning or tool; "" when there was none
    response_id            the id that the server gave its reply
    timings_source         which engine reported the server_ columns (protocols.reading.timings.ServerTimings), or ""
    server_*               float64, NaN where the server said nothing; peak_memory_bytes is int64, -1
    draft*                 what the server said of speculative decoding: drafts verified, their tokens, those accepted
    status                 one of STATUSES
    error                  "kind: message"
    received_bytes         response bodies on the wire, framing included
    """

    index: Ints
    phase: Texts
    workload_class: Texts
    model: Texts
    endpoint_url: Texts
    request_id: Texts
    trace_id: Texts
    scheduled_ns: Ints
    dispatch_ns: Ints
    held_ns: Ints
    connected_ns: Ints
    submit_ns: Ints
    first_read_ns: Ints
    first_output_ns: Ints
    last_output_ns: Ints
    first_token_ns: Ints
    first_visible_ns: Ints
    last_token_ns: Ints
    end_ns: Ints
    declared_input_tokens: Ints
    max_tokens: Ints
    input_tokens: Ints
    output_tokens: Ints
    output_tokens_source: Texts
    status: Texts
    http_status: Ints
    error: Texts
    finish_reason: Texts
    worker: Ints
    reused: Bools
    retried: Bools
    role_only_first: Bools
    blank_before_first: Ints
    received_bytes: Ints
    chunk_ns: Ints = field(metadata=ragged("chunk_start"))
    chunk_start: Ints
    chunk_chars: Ints = field(metadata=ragged("chunk_start"))
    chunk_choice: Ints = field(metadata=ragged("choice_start"))
    choice_start: Ints
    choices: Ints
    output_span_ns: Ints
    unseen_tokens: Ints
    reasoning_tokens: Ints
    usage_input_tokens: Ints
    usage_output_tokens: Ints
    usage_cached_tokens: Ints
    usage_contradiction: Texts
    session: Ints
    turn: Ints
    first_kind: Texts
    response_id: Texts
    cached_tokens: Ints
    timings_source: Texts
    server_queue_ms: Floats
    server_prefill_ms: Floats
    server_decode_ms: Floats
    server_ttft_ms: Floats
    server_e2e_ms: Floats
    server_scheduler_intake_ms: Floats
    server_load_ms: Floats
    server_prompt_tps: Floats
    server_generation_tps: Floats
    peak_memory_bytes: Ints
    drafts: Ints
    draft_tokens: Ints
    draft_tokens_accepted: Ints

    def __len__(self) -> int:
        return len(self.index)


# The columns that are a time of a request: one value a row, no duration.
STAMPS = tuple(
    column.name
    for column in fields(RequestLog)
    if column.name.endswith("_ns") and not column.metadata and column.name not in ("held_ns", "output_span_ns")
)


def unknown_requests(size: int) -> RequestLog:
    """Return a table of `size` unknown requests, without chunks."""
    missing = {"Ints": -1, "Floats": np.nan, "Texts": "", "Bools": False}
    columns: dict[str, Any] = {
        column.name: np.full(0 if column.metadata else size, missing[str(column.type)], DTYPES[str(column.type)])
        for column in fields(RequestLog)
    }
    starts = dict.fromkeys(("chunk_start", "choice_start"), np.zeros(size + 1, dtype=np.int64))
    return RequestLog(**{**columns, **starts})
