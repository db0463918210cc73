"""How tokens were delivered, and what their gaps may therefore be called (token-chunking, itl-sse-measurement).

The draft: characterise tokens per chunk first; where over 90 % of the chunks hold one token, gaps between chunks are
inter-token latencies; else prefer the server's own times; else report the time between chunks and say so.

A chunk does not say how many tokens it holds; a reply says how many it had in all (usage). T tokens in C chunks leave
bounds: with T >= C at most T - C chunks hold more than one, and with T > C at least one does. A reply whose last token
is an end-of-sequence token without text has one token more than chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import to_builtins

from loadgen.requests.metrics import RequestMetrics, counts
from loadgen.requests.table import RequestLog
from rundir.columns import Floats
from rundir.stats import describe

# Above this share of chunks that hold one token, chunk gaps are inter-token latencies.
SINGLE_TOKEN_RATIO = 0.9
# Above this share of replies with the server's own decode time, option C of itl-chunked is available.
SERVER_TIMED_RATIO = 0.9

STATEMENTS = {
    "direct": "over 90 % of the chunks hold one token, so gaps between chunks are inter-token latencies",
    "C": "chunks hold several tokens; the server's own decode times stand beside the time between chunks (option C)",
    "A": "the time between chunks is reported: chunks hold several tokens, or it cannot be told (option A)",
    "none": "no reply that ended ok came in chunks",
}

# What every number of the client means by content; docs/protocols.md has the fields of each protocol.
CONTENT_RULE = "text, reasoning and calls of tools are content; the first token is the first of them that is not blank"
KINDS = ("content", "reasoning", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleTokens:
    """Of `chunks` content chunks with a known number of tokens, at least and at most so many hold exactly one."""

    chunks: int
    least: int
    most: int


def single_token_chunks(log: RequestLog) -> SingleTokens:
    """Bounds on how many chunks hold one token, over the replies that came in chunks and told their usage.

    More chunks than tokens: each chunk too many makes up to two of them hold less than a token.
    """
    chunks, tokens = np.diff(log.chunk_start), _usage(log)
    told = (tokens >= 0) & (chunks > 0)
    chunks, tokens = chunks[told], tokens[told]
    more, fewer = np.maximum(tokens - chunks, 0), np.maximum(chunks - tokens, 0)
    least = np.maximum(chunks - more - 2 * fewer, 0)
    most = np.where(more > 0, chunks - 1, np.minimum(chunks, tokens))
    return SingleTokens(chunks=int(chunks.sum()), least=int(least.sum()), most=int(most.sum()))


def single_token_ratio(log: RequestLog) -> float:
    """Share of the requests with known token counts that came in as many content chunks as tokens; NaN for none."""
    tokens = _usage(log)
    told = tokens > 0
    if not told.any():
        return float("nan")
    return float(np.mean(np.diff(log.chunk_start)[told] == tokens[told]))


def _usage(log: RequestLog) -> npt.NDArray[np.int64]:
    """Output tokens as the server counted them, -1 elsewhere: an estimate tells nothing of chunks."""
    return np.where(log.output_tokens_source == "estimate", -1, log.output_tokens)


def server_itl_ms(log: RequestLog) -> Floats:
    """The server's own mean time between tokens of each request, float64[n]: decode time over tokens less one."""
    tokens = counts(_usage(log))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(tokens >= 2, log.server_decode_ms / (tokens - 1), np.nan)


def itl_option(log: RequestLog) -> str:
    """Which of STATEMENTS holds for the replies of a log: direct, C, A, or none."""
    if not len(log.chunk_ns):
        return "none"
    single = single_token_chunks(log)
    if single.least > SINGLE_TOKEN_RATIO * single.chunks:
        return "direct"
    several = np.diff(log.chunk_start) > 0
    timed = ~np.isnan(log.server_decode_ms)
    return "C" if timed[several].mean() > SERVER_TIMED_RATIO else "A"


def delivery(log: RequestLog, metrics: RequestMetrics) -> dict[str, Any]:
    """How the replies of a log were delivered, for summary.json; `metrics` are those of the same log.

    tokens_per_chunk       one value a reply: its tokens over its chunks
    characters_per_chunk   one value a chunk
    first_tokens           how many replies began with what; those that came whole, or with blanks alone, are none
    same_read_ratio        gaps of exactly 0, of chunks that one read of the socket brought, over all gaps
    """
    single = single_token_chunks(log)
    sizes = np.diff(log.chunk_start)
    option = itl_option(log)
    with np.errstate(divide="ignore", invalid="ignore"):
        tokens = _usage(log)
        per_chunk = np.where((sizes > 0) & (tokens >= 0), tokens / sizes, np.nan)
    gaps = metrics.itl_ms
    return {
        "itl_option": option,
        "statement": STATEMENTS[option],
        "content_rule": CONTENT_RULE,
        "first_tokens": {kind: int((log.first_kind == kind).sum()) for kind in KINDS},
        "chunks": int(sizes.sum()),
        "replies_in_chunks": int((sizes > 0).sum()),
        "replies_whole": int((sizes == 0).sum()),
        "single_token_chunks_ratio": {
            "least": single.least / single.chunks if single.chunks else None,
            "most": single.most / single.chunks if single.chunks else None,
        },
        "same_read_ratio": float((gaps == 0).mean()) if len(gaps) else None,
        "tokens_per_chunk": to_builtins(describe(per_chunk, "no reply in chunks told its usage")),
        "characters_per_chunk": to_builtins(describe(counts(log.chunk_chars), "no reply came in chunks")),
        "server_itl_ms": to_builtins(describe(server_itl_ms(log), "the server told no decode times")),
    }
