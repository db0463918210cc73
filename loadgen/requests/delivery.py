"""The delivery of tokens in chunks, and the resulting name of their gaps.

Draft: token-chunking, itl-sse-measurement.

The draft: characterise tokens per chunk first; where over 90 % of the chunks hold one token, gaps between chunks are
inter-token latencies; else prefer the server's own times; else report the time between chunks and say so.

A chunk does not say how many tokens it holds; a reply says how many it had in all (usage). T tokens in C chunks leave
bounds: with T >= C at most T - C chunks hold more than one, and with T > C at least one does. A reply whose last token
is an end-of-sequence token without text has one token more than chunks. Where a reply contradicts its usage, the
tokens are not known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import UnsetType

from sidelight.loadgen.requests.metrics import content_gaps, counts, in_one_read, span_ms, with_possible_times
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats, Ints, take
from sidelight.rundir.fields import UNSET, Count, Ratio, doc
from sidelight.rundir.stats import Statistics, describe, finite

# Above this share of chunks that hold one token, chunk gaps are inter-token latencies.
SINGLE_TOKEN_RATIO = 0.9
# Above this share of replies with the server's own decode time, option C of itl-chunked is available.
SERVER_TIMED_RATIO = 0.9

Option = Literal["direct", "C", "A", "none"]
STATEMENTS: dict[Option, str] = {
    "direct": "over 90 % of the chunks hold one token, so gaps between chunks are inter-token latencies",
    "C": "chunks hold several tokens; the server's own decode times stand beside the time between chunks (option C)",
    "A": "the time between chunks is reported: chunks hold several tokens, or that is not known (option A)",
    "none": "no reply that ended ok came in chunks",
}

# What every number of the client means by content; docs/reference/protocols.md has the fields of each protocol.
CONTENT_RULE = "text, reasoning and tool calls count as content; the first token is the first that is not blank"


class FirstTokens(msgspec.Struct, frozen=True, kw_only=True):
    """Replies by the kind of their first token. Replies in one piece, or of blanks alone, are not counted."""

    content: Annotated[Count, doc("Text.", "replies")]
    reasoning: Annotated[Count, doc("Reasoning.", "replies")]
    tool: Annotated[Count, doc("A call of a tool.", "replies")]


class RatioBounds(msgspec.Struct, frozen=True, kw_only=True):
    """The bounds of a ratio that is not known exactly."""

    least: Annotated[Ratio | None, doc("Certain.", "ratio")]
    most: Annotated[Ratio | None, doc("Possible.", "ratio")]


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The delivery of tokens in chunks."""

    itl_option: Annotated[
        Option,
        doc(
            "`direct` (over 90 % single-token chunks), else `C` (server's decode times for over 90 % of replies), "
            "else `A`; `none` without chunks",
            source="draft `itl-sse-measurement`",
        ),
    ]
    statement: Annotated[str, doc("the same in words", source="draft `itl-sse-measurement`")]
    content_rule: Annotated[str, doc("what counts as content, in words", source="draft `first-token-def`")]
    first_tokens: Annotated[
        FirstTokens,
        doc(
            "replies that began with `content` (text), `reasoning` or `tool` (a call of one)",
            source="draft `first-token-def`",
        ),
    ]
    chunks: Annotated[Count, doc("content chunks", "chunks", source="draft `token-chunking`")]
    replies_in_chunks: Annotated[Count, doc("replies that came in chunks", "replies", source="draft `token-chunking`")]
    replies_whole: Annotated[Count, doc("replies without chunks", "replies", source="draft `token-chunking`")]
    replies_in_one_read: Annotated[
        Count,
        doc(
            "replies of 8 tokens or more that came in one read, 50 ms or more after the submission: TTFT is that "
            "of the whole reply, and TPOT and gaps are missing",
            "replies",
        ),
    ]
    single_token_chunks_ratio: Annotated[
        RatioBounds,
        doc(
            "share of chunks that hold one token: `least` is certain, `most` is possible",
            "ratio",
            source="draft `itl-sse-measurement`",
        ),
    ]
    same_read_ratio: Annotated[
        Ratio | None,
        doc(
            "gaps of 0, between chunks that one read of the socket brought, over all gaps",
            "ratio",
            source="draft `itl-sse-measurement`",
        ),
    ]
    tokens_per_chunk: Annotated[Statistics, doc("tokens / chunks of a reply", "tokens", source="draft `itl-chunked`")]
    characters_per_chunk: Annotated[
        Statistics, doc("characters of content in a chunk", "characters", source="draft `itl-chunked`")
    ]
    server_itl_ms: Annotated[
        Statistics,
        doc("the server's decode time / (tokens - 1) of a reply", "ms", source="draft `itl-chunked`, option C"),
    ]


class Chunks(msgspec.Struct, frozen=True, kw_only=True):
    """Notes on chunks that the draft requires."""

    single_token_ratio: Annotated[
        Ratio | None,
        doc("share of replies with as many content chunks as tokens", "ratio", source="draft `token-chunking`"),
    ]
    role_only_first: Annotated[
        Count,
        doc("replies that began with a chunk that held only a role", "replies", source="draft `first-token-def`"),
    ]
    blank_before_first: Annotated[
        Count,
        doc("replies with blank content before the first token", "replies", source="draft `first-token-def`"),
    ]


class ContradictedUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The server's `usage` where the replies contradict it, and measurements of these replies."""

    replies: Annotated[Count, doc("Replies ok whose usage is contradicted.", "replies")]
    kinds: Annotated[dict[str, Count], doc("Those replies by what contradicts it; one may have several.", "replies")]
    examples: Annotated[dict[str, str], doc("The numbers of the first reply of each kind.")]
    without_output_tokens: Annotated[
        Count, doc("Of those, replies whose output tokens are not used, nor their TPOT.", "replies")
    ]
    without_input_tokens: Annotated[Count, doc("Of those, replies whose input tokens are not known.", "replies")]
    stated_output_tokens: Annotated[Statistics, doc("Output tokens as they were stated.", "tokens")]
    chunks: Annotated[Statistics, doc("Chunks of content that came of such a reply.", "chunks")]
    chunks_per_s: Annotated[
        float | None, doc("Chunks of content of all replies ok in the window, over its length.", "chunks/s")
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTokens:
    """Bounds on the number of chunks that hold exactly one token.

    `chunks` is the number of content chunks with a known number of tokens.
    """

    chunks: int
    least: int
    most: int


def single_token_chunks(log: RequestLog) -> SingleTokens:
    """Return bounds on the number of chunks that hold one token. Counted are the replies in chunks with known usage.

    More chunks than tokens: each chunk too many makes up to two of them hold less than a token.
    """
    chunks, tokens = np.diff(log.chunk_start), _usage(log)
    counted = (tokens >= 0) & (chunks > 0)
    chunks, tokens = chunks[counted], tokens[counted]
    more, fewer = np.maximum(tokens - chunks, 0), np.maximum(chunks - tokens, 0)
    least = np.maximum(chunks - more - 2 * fewer, 0)
    most = np.where(more > 0, chunks - 1, np.minimum(chunks, tokens))
    return SingleTokens(chunks=int(chunks.sum()), least=int(least.sum()), most=int(most.sum()))


def single_token_ratio(log: RequestLog) -> float:
    """Return the share of replies with as many content chunks as tokens.

    Replies without known tokens are left out; NaN if no reply remains.
    """
    tokens = _usage(log)
    counted = tokens > 0
    if not counted.any():
        return float("nan")
    return float(np.mean(np.diff(log.chunk_start)[counted] == tokens[counted]))


def _usage(log: RequestLog) -> Ints:
    """Return output tokens as the server counted them, -1 elsewhere: an estimate says nothing about chunks."""
    return np.where(log.output_tokens_source == "estimate", -1, log.output_tokens)


def server_itl_ms(log: RequestLog) -> Floats:
    """Return each request's mean time between tokens by the server, float64[n]: decode time over tokens less one."""
    tokens, log = counts(_usage(log)), with_possible_times(log)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((tokens >= 2) & (log.choices <= 1), log.server_decode_ms / (tokens - 1), np.nan)


def itl_option(log: RequestLog) -> Option:
    """Return the key of the statement that holds for a log's replies. One of STATEMENTS: direct, C, A, or none."""
    if not len(log.chunk_ns):
        return "none"
    single = single_token_chunks(log)
    if single.least > SINGLE_TOKEN_RATIO * single.chunks:
        return "direct"
    several = np.diff(log.chunk_start) > 0
    timed = ~np.isnan(with_possible_times(log).server_decode_ms)
    return "C" if timed[several].mean() > SERVER_TIMED_RATIO else "A"


def chunks(log: RequestLog) -> Chunks:
    """Return the notes on chunks.

    They are the tokens in chunks, and events before the first token that are not content.
    """
    return Chunks(
        single_token_ratio=finite(single_token_ratio(log)),
        role_only_first=int(log.role_only_first.sum()),
        blank_before_first=int((log.blank_before_first > 0).sum()),
    )


def first_reads(log: RequestLog) -> tuple[Ints, Floats]:
    """Return the number of chunks [n] that each first token's read brought.

    With it comes the time that as many later chunks took, ms [n]; NaN without later chunks.
    """
    row = np.repeat(np.arange(len(log)), np.diff(log.chunk_start))
    together = np.bincount(row[log.chunk_ns == log.first_token_ns[row]], minlength=len(log))
    later = np.bincount(row[log.chunk_ns > log.first_token_ns[row]], minlength=len(log))
    with np.errstate(divide="ignore", invalid="ignore"):
        pace_ms = np.where(later > 0, span_ms(log.first_token_ns, log.last_token_ns) / later, np.nan)
    return together, pace_ms * (together - 1)


def delivery(log: RequestLog) -> Delivery:
    """Describe the delivery of a log's replies.

    `tokens_per_chunk` has one value a reply, `characters_per_chunk` one a chunk.
    """
    single = single_token_chunks(log)
    sizes = np.diff(log.chunk_start)
    option = itl_option(log)
    with np.errstate(divide="ignore", invalid="ignore"):
        tokens = _usage(log)
        per_chunk = np.where((sizes > 0) & (tokens >= 0), tokens / sizes, np.nan)
    zeros = gaps = 0
    for _, gaps_ms, *_ in content_gaps(log, np.ones(len(log), np.bool_)):
        zeros, gaps = zeros + int((gaps_ms == 0).sum()), gaps + len(gaps_ms)
    return Delivery(
        itl_option=option,
        statement=STATEMENTS[option],
        content_rule=CONTENT_RULE,
        first_tokens=FirstTokens(
            **{kind: int((log.first_kind == kind).sum()) for kind in FirstTokens.__struct_fields__}
        ),
        chunks=int(sizes.sum()),
        replies_in_chunks=int((sizes > 0).sum()),
        replies_whole=int((sizes == 0).sum()),
        replies_in_one_read=int(in_one_read(log).sum()),
        single_token_chunks_ratio=RatioBounds(
            least=single.least / single.chunks if single.chunks else None,
            most=single.most / single.chunks if single.chunks else None,
        ),
        same_read_ratio=zeros / gaps if gaps else None,
        tokens_per_chunk=describe(per_chunk, "no reply in chunks reports its usage"),
        characters_per_chunk=describe(counts(log.chunk_chars), "no reply came in chunks"),
        server_itl_ms=describe(server_itl_ms(log), "the server reports no decode times"),
    )


def contradicted_usage(ok: RequestLog, start_ns: int | None, end_ns: int | None) -> ContradictedUsage | UnsetType:
    """Summarise the usage that replies contradict; UNSET if no usage is contradicted."""
    doubted = take(ok, ok.usage_contradiction != "")
    if not len(doubted):
        return UNSET
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for text in doubted.usage_contradiction:
        for kind, _, numbers in (part.partition(": ") for part in str(text).split("; ")):
            kinds[kind] += 1
            examples.setdefault(kind, numbers)
    sizes, duration_s = np.diff(ok.chunk_start), 0.0
    if start_ns is not None and end_ns is not None:
        duration_s = (end_ns - start_ns) / 1e9
        sizes = sizes[(ok.end_ns >= start_ns) & (ok.end_ns <= end_ns)]
    return ContradictedUsage(
        replies=len(doubted),
        kinds=dict(kinds),
        examples=examples,
        without_output_tokens=int((doubted.output_tokens_source == "contradicted").sum()),
        without_input_tokens=int((doubted.input_tokens < 0).sum()),
        stated_output_tokens=describe(counts(doubted.usage_output_tokens), "none was stated"),
        chunks=describe(np.diff(doubted.chunk_start).astype(np.float64), "no such reply"),
        chunks_per_s=float(sizes.sum()) / duration_s if duration_s > 0 else None,
    )
