from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import request_log
from msgspec import to_builtins

from loadgen.requests import slo
from loadgen.requests.metrics import request_metrics
from loadgen.requests.summary import client_summary

# ttft 20, tpot and every gap 10, e2e 40
THREE = {"submit": 100, "first": 120, "last": 140, "end": 145, "output": 3, "chunks": (120, 130, 140)}


@pytest.mark.parametrize(
    ("text", "metric", "statistic", "quantile", "bound_ms", "inclusive"),
    [
        ("ttft_p99<500ms", "ttft", "p99", 0.99, 500, False),
        ("tpot_p50 <= 0.05s", "tpot", "p50", 0.5, 50, True),
        ("itl_p99.9<50ms", "itl", "p99.9", 0.999, 50, False),
        ("itl_p99_9<50ms", "itl", "p99.9", 0.999, 50, False),
        ("e2e_mean<2s", "e2e", "mean", None, 2000, False),
        ("e2e_max<1e1s", "e2e", "max", None, 10_000, False),
        (" ttft<500ms ", "ttft", "every", None, 500, False),
    ],
)
def test_an_objective_is_read(
    text: str, metric: str, statistic: str, quantile: float | None, bound_ms: float, inclusive: bool
):
    """Metric, statistic, bound in ms; one a line."""
    (got,) = slo.parse_slo(text).objectives
    assert (metric, statistic, inclusive) == (got.metric, got.statistic, got.inclusive)
    assert (quantile, bound_ms) == (
        None if got.quantile is None else pytest.approx(got.quantile), pytest.approx(got.bound_ms),
    )  # fmt: skip


def test_several_objectives_are_read_in_order():
    """And told again without the blanks."""
    got = slo.parse_slo("ttft_p99<500ms, tpot_p99<50ms")
    assert ("ttft_p99<500ms,tpot_p99<50ms", ["ttft", "tpot"]) == (got.text, [each.metric for each in got.objectives])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not an objective; write one like ttft_p99<500ms"),
        ("ttft_p99", "'ttft_p99' is not an objective; write one like ttft_p99<500ms"),
        ("ttft>500ms", "'ttft>500ms' is not an objective; write one like ttft_p99<500ms"),
        ("ttfb_p99<1s", "'ttfb_p99<1s': unknown metric 'ttfb'; choose from ttft, tpot, itl, e2e"),
        ("ttft_p99<500", "'ttft_p99<500': no unit; write the bound in ms or s, like 500ms"),
        ("ttft_p99<5min", "'ttft_p99<5min': unknown unit 'min'; write the bound in ms or s, like 500ms"),
        ("ttft_p99<0ms", "'ttft_p99<0ms': '0' is not a bound; write a number above zero, like 500ms"),
        ("ttft_p99<1-2ms", "'ttft_p99<1-2ms': '1-2' is not a bound; write a number above zero, like 500ms"),
        ("ttft_p100<1s", "'ttft_p100<1s': unknown statistic 'p100'; choose p50, p99, p99.9, …, mean or max"),
        ("ttft_p0<1s", "'ttft_p0<1s': unknown statistic 'p0'; choose p50, p99, p99.9, …, mean or max"),
        ("ttft_avg<1s", "'ttft_avg<1s': unknown statistic 'avg'; choose p50, p99, p99.9, …, mean or max"),
        ("ttft<1s,ttft<2s", "'ttft<1s': ttft_every is bound twice; keep one of the bounds"),
        ("ttft<1s,", "'' is not an objective; write one like ttft_p99<500ms"),
    ],
)
def test_what_is_no_objective_is_refused(text: str, message: str):
    """The term, what is wrong with it, and the cure."""
    with pytest.raises(ValueError, match="--slo") as caught:
        slo.parse_slo(text)
    assert f"--slo: {message}" == str(caught.value)


@pytest.mark.parametrize(
    ("text", "row", "met", "unknown"),
    [
        ("ttft<20ms", THREE, False, False),
        ("ttft<=20ms", THREE, True, False),
        ("ttft_p99<21ms", THREE, True, False),
        ("tpot<11ms,ttft<21ms", THREE, True, False),
        ("tpot<11ms,ttft<19ms", THREE, False, False),
        ("ttft<21ms", THREE | {"status": "failed"}, False, False),
        ("tpot<11ms", THREE | {"output": -1}, False, True),
        ("tpot<11ms", THREE | {"output": 1}, True, False),
        ("itl<16ms", THREE | {"chunks": (120, 125, 140)}, True, False),
        ("itl<15ms", THREE | {"chunks": (120, 125, 140)}, False, False),
        ("itl_max<15ms", THREE | {"chunks": (120, 125, 140)}, False, False),
        ("itl_p99<11ms", THREE | {"chunks": (120, 125, 140)}, True, False),
        ("itl<1ms", THREE | {"chunks": (120,)}, True, False),
        ("itl<1s", {"submit": 100, "end": 150, "output": 5}, False, True),
        ("ttft<1s", {"submit": 100, "end": 150, "output": 5}, False, True),
        ("e2e<51ms", {"submit": 100, "end": 150, "output": 5}, True, False),
    ],
)
def test_what_counts_for_goodput(text: str, row: dict[str, object], met: bool, unknown: bool):
    """Every bound holds for the request itself; one token has no gap, and what was not told is not met."""
    log = request_log(row)
    got = slo.goodput(slo.parse_slo(text), log, request_metrics(log))
    assert (met, unknown) == (bool(got.met[0]), bool(got.unknown[0]))


def test_a_run_meets_an_objective_or_not():
    """By the statistic over the requests that ended ok; plain metrics bind every request."""
    log = request_log(THREE, THREE | {"first": 110}, THREE | {"first": 140, "status": "failed"})
    got = slo.slo_result(slo.parse_slo("ttft_mean<16ms,ttft_max<20ms,ttft<20.1ms"), log, request_metrics(log))
    assert [(15.0, True, 2), (20.0, False, 2), (20.0, True, 2)] == [
        (each.value_ms, each.met, each.count) for each in got.objectives
    ]
    assert (False, 2) == (got.met, got.good_requests + 1)
    json.dumps(to_builtins(got), allow_nan=False)


def test_an_objective_without_a_sample_is_neither_met_nor_missed():
    """Null, and why."""
    log = request_log(THREE | {"output": -1})
    got = slo.slo_result(slo.parse_slo("tpot_p99<1s,ttft<1s"), log, request_metrics(log))
    first, second = got.objectives
    assert (None, None, "no request that ended ok has a value of tpot") == (
        first.value_ms, first.met, first.missing,
    )  # fmt: skip
    assert (True, None, 1) == (second.met, got.met, got.undetermined_requests)


def test_goodput_that_no_reply_can_tell_is_missing():
    """Without any usage, no request can meet or miss a bound on TPOT; a zero would be a claim."""
    got = client_summary(request_log(THREE | {"output": -1}), slo=slo.parse_slo("tpot<1s")).throughput
    assert (None, "no reply has what tpot<1s bounds") == (
        got.goodput_requests_per_s, got.missing["goodput_requests_per_s"],
    )  # fmt: skip


ROWS = st.builds(
    lambda ttft, gaps, tokens, status: {
        "submit": 0, "first": ttft, "last": ttft + sum(gaps), "end": ttft + sum(gaps), "output": tokens,
        "chunks": tuple(np.cumsum([ttft, *gaps]).tolist()), "status": status,
    },
    st.integers(1, 100), st.lists(st.integers(0, 50), max_size=4), st.integers(-1, 6),
    st.sampled_from(["ok", "ok", "failed"]),
)  # fmt: skip
BOUNDS = st.tuples(st.sampled_from(["ttft", "tpot", "itl", "e2e", "itl_max", "ttft_p99"]), st.integers(1, 150))


@given(st.lists(ROWS, min_size=1, max_size=20), BOUNDS, st.integers(0, 100))
def test_goodput_is_at_most_throughput_and_grows_with_the_bound(
    rows: list[dict[str, object]], bound: tuple[str, int], more: int
):
    """A looser bound loses no request, and what is good was counted before."""
    log = request_log(*rows)
    tight, loose = (slo.parse_slo(f"{bound[0]}<{ms}ms") for ms in (bound[1], bound[1] + more))
    metrics = request_metrics(log)
    assert not (slo.goodput(tight, log, metrics).met & ~slo.goodput(loose, log, metrics).met).any()
    flow = client_summary(log, slo=tight).throughput
    if flow.goodput_requests_per_s is not None:
        assert flow.goodput_requests_per_s <= flow.requests_per_s


@given(st.lists(ROWS, min_size=1, max_size=20), st.integers(1, 150))
def test_when_every_request_is_bound_all_good_means_met(rows: list[dict[str, object]], bound_ms: int):
    """The plain objective is met exactly when each request that ended ok, and tells, meets it."""
    log = request_log(*rows)
    metrics, objective = request_metrics(log), slo.parse_slo(f"e2e<{bound_ms}ms")
    ok = log.status == "ok"
    assert (bool(slo.goodput(objective, log, metrics).met[ok].all()) if ok.any() else None) == slo.slo_result(
        objective, log, metrics
    ).met
