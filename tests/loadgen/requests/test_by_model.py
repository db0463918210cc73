"""Results of each model that a run asked, as of LoRA adapters of one engine."""

from __future__ import annotations

import numpy as np
import pytest
from recordings import log_of

from sidelight.loadgen.requests.summary import grouped

S = 10**9


def test_each_model_is_stated_alone():
    """Together they are the whole; `client.models` has them."""
    count = 30
    submit_ns = np.arange(count) * S
    wait_ns = np.where(np.arange(count) % 3 == 0, S // 2, S // 10)
    log = log_of(
        count,
        status=np.array(["ok"] * (count - 1) + ["failed"], np.object_),
        model=np.array(["a", "b", "b"] * 10, np.object_),
        submit_ns=submit_ns,
        first_token_ns=submit_ns + wait_ns,
        last_token_ns=submit_ns + S,
        end_ns=submit_ns + S,
    )
    models = grouped(log, log.model, None, None, None)
    assert {"a": (10, 10), "b": (20, 19)} == {
        name: (model.requests.sent, model.requests.ok) for name, model in models.items()
    }
    assert models["a"].ttft_ms.mean == pytest.approx(500.0)
    assert models["b"].ttft_ms.p99 == pytest.approx(100.0)
