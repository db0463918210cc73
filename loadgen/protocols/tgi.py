"""Text Generation Inference's native /generate_stream (SSE, an event a token), and what /generate answers, whole.

The last event has the whole text and the details. Special tokens are told apart by the server, and are no content.
"""

from __future__ import annotations

import msgspec

from loadgen.protocols.failures import NULL, failure_of
from loadgen.protocols.prompt import Prompt, Target, joined, with_extra
from loadgen.protocols.sse import SseEvent
from loadgen.protocols.stream import Form, Seen
from loadgen.protocols.timings import Count

# The words of the other protocols for the same.
_REASONS = {"eos_token": "stop", "stop_sequence": "stop"}


def encode_request(
    target: Target,
    prompt: Prompt,
    max_tokens: int,
    temperature: float,
    *,
    ignore_eos: bool = True,  # noqa: ARG001  # TGI has no such option: it always stops at the end of a sequence
) -> tuple[str, bytes]:
    """Path and JSON body; the endpoint serves one model and takes no name, no roles and no chat template.

    TGI refuses a temperature of 0, and decodes greedily without one.
    """
    parameters: dict[str, object] = {"max_new_tokens": max_tokens, "details": True, "decoder_input_details": False}
    if temperature > 0:
        parameters |= {"do_sample": True, "temperature": temperature}
    body = {"inputs": joined(prompt), "parameters": parameters}
    return "/generate_stream", msgspec.json.encode(with_extra(body, target))


class _Token(msgspec.Struct, gc=False):
    text: str = ""
    special: bool = False


class _Details(msgspec.Struct, gc=False):
    finish_reason: str = ""
    generated_tokens: Count | None = None
    input_length: Count | None = None
    prefill: list[msgspec.Raw] | None = None


class _Chunk(msgspec.Struct, gc=False):
    token: _Token | None = None
    generated_text: str | None = None
    details: _Details | None = None
    error: msgspec.Raw = NULL


_decode = msgspec.json.Decoder(_Chunk).decode


def _take(seen: Seen, event: SseEvent) -> None:
    """Add one event to what was seen. Raises what UNREADABLE lists."""
    chunk = _decode(event.data)
    if not _described(seen, chunk, event.name):
        return
    if chunk.token is not None:
        seen.say(event.end, "" if chunk.token.special else chunk.token.text)
    if chunk.generated_text is not None:
        seen.done_end = event.end


def _whole(seen: Seen, data: bytes) -> None:
    chunk = _decode(data)
    if _described(seen, chunk, ""):
        seen.texts.append(chunk.generated_text or "")


def _described(seen: Seen, chunk: _Chunk, event_name: str) -> bool:
    """Note all but the content; False when the event is an error."""
    if (message := failure_of(chunk.error, said=event_name == "error")) is not None:
        seen.fail(message)
        return False
    if (details := chunk.details) is not None:
        seen.finish_reason = _REASONS.get(details.finish_reason, details.finish_reason)
        inputs = details.input_length
        if inputs is None and details.prefill:
            inputs = len(details.prefill)
        seen.count(inputs, details.generated_tokens)
    return True


FORM = Form(take=_take, whole=_whole)
