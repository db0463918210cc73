"""OpenAI's /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from simulator.api.dialects import Dialect, Positive, Told, generation, sse, text_of
from simulator.api.requests import ChatMessage, Generation, chat_token_ids, check_model, read
from simulator.api.responses import refused
from simulator.engine.history import RequestRecord, TokenOutput
from simulator.settings import SimulatorSettings


class _Request(msgspec.Struct):
    input: str | list[ChatMessage]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None


def _read(body: bytes, settings: SimulatorSettings) -> Generation:
    asked = read(body, _Request)
    check_model(asked.model, settings.model)
    messages = [ChatMessage(role="user", content=asked.input)] if isinstance(asked.input, str) else asked.input
    if asked.instructions is not None:
        messages = [ChatMessage(role="system", content=asked.instructions), *messages]
    return generation(
        chat_token_ids(messages),
        asked.max_output_tokens,
        settings,
        ignore_eos=bool(asked.ignore_eos),
        stream=bool(asked.stream),
    )


def _opening(told: Told) -> bytes:
    kinds = ("response.created", "response.in_progress")
    opened = b"".join(_typed(kind, response=_response(told, "in_progress")) for kind in kinds)
    item = {"id": f"msg-{told.response_id}", "type": "message", "role": "assistant", "content": []}
    return opened + _typed("response.output_item.added", output_index=0, item=item)


def _event(told: Told, outputs: Sequence[TokenOutput], record: RequestRecord | None) -> bytes:
    item = {"item_id": f"msg-{told.response_id}", "output_index": 0, "content_index": 0}
    delta = _typed("response.output_text.delta", **item, delta=text_of(outputs[-1:]))
    if record is None:
        return delta
    done = _typed("response.output_text.done", **item, text=text_of(outputs))
    kind = "response.completed" if record.finish_reason == "stop" else "response.incomplete"
    return delta + done + _typed(kind, response=_finished(told, outputs, record))


def _whole(told: Told, outputs: Sequence[TokenOutput], record: RequestRecord) -> bytes:
    return msgspec.json.encode(_finished(told, outputs, record))


def _finished(told: Told, outputs: Sequence[TokenOutput], record: RequestRecord) -> dict[str, object]:
    stopped = record.finish_reason == "stop"
    text = {"type": "output_text", "text": text_of(outputs), "annotations": []}
    return {
        **_response(told, "completed" if stopped else "incomplete"),
        "incomplete_details": None if stopped else {"reason": "max_output_tokens"},
        "output": [{"type": "message", "role": "assistant", "status": "completed", "content": [text]}],
        "usage": {
            "input_tokens": told.prompt_tokens,
            "input_tokens_details": {"cached_tokens": record.cached_tokens},
            "output_tokens": len(outputs),
            "total_tokens": told.prompt_tokens + len(outputs),
        },
    }


def _response(told: Told, status: str) -> dict[str, object]:
    return {
        "id": told.response_id,
        "object": "response",
        "created_at": told.created_s,
        "status": status,
        "model": told.model,
        "error": None,
    }


def _typed(kind: str, **fields: object) -> bytes:
    return sse({"type": kind, **fields}, name=kind)


def _failed(message: str) -> bytes:
    failed = {"status": "failed", "error": {"code": "server_error", "message": message}}
    return _typed("response.failed", response=failed)


DIALECT = Dialect(
    prefix="resp", read=_read, opening=_opening, event=_event, whole=_whole, failed=_failed, refused=refused
)
