"""Synthetic-Uniform, the draft's controlled baseline with minimal variance.

To the letter of draft-gaikwad-llm-benchmarking-methodology-00, appendix Synthetic-Uniform: `random.Random(seed)`, and
the draws in the order of its pseudocode. No system prompt, no shared prefix, no stop sequences, temperature 0.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from loadgen.workloads.request import WorkloadRequest

NAME = "synthetic-uniform"


def requests(*, seed: int) -> Iterator[WorkloadRequest]:
    """Requests without end: input Uniform(128, 512) tokens with ids in [0, 100255], output Uniform(64, 256)."""
    rng = random.Random(seed)
    while True:
        input_tokens = rng.randint(128, 512)
        max_tokens = rng.randint(64, 256)
        yield WorkloadRequest(
            workload_class=NAME,
            token_ids=tuple(rng.randint(0, 100_255) for _ in range(input_tokens)),
            input_tokens=input_tokens,
            max_tokens=max_tokens,
            temperature=0.0,
        )
