"""What every workload produces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request before it is fitted to a tokenizer and a server.

    token_ids     the input as token ids of cl100k_base
    input_tokens  its length in tokens, as drawn
    """

    workload_class: str
    token_ids: tuple[int, ...]
    input_tokens: int
    max_tokens: int
    temperature: float
