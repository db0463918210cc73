"""Synthetic-Uniform, the draft's controlled baseline with minimal variance.

To the letter of draft-gaikwad-llm-benchmarking-methodology-00, appendix Synthetic-Uniform: `random.Random(seed)`, and
the draws in the order of its pseudocode. No system prompt, no shared prefix, no stop sequences, temperature 0.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

from loadgen.plan.workloads.request import WorkloadRequest

NAME = "synthetic-uniform"

_IDS = 100_256
_ID_BITS = 17
_WORD_BITS = 32


def requests(*, seed: int) -> Iterator[WorkloadRequest]:
    """Yield requests without end, with uniform input and output lengths.

    Input is Uniform(128, 512) tokens with ids in [0, 100255], output Uniform(64, 256).
    """
    rng = random.Random(seed)
    while True:
        input_tokens = rng.randint(128, 512)
        max_tokens = rng.randint(64, 256)
        yield WorkloadRequest(
            workload_class=NAME,
            token_ids=_draw_ids(rng, input_tokens),
            input_tokens=input_tokens,
            max_tokens=max_tokens,
        )


def _draw_ids(rng: random.Random, count: int) -> tuple[int, ...]:
    """Return the results of `count` calls of rng.randint(0, 100255), several times faster.

    randint takes the upper 17 bits of one 32-bit word of the generator and draws again while they are too high. Many
    words come at once here, never more than are still missing, so that the generator stands where the calls leave it.
    """
    ids: list[int] = []
    while missing := count - len(ids):
        words = rng.getrandbits(_WORD_BITS * missing).to_bytes(4 * missing, "little")
        drawn = struct.unpack(f"<{missing}I", words)
        ids += [token_id for word in drawn if (token_id := word >> (_WORD_BITS - _ID_BITS)) < _IDS]
    return tuple(ids)
