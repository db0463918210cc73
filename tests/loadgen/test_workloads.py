from __future__ import annotations

import itertools
import random

import pytest

from loadgen import workloads


def generate_synthetic_uniform(n_requests, seed=42):  # noqa: ANN001  # the appendix's pseudocode
    rng = random.Random(seed)
    requests = []
    for _ in range(n_requests):
        input_len = rng.randint(128, 512)
        output_len = rng.randint(64, 256)
        input_tokens = [rng.randint(0, 100255) for _ in range(input_len)]
        requests.append({"input_tokens": input_tokens, "max_tokens": output_len, "temperature": 0.0})
    return requests


def test_synthetic_uniform_is_the_appendix_to_the_letter():
    """1000 requests for seed 42 have the token ids, lengths and temperature of the draft's pseudocode."""
    ours = itertools.islice(workloads.requests("synthetic-uniform", seed=42), 1000)
    expected = generate_synthetic_uniform(1000, seed=42)
    actual = [
        {"input_tokens": list(one.token_ids), "max_tokens": one.max_tokens, "temperature": one.temperature}
        for one in ours
    ]
    assert expected == actual


def test_lengths_are_declared_as_drawn():
    """input_tokens is the number of ids."""
    for one in itertools.islice(workloads.requests("synthetic-uniform", seed=7), 50):
        assert one.input_tokens == len(one.token_ids)


def test_an_unknown_workload_lists_the_names_and_the_nearest():
    """The error is raised at the call, not at the first request."""
    with pytest.raises(
        workloads.UnknownWorkload, match=r"did you mean 'synthetic-uniform'\?\); known: synthetic-uniform"
    ):
        workloads.requests("synthetic-unifrom", seed=1)
