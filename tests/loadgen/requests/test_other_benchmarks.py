from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs import request_log

from sidelight.loadgen.requests.other_benchmarks import asiai, exo, siclait
from sidelight.rundir.stats import Missing

NO_POWER = Missing(reason="not measured")
# Sent at 100, first content at 120, last at 140: siclait and asiai count from the dispatch.
THREE = {
    "dispatch": 100, "submit": 101, "first": 120, "last": 140, "end": 150, "output": 3, "input": 8, "declared": 7,
    "chunks": (120, 130, 140), "class": "short",
}  # fmt: skip


def shown(result: object) -> Any:
    """Return what summary.json shows of a result: strict JSON."""
    return json.loads(json.dumps(msgspec.to_builtins(result), allow_nan=False))


def test_siclaits_eight():
    """By its script: from before the request to the last content, deviations of a population."""
    slow = THREE | {"dispatch": 200, "first": 260, "last": 300, "end": 310, "output": 5, "declared": 9}
    got = shown(siclait.siclait(request_log(THREE, slow)))
    means = {
        "ttft_ms": 40.0, "request_latency_ms": 70.0, "itl_ms": 10.0, "request_output_tps": 62.5, "input_tokens": 8.0,
        "output_tokens": 4.0,
    }  # fmt: skip
    assert means == {name: pytest.approx(got[name]["mean"]) for name in means}
    assert (20.0, 20.0, 60.0) == tuple(got["ttft_ms"][name] for name in ("std", "min", "max"))
    assert (0.2, 40.0, 10.0) == (got["duration_s"], got["output_tps"], got["requests_per_s"])


def test_siclait_without_usage_has_no_token_rates():
    """Half a sum would be a wrong one."""
    got = shown(siclait.siclait(request_log(THREE, THREE | {"output": -1})))
    assert (None, "1 of 2 replies report no usage") == (got["output_tps"], got["missing"]["output_tps"])
    assert 1 == got["itl_ms"]["count"]


@pytest.mark.parametrize(
    ("row", "speed", "ttft", "total", "tokens", "generation"),
    [
        (THREE, 100.0, 20.0, 50.0, 3, 30.0),
        (THREE | {"end": 129, "last": 125}, None, 20.0, 29.0, 3, 9.0),
        ({"dispatch": 100, "end": 150, "output": 3}, None, None, 50.0, 3, None),
        (
            THREE | {
                "timings_source": "ollama", "server_prefill_ms": 15.0, "server_decode_ms": 20.0, "server_e2e_ms": 40.0,
            },
            150.0, 15.0, 40.0, 3, 20.0,
        ),
        (THREE | {"timings_source": "llamacpp", "server_prefill_ms": 15.0}, 100.0, 20.0, 50.0, 3, 30.0),
    ],
    ids=["client", "below 10 ms", "not streamed", "ollama", "another server's words"],
)  # fmt: skip
def test_asiais_m1_to_m5(
    row: dict[str, object], speed: float | None, ttft: float | None, total: float, tokens: int, generation: float | None
):
    """Ollama's durations, else the client's clock; tokens as the log has them."""
    got = asiai.asiai_columns(request_log(row))
    columns = (
        got.tok_per_sec, got.ttft_ms, got.total_duration_ms, got.tokens_generated, got.generation_duration_ms,
    )  # fmt: skip
    expected = [np.nan if value is None else value for value in (speed, ttft, total, tokens, generation)]
    assert expected == pytest.approx([float(column[0]) for column in columns], nan_ok=True)


ROWS = st.builds(
    lambda connect, wait, span, rest, tokens, name: {
        "dispatch": 0, "submit": connect, "first": connect + wait, "last": connect + wait + span,
        "end": connect + wait + span + rest, "output": tokens, "class": name,
    },
    *[st.integers(0, 500)] * 4, st.integers(-1, 50), st.sampled_from(["short", "long"]),
)  # fmt: skip


@given(st.lists(ROWS, min_size=1, max_size=20))
def test_asiais_invariants_hold(rows: list[dict[str, object]]):
    """total >= ttft, always, and total = ttft + generation by the client's clock."""
    got = shown(asiai.invariants(asiai.asiai_columns(request_log(*rows))))
    assert {"checked": len(rows), "violated": 0} == got["total_at_least_ttft"]
    assert got["total_is_ttft_plus_generation"]["greatest_residual_ms"] < 1e-6


def test_a_violated_invariant_is_reported():
    """Ollama's prompt evaluation cannot take longer than all of it."""
    row = THREE | {
        "timings_source": "ollama", "server_prefill_ms": 45.0, "server_decode_ms": 20.0, "server_e2e_ms": 40.0,
    }  # fmt: skip
    got = shown(asiai.asiai(request_log(row), power_watts=NO_POWER))["invariants"]
    assert {"checked": 1, "violated": 1} == got["total_at_least_ttft"]
    assert {"checked": 1, "greatest_residual_ms": 25.0} == got["total_is_ttft_plus_generation"]


def test_asiai_states_which_tokens_were_estimated():
    """The log estimates where no server counted; what it estimated is not the server's."""
    log = request_log(THREE, THREE | {"output": 7, "output_tokens_source": "estimate"}, THREE | {"output": -1})
    sources = shown(asiai.asiai(log, power_watts=NO_POWER))["sources"]
    assert (1, 1) == (sources["tokens_by_server"], sources["tokens_estimated"])


def test_asiais_variance_is_pooled_over_runs_of_the_same():
    """M8: the root of the mean of the population variances of what was run twice or more."""
    values = np.array([10.0, 14.0, 100.0, 106.0, 50.0, np.nan])
    groups = np.array(["a", "a", "b", "b", "c", "a"], np.object_)
    assert np.sqrt((4 + 9) / 2) == pytest.approx(asiai.pooled_std(values, groups))
    assert isinstance(asiai.pooled_std(values[4:], groups[4:]), Missing)


@pytest.mark.parametrize(
    ("cv", "name"), [(0, "stable"), (4.99, "stable"), (5, "variable"), (9.99, "variable"), (10, "unstable")]
)
def test_asiais_stability_classes(cv: float, name: str):
    """Below 5 %, below 10 %, and above."""
    assert name == asiai.stability(cv)


def test_requests_of_a_class_are_no_runs():
    """They have other prompts and run beside each other: M8, from run to run, is not known of one run."""
    got = shown(asiai.asiai(request_log(THREE, THREE | {"output": 6}), power_watts=NO_POWER))
    assert (None, None, None) == (got["std_dev_tok_s"], got["cv_percent"], got["stability"])
    for name in ("std_dev_tok_s", "cv_percent", "stability"):
        assert "over runs of the same prompts, and this is one run" in got["missing"][name]


def test_asiais_power_is_read_or_missing():
    """M6 and M7, from the mean speed."""
    rows = [THREE, THREE | {"output": 6}]
    got = shown(asiai.asiai(request_log(*rows), power_watts=300.0))
    assert (300.0, 0.5) == (got["power_watts"], got["tok_per_sec_per_watt"])
    assert 150.0 == got["tok_per_sec"]["p50"]
    without = shown(asiai.asiai(request_log(*rows), power_watts=NO_POWER))
    assert (None, "not measured") == (without["power_watts"], without["missing"]["tok_per_sec_per_watt"])


@pytest.mark.parametrize(
    ("row", "prefill", "generation", "source"),
    [
        (THREE, 8 / 0.019, 100.0, "client_clock"),
        (THREE | {"server_prefill_ms": 4.0, "server_decode_ms": 16.0}, 2000.0, 125.0, "server_duration"),
        (
            THREE | {"server_prefill_ms": 4.0, "server_prompt_tps": 999.0, "server_generation_tps": 77.0},
            999.0, 77.0, "server_rate",
        ),
    ],
)  # fmt: skip
def test_exos_rates(row: dict[str, object], prefill: float, generation: float, source: str):
    """The server's own rates, else from its durations, else the client's."""
    got = shown(exo.exo(request_log(row), concurrency=None))
    assert (prefill, generation) == pytest.approx((got["prefill_tps"]["mean"], got["generation_tps"]["mean"]))
    assert {"prefill_tps": source, "generation_tps": source} == {
        name: next(source for source, count in counted.items() if count) for name, counted in got["sources"].items()
    }


def test_exos_rate_needs_two_tokens():
    """tg = 1 does not work, as it says."""
    assert 0 == shown(exo.exo(request_log(THREE | {"output": 1}), concurrency=1))["generation_tps"]["count"]


def test_exos_aggregate_of_one_in_flight_is_each_request():
    """One that did not succeed is left out, and counted."""
    rows = [THREE | {"server_generation_tps": rate} for rate in (100.0, 120.0, 90.0)]
    rows[1] |= {"end": 400}
    rows[2] |= {"status": "failed"}
    got = shown(exo.exo(request_log(*rows), concurrency=1))["aggregate"]
    assert (1, 2, 1) == (got["concurrency"], got["batches"], got["incomplete_batches"])
    assert (120.0, 100.0) == (got["agg_gen_tps"]["max"], got["agg_gen_tps"]["min"])
    assert (0.3, 0.05) == (got["batch_wall_s"]["max"], got["batch_wall_s"]["min"])


@pytest.mark.parametrize("concurrency", [None, 4])
def test_exos_aggregate_needs_one_instant(concurrency: int | None):
    """Requests that did not start together make no batch."""
    got = shown(exo.exo(request_log(THREE), concurrency=concurrency))["aggregate"]
    assert "released at one instant" in got["agg_gen_tps"]["missing"]


def test_an_empty_log_has_all_blocks():
    """Reasons, no zeros."""
    log = request_log()
    blocks = [
        shown(siclait.siclait(log)),
        shown(asiai.asiai(log, power_watts=NO_POWER)),
        shown(exo.exo(log, concurrency=2)),
    ]
    assert blocks[0]["missing"]["output_tps"] == "no reply came in chunks"
