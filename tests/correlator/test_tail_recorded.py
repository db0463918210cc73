"""Which part makes the TTFT of a real vLLM vary: from scrapes alone as from its own spans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import recordings

from sidelight.correlator.attribute import attribute
from sidelight.correlator.breakdown import break_down
from sidelight.correlator.exact.clock_offset import clock_offsets
from sidelight.correlator.exact.join import join
from sidelight.correlator.statistics.association import Association, associations
from sidelight.correlator.statistics.server_load import met_at_submission
from sidelight.correlator.statistics.tail import TailShares, tail_shares
from sidelight.exporter.summary.tail import tail_attribution
from sidelight.scraper.spans.requests import engine_spans


@pytest.fixture(scope="module")
def main() -> Any:
    """The recording `main`: idle, closed loop, under- and overload."""
    return recordings.recording("main")


def shares_of(run: Any) -> TailShares:
    joined = join(run.requests, run.spans)
    parts = break_down(
        run.requests, joined, attribute(run.requests, run.endpoints), clock_offsets(run.requests, joined)
    )
    waiting = met_at_submission(run.requests, run.endpoints)["requests_waiting"]
    shares = tail_shares(parts, run.requests.submit_ns, waiting)
    assert isinstance(shares, TailShares)
    return shares


@pytest.fixture(scope="module")
def traced(main: Any) -> TailShares:
    """With the engine's spans."""
    return shares_of(main)


@pytest.fixture(scope="module")
def withheld(main: Any) -> TailShares:
    """Without spans and without timings in replies."""
    unknown = np.full(len(main.requests.submit_ns), np.nan)
    reply_times = {f"server_{part}_ms": unknown for part in ("queue", "prefill", "decode", "ttft", "e2e")}
    return shares_of(replace(main, requests=replace(main.requests, **reply_times), spans=engine_spans([])))


def test_the_queue_varies_the_ttft(traced: TailShares, withheld: TailShares):
    """The queue's share of var(TTFT) is 0.994, and within 0.05 of it without the spans."""
    assert traced.variance_share["queue"] == pytest.approx(0.994, abs=0.0005)
    assert withheld.variance_share["queue"] == pytest.approx(0.994, abs=0.05)
    assert {"exact": 397} == traced.quality
    assert 397 == sum(withheld.quality.values())
    assert 0 < withheld.quality["exact"] < 200


def test_few_blocks_are_counted_as_few(traced: TailShares):
    """Three phases of load are not many independent samples."""
    interval = traced.ci95["queue"]
    assert interval[0] < 0.994 < interval[1]
    assert 5 == traced.blocks


def test_the_sentence_is_the_same_without_spans_but_for_its_flag(traced: TailShares, withheld: TailShares):
    """Both rest on the same four requests; without spans they are called estimated."""
    spent = "spent 97 % of their TTFT in the engine's queue."
    assert f"The slowest 1 % (4 requests) {spent}" == tail_attribution(traced).sentence
    assert f"The slowest 1 % (4 requests, estimated) {spent}" == tail_attribution(withheld).sentence


def test_waiting_requests_go_with_the_ttft_and_running_ones_do_not(main: Any):
    """Rank correlation 0.88 [0.50, 0.98], greatest within half a second; a gauge that saturates shows nothing."""
    ttft_ms = (main.requests.first_token_ns - main.requests.submit_ns) / 1e6
    by_quantity = {
        association.server: association
        for association in associations(main.requests, {"ttft_ms": ttft_ms}, main.endpoints)
    }
    waiting, running = by_quantity["requests_waiting"], by_quantity["requests_running"]

    assert waiting.rho_lag0 == pytest.approx(0.88, abs=0.02)
    assert ends(waiting) == pytest.approx((0.50, 0.98), abs=0.05)
    assert waiting.lag_s in {0.0, 0.5}
    assert waiting.partial_rho > 0.8
    low, high = ends(running)
    assert low < 0 < high
    assert "the quantity never changed" == by_quantity["preemptions"].missing


def ends(association: Association) -> tuple[float, float]:
    assert association.ci95_lag0 is not None
    return association.ci95_lag0
