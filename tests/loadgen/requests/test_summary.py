from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import MS
from logs import request_log as _log

from sidelight.loadgen.requests import summary as metrics
from sidelight.loadgen.requests.metrics import request_metrics, schedule_lateness_ms, span_ms, span_s, stamped_ms
from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.rundir.stats import QUANTILES, describe

THREE = {"submit": 100, "first": 120, "last": 140, "end": 145, "output": 3, "input": 7, "chunks": (120, 130, 140)}


def _values(array: np.ndarray) -> list[float | None]:
    return [None if np.isnan(value) else float(value) for value in array]


@pytest.mark.parametrize(
    ("row", "ttft", "tpot", "e2e", "tps", "itl"),
    [
        (THREE, 20, 10, 40, 75, [10, 10]),
        (THREE | {"output": -1}, 20, None, 40, None, [10, 10]),
        (THREE | {"output": 1, "last": 120, "chunks": (120,)}, 20, None, 20, 50, []),
        ({"submit": 100, "end": 150, "output": 5}, None, None, 50, 100, []),
        ({"dispatch": 90}, None, None, None, None, []),
        (THREE | {"submit": -1}, None, 10, None, None, [10, 10]),
        (THREE | {"chunks": (105, 110, 120, 130, 140)}, 20, 10, 40, 75, [10, 10]),
        ({"submit": 100, "end": 150, "chunks": (105, 110)}, None, None, 50, None, []),
        (THREE | {"output": 5, "chunks": (120, 140)}, 20, 5, 40, 125, [20]),
    ],
    ids=[
        "three tokens", "no usage", "one token", "not streamed", "never submitted", "submit unknown",
        "blank chunks before the first token", "blank chunks only", "several tokens in a chunk",
    ],
)  # fmt: skip
def test_what_a_request_gives(
    row: dict[str, object],
    ttft: float | None,
    tpot: float | None,
    e2e: float | None,
    tps: float | None,
    itl: list[float],
):
    """The draft's definitions, one case a line; missing is NaN, never zero."""
    got = request_metrics(_log(row))
    columns = (got.ttft_ms, got.tpot_ms, got.e2e_ms, got.request_output_tps)
    assert [ttft, tpot, e2e, tps] == [value for column in columns for value in _values(column)]
    assert itl == got.itl_ms.tolist()


def test_gaps_do_not_cross_requests():
    """The last chunk of one request and the first of the next are no pair."""
    got = request_metrics(_log(THREE, {"dispatch": 1}, THREE | {"chunks": (120, 125, 140)}))
    assert [10, 10, 5, 15] == got.itl_ms.tolist()


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_statistics_are_numpys(values: list[float]):
    """Ascending quantiles between minimum and maximum, mean and sample deviation; NaN is not a value.

    Of equal values numpy's mean may be off by a rounding error; here it is theirs, and the deviation 0.
    """
    block = msgspec.to_builtins(describe([*values, float("nan")], "none"))
    assert len(values) == block["count"]
    quantiles = [block[name] for name in QUANTILES]
    assert [min(values), *np.quantile(values, list(QUANTILES.values())), max(values)] == [
        block["min"], *quantiles, block["max"],
    ]  # fmt: skip
    equal = min(values) == max(values)
    assert (values[0] if equal else float(np.mean(values))) == block["mean"]
    std = 0.0 if equal else float(np.std(values, ddof=1))
    assert (std if len(values) > 1 else None) == block["std"]
    json.dumps(block, allow_nan=False)


@given(st.lists(st.integers(-1, 10**13), min_size=1))
def test_a_time_is_the_same_to_the_bit_by_seconds(ends_ns: list[int]):
    """The breakdown keeps seconds, the client milliseconds: a summary says one TTFT, not two."""
    start_ns, end_ns = np.zeros(len(ends_ns), np.int64), np.array(ends_ns, np.int64)
    np.testing.assert_array_equal(span_ms(start_ns, end_ns), stamped_ms(span_s(start_ns, end_ns)))


def test_no_values_are_missing_for_a_reason():
    """Nulls, and why."""
    block = msgspec.to_builtins(describe([float("nan")], "no samples"))
    assert (0, None, None, "no samples") == (block["count"], block["mean"], block["p99_9"], block["missing"])


def test_a_summary_counts_by_status_and_error():
    """Every request sent is in exactly one status, every failure in one kind."""
    got = metrics.client_summary(
        _log(
            THREE,
            THREE | {"status": "failed", "error": "connect: Connection refused"},
            THREE | {"status": "failed", "error": "connect: Too many open files"},
            THREE | {"status": "refused", "error": "http_404: no such model"},
            THREE | {"status": "cancelled", "error": "cancelled: stopped"},
            THREE | {"status": "in_flight"},
        )
    )
    assert msgspec.to_builtins(got.requests) == {
        "sent": 6,
        "ok": 1,
        "failed": 2,
        "refused": 1,
        "cancelled": 1,
        "in_flight": 1,
    }
    assert list(got.errors.items()) == [("connect", 2), ("cancelled", 1), ("http_404", 1)]
    assert got.ttft_ms.count == 1
    json.dumps(msgspec.to_builtins(got), allow_nan=False)


def test_throughput_is_over_the_window():
    """From the first submission to the last response, or as given; what ended outside is not counted."""
    rows = [THREE, THREE | {"submit": 600, "first": 700, "last": 1000, "end": 1100}]
    got = metrics.client_summary(_log(*rows)).throughput
    assert (1.0, 6.0, 14.0, 2.0) == tuple(
        getattr(got, key) for key in ("duration_s", "output_tokens_per_s", "input_tokens_per_s", "requests_per_s")
    )
    half = metrics.client_summary(_log(*rows), start_ns=0, end_ns=500 * MS).throughput
    assert (0.5, 6.0) == (half.duration_s, half.output_tokens_per_s)


def test_goodput_needs_an_objective():
    """Null with a reason without one, and with one only those that met it."""
    rows = _log(THREE, THREE | {"first": 700, "last": 1000, "end": 1100})
    without = metrics.client_summary(rows).throughput
    assert without.goodput_requests_per_s is None
    assert "objective" in without.missing["goodput_requests_per_s"]
    fast = metrics.client_summary(rows, slo=parse_slo("ttft<500ms")).throughput
    assert fast.goodput_requests_per_s == 1.0


def test_without_usage_there_is_no_token_throughput():
    """Half a sum would be a wrong one."""
    got = metrics.client_summary(_log(THREE, THREE | {"output": -1})).throughput
    assert got.output_tokens_per_s is None
    assert got.missing["output_tokens_per_s"] == "1 of 2 replies report no usage"
    assert got.input_tokens_per_s is not None


def test_chunk_gaps_are_called_what_they_are():
    """Inter-token latency only where more than 90 % of the chunks are certain to hold one token."""
    several = THREE | {"output": 5}
    assert metrics.client_summary(_log(*[THREE] * 10)).itl_ms
    assert metrics.client_summary(_log(*[THREE] * 5, several)).time_between_chunks_ms
    assert metrics.client_summary(_log(*[THREE] * 19, several)).itl_ms


def test_an_empty_log_has_a_summary():
    """Nothing sent: zeros where things are counted, reasons where they are measured."""
    got = metrics.client_summary(_log())
    assert got.requests.sent == 0
    assert got.ttft_ms.missing == "no request succeeded"
    assert got.throughput.missing
    json.dumps(msgspec.to_builtins(got), allow_nan=False)


def test_lateness_is_dispatch_after_schedule():
    """The generator's own error."""
    assert _values(schedule_lateness_ms(_log({"scheduled": 5, "dispatch": 8}, {}))) == [3, None]


def test_time_per_token_counts_what_does_not_show():
    """Tokens without visible text are in the usage, so the time that they took is in the time per token."""
    row = {"submit": 0, "first": 40, "last": 60, "end": 110, "output": 11}
    log = _log(row | {"first_output_ns": 10 * MS, "last_output_ns": 110 * MS})
    assert [10.0] == request_metrics(log).tpot_ms.tolist()
    assert [40.0] == request_metrics(log).ttft_ms.tolist()
