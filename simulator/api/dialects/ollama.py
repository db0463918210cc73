"""Ollama's /api/chat: a JSON object a line, durations in ns on the last."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec

from sidelight.simulator.api.dialects.dialect import Dialect, Positive, generation, text_of
from sidelight.simulator.api.requests import ChatMessage, Generation, RefusedError, chat_token_ids, read
from sidelight.simulator.api.responses import ReplyInfo
from sidelight.simulator.engine.history import RequestRecord, TokenOutput
from sidelight.simulator.settings import SimulatorSettings


class _Options(msgspec.Struct):
    num_predict: Positive | None = None


class _OllamaRequest(msgspec.Struct):
    model: str
    messages: list[ChatMessage]
    stream: bool = True
    options: _Options = msgspec.field(default_factory=_Options)


def _read(body: bytes, settings: SimulatorSettings) -> Generation:
    wanted = read(body, _OllamaRequest)
    if wanted.model != settings.model:
        raise RefusedError(404, f"model '{wanted.model}' not found")
    # Ollama always stops at the end of a sequence.
    return generation(
        chat_token_ids(wanted.messages), wanted.options.num_predict, settings, ignore_eos=False, stream=wanted.stream
    )


def _event(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord | None) -> bytes:
    line = _line(info, text_of(outputs[-1:]), done=False)
    if record is not None:
        line += _line(info, "", done=True, **_measured(info, outputs, record))
    return line


def _whole(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord) -> bytes:
    return _line(info, text_of(outputs), done=True, **_measured(info, outputs, record))


def _measured(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord) -> dict[str, object]:
    """Return the counts and durations; the queue is in none of them, the load is nothing and so left out."""
    return {
        "done_reason": record.finish_reason,
        "total_duration": record.finished_ns - record.arrival_ns,
        "prompt_eval_count": info.prompt_tokens,
        "prompt_eval_duration": record.first_token_ns - record.scheduled_ns,
        "eval_count": len(outputs),
        "eval_duration": record.finished_ns - record.first_token_ns,
    }


def _line(info: ReplyInfo, text: str, *, done: bool, **measured: object) -> bytes:
    created_at = datetime.fromtimestamp(info.created_s, UTC).isoformat()
    message = {"role": "assistant", "content": text}
    line = {"model": info.model, "created_at": created_at, "message": message, "done": done, **measured}
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
