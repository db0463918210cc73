"""Ollama's native /api/chat: a JSON object a line, the last of them with counts and durations in ns.

Zero durations and counts are left out by the server, so what is missing in a last line is unknown. Ollama has no way
to ignore the end of a sequence.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sidelight.loadgen.protocols.reading.content import calls_tool
from sidelight.loadgen.protocols.reading.events import SseEvent, lines
from sidelight.loadgen.protocols.reading.failures import NULL, stated
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState
from sidelight.loadgen.protocols.reading.timings import ServerTimings, is_count
from sidelight.loadgen.protocols.request import RequestContent, json_body, messages_of


def body(asked: RequestContent) -> bytes:
    """Write a chat; lengths and sampling stand in `options`."""
    fields = {
        "model": asked.target.model,
        "messages": messages_of(asked.prompt),
        "stream": True,
        "options": {"num_predict": asked.max_tokens, "temperature": asked.temperature},
    }
    return json_body(fields, asked.target)


class _OllamaMessage(msgspec.Struct, gc=False):
    content: str = ""
    thinking: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Line(msgspec.Struct, gc=False):
    message: _OllamaMessage | None = None
    done: bool = False
    done_reason: str | None = None
    error: msgspec.Raw = NULL
    total_duration: Any = None
    load_duration: Any = None
    prompt_eval_count: Any = None
    prompt_eval_duration: Any = None
    eval_count: Any = None
    eval_duration: Any = None


_decode = msgspec.json.Decoder(_Line).decode


def _take(seen: ReplyState, event: SseEvent) -> None:
    line = _decode(event.data)
    if (message := stated(line.error)) is not None:
        seen.fail(message)
        return
    said = line.message or _OllamaMessage()
    calls = any(map(calls_tool, said.tool_calls or ()))
    # The last line's message is empty by design, and nothing was generated for it; some repeat the whole reply there.
    repeats = line.done and len(seen.texts) > 1 and said.content == "".join(seen.texts)
    if not repeats and (not line.done or said.content or said.thinking or calls):
        seen.say(event.end, said.content, said.thinking or "", tools=calls)
    if line.done:
        seen.finish(line.done_reason or "stop")  # older servers give none
        generated = 0 if line.eval_count is None and not (seen.ends or seen.settled) else line.eval_count
        seen.usage({"prompt_tokens": line.prompt_eval_count, "completion_tokens": generated})
        seen.time(_timings(line))
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


def _ms(duration_ns: Any) -> float:
    """Return a time in ms, NaN if it cannot be read.

    A time below 0 is returned too: it is refused with its reason where parts are made of it.
    """
    return duration_ns / 1e6 if isinstance(duration_ns, int | float) and is_count(abs(duration_ns)) else float("nan")


def _per_s(tokens: Any, duration_ms: float) -> float:
    return tokens / duration_ms * 1e3 if is_count(tokens) and duration_ms > 0 else float("nan")


FORM = Form(kinds=frozenset({"application/x-ndjson"}), split=lines, breaks=(b"\n",), take=_take)
