"""The engines' own endpoints beside OpenAI's chat and completions: how each is asked and how it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from sidelight.simulator.api.requests import Generation, RefusedError, fitting_max_tokens
from sidelight.simulator.api.responses import ReplyInfo
from sidelight.simulator.engine.history import RequestRecord, TokenOutput
from sidelight.simulator.engine.tokenizer import decode
from sidelight.simulator.settings import SimulatorSettings

SSE = "text/event-stream"
Positive = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One endpoint's language.

    prefix   of response ids
    read     what a body asks for; raises RefusedError
    opening  the bytes before the first token
    whole    the body of a reply that is not streamed
    event    the bytes of outputs[-1], of all so far; the record comes with the last one, which ends the stream; None
             where there are no streams
    failed   the bytes that tell of an error in the middle of a stream
    refused  status and body of a refusal
    """

    prefix: str
    content_type: str = SSE
    read: Callable[[bytes, SimulatorSettings], Generation]
    opening: Callable[[ReplyInfo], bytes] = lambda _: b""
    whole: Callable[[ReplyInfo, Sequence[TokenOutput], RequestRecord], bytes]
    event: Callable[[ReplyInfo, Sequence[TokenOutput], RequestRecord | None], bytes] | None = None
    failed: Callable[[str], bytes] = lambda _: b""
    refused: Callable[[RefusedError], tuple[int, bytes]]


def generation(
    token_ids: Sequence[int], limit: int | None, settings: SimulatorSettings, *, ignore_eos: bool, stream: bool
) -> Generation:
    """Return a request for that prompt. Raises RefusedError (400) for an empty one and for one that does not fit."""
    if not token_ids:
        raise RefusedError(400, "the prompt must not be empty")
    return Generation(
        prompt_token_ids=tuple(token_ids),
        max_tokens=fitting_max_tokens(len(token_ids), limit, settings.engine_settings.max_model_len),
        ignore_eos=ignore_eos,
        stream=stream,
    )


def text_of(outputs: Sequence[TokenOutput]) -> str:
    return decode(output.token_id for output in outputs)


def sse(payload: object, *, name: str = "") -> bytes:
    head = f"event: {name}\n".encode() if name else b""
    return b"%bdata: %b\n\n" % (head, msgspec.json.encode(payload))
