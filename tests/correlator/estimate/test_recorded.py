"""Estimates from scrapes of a real vLLM against its own spans, which the estimator does not see."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import recordings
from recordings import Case

from sidelight.correlator.attribute import attribute
from sidelight.correlator.estimate.intervals import observe
from sidelight.correlator.estimate.table import Attribution
from sidelight.correlator.statistics.accuracy import PartError, agreement
from sidelight.correlator.statistics.server_times import server_percentiles

Floats = npt.NDArray[np.float64]


def errors(case: Case, table: Attribution) -> tuple[PartError, PartError]:
    """Compare queue and prefill with the truth, where there is one, as a run does with its spans."""
    truth = SimpleNamespace(source=np.full(len(table), "trace"), queue_s=case.queue_s, prefill_s=case.prefill_s)
    by_part = agreement(truth, table)
    return by_part["queue"], by_part["prefill"]


@pytest.fixture(scope="module")
def main() -> Case:
    """The whole recording `main`; what needs it is skipped where it is absent."""
    return recordings.whole_case("main")


def test_an_overloaded_engine_is_attributed_at_5_hz():
    """161 requests with a queue of 3 s on average: off by less than the figures, exact ones right."""
    overload = recordings.overload()
    table = attribute(overload.requests, overload.scrapes)
    queue, prefill = errors(overload, table)

    assert (0, 0) == (queue.exact_but_wrong, prefill.exact_but_wrong)
    assert queue.p95_ms < 30
    assert max(queue.wape / 0.005, prefill.wape / 0.06) < 1
    assert min(queue.covered_90, prefill.covered_90) > 0.85


@pytest.mark.parametrize(("nth", "queue_p95_ms", "prefill_wape"), [(1, 17, 0.04), (5, 38, 0.10), (25, 43, 0.12)])
def test_the_whole_recording_is_attributed_within_the_figures(
    main: Case, nth: int, queue_p95_ms: float, prefill_wape: float
):
    """At 0.2, 1 and 5 s: idle, closed loop, under- and overload in one run."""
    thinned = main.every(nth)
    table = attribute(thinned.requests, thinned.scrapes)
    queue, prefill = errors(thinned, table)

    assert queue.p95_ms < queue_p95_ms
    assert prefill.wape < prefill_wape
    assert (0, 0) == (queue.exact_but_wrong, prefill.exact_but_wrong)
    assert queue.covered_90 > 0.85
    assert prefill.covered_90 > 0.80


@pytest.mark.parametrize("seed", range(4))
def test_withheld_records_are_flagged_as_unmatched(main: Case, seed: int):
    """With 30 % of the requests unknown, intervals that hold one are never called exact, and errors stay in bounds."""
    shared = main.every(5).withheld(0.3, seed)
    table = attribute(shared.requests, shared.scrapes)
    queue, prefill = errors(shared, table)

    assert (table.quality == "mixed_traffic").mean() > 0.7
    assert (0, 0) == (queue.exact_but_wrong, prefill.exact_but_wrong)
    assert queue.p95_ms < 1.3 * 50
    assert max(queue.wape / 0.0091, prefill.wape / 0.182) < 1
    assert min(queue.covered_90 / 0.85, prefill.covered_90 / 0.8) > 1


@pytest.mark.parametrize("nth", [1, 3])
def test_means_of_slices_are_off_by_less_than_a_millisecond(main: Case, nth: int):
    """Slices of 5 s by submission, queue and prefill."""
    thinned = main.every(nth)
    table = attribute(thinned.requests, thinned.scrapes)
    slices = (thinned.requests.submit_ns - thinned.requests.submit_ns.min()) // (5 * 10**9)
    off_ms = {
        part: [
            1e3 * abs(float(np.mean((getattr(table, part) - getattr(thinned, part))[slices == number])))
            for number in np.unique(slices)
        ]
        for part in ("queue_s", "prefill_s")
    }

    assert max(float(np.mean(off)) for off in off_ms.values()) < 1


def test_the_queues_share_of_the_variance_of_ttft_is_that_of_the_truth(main: Case):
    table = attribute(main.every(5).requests, main.every(5).scrapes)
    wait_s = (main.requests.first_output_ns - main.requests.submit_ns) / 1e9

    def share(queue_s: Floats) -> float:
        return float(np.cov(queue_s, wait_s)[0, 1] / np.var(wait_s, ddof=1))

    assert share(main.queue_s) == pytest.approx(share(table.queue_s), abs=0.05)


def test_percentiles_are_read_off_the_clients_spans(main: Case):
    """A first bucket of 0.3 s says nothing of a prefill of 54 ms; the estimates at 1 s do."""
    thinned = main.every(5)
    table = attribute(thinned.requests, thinned.scrapes)

    for part, allowed in (("queue", (0.001, 0.02, 0.02)), ("prefill", (0.1, 0.1, 0.1))):
        percentiles = server_percentiles(
            table, [observe(endpoint) for endpoint in thinned.scrapes], part, [0.5, 0.9, 0.99]
        )
        assert ("client spans", 1.0) == (percentiles.source, percentiles.covered_ratio)
        truth = np.quantile(getattr(main, f"{part}_s"), [0.5, 0.9, 0.99])
        assert (
            np.abs(percentiles.values_s - truth) <= np.array(allowed) * np.maximum(truth, 1.0 * (part == "queue"))
        ).all()
        assert (percentiles.low_s <= percentiles.values_s).all()
        assert (percentiles.values_s <= percentiles.high_s).all()


def test_percentiles_of_an_engine_that_others_use_stay_those_of_its_buckets(main: Case):
    """Our requests do not stand for those of other clients."""
    shared = main.every(5).withheld(0.35, 1)
    table = attribute(shared.requests, shared.scrapes)

    percentiles = server_percentiles(table, [observe(endpoint) for endpoint in shared.scrapes], "queue", [0.5])

    assert "buckets and sums" == percentiles.source
    assert 0.6 < percentiles.covered_ratio < 0.7
