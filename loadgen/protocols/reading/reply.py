"""What a reply said and when, whatever protocol it came by."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from rundir.columns import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimings:
    """What the server told of this very request inside its reply; NaN and -1 where it did not.

    source             whose words they are: vllm, llamacpp, sglang, dynamo, tgi, ollama, exo, websocket
    queue_ms           waiting before the engine began with the prompt
    prefill_ms         from there to the first token
    decode_ms          from the first token to the last
    ttft_ms, e2e_ms    from the server's receipt of the request to its first and last token
    load_ms            until the model was loaded
    prompt_tps         prompt tokens/s of the prefill
    generation_tps     output tokens/s of the decode
    peak_memory_bytes  of the accelerator, so far
    """

    source: str
    queue_ms: float = math.nan
    prefill_ms: float = math.nan
    decode_ms: float = math.nan
    ttft_ms: float = math.nan
    e2e_ms: float = math.nan
    load_ms: float = math.nan
    prompt_tps: float = math.nan
    generation_tps: float = math.nan
    peak_memory_bytes: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one reply said and when; stamps and counts are -1 where missing.

    first_output_ns     the first event the model generated something for, if only blanks or nothing visible
    last_output_ns      the last such event
    first_kind          what the first token was: content, reasoning or tool; "" when there was none
    chunk_ns            int64[m]: one stamp an event with content that is not empty (blank ones included)
    chunk_chars         int64[m]: characters in each of those events, of reasoning too; 0 of a tool call
    output_tokens       by the server's usage
    timed_tokens        output tokens that the server's timings are of (llama.cpp's predicted_n)
    cached_tokens       prompt tokens that the server found in its prefix cache
    complete            a finish reason or the protocol's last event was seen, and no error
    done                the protocol's last event ([DONE]) was seen, or a whole JSON reply
    done_ns             when that event, or the last byte of a whole JSON reply, was read
    error               "" or "kind: message", kind http_<status>, server (an error event under 200) or protocol
    role_only_first     the first event carried a role and no content
    blank_before_first  content events before the first token: whitespace only
    """

    first_output_ns: int = -1
    last_output_ns: int = -1
    first_token_ns: int = -1
    last_token_ns: int = -1
    first_kind: str = ""
    chunk_ns: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    chunk_chars: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    output_tokens: int = -1
    input_tokens: int = -1
    cached_tokens: int = -1
    timed_tokens: int = -1
    finish_reason: str = ""
    error: str = ""
    complete: bool = False
    done: bool = False
    done_ns: int = -1
    role_only_first: bool = False
    blank_before_first: int = 0
    response_id: str = ""
    timings: ServerTimings | None = None
