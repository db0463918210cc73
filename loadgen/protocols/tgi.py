"""Text Generation Inference's native /generate_stream, and the replies of /generate.

The stream is SSE, an event a token; /generate answers whole.

The last event has the whole text and the details. The server marks special tokens, which are not content.
TGI has no way to ignore the end of a sequence.
"""

from __future__ import annotations

import msgspec

from sidelight.loadgen.protocols.reading.failures import Payload
from sidelight.loadgen.protocols.reading.stream import Form, ReplyState, reader
from sidelight.loadgen.protocols.reading.timings import Count
from sidelight.loadgen.protocols.request import RequestContent, joined, json_body

# The words of the other protocols for the same.
_REASONS = {"eos_token": "stop", "stop_sequence": "stop"}


def body(asked: RequestContent) -> bytes:
    """Write a request; the endpoint serves one model and takes no name, no roles and no chat template.

    TGI refuses a temperature of 0, and decodes greedily without one.
    """
    parameters: dict[str, object] = {
        "max_new_tokens": asked.max_tokens,
        "details": True,
        "decoder_input_details": False,
    }
    if asked.temperature > 0:
        parameters |= {"do_sample": True, "temperature": asked.temperature}
    return json_body({"inputs": joined(asked.prompt), "parameters": parameters}, asked.target)


class _Token(msgspec.Struct, gc=False):
    text: str = ""
    special: bool = False


class _Details(msgspec.Struct, gc=False):
    finish_reason: str = ""
    generated_tokens: Count | None = None
    input_length: Count | None = None
    prefill: list[msgspec.Raw] | None = None


class _TgiChunk(Payload, gc=False):
    token: _Token | None = None
    generated_text: str | None = None
    details: _Details | None = None


def _take(seen: ReplyState, chunk: _TgiChunk, end: int) -> None:
    if (details := chunk.details) is not None:
        seen.finish(_REASONS.get(details.finish_reason, details.finish_reason))
        inputs = details.input_length
        if inputs is None and details.prefill:
            inputs = len(details.prefill)
        seen.count(inputs, details.generated_tokens)
    if chunk.token is not None:
        seen.say(end, "" if chunk.token.special else chunk.token.text)
    elif chunk.generated_text is not None:
        seen.texts.append(chunk.generated_text)
    if chunk.generated_text is not None:
        seen.done_end = end


FORM = Form(take=reader(_TgiChunk, _take))
