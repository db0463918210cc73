"""The slowest requests: which they are, and what ran beside them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import summaries
from logs import request_log

from sidelight.exporter.summary.slowest import MOST, SlowRequest, slowest
from sidelight.rundir.columns import take
from sidelight.rundir.stats import Missing

TTFT_MS = (50.0, 300.0, 200.0)


def three() -> list[SlowRequest]:
    """Three requests, 100 ms apart, of which the engine was scraped at the second alone."""
    rows = [
        {"submit": 100 * at, "end": 100 * at + 400, "trace_id": f"t{at}", "declared": 7, "input": tokens}
        for at, tokens in enumerate((-1, 9, 9))
    ]
    parts = take(summaries.parts(), np.arange(3))
    parts = replace(parts, ttft_s=np.array(TTFT_MS) / 1e3)
    waiting = np.array([np.nan, 4.0, np.nan])
    return slowest(request_log(*rows), parts, waiting, Missing("not scraped"), start_ns=0)


def test_the_longest_ttft_comes_first_with_its_parts_and_what_ran_beside_it():
    """Also of a run of three requests, from which no statistic of a tail could be made."""
    first, *others = three()

    assert ["t1", "t2", "t0"] == [request.trace_id for request in (first, *others)]
    assert (300.0, 150.0, 30.0, None) == (first.ttft_ms, first.queue_ms, first.prefill_ms, first.gateway_ms)
    assert (4.0, None, 1, 0.1) == (
        first.requests_waiting,
        first.requests_running,
        first.in_flight,
        first.submitted_s,
    )


def test_input_tokens_are_the_servers_else_the_tokenizers():
    assert [9, 9, 7] == [request.input_tokens for request in three()]


def test_there_are_five_at_most_and_none_without_a_first_token():
    log = request_log(*({"submit": at} for at in range(summaries.SIZE)))
    parts = summaries.parts()
    unknown = Missing("not scraped")

    assert MOST == len(slowest(log, parts, unknown, unknown, start_ns=0))
    never = replace(parts, ttft_s=np.full(summaries.SIZE, np.nan))
    assert [] == slowest(log, never, unknown, unknown, start_ns=0)
