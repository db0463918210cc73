"""Ollama's native /api/chat: a JSON object a line, the last of them with counts and durations in ns.

Zero durations and counts are left out by the server, so what is missing in a last line is unknown. Ollama has no way
to ignore the end of a sequence.
"""

from __future__ import annotations

import msgspec

from loadgen.protocols.reading.content import calls_tool
from loadgen.protocols.reading.events import SseEvent, lines
from loadgen.protocols.reading.failures import NULL, stated
from loadgen.protocols.reading.stream import Form, Seen
from loadgen.protocols.reading.timings import Count, ServerTimings
from loadgen.protocols.request import Asked, json_body, messages_of


def body(asked: Asked) -> bytes:
    """Write a chat; lengths and sampling stand in `options`."""
    fields = {
        "model": asked.target.model,
        "messages": messages_of(asked.prompt),
        "stream": True,
        "options": {"num_predict": asked.max_tokens, "temperature": asked.temperature},
    }
    return json_body(fields, asked.target)


class _Message(msgspec.Struct, gc=False):
    content: str = ""
    thinking: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Line(msgspec.Struct, gc=False):
    message: _Message | None = None
    done: bool = False
    done_reason: str | None = None
    error: msgspec.Raw = NULL
    total_duration: Count | None = None
    load_duration: Count | None = None
    prompt_eval_count: Count | None = None
    prompt_eval_duration: Count | None = None
    eval_count: Count | None = None
    eval_duration: Count | None = None


_decode = msgspec.json.Decoder(_Line).decode


def _take(seen: Seen, event: SseEvent) -> None:
    line = _decode(event.data)
    if (message := stated(line.error)) is not None:
        seen.fail(message)
        return
    said = line.message or _Message()
    calls = any(map(calls_tool, said.tool_calls or ()))
    # The last line's message is empty by design, and nothing was generated for it.
    if not line.done or said.content or said.thinking or calls:
        seen.say(event.end, said.content, said.thinking or "", tools=calls)
    if line.done:
        seen.finish(line.done_reason or "stop")  # older servers give none
        seen.count(line.prompt_eval_count, line.eval_count if seen.ends or seen.settled else line.eval_count or 0)
        seen.timings = _timings(line)
        seen.done_end = event.end


def _timings(line: _Line) -> ServerTimings:
    """Return the last line's times; the load time includes waiting for a runner, so it is not a queue time."""
    prefill_ms, decode_ms = _ms(line.prompt_eval_duration), _ms(line.eval_duration)
    return ServerTimings(
        source="ollama",
        load_ms=_ms(line.load_duration),
        prefill_ms=prefill_ms,
        decode_ms=decode_ms,
        e2e_ms=_ms(line.total_duration),
        prompt_tps=_per_s(line.prompt_eval_count, prefill_ms),
        generation_tps=_per_s(line.eval_count, decode_ms),
    )


def _ms(duration_ns: int | None) -> float:
    return float("nan") if duration_ns is None else duration_ns / 1e6


def _per_s(tokens: int | None, duration_ms: float) -> float:
    return tokens / duration_ms * 1e3 if tokens is not None and duration_ms > 0 else float("nan")


FORM = Form(kinds=frozenset({"application/x-ndjson"}), split=lines, breaks=(b"\n",), take=_take)
