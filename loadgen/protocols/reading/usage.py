"""Token counts stated by a server, and evidence against them. A usage is a witness, not the judge.

A count is doubted, and then not used, where what came with it cannot be so. Bounds are wide, since tokens may show no
text, gateways may cut chunks anew, and templates and gateways add to prompts.
"""

from __future__ import annotations

from typing import NamedTuple

from sidelight.loadgen.protocols.reading.reply import Reply
from sidelight.loadgen.protocols.reading.timings import FELL
from sidelight.loadgen.records import PlannedRequest

_CHARACTERS_A_TOKEN = 4  # of an estimate
# Of a character, a byte each; of an event without text, as speculation sends them; of a choice: special tokens.
_A_CHARACTER, _A_SILENT_EVENT, _A_CHOICE = 4, 8, 16
# Chunks with text beyond the tokens: of a call of a tool, or of a token that is both reasoning and content.
_MORE_CHUNKS, _MORE_CHUNKS_SHARE = 4, 4
_ADDED_TOKENS = 16_384  # to a prompt by templates and gateways
_LESS_THAN_DECLARED = 4  # times: tokenizers differ
_LEAST_STATEMENTS = 3


class Contradictions(NamedTuple):
    """Evidence against the counts of a reply, as `kind: numbers`; "" where there is none.

    `total` takes no count away: hidden reasoning may stand in it alone.
    """

    output: str = ""
    input: str = ""
    cached: str = ""
    total: str = ""


def contradictions(reply: Reply, asked: PlannedRequest, *, sent_bytes: int, received_bytes: int) -> Contradictions:
    """Return the evidence against the token counts of a whole reply.

    `sent_bytes` is the size of its request's body, -1 where not known.
    """
    return Contradictions(
        output=reply.doubts.get("output_tokens") or _of_output(reply, asked.max_tokens, received_bytes),
        input=reply.doubts.get("input_tokens") or _of_input(reply, asked.input_tokens, sent_bytes),
        cached=reply.doubts.get("cached_tokens") or _of_cached(reply),
        total=_of_total(reply),
    )


def _of_output(reply: Reply, max_tokens: int, received_bytes: int) -> str:
    tokens, chunks, choices = _stated_output(reply), len(reply.chunk_ns), max(reply.choices, 1)
    if tokens < 0:
        return ""
    if tokens == 0 and chunks:
        return f"0 output tokens beside text: {chunks:,} chunks, {int(reply.chunk_chars.sum()):,} characters"
    if choices == 1 and (fell := reply.doubts.get(FELL)):  # elsewhere each choice may have counts of its own
        return fell
    if reply.reasoning_tokens > tokens:
        return f"more reasoning tokens than output tokens: {reply.reasoning_tokens:,} of {tokens:,}"
    # What a server generates beyond the limit comes as events.
    if 0 <= max_tokens * choices < tokens and tokens > chunks + reply.silent_events:
        return f"more output tokens than max_tokens allows: {tokens:,} for {max_tokens * choices:,}"
    return _beside_text(reply, tokens, chunks, choices, received_bytes)


def _stated_output(reply: Reply) -> int:
    """Return the output tokens of the usage, else of the timings, else -1."""
    return reply.output_tokens if reply.output_tokens >= 0 else reply.timed_tokens


def _beside_text(reply: Reply, tokens: int, chunks: int, choices: int, received_bytes: int) -> str:
    if not chunks:
        return ""
    unseen = _A_SILENT_EVENT * reply.silent_events + _A_CHOICE * choices + max(reply.reasoning_tokens, 0)
    if tokens > chunks + unseen:  # each of which has a character at least, or is a call of a tool
        chars = int(reply.chunk_chars.sum())
        # A call of a tool counts no characters.
        of_tools = received_bytes if not reply.chunk_chars.all() else 0
        if tokens > _A_CHARACTER * chars + of_tools + unseen:
            return f"more output tokens than the text can hold: {tokens:,} in {chars:,} characters"
    if chunks > tokens + max(_MORE_CHUNKS, tokens // _MORE_CHUNKS_SHARE):
        return f"fewer output tokens than chunks with text: {tokens:,} in {chunks:,} chunks"
    stated = reply.statements >= max(_LEAST_STATEMENTS, chunks // 2)
    if choices == 1 and stated and not reply.grew and chunks >= _LEAST_STATEMENTS:
        return f"output tokens that never grow: {tokens:,} in each of {reply.statements:,} chunks"
    return ""


def _of_input(reply: Reply, declared_tokens: int, sent_bytes: int) -> str:
    tokens = reply.input_tokens
    if tokens < 0:
        return ""
    if tokens == 0:
        return "0 input tokens"
    if tokens > sent_bytes + _ADDED_TOKENS and sent_bytes >= 0:
        return f"more input tokens than the request has bytes: {tokens:,} for {sent_bytes:,}"
    if tokens * _LESS_THAN_DECLARED < declared_tokens:
        return f"far fewer input tokens than the tokenizer counted: {tokens:,} of {declared_tokens:,}"
    return ""


def _of_cached(reply: Reply) -> str:
    # SGLang adds up what each choice found in the cache.
    if 0 <= reply.input_tokens * max(reply.choices, 1) < reply.cached_tokens:
        return f"more cached tokens than input tokens: {reply.cached_tokens:,} of {reply.input_tokens:,}"
    return ""


def _of_total(reply: Reply) -> str:
    parts = (reply.input_tokens, reply.output_tokens)
    if min(*parts, reply.total_tokens) < 0 or reply.total_tokens == sum(parts):
        return ""
    return f"total_tokens is not input and output together: {reply.total_tokens:,} for {parts[0]:,} and {parts[1]:,}"


def output_tokens(reply: Reply, status: str, contradiction: str) -> tuple[int, str]:
    """Return a reply's tokens, and who counted them. Events are never counted: one may hold any number of tokens."""
    if contradiction:
        return -1, "contradicted"
    if (tokens := _stated_output(reply)) >= 0:
        return tokens, "usage" if reply.output_tokens >= 0 else "timings"
    chars = int(reply.chunk_chars.sum())
    if status != "ok" or not chars:
        return -1, ""
    return max(1, chars // _CHARACTERS_A_TOKEN), "estimate"
