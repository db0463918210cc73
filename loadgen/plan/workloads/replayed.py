"""A workload of a trace's lengths: which came when, how long, and, where the trace tells, what they had in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from sidelight.loadgen.plan.traces import ArrivalTrace
from sidelight.loadgen.plan.workloads.content import about_content, token_ids
from sidelight.loadgen.plan.workloads.mix import stream_rng
from sidelight.loadgen.plan.workloads.request import Turn, WorkloadRequest

_CONTENT_STREAM, _BLOCK_STREAM = 301, 302
_BLOCKS_KEPT = 4096


def requests(trace: ArrivalTrace, *, seed: int) -> Iterator[WorkloadRequest]:
    """Yield the trace's requests in its order, once. Their texts are English words.

    With hash_ids a prompt is the blocks of these numbers, equal numbers equal words, so prefixes are shared as they
    were; what the lengths have beyond the blocks is the request's own.
    """
    rng = stream_rng(seed, _CONTENT_STREAM)

    @lru_cache(maxsize=_BLOCKS_KEPT)
    def block(number: int) -> tuple[int, ...]:
        return token_ids("words", trace.block_tokens, stream_rng(seed, _BLOCK_STREAM, number % 2**64))

    def prompt(numbers: Sequence[int], input_tokens: int) -> tuple[int, ...]:
        shared = [token_id for number in numbers for token_id in block(number)][:input_tokens]
        return (*shared, *token_ids("words", input_tokens - len(shared), rng))

    lengths = zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True)
    for at, (input_tokens, max_tokens) in enumerate(lengths):
        yield WorkloadRequest(
            workload_class=f"trace {trace.name}",
            token_ids=prompt(trace.hash_ids[at] if trace.hash_ids is not None else (), input_tokens),
            input_tokens=input_tokens,
            max_tokens=max_tokens,
            turns=tuple(
                Turn(
                    token_ids=prompt(turn.hash_ids, turn.input_tokens),
                    input_tokens=turn.input_tokens,
                    max_tokens=turn.output_tokens,
                    think_s=turn.think_s,
                    whole=True,
                )
                for turn in (trace.later[at] if trace.later else ())
            ),
        )


def about(trace: ArrivalTrace) -> dict[str, Any]:
    """Return the report's description of the trace."""
    return {
        "trace": trace.name,
        "requests": len(trace.offsets_ns) + sum(map(len, trace.later or ())),
        **({"sessions": len(trace.offsets_ns)} if trace.later else {}),
        **about_content("words"),
        "shared_prefix": f"hash_ids of {trace.block_tokens} tokens a block" if trace.hash_ids is not None else None,
        "notes": list(trace.notes),
    }
