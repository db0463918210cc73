"""What a system's output cost, by its price an hour and the rates of a run."""

from __future__ import annotations

import msgspec
import pytest

from sidelight.loadgen.requests.rates import SteadyThroughput, cost

STEADY = SteadyThroughput(
    start_ns=0, end_ns=10**10, duration_s=10.0, requests_per_s=5.0, requests_per_s_ci95=None, output_tokens_per_s=500.0,
    output_tokens_per_s_ci95=(400.0, 625.0), input_tokens_per_s=None, steady=None, mser5_left_out=None,
)  # fmt: skip
PER_S = {"output_tokens_per_s": 450.0, "requests_per_s": 4.0, "goodput_requests_per_s": 2.0}


def test_a_million_tokens_cost_what_the_system_costs_while_it_makes_them():
    """At 3.6 an hour, and 500 tokens/s (400 to 625): 2000 s, of which each costs a thousandth."""
    result = cost(3.6, STEADY, PER_S)
    assert (2.0, (1.6, 2.5)) == (result.million_output_tokens, pytest.approx(result.million_output_tokens_ci95))
    assert (0.00025, 0.0005) == (pytest.approx(result.request), pytest.approx(result.good_request))


def test_without_a_steady_part_the_window_counts_and_no_interval_is_known():
    few = msgspec.structs.replace(STEADY, output_tokens_per_s=None, output_tokens_per_s_ci95=None)
    for steady in (None, few):
        result = cost(3.6, steady, PER_S)
        assert (pytest.approx(1e3 / 450), None) == (result.million_output_tokens, result.million_output_tokens_ci95)


def test_what_was_not_served_has_no_cost():
    """Nor has an interval that reaches down to nothing an upper end."""
    nothing = cost(3.6, None, dict.fromkeys(PER_S, 0.0))
    assert [None] * 3 == [nothing.million_output_tokens, nothing.request, nothing.good_request]
    wide = msgspec.structs.replace(STEADY, output_tokens_per_s_ci95=(0.0, 900.0))
    assert cost(3.6, wide, PER_S | {"goodput_requests_per_s": None}).million_output_tokens_ci95 is None
