from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import request_log
from msgspec import to_builtins

from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.slo import objectives
from sidelight.loadgen.requests.slo import results as slo
from sidelight.loadgen.requests.summary import client_summary

LIKE = "write one like ttft_p99<500ms or error_rate<1%"
# ttft 20, tpot and every gap 10, e2e 40
THREE = {"submit": 100, "first": 120, "last": 140, "end": 145, "output": 3, "chunks": (120, 130, 140)}


@pytest.mark.parametrize(
    ("text", "metric", "statistic", "quantile", "bound_ms", "inclusive"),
    [
        ("ttft_p99<500ms", "ttft", "p99", 0.99, 500, False),
        ("tpot_p50 <= 0.05s", "tpot", "p50", 0.5, 50, True),
        ("itl_p99.9<50ms", "itl", "p99.9", 0.999, 50, False),
        ("itl_p99_9<50ms", "itl", "p99.9", 0.999, 50, False),
        ("ttft_p9.0<50ms", "ttft", "p9.0", 0.09, 50, False),
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
        None if got.quantile is None else pytest.approx(got.quantile), pytest.approx(got.bound),
    )  # fmt: skip
    assert ("ms", False, True) == (got.unit, got.from_below, got.of_latency)


@pytest.mark.parametrize(
    ("text", "metric", "bound", "unit", "value", "met"),
    [
        ("error_rate<1%", "error_rate", 0.01, "ratio", 0.01, False),
        ("error_rate<=1%", "error_rate", 0.01, "ratio", 0.01, True),
        ("error_rate < 0.01", "error_rate", 0.01, "ratio", 0.009, True),
        ("error_rate<=0", "error_rate", 0, "ratio", 0, True),
        ("ttft<1s,goodput_ratio>95%", "goodput_ratio", 0.95, "ratio", 0.95, False),
        ("ttft<1s,goodput_ratio>=0.95", "goodput_ratio", 0.95, "ratio", 0.95, True),
        ("ttft<1s,goodput_ratio>=95%", "goodput_ratio", 0.95, "ratio", 95 / 100, True),
        ("ttft<1s,goodput_ratio>=99.9%", "goodput_ratio", 0.999, "ratio", 999 / 1000, True),
        ("error_rate<35%", "error_rate", 0.35, "ratio", 35 / 100, False),
        ("ttft<1s,goodput>3", "goodput", 3, "requests/s", 3.1, True),
        ("ttft<1s,goodput>=3/s", "goodput", 3, "requests/s", 2.9, False),
        ("requests_per_s>0.5", "requests_per_s", 0.5, "requests/s", 0.6, True),
        ("output_tokens_per_s>1e3/s", "output_tokens_per_s", 1000, "tokens/s", 1000, False),
    ],
)
def test_an_objective_of_a_run_is_read(text: str, metric: str, bound: float, unit: str, value: float, met: bool):
    """Shares from above or from below, rates from below; and whether a value keeps the bound."""
    got = slo.parse_slo(text).objectives[-1]
    assert (metric, "run", unit, False) == (got.metric, got.statistic, got.unit, got.of_latency)
    assert (pytest.approx(bound), met) == (got.bound, got.holds(value))


def test_several_objectives_are_read_in_order():
    """And repeated without the blanks."""
    got = slo.parse_slo("ttft_p99<500ms, tpot_p99<50ms")
    assert ("ttft_p99<500ms,tpot_p99<50ms", ["ttft", "tpot"]) == (got.text, [each.metric for each in got.objectives])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", f"'' is not an objective; {LIKE}"),
        ("ttft_p99", f"'ttft_p99' is not an objective; {LIKE}, in quotes: a shell takes < and > for files"),
        ("ttft>500ms", "'ttft>500ms': a latency is bound from above; write < or <=, like ttft_p99<500ms"),
        ("ttfb_p99<1s", f"'ttfb_p99<1s': unknown metric 'ttfb'; choose from {', '.join(objectives.METRICS)}"),
        ("p99_ttft<1s", "'p99_ttft<1s': the metric comes first; write ttft_p99<1s"),
        ("error_rate>1%", "'error_rate>1%': error_rate is bound from above; write < or <=, like error_rate<1%"),
        ("ttft<1s,goodput<3", "'goodput<3': goodput is bound from below; write > or >=, like goodput>3"),
        (
            "error_rate_p99<1%",
            "'error_rate_p99<1%': error_rate is one number of a run and has no statistics; write error_rate<1%",
        ),
        ("error_rate<5", "'error_rate<5': '5' is not a share; write a percentage, or a number from 0 to 1"),
        ("error_rate<101%", "'error_rate<101%': '101' is not a share; write a percentage, or a number from 0 to 1"),
        ("error_rate<0", "'error_rate<0': no run can meet this; write error_rate<=0"),
        ("ttft<1s,goodput_ratio>100%", "'goodput_ratio>100%': no run can meet this; write goodput_ratio>=100%"),
        ("error_rate<10ms", "'error_rate<10ms': unknown unit 'ms'; write it like error_rate<1%"),
        (
            "goodput>95%",
            "'goodput>95%': unknown unit '%'; write it like goodput>3; the share of good requests is goodput_ratio",
        ),
        (
            "requests_per_s>-1",
            "'requests_per_s>-1': '-1' is not a rate; write a number a second, like requests_per_s>3",
        ),
        (
            "requests_per_s>1-2",
            "'requests_per_s>1-2': '1-2' is not a rate; write a number a second, like requests_per_s>3",
        ),
        (
            "error_rate<1%,goodput>3",
            "'goodput>3': no objective says which requests are good; add one of a latency, like goodput>3,ttft<500ms",
        ),
        (
            "requests_per_s>1,requests_per_s>2",
            "'requests_per_s>1': requests_per_s is bound twice; keep one of the bounds",
        ),
        ("ttft_p99<500", "'ttft_p99<500': no unit; write the bound in ms or s, like 500ms"),
        ("ttft_p99<5min", "'ttft_p99<5min': unknown unit 'min'; write the bound in ms or s, like 500ms"),
        ("ttft_p99<0ms", "'ttft_p99<0ms': '0' is not a bound; write a number above zero, like 500ms"),
        ("ttft_p99<1-2ms", "'ttft_p99<1-2ms': '1-2' is not a bound; write a number above zero, like 500ms"),
        ("ttft_p100<1s", "'ttft_p100<1s': unknown statistic 'p100'; choose p50, p99, p99.9, …, mean or max"),
        ("ttft_p0<1s", "'ttft_p0<1s': unknown statistic 'p0'; choose p50, p99, p99.9, …, mean or max"),
        (
            "ttft_p9<1s",
            "'ttft_p9<1s': p9 lets 91 % of the requests be slower; choose p50, p90, p99, or write p9.0 if it is meant",
        ),
        ("ttft_avg<1s", "'ttft_avg<1s': unknown statistic 'avg'; choose p50, p99, p99.9, …, mean or max"),
        ("ttft<1s,ttft<2s", "'ttft<1s': ttft is bound twice; keep one of the bounds"),
        ("ttft<1s,", f"'' is not an objective; {LIKE}"),
    ],
)
def test_what_is_no_objective_is_refused(text: str, message: str):
    """The term, what is wrong with it, and the cure."""
    with pytest.raises(ValueError, match="--slo") as caught:
        slo.parse_typed_slo(text)
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
    """Every bound holds for the request itself; one token has no gap, and an unknown value does not meet a bound."""
    log = request_log(row)
    got = slo.goodput(slo.parse_slo(text), log, request_metrics(log))
    assert (met, unknown) == (bool(got.met[0]), bool(got.unknown[0]))


def result_of(text: str, *rows: dict[str, object], stopped: bool = False) -> slo.SloResult:
    """The objectives of a run of 1 s that had these requests."""
    client = client_summary(request_log(*rows), start_ns=0, end_ns=10**9, slo=slo.parse_slo(text), stopped=stopped)
    assert client.slo is not None
    json.dumps(to_builtins(client.slo), allow_nan=False)
    return client.slo


FAILED = {"submit": 100, "end": 101, "status": "failed"}


def test_a_run_meets_an_objective_or_not():
    """By the statistic over its requests; plain metrics bind every request."""
    got = result_of("ttft_mean<16ms,ttft_max<20ms,ttft<20.1ms", THREE, THREE | {"first": 110})
    assert [(15.0, True, 2), (20.0, False, 2), (20.0, True, 2)] == [
        (each.value_ms, each.met, each.count) for each in got.objectives
    ]
    assert (False, 1) == (got.met, got.good_requests)


@pytest.mark.parametrize("status", ["failed", "refused", "cancelled", "in_flight"])
def test_a_request_that_did_not_end_ok_has_an_infinite_latency(status: str):
    """24 of 27 were lost, and what came had come in time: no statistic of any latency is met, and JSON says so."""
    text = "ttft_p99<2s,ttft_p50<2s,tpot_mean<2s,itl_p99<2s,e2e_max<2s,itl<2s"
    got = result_of(text, *[THREE] * 3, *[FAILED | {"status": status}] * 24)
    assert [(None, None, False, 27, 24, 0)] * 6 == [
        (each.value, each.value_ms, each.met, each.requests, each.failed_requests, each.left_out_requests)
        for each in got.objectives
    ]
    assert got.objectives[2].missing == "24 of 27 requests did not end ok, and their tpot counts as infinite"
    assert (False, 3) == (got.met, got.good_requests)


def test_a_percentile_is_finite_while_fewer_have_failed_than_lie_above_it():
    """One of 200: p99 is among the answers, a mean and a maximum are not."""
    rows = [THREE | {"first": 100 + at % 40} for at in range(199)]
    got = result_of("ttft_p99<2s,ttft_p99.9<2s,ttft_mean<2s,ttft<2s,itl_p99<2s", *rows, FAILED)
    assert [True, False, False, False, True] == [each.met for each in got.objectives]
    assert got.objectives[0].value_ms == np.quantile([at % 40 for at in range(199)] + [1e9], 0.99)
    assert (199, 200, 1) == (
        got.objectives[0].count, got.objectives[0].requests, got.objectives[0].failed_requests,
    )  # fmt: skip
    assert [False] == [each.met for each in result_of("itl_p99<2s", *rows, *[FAILED] * 3).objectives]


def test_all_requests_failed():
    """Every latency is missed, not unknown; so is a share of errors, and a rate of nothing is zero."""
    got = result_of("ttft_p50<2s,error_rate<1%,requests_per_s>0,goodput_ratio>0", *[FAILED] * 5)
    assert [(None, False), (1.0, False), (0.0, False), (0.0, False)] == [
        (each.value, each.met) for each in got.objectives
    ]


def test_what_the_user_stopped_is_not_held_against_the_server():
    """Unless it had waited for longer than the bound by then. Where the load generator gave it up, it counts."""
    waiting = {"submit": 100, "end": 1100, "status": "cancelled"}  # 1 s without a token
    early = THREE | {"end": 130, "status": "cancelled", "last": -1}
    text = "ttft_p99<2s,ttft_p50<900ms,e2e_p99<2s,tpot_p99<2s,error_rate<1%,goodput_ratio>99%"
    stopped = result_of(text, THREE, waiting, early, stopped=True)
    assert [
        (True, 1, 0, 2), (False, 2, 1, 1), (True, 1, 0, 2), (True, 1, 0, 2), (True, 1, 0, 2), (True, 1, 0, 2),
    ] == [
        (each.met, each.requests, each.failed_requests, each.left_out_requests) for each in stopped.objectives
    ]  # fmt: skip
    given_up = result_of(text, THREE, waiting, early)
    assert [False] * 5 == [each.met for each in given_up.objectives][:5]


def test_shares_and_rates_of_a_run():
    """Of all requests, over the window; each states how many requests it covers."""
    got = result_of(
        "ttft<15ms,error_rate<30%,goodput>1,goodput_ratio>=0.25,requests_per_s>2,output_tokens_per_s>9",
        THREE, THREE | {"first": 110}, THREE | {"first": 110}, FAILED,
    )  # fmt: skip
    assert [(False, None), (True, 0.25), (True, 2.0), (True, 0.5), (True, 3.0), (False, 9.0)] == [
        (each.met, each.value) for each in got.objectives
    ]
    assert {(4, 1, 0)} == {(each.requests, each.failed_requests, each.left_out_requests) for each in got.objectives}
    assert {(None, None)} == {(each.bound_ms, each.value_ms) for each in got.objectives[1:]}


def test_an_objective_without_a_sample_is_neither_met_nor_missed():
    """Null, and why."""
    first, second, third = (
        got := result_of("tpot_p99<1s,ttft<1s,output_tokens_per_s>1", THREE | {"output": -1})
    ).objectives
    assert (None, None, "no request that ended ok has a value of tpot", 1) == (
        first.value_ms, first.met, first.missing, first.left_out_requests,
    )  # fmt: skip
    assert (True, None, 1) == (second.met, got.met, got.undetermined_requests)
    assert (None, "1 of 1 replies report no usage") == (third.met, third.missing)


def test_goodput_that_no_reply_can_show_is_missing():
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


ALL = "ttft_p99<50ms,tpot_mean<9ms,itl_max<30ms,itl_p50<20ms,e2e<90ms,error_rate<10%,goodput_ratio>50%"


@given(st.lists(ROWS, max_size=20), st.integers(0, 20), st.booleans())
def test_objectives_of_requests_that_came_batch_by_batch_are_those_of_all_at_once(
    rows: list[dict[str, object]], first: int, stopped: bool
):
    """A live view adds up what the report evaluates in one go."""
    objectives = slo.parse_slo(ALL)
    tally = slo.SloTally(objectives, stopped=stopped)
    for batch in (rows[:first], rows[first:]):
        log = request_log(*batch)
        tally.add(log, request_metrics(log))
    log = request_log(*rows)
    whole = slo.slo_result(objectives, log, request_metrics(log), {}, stopped=stopped)
    assert whole == tally.result({})


@given(st.lists(ROWS, min_size=1, max_size=20), st.integers(1, 150))
def test_when_every_request_is_bound_all_good_means_met(rows: list[dict[str, object]], bound_ms: int):
    """The plain objective is met exactly when each request ended ok and meets it."""
    log = request_log(*rows)
    good = slo.goodput(slo.parse_slo(f"e2e<{bound_ms}ms"), log, request_metrics(log))
    assert bool(good.met.all()) == result_of(f"e2e<{bound_ms}ms", *rows).met


@given(st.lists(st.integers(0, 100), max_size=30), st.integers(0, 30), st.sampled_from([50, 90, 95, 99, 99.9]))
def test_a_percentile_among_failures_is_that_of_very_long_waits(ttft_ms: list[int], failed: int, percent: float):
    """As numpy has it, with a wait far above the bound in the place of each failure."""
    rows = [THREE | {"first": 100 + wait} for wait in ttft_ms] + [FAILED] * failed
    if rows:
        (got,) = result_of(f"ttft_p{percent:g}<200ms", *rows).objectives
        expected = np.quantile([*ttft_ms, *[1e15] * failed], percent / 100)
        assert (expected < 200, None if expected > 1e6 else pytest.approx(expected)) == (got.met, got.value_ms)
