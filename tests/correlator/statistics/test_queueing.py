"""What engines show while requests wait for them: the evidence for why they wait."""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence

import numpy as np
import pytest
from engine_series import SECOND, engine
from msgspec import UNSET
from recordings import REPOSITORY
from series import endpoint_of_columns

from sidelight.correlator.statistics.queueing import NEVER_WAITED, KvLoads, WhileWaiting, kv_loads, while_waiting
from sidelight.scraper.exposition import Series
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import Window

WINDOW = Window(start_ns=0, end_ns=10 * SECOND)


def test_only_scrapes_that_show_a_waiting_request_count():
    """Before the window, and while nothing waits, what runs is not evidence; the most that ran is of the window."""
    shown = engine([-1, 1, 2, 3, 4], waiting=[9, 0, 1, 5, 2], running=[9, 1, 4, 4, 2], kv=[0.99, 0.1, 0.2, 0.4, 0.3])

    assert while_waiting([shown], WINDOW) == WhileWaiting(
        scrapes=3, running_p50=4.0, running_most=4.0, at_most_ratio=2 / 3, kv_cache_p50=0.3, kv_cache_max=0.4
    )


def test_each_engine_is_compared_with_its_own_most():
    """One runs four at most and the other one: both were full."""
    engines = (
        engine([1, 2], "http://a:1/metrics", waiting=[1, 1], running=[4, 4], kv=[0.1, 0.1]),
        engine([1, 2], "http://b:1/metrics", waiting=[1, 0], running=[1, 0], kv=[0.1, 0.1]),
    )

    state = while_waiting(engines, WINDOW)

    assert (3, 4.0, 1.0) == (state.scrapes, state.running_most, state.at_most_ratio)


def test_a_gauge_that_is_one_short_as_a_prefill_begins_shows_a_full_engine():
    """SGLang's, of a few places: 7 of 8 are near the most, 6 are not; of two or three only all are."""
    shown = engine([1, 2, 3, 4], waiting=[3, 3, 3, 3], running=[8, 7, 7, 6], kv=[0.2] * 4)
    three = engine([1, 2, 3, 4], waiting=[3, 3, 3, 3], running=[3, 2, 2, 2], kv=[0.2] * 4)

    assert [3 / 4, 1 / 4] == [while_waiting([each], WINDOW).at_most_ratio for each in (shown, three)]


def test_an_engine_without_a_gauge_of_its_cache_leaves_that_unknown():
    state = while_waiting([engine([1, 2], waiting=[1, 1], running=[1, 1])], WINDOW)

    assert (2, 1.0, None) == (state.scrapes, state.at_most_ratio, state.kv_cache_max)


def test_an_engine_that_does_not_say_what_runs_leaves_that_unknown():
    """Unknown, and not zero, which would say that nothing ran."""
    shown = while_waiting([engine([1, 2], waiting=[1, 1], kv=[0.1, 0.1])], WINDOW)

    assert (2, None, None, None) == (shown.scrapes, shown.running_p50, shown.running_most, shown.at_most_ratio)


def test_where_nothing_waited_there_is_only_a_reason():
    idle = WhileWaiting(missing=NEVER_WAITED)

    assert [idle, idle] == [while_waiting(engines, WINDOW) for engines in ([], [engine([1, 2], waiting=[0, 0])])]


STAGES = ("waiting_to_start", "in_progress", "completed_waiting")


def fetching(at_ms: Sequence[int], *stages: Sequence[float]) -> EndpointSeries:
    """The page of a decode engine, scraped at some moments."""
    names = ["vllm:num_requests_waiting", *["vllm:num_requests_kv_fetch_by_stage"] * 3]
    labels = [(), *((("stage", stage),) for stage in STAGES)]
    series = [
        Series(name=name, labels=own_labels, family=name, type="gauge", help="")
        for name, own_labels in zip(names, labels, strict=True)
    ]
    at_ns = np.array(at_ms, dtype=np.int64) * 10**6
    values = np.array([[0] * len(at_ms), *stages], dtype=np.float64).T
    return endpoint_of_columns(series, values, request_ns=at_ns, response_ns=at_ns + 10**6)


def test_the_loads_of_real_kv_caches_are_within_their_error():
    """A decode pod of vLLM held each load for 200 ms: 85 requests, 203.6 ms in the mean by its own log, scraped each
    250 ms. The three stages are its queue, 751.5 ms by its spans.
    """
    with lzma.open(REPOSITORY / "tests/data/vllm_two_pods.jsonl.xz", "rt") as file:
        recorded = next(loads for line in file if (loads := json.loads(line).get("loads")))
    page = fetching(*map(list, zip(*recorded["scrapes"], strict=True)))
    window = Window(start_ns=0, end_ns=int(page.at_ns[-1]))
    loads = kv_loads([page], window, recorded["requests"])
    assert isinstance(loads, KvLoads)
    assert abs(loads.load_ms - recorded["mean_ms"]) < min(loads.error_ms, 25.0)
    queue_ms = loads.before_ms + loads.load_ms + loads.after_ms
    assert queue_ms == pytest.approx(recorded["queue_ms"], rel=0.05)


def test_nine_of_ten_intervals_hold_the_mean_load():
    """Of 300 runs of 60 requests at random moments whose loads take 20 to 600 ms; the bound is for the worst phase."""
    rng, inside = np.random.default_rng(35), 0
    at_ms = np.arange(0, 60_000, 250)
    for _ in range(300):
        began_ms, load_ms = rng.uniform(500, 58_000, 60), rng.uniform(20, 600)
        loading = ((began_ms[:, None] <= at_ms) & (at_ms < began_ms[:, None] + load_ms)).sum(axis=0).tolist()
        zeros = [0] * len(at_ms)
        loads = kv_loads([fetching(at_ms.tolist(), zeros, loading, zeros)], Window(start_ns=0, end_ns=60 * SECOND), 60)
        inside += isinstance(loads, KvLoads) and abs(loads.load_ms - load_ms) <= loads.error_ms
    assert inside >= 0.88 * 300


def test_a_scrape_without_the_gauge_shows_no_load_and_none_that_ended():
    """A missing value counts as unknown: half of the readings give the mean that all give."""
    at_ms, zeros, window = [*range(0, 20_000, 1000)], [0] * 20, Window(start_ns=0, end_ns=20 * SECOND)
    readings = [[1.0] * 20, [1.0, float("nan")] * 10]
    whole, half = (kv_loads([fetching(at_ms, zeros, loading, zeros)], window, 10) for loading in readings)
    assert isinstance(whole, KvLoads)
    assert whole == half


def test_an_engine_that_loads_nothing_seen_has_loads_of_0_within_an_error():
    """One without the gauge has none, nor where no request ended."""
    zeros, window = [0] * 8, Window(start_ns=0, end_ns=8 * SECOND)
    idle = fetching([*range(0, 8000, 1000)], zeros, zeros, zeros)
    busy = fetching([*range(0, 8000, 1000)], zeros, [1] * 8, zeros)
    others = [engine([1, 2, 3, 4, 5, 6], waiting=[1] * 6)]
    loads = kv_loads([idle], window, 5)
    assert isinstance(loads, KvLoads)
    assert (0.0, 0.0, 0.0) == (loads.before_ms, loads.load_ms, loads.after_ms)
    assert loads.error_ms > 100
    assert [UNSET] * 2 == [kv_loads(others, window, 5), kv_loads([busy], window, 0)]
