"""What a gateway before the engine took of a wait, told by its own span in the request's trace."""

from __future__ import annotations

import pytest
from sent_spans import TRACE, call, engine, export, gateway, span

from correlator.live.client_spans import GatewaySpans
from scraper.spans.log import ExportRecord


def gateway_first_output_s(exports: list[ExportRecord]) -> dict[str, float]:
    gateways = GatewaySpans()
    for one in exports:
        for received in one.spans():
            gateways.add(received)
    return gateways.first_output_s()


@pytest.mark.parametrize("sent", [gateway("g", first_ms=250.0), call("g", first_ms=250.0)])
def test_a_call_of_a_model_in_a_trace_of_ours_is_a_gateways(sent: object):
    """Known by its form, or by its own word."""
    assert {TRACE.hex(): 0.25} == gateway_first_output_s([export([sent, engine(parent="g")])])  # type: ignore[list-item]


def test_of_several_the_outermost_counts():
    outer = call("outer", first_ms=400.0, end_ms=1000.0)
    inner = call("inner", "outer", first_ms=300.0, start_ms=20.0, end_ms=900.0)
    for spans in ([outer, inner], [inner, outer]):
        assert {TRACE.hex(): 0.4} == gateway_first_output_s([export(spans)])


@pytest.mark.parametrize(
    "sent",
    [engine(), call("g", first_ms=None), span("step", "s"), call("g", first_ms=1e9)],
    ids=["an engine's request", "no first output", "no call of a model", "longer than it took"],
)
def test_what_tells_no_gateways_first_output_is_passed_over(sent: object):
    assert {} == gateway_first_output_s([export([sent])])  # type: ignore[list-item]


def test_a_gateway_off_our_clock_is_refused():
    """By an hour; minutes are no fault, because durations are all that is read."""
    assert {} == gateway_first_output_s([export([call("g", first_ms=250.0, clock_ms=3_600_000.0)])])
    assert {TRACE.hex(): 0.25} == gateway_first_output_s([export([call("g", first_ms=250.0, clock_ms=500_000.0)])])
