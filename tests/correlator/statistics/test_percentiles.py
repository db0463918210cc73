"""The intervals of a run's percentiles: of which requests they are, and in which order."""

from __future__ import annotations

import numpy as np
import pytest
from golden_files import evaluated

from sidelight.correlator.statistics.intervals import quantile


def test_intervals_are_of_the_percentiles_that_the_summary_has():
    """Of the client's times and of the parts of the TTFT alike."""
    summary = evaluated("vllm_spans").summary
    percentiles, client, parts = summary.methodology.percentiles, summary.client, summary.correlation.breakdown
    described = {
        "ttft_ms": client.ttft_ms, "tpot_ms": client.tpot_ms, "e2e_ms": client.e2e_ms,
        "itl_ms": client.itl_ms or client.time_between_chunks_ms, "queue_ms": parts.queue_ms,
        "prefill_ms": parts.prefill_ms, "network_ms": parts.network_ms, "other_ms": parts.other_ms,
    }  # fmt: skip
    assert described.keys() == percentiles.keys()
    for name, times in described.items():
        for label in ("p50", "p90", "p95", "p99"):
            assert getattr(percentiles[name], label).estimate == pytest.approx(getattr(times, label)), (name, label)


def test_requests_are_taken_in_the_order_in_which_they_were_sent():
    """In the order in which several workers' logs are read they would resemble their neighbours less."""
    run = evaluated("vllm_spans")
    log = run.run.requests
    sent = np.argsort(log.submit_ns, kind="stable")
    measured = sent[(log.phase == "measure")[sent] & (log.status == "ok")[sent]]
    ttft_ms = (log.first_token_ns - log.submit_ns)[measured] / 1e6
    assert run.summary.methodology.percentiles["ttft_ms"].p90 == quantile(ttft_ms, 0.9)
