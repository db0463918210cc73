"""Writing replies of the OpenAI-compatible endpoints, as vLLM's bytes.

A stream is one event for the tokens of a step: one, or several with speculative decoding. All that is constant in an
event is encoded once a request, because this process shares its cores with the load generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from sidelight.simulator.api.requests import RefusedError
from sidelight.simulator.engine.history import RequestRecord, TokenOutput
from sidelight.simulator.engine.replies import TOKEN_IDS, WORDS
from sidelight.simulator.engine.tokenizer import END_OF_SEQUENCE

DONE = b"data: [DONE]\n\n"

#: The text of a token inside a JSON string: the words need no escapes.
_TEXT = {END_OF_SEQUENCE: b""} | {token_id: word.encode() for token_id, word in zip(TOKEN_IDS, WORDS, strict=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyInfo:
    """Constants of a reply's events: id, model, creation time, prompt length, the first tokens that are reasoning."""

    response_id: str
    model: str
    created_s: int
    prompt_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EventTemplate:
    """The parts of a request's stream that are the same in every event.

    `opening` is the role-only event that precedes the first token of a chat, empty for completions. The first
    `reasoning_tokens` are reasoning.
    """

    opening: bytes
    before_text: bytes
    before_reasoning: bytes
    after_text: bytes
    after_last_text: dict[str, bytes]
    head: bytes
    prompt_tokens: int
    reasoning_tokens: int
    continuous_usage: bool


def event_template(info: ReplyInfo, *, chat: bool, continuous_usage: bool, choice: int = 0) -> EventTemplate:
    kind = "chat.completion.chunk" if chat else "text_completion"
    fields = {"id": info.response_id, "object": kind, "created": info.created_s, "model": info.model}
    head = b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":['
    index = b'{"index":%d,' % choice
    text = index + (b'"delta":{"content":"' if chat else b'"text":"')
    closing = b'"},"logprobs":null,"finish_reason":%b%b}]' if chat else b'","logprobs":null,"finish_reason":%b%b}]'
    opening = b""
    if chat:
        opening = head + index
        opening += b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        opening += (b',"usage":' + usage(info.prompt_tokens, 0) if continuous_usage else b"") + b"}\n\n"
    return EventTemplate(
        opening=opening,
        before_text=head + text,
        before_reasoning=head + index + b'"delta":{"reasoning":"',
        # vLLM shows stop_reason in every completions chunk, but in a chat only beside a finish_reason.
        after_text=closing % (b"null", b"" if chat else b',"stop_reason":null'),
        after_last_text={
            reason: closing % (b'"%b"' % reason.encode(), b',"stop_reason":null') for reason in ("stop", "length")
        },
        head=head,
        prompt_tokens=info.prompt_tokens,
        reasoning_tokens=info.reasoning_tokens if chat else 0,
        continuous_usage=continuous_usage,
    )


def token_events(template: EventTemplate, outputs: Sequence[TokenOutput]) -> bytes:
    """Return an event for the tokens of each step; before the first token of a chat comes the role-only event."""
    visible = template.reasoning_tokens + 1
    begins = [
        at
        for at, output in enumerate(outputs)
        if at == 0 or output.interval_ns is not None or output.output_tokens == visible
    ]
    return b"".join(_event(template, outputs[begin:end]) for begin, end in pairwise([*begins, len(outputs)]))


def _event(template: EventTemplate, outputs: Sequence[TokenOutput]) -> bytes:
    output = outputs[-1]
    reason = output.finish_reason
    parts = [
        template.opening if outputs[0].output_tokens == 1 else b"",
        template.before_reasoning if output.output_tokens <= template.reasoning_tokens else template.before_text,
        *(_TEXT[each.token_id] for each in outputs),
        template.after_text if reason is None else template.after_last_text[reason],
    ]
    if template.continuous_usage:
        parts += [b',"usage":', usage(template.prompt_tokens, output.output_tokens, None, template.reasoning_tokens)]
    parts.append(b"}\n\n")
    return b"".join(parts)


def usage_event(
    template: EventTemplate,
    output_tokens: int,
    record: RequestRecord | None = None,
    drafted: RequestRecord | None = None,
) -> bytes:
    """Return the usage event, without choices, with a request's times and drafts if wanted."""
    stated = usage(template.prompt_tokens, output_tokens, record, template.reasoning_tokens)
    return template.head + b'],"usage":' + stated + _metrics(record, drafted) + b"}\n\n"


def usage(
    prompt_tokens: int, output_tokens: int, record: RequestRecord | None = None, reasoning_tokens: int = 0
) -> bytes:
    """Return the usage object, with a record's cached tokens, and with any reasoning tokens."""
    details = b"" if record is None else b',"prompt_tokens_details":{"cached_tokens":%d}' % record.cached_tokens
    if reasoning_tokens:
        details += b',"completion_tokens_details":{"reasoning_tokens":%d}' % min(reasoning_tokens, output_tokens)
    return b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%b}' % (
        prompt_tokens,
        prompt_tokens + output_tokens,
        output_tokens,
        details,
    )


def _metrics(record: RequestRecord | None, drafted: RequestRecord | None) -> bytes:
    """Return vLLM's per-request metrics: the times of one record, the drafts of the other."""
    fields: dict[str, object] = {} if record is None else _times(record)
    if drafted is not None and drafted.accepted:
        drafts, tokens = sum(drafted.accepted), drafted.accepted_tokens
        fields["speculative_decoding"] = {
            "mean_acceptance_length": 1 + tokens / drafts,
            "draft_acceptance_rate": tokens / drafted.draft_tokens,
            "acceptance_histogram": drafted.accepted,
            "num_spec_steps": drafts,
            "num_accepted_draft_tokens": tokens,
            "num_draft_tokens": drafted.draft_tokens,
            "num_spec_tokens": len(drafted.accepted) - 1,
        }
    return b',"metrics":' + msgspec.json.encode(fields) if fields else b""


def _times(record: RequestRecord) -> dict[str, object]:
    """Return the times of a request. What vLLM calls time to first token begins with the scheduling."""
    decode_ms = (record.finished_ns - record.first_token_ns) / 1e6
    return {
        "time_to_first_token_ms": (record.first_token_ns - record.scheduled_ns) / 1e6,
        "queue_time_ms": (record.scheduled_ns - record.queued_ns) / 1e6,
        "generation_time_ms": decode_ms,
        "mean_itl_ms": decode_ms / (record.output_tokens - 1) if record.output_tokens > 1 else None,
        "tokens_per_second": record.output_tokens / record.inference_s if record.inference_s > 0 else None,
    }


def whole_reply(
    info: ReplyInfo,
    outputs: Sequence[TokenOutput],
    *,
    chat: bool,
    record: RequestRecord | None = None,
    drafted: RequestRecord | None = None,
) -> bytes:
    """Return the body of an unstreamed reply, with a request's times and drafts if wanted."""
    thought = info.reasoning_tokens if chat else 0
    text = b"".join(_TEXT[output.token_id] for output in outputs[thought:]).decode()
    reasoning = b"".join(_TEXT[output.token_id] for output in outputs[:thought]).decode()
    choice: dict[str, object] = {"index": 0}
    said = {"role": "assistant", "content": text} | ({"reasoning": reasoning} if thought else {})
    choice |= {"message": said} if chat else {"text": text}
    choice |= {"logprobs": None, "finish_reason": outputs[-1].finish_reason, "stop_reason": None}
    reply = msgspec.json.encode(
        {
            "id": info.response_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": info.created_s,
            "model": info.model,
            "choices": [choice],
            "usage": msgspec.Raw(usage(info.prompt_tokens, len(outputs), record, thought)),
        }
    )
    return reply[:-1] + _metrics(record, drafted) + b"}"


def refused(error: RefusedError) -> tuple[int, bytes]:
    fields = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
    return error.status, msgspec.json.encode({"error": fields})
