"""Times and token counts that servers report inside a reply, in one vocabulary. They are of the reply's own request.

Only what a server states, or what follows from it by the server's own definition. What cannot be read is left out: a
reply is not wrong because its extras are. Names and moments: docs/reference/protocols.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import field

from sidelight.loadgen.protocols.reading.failures import NULL, UNREADABLE

# A count beyond what a double holds exactly is nonsense, and beyond int64 it would not fit the log.
_MOST_TOKENS = 2**53
Count = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]

# Of counts that cannot be so.
UNREADABLE_COUNT = "that are no number of tokens"
CHANGED = "input tokens that change between chunks"
FELL = "a later count below an earlier one"

_OVERLAP_MS = 10.0

_Extra = TypeVar("_Extra", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTimings:
    """The server's own timings of a request, from its reply; NaN and -1 if missing.

    source             which server reported them: vllm, llamacpp, sglang, dynamo, tgi, ollama, exo, websocket
    queue_ms           waiting before the engine began with the prompt
    prefill_ms         from there to the first token
    decode_ms          from the first token to the last
    ttft_ms, e2e_ms    from the server's receipt of the request to its first and last token
    scheduler_intake_ms  from the server's API process to its scheduler, before the queue
    load_ms            until the model was loaded
    prompt_tps         prompt tokens/s of the prefill
    generation_tps     output tokens/s of the decode
    peak_memory_bytes  of the accelerator, so far
    drafts             of speculative decoding: those that were verified, each in a step of the model
    draft_tokens, draft_tokens_accepted  the tokens of these drafts, and of them those that the model kept
    """

    source: str
    queue_ms: float = math.nan
    prefill_ms: float = math.nan
    decode_ms: float = math.nan
    ttft_ms: float = math.nan
    e2e_ms: float = math.nan
    scheduler_intake_ms: float = math.nan
    load_ms: float = math.nan
    prompt_tps: float = math.nan
    generation_tps: float = math.nan
    peak_memory_bytes: int = -1
    drafts: int = -1
    draft_tokens: int = -1
    draft_tokens_accepted: int = -1


def succeeded(before: ServerTimings, stated: ServerTimings) -> ServerTimings:
    """Return the later of two statements on one reply, which knows more.

    A queue or a prefill that they state differently is infinite: no time that can be used, and refused as such.
    """
    pairs = {name: (getattr(before, name), getattr(stated, name)) for name in ("queue_ms", "prefill_ms")}
    changed: dict[str, Any] = {
        name: math.inf for name, pair in pairs.items() if pair[0] != pair[1] and not any(map(math.isnan, pair))
    }
    return replace(stated, **changed)


# Fields bear the names that the times have in ServerTimings.


class _Speculation(msgspec.Struct, gc=False):
    drafts: Count | None = field(default=None, name="num_spec_steps")
    draft_tokens: Count | None = field(default=None, name="num_draft_tokens")
    draft_tokens_accepted: Count | None = field(default=None, name="num_accepted_draft_tokens")


class _Vllm(msgspec.Struct, gc=False):
    speculative_decoding: msgspec.Raw = NULL
    queue_ms: float | None = field(default=None, name="queue_time_ms")
    # Runs from scheduling: it is the prefill, and no TTFT.
    prefill_ms: float | None = field(default=None, name="time_to_first_token_ms")
    decode_ms: float | None = field(default=None, name="generation_time_ms")


class LlamaCpp(msgspec.Struct, gc=False):
    """llama.cpp's `timings`; cache_n of the prompt were in the slot's cache.

    predicted_ms runs from the first token to the last, though predicted_n counts the first as well.
    """

    cache_n: Count | None = None
    predicted_n: Count | None = None
    prefill_ms: float | None = field(default=None, name="prompt_ms")
    decode_ms: float | None = field(default=None, name="predicted_ms")
    prompt_tps: float | None = field(default=None, name="prompt_per_second")
    generation_tps: float | None = field(default=None, name="predicted_per_second")


class WebSocket(msgspec.Struct, gc=False):
    """The `timings` of our own framing."""

    queue_ms: float | None = None
    prefill_ms: float | None = None
    decode_ms: float | None = None
    ttft_ms: float | None = None
    e2e_ms: float | None = None


class _DynamoTiming(msgspec.Struct, gc=False):
    queue_ms: float | None = field(default=None, name="prefill_wait_time_ms")
    prefill_ms: float | None = field(default=None, name="prefill_time_ms")
    ttft_ms: float | None = None
    e2e_ms: float | None = field(default=None, name="total_time_ms")


class _Dynamo(msgspec.Struct, gc=False):
    timing: _DynamoTiming | None = None


class SglangMeta(msgspec.Struct, gc=False):
    """SGLang's `meta_info`; durations in s, `_ts` and `_time` of a moment in Unix s."""

    id: str | None = None
    finish_reason: msgspec.Raw = msgspec.Raw(b"null")
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    cached_tokens: Count | None = None
    queue_time: float | None = None
    num_retractions: Count | None = None
    forward_entry_time: float | None = None
    prefill_finished_time: float | None = None
    api_server_dispatch_finish_ts: float | None = None
    first_token_latency: float | None = None
    decode_throughput: float | None = None
    e2e_latency: float | None = None
    spec_verify_ct: Count | None = None
    spec_num_proposed_drafts: Count | None = None
    spec_num_correct_drafts: Count | None = None


class _Memory(msgspec.Struct, gc=False):
    in_bytes: Count | None = None
    in_bytes_alias: Count | None = field(default=None, name="inBytes")


class _Exo(msgspec.Struct, gc=False):
    prompt_tps: float | None = None
    generation_tps: float | None = None
    prompt_tokens: Count | None = None
    generation_tokens: Count | None = None
    peak_memory_usage: _Memory | Count | None = None
    prefix_cache_hit: str | None = None


def timings_of(source: str, stated: msgspec.Struct | None) -> ServerTimings | None:
    """Return the times among a struct's fields; None where there are none."""
    fields = {} if stated is None else msgspec.structs.asdict(stated)
    times = {name: value for name, value in fields.items() if value is not None and name.endswith(("_ms", "_tps"))}
    return ServerTimings(source=source, **times) if times else None


def _drafted(drafts: int | None, tokens: int | None, accepted: int | None) -> dict[str, Any]:
    """Return the counts of speculative decoding; nothing where one is missing, or where they cannot be so."""
    if drafts is None or tokens is None or accepted is None or accepted > tokens:
        return {}
    return {"drafts": drafts, "draft_tokens": tokens, "draft_tokens_accepted": accepted}


def of_vllm(raw: bytes) -> ServerTimings | None:
    """Return the `metrics` of vLLM."""
    stated = _read(raw, _Vllm)
    times = timings_of("vllm", stated)
    drafts = _read(bytes(stated.speculative_decoding), _Speculation) if stated is not None else None
    counted = _drafted(*msgspec.structs.astuple(drafts)) if drafts is not None else {}
    return replace(times or ServerTimings(source="vllm"), **counted) if counted else times


def of_llamacpp(raw: bytes) -> tuple[ServerTimings | None, LlamaCpp]:
    """Return the times of llama.cpp's `timings`, and all of its fields."""
    stated = _read(raw, LlamaCpp) or LlamaCpp()
    return timings_of("llamacpp", stated), stated


def of_sglang(raw: bytes) -> ServerTimings | None:
    """Return SGLang's `meta_info`; without --enable-metrics it has only e2e_latency."""
    meta = _read(raw, SglangMeta)
    return None if meta is None else of_sglang_meta(meta)


def of_sglang_meta(meta: SglangMeta) -> ServerTimings | None:
    """Return the same of a `meta_info` that was read already; None while it has no times.

    The `queue_time` of a request that was retracted also holds its later waits, behind its first token: it is left out,
    and with it what lies between the API process and the queue. The decode is by the API process, as in its spans: the
    scheduler's stamps are earlier.
    """
    prefill_ms = _ms_between(meta.forward_entry_time, meta.prefill_finished_time)
    queue_ms = math.nan if meta.num_retractions else _float(meta.queue_time) * 1e3
    if meta.e2e_latency is None and meta.queue_time is None and math.isnan(prefill_ms):
        return None
    return ServerTimings(
        source="sglang",
        queue_ms=queue_ms,
        prefill_ms=prefill_ms,
        decode_ms=_ms_between(meta.first_token_latency, meta.e2e_latency),
        ttft_ms=_float(meta.first_token_latency) * 1e3,
        e2e_ms=_float(meta.e2e_latency) * 1e3,
        scheduler_intake_ms=_not_negative(
            _ms_between(meta.api_server_dispatch_finish_ts, meta.forward_entry_time) - queue_ms
        ),
        generation_tps=_float(meta.decode_throughput),
        **_drafted(meta.spec_verify_ct, meta.spec_num_proposed_drafts, meta.spec_num_correct_drafts),
    )


def of_dynamo(raw: bytes) -> ServerTimings | None:
    """Return Dynamo's `nvext.timing`, asked for by nvext.extra_fields."""
    extension = _read(raw, _Dynamo)
    return None if extension is None else timings_of("dynamo", extension.timing)


def of_exo(raw: bytes) -> ServerTimings | None:
    """Return exo's `generation_stats`.

    Its rates are defined as prompt tokens / prefill and (tokens - 1) / decode, so the times follow; not the prefill's
    where a prefix was cached, since an exact hit repeats the rate of an earlier run.
    """
    statistics = _read(raw, _Exo)
    if statistics is None or statistics == _Exo():
        return None
    memory = statistics.peak_memory_usage
    if isinstance(memory, _Memory):
        memory = memory.in_bytes if memory.in_bytes is not None else memory.in_bytes_alias
    uncached = statistics.prefix_cache_hit in {None, "none"}
    decoded = None if statistics.generation_tokens is None else statistics.generation_tokens - 1
    return ServerTimings(
        source="exo",
        prefill_ms=_ms_of(statistics.prompt_tokens, statistics.prompt_tps) if uncached else math.nan,
        decode_ms=_ms_of(decoded, statistics.generation_tps),
        prompt_tps=_float(statistics.prompt_tps),
        generation_tps=_float(statistics.generation_tps),
        peak_memory_bytes=-1 if memory is None else memory,
    )


def of_headers(headers: Mapping[str, str]) -> ServerTimings | None:
    """Return TGI's headers of a reply that is not streamed, in integer ms; inference is prefill and decode together."""
    queue, total = headers.get("x-queue-time"), headers.get("x-total-time")
    if queue is None and total is None:
        return None
    return ServerTimings(source="tgi", queue_ms=_number(queue), e2e_ms=_number(total))


def _read(raw: bytes, kind: type[_Extra]) -> _Extra | None:
    try:
        return msgspec.json.decode(raw, type=kind)
    except UNREADABLE:
        return None


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _number(text: str | None) -> float:
    try:
        return math.nan if text is None else float(text)
    except ValueError:
        return math.nan


def _ms_between(begin_s: float | None, end_s: float | None) -> float:
    return math.nan if begin_s is None or end_s is None else (end_s - begin_s) * 1e3


def _not_negative(time_ms: float) -> float:
    """Return a time between stamps of two processes, 0 for a small overlap.

    An overlap is small if it is within the uncertainty of the stamps; a greater one gives NaN.
    """
    return max(time_ms, 0.0) if time_ms >= -_OVERLAP_MS else math.nan


def _ms_of(tokens: int | None, per_s: float | None) -> float:
    return tokens / per_s * 1e3 if tokens is not None and per_s else math.nan


class UsageCounts(msgspec.Struct, frozen=True, gc=False):
    """The counts of one usage, None where missing. `unreadable` are values in place of a count, by its name."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    total_tokens: int | None = None
    unreadable: dict[str, str] = {}


_INPUT, _OUTPUT = ("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")
_INPUT_DETAILS, _OUTPUT_DETAILS = (tuple(f"{name}_details" for name in names) for names in (_INPUT, _OUTPUT))


def counts_of(usage: Any) -> UsageCounts:
    """Return the counts of a usage by the names of any OpenAI endpoint; it may be any JSON."""
    if not isinstance(usage, dict):
        return UsageCounts(unreadable={"output_tokens": _shown(usage)})
    inputs, outputs = _details(usage, _INPUT_DETAILS), _details(usage, _OUTPUT_DETAILS)
    counts, unreadable = {}, {}
    for name, value in (
        ("input_tokens", _first(usage, _INPUT)),
        ("output_tokens", _first(usage, _OUTPUT)),
        ("cached_tokens", inputs.get("cached_tokens", usage.get("cached_tokens"))),
        ("reasoning_tokens", outputs.get("reasoning_tokens", usage.get("reasoning_tokens"))),
        ("total_tokens", usage.get("total_tokens")),
    ):
        if value is None:
            continue
        if is_count(value):
            counts[name] = int(value)
        else:
            unreadable[name] = _shown(value)
    return UsageCounts(**counts, unreadable=unreadable)


def is_count(value: Any) -> bool:
    """Return whether a JSON value is a number of tokens; 20.0 is one."""
    return type(value) in (int, float) and 0 <= value <= _MOST_TOKENS and value == int(value)


def _first(usage: dict[str, Any], names: Sequence[str]) -> Any:
    value = usage.get(names[0])
    return usage.get(names[1]) if value is None else value


def _details(usage: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    details = _first(usage, names)
    return details if isinstance(details, dict) else {}


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:40]
