"""Ollama's /api/chat: a JSON object a line, durations in ns on the last."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from simulator.api.dialects import Dialect, Positive, Told, generation, text_of
from simulator.api.requests import ChatMessage, Generation, RefusedError, chat_token_ids, read
from simulator.engine.history import RequestRecord, TokenOutput
from simulator.settings import SimulatorSettings


class _Options(msgspec.Struct):
    num_predict: Positive | None = None


class _Request(msgspec.Struct):
    model: str
    messages: list[ChatMessage]
    stream: bool = True
    options: _Options = msgspec.field(default_factory=_Options)


def _read(body: bytes, settings: SimulatorSettings) -> Generation:
    asked = read(body, _Request)
    if asked.model != settings.model:
        raise RefusedError(404, f"model '{asked.model}' not found")
    # Ollama always stops at the end of a sequence.
    return generation(
        chat_token_ids(asked.messages), asked.options.num_predict, settings, ignore_eos=False, stream=asked.stream
    )


def _event(told: Told, outputs: Sequence[TokenOutput], record: RequestRecord | None) -> bytes:
    line = _line(told, text_of(outputs[-1:]), done=False)
    if record is not None:
        line += _line(told, "", done=True, **_measured(told, outputs, record))
    return line


def _whole(told: Told, outputs: Sequence[TokenOutput], record: RequestRecord) -> bytes:
    return _line(told, text_of(outputs), done=True, **_measured(told, outputs, record))


def _measured(told: Told, outputs: Sequence[TokenOutput], record: RequestRecord) -> dict[str, object]:
    """Return the counts and durations; the queue is in none of them, the load is nothing and so left out."""
    return {
        "done_reason": record.finish_reason,
        "total_duration": record.finished_ns - record.arrival_ns,
        "prompt_eval_count": told.prompt_tokens,
        "prompt_eval_duration": record.first_token_ns - record.scheduled_ns,
        "eval_count": len(outputs),
        "eval_duration": record.finished_ns - record.first_token_ns,
    }


def _line(told: Told, text: str, *, done: bool, **measured: object) -> bytes:
    created_at = datetime.fromtimestamp(told.created_s, UTC).isoformat()
    message = {"role": "assistant", "content": text}
    line = {"model": told.model, "created_at": created_at, "message": message, "done": done, **measured}
    return msgspec.json.encode(line) + b"\n"


def _failed(message: str) -> bytes:
    return msgspec.json.encode({"error": message}) + b"\n"


def _refused(error: RefusedError) -> tuple[int, bytes]:
    return error.status, msgspec.json.encode({"error": error.message})


DIALECT = Dialect(
    prefix="ollama",
    content_type="application/x-ndjson",
    read=_read,
    event=_event,
    whole=_whole,
    failed=_failed,
    refused=_refused,
)
