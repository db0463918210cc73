"""TGI's /generate_stream and /generate: an event a token, the last one with the details."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from sidelight.simulator.api.dialects.dialect import Dialect, Positive, generation, sse, text_of
from sidelight.simulator.api.requests import Generation, RefusedError, read
from sidelight.simulator.api.responses import ReplyInfo
from sidelight.simulator.engine.history import RequestRecord, TokenOutput
from sidelight.simulator.engine.tokenizer import END_OF_SEQUENCE, encode
from sidelight.simulator.settings import SimulatorSettings

_DEFAULT_MAX_NEW_TOKENS = 100
# TGI calls its own refusals validation errors.
_UNPROCESSABLE = 422


class _Parameters(msgspec.Struct):
    max_new_tokens: Positive = _DEFAULT_MAX_NEW_TOKENS


class _TgiRequest(msgspec.Struct):
    inputs: str
    parameters: _Parameters = msgspec.field(default_factory=_Parameters)


def _read(body: bytes, settings: SimulatorSettings) -> Generation:
    wanted = read(body, _TgiRequest)
    limit = wanted.parameters.max_new_tokens
    return generation(encode(wanted.inputs), limit, settings, ignore_eos=False, stream=False)


def _read_streamed(body: bytes, settings: SimulatorSettings) -> Generation:
    return replace(_read(body, settings), stream=True)


def _event(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord | None) -> bytes:
    last = outputs[-1]
    special = last.token_id == END_OF_SEQUENCE
    text = "</s>" if special else text_of([last])
    chunk: dict[str, object] = {
        "index": last.output_tokens,
        "token": {"id": last.token_id, "text": text, "logprob": 0.0, "special": special},
        "generated_text": None,
        "details": None,
    }
    if record is not None:
        chunk |= {"generated_text": text_of(outputs), "details": _details(info, outputs, record)}
    return sse(chunk)


def _whole(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord) -> bytes:
    return msgspec.json.encode({"generated_text": text_of(outputs), "details": _details(info, outputs, record)})


def _details(info: ReplyInfo, outputs: Sequence[TokenOutput], record: RequestRecord) -> dict[str, object]:
    reason = "eos_token" if record.finish_reason == "stop" else record.finish_reason
    return {
        "finish_reason": reason,
        "generated_tokens": len(outputs),
        "input_length": info.prompt_tokens,
        "seed": None,
    }


def _failed(message: str) -> bytes:
    return sse({"error": f"Request failed during generation: {message}", "error_type": "generation"})


def _refused(error: RefusedError) -> tuple[int, bytes]:
    body = {"error": f"Input validation error: {error.message}", "error_type": "validation"}
    return _UNPROCESSABLE, msgspec.json.encode(body)


WHOLE = Dialect(prefix="tgi", read=_read, event=_event, whole=_whole, failed=_failed, refused=_refused)
STREAMED = replace(WHOLE, read=_read_streamed)
