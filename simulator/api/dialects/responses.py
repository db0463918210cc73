"""OpenAI's /v1/responses."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sidelight.simulator.api.dialects.dialect import Dialect, Positive, generation, sse, text_of
from sidelight.simulator.api.requests import ChatMessage, Generation, chat_token_ids, check_model, read
from sidelight.simulator.api.responses import ReplyInfo, refused
from sidelight.simulator.engine.history import RequestRecord, TokenOutput
from sidelight.simulator.settings import SimulatorSettings


class _ResponsesRequest(msgspec.Struct):
    input: str | list[ChatMessage]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None


def _read(body: bytes, settings: SimulatorSettings) -> Generation:
    wanted = read(body, _ResponsesRequest)
    check_model(wanted.model, settings.only_model)
    messages = [ChatMessage(role="user", content=wanted.input)] if isinstance(wanted.input, str) else wanted.input
    if wanted.instructions is not None:
        messages = [ChatMessage(role="system", content=wanted.instructions), *messages]
    return generation(
        chat_token_ids(messages),
        wanted.max_output_tokens,
        settings,
        ignore_eos=bool(wanted.ignore_eos),
        stream=bool(wanted.stream),
    )


def _opening(info: ReplyInfo) -> bytes:
    kinds = ("response.created", "response.in_progress")
    opened = b"".join(_typed(kind, response=_response(info, "in_progress")) for kind in kinds)
    item = {"id": f"msg-{info.response_id}", "type": "message", "role": "assistant", "content": []}
    return opened + _typed("response.output_item.added", output_index=0, item=item)


def _event(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord | None) -> bytes:
    item = {"item_id": f"msg-{info.response_id}", "output_index": 0, "content_index": 0}
    delta = _typed("response.output_text.delta", **item, delta=text_of(outputs[-1:]))
    if record is None:
        return delta
    done = _typed("response.output_text.done", **item, text=text_of(outputs))
    kind = "response.completed" if record.finish_reason == "stop" else "response.incomplete"
    return delta + done + _typed(kind, response=_finished(info, outputs, record))


def _whole(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord) -> bytes:
    return msgspec.json.encode(_finished(info, outputs, record))


def _finished(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord) -> dict[str, object]:
    stopped = record.finish_reason == "stop"
    text = {"type": "output_text", "text": text_of(outputs), "annotations": []}
    return {
        **_response(info, "completed" if stopped else "incomplete"),
        "incomplete_details": None if stopped else {"reason": "max_output_tokens"},
        "output": [{"type": "message", "role": "assistant", "status": "completed", "content": [text]}],
        "usage": {
            "input_tokens": info.prompt_tokens,
            "input_tokens_details": {"cached_tokens": record.cached_tokens},
            "output_tokens": len(outputs),
            "total_tokens": info.prompt_tokens + len(outputs),
        },
    }


def _response(info: ReplyInfo, status: str) -> dict[str, object]:
    return {
        "id": info.response_id,
        "object": "response",
        "created_at": info.created_s,
        "status": status,
        "model": info.model,
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
