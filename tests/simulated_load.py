"""Arrivals at a small simulated engine that has to chunk, to find prefixes and to preempt."""

from __future__ import annotations

from hypothesis import strategies as st

from simulator.history import EngineRequest
from simulator.settings import PROFILES, EngineSettings

LIMITS = EngineSettings(
    max_num_seqs=4, max_num_batched_tokens=24, kv_blocks=20, block_size=4, max_model_len=64, speed=PROFILES["fast"]
)


def ask(name: object, length: int, max_tokens: int, *, token: int = 256) -> EngineRequest:
    return EngineRequest(request_id=f"cmpl-{name}", prompt_token_ids=(token,) * length, max_tokens=max_tokens)


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 200_000_000), st.integers(256, 258), st.integers(1, 40), st.integers(1, 24)),
    min_size=1,
    max_size=12,
).map(
    lambda drawn: [
        (at, ask(number, length, max_tokens, token=token))
        for number, (at, token, length, max_tokens) in enumerate(drawn)
    ]
)
