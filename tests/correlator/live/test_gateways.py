"""Which spans of a trace are gateways' between client and engine, and what each of them took of the wait."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import INTERNAL, NOON, SERVER, TRACE, S, call, engine, export, gateway, span

from sidelight.correlator.live.breakdown import break_down_ended
from sidelight.correlator.live.window import TraceWindow
from sidelight.recorded.gateway_spans import GatewaySpans
from sidelight.scraper.spans.log import ExportRecord

PATH = {"http.target": "/v1/chat/completions"}
POSTED = {"call_type": "post <- track_llm_api_timing"}
Sent = dict[str, list[Span]]  # by service


def gateway_first_output_s(exports: list[ExportRecord]) -> dict[str, float]:
    gateways = GatewaySpans()
    for record in exports:
        for received in record.spans():
            gateways.add(received)
    return {trace: spans[0].first_s for trace, spans in gateways.by_trace().items() if spans[0].first_s >= 0}


@pytest.mark.parametrize("sent", [gateway("g", first_ms=250.0), call("g", first_ms=250.0)])
def test_a_call_of_a_model_in_a_trace_of_ours_is_a_gateways(sent: object):
    """Known by its form, or by an attribute."""
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
def test_spans_without_a_gateways_first_output_are_passed_over(sent: object):
    assert {} == gateway_first_output_s([export([sent])])  # type: ignore[list-item]


def test_a_gateway_off_our_clock_is_refused():
    """By an hour; minutes are no fault, because durations are all that is read."""
    assert {} == gateway_first_output_s([export([call("g", first_ms=250.0, clock_ms=3_600_000.0)])])
    assert {TRACE.hex(): 0.25} == gateway_first_output_s([export([call("g", first_ms=250.0, clock_ms=500_000.0)])])


def server(span_id: str, parent: str = "client", *, path: bool = True, **changes: object) -> Span:
    """Return a server's span as standard instrumentation makes it, from 40 to 940 ms."""
    whole = {"start_ms": 40.0, "end_ms": 940.0, **changes}
    return span("POST", span_id, parent, kind=SERVER, attributes=PATH if path else {}, **whole)  # type: ignore[arg-type]


def client(span_id: str, parent: str, start_ms: float, end_ms: float) -> Span:
    """Return the span of an HTTP client."""
    return span("POST", span_id, parent, start_ms=start_ms, end_ms=end_ms)


def sends(parent: str, at_ms: float, event: str = "http.response.body") -> Span:
    """Return the span of an ASGI server's sending of a part of a reply."""
    name = f"s{at_ms:.0f}"
    return span("POST http send", name, parent, at_ms, at_ms + 1, kind=INTERNAL, attributes={"asgi.event.type": event})


def parts_of(sent: Sent, *, watched: bool) -> list[tuple[str | float, ...]]:
    """Service, part, part before its call and bound of each gateway, ms, -1 where unknown: in a watch or in a run.

    The client waited 300 ms for its first output, of which the engine took 200; its whole took 710 of 1000.
    """
    sent = {"app": [call("client", first_ms=300.0)], **sent}
    window, gateways = TraceWindow(), GatewaySpans()
    for service, spans in sent.items():
        record = export(spans, service=service)
        window.take(record)
        for received in record.spans() if service != "app" else ():
            gateways.add(received)
    requests = window.finished(NOON + S, all_of_it=True)
    (request,) = (candidate for candidate in requests if candidate.engine)
    if not watched:
        request = replace(request, gateways=gateways.by_trace().get(TRACE.hex(), ()))
    broken_down = break_down_ended([request]).parts.gateways[0]
    return [
        (
            gateway.service,
            *(round(1e3 * x, 6) if x >= 0 else -1 for x in (gateway.part_s, gateway.request_s, gateway.at_most_s)),
        )
        for gateway in broken_down
    ]


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"gw": [server("g"), client("c", "g", 70, 300)], "llm": [engine(parent="c")]}, [("gw", 30, 30, 100)]),
        ({"gw": [server("g", path=False)], "llm": [engine(parent="g")]}, [("gw", -1, -1, 100)]),
        ({"gw": [server("g"), sends("g", 300), sends("g", 280)], "llm": [engine(parent="g")]}, [("gw", 40, -1, -1)]),
        ({"gw": [server("g"), sends("g", 260, "start")], "llm": [engine(parent="g")]}, [("gw", -1, -1, 100)]),
        ({"gw": [server("g")], "llm": [engine()]}, [("gw", -1, -1, 100)]),
        ({"gw": [server("g", start_ms=-300, end_ms=-10)], "llm": [engine()]}, []),
        ({"gw": [server("g", path=False)], "llm": [engine()]}, []),
        (
            {"gw": [server("g", path=False), call("c", "g", first_ms=220, start_ms=60)], "llm": [engine()]},
            [("gw", 40, 20, 100)],
        ),
        (
            {"gw": [server("g", end_ms=790.0), call("c", "g", first_ms=220, start_ms=60)], "llm": [engine(parent="c")]},
            [("gw", 40, 20, -1)],
        ),
        ({"llm": [server("g"), engine(parent="g")]}, []),
        ({"gw": [gateway("g", "client", first_ms=240.0)], "llm": [engine(parent="g")]}, [("gw", 40, -1, -1)]),
        ({"gw": [server("g"), sends("g", 60)], "llm": [engine(parent="g")]}, [("gw", -1, -1, 100)]),
    ],
    ids=[
        "by parents, with its call",
        "by parents alone",
        "its first part of the reply",
        "headers are no output",
        "beside the engine, around it",
        "beside the engine, before it",
        "beside the engine, and no call of a model",
        "beside the engine, with a call of a model",
        "with a call of a model, no longer open than the engine's",
        "of the engine's own service",
        "in the catalogue",
        "a part sent before the engine's first token",
    ],
)
def test_a_gateway_is_recognised_by_where_its_span_stands(
    sent: Sent, expected: list[tuple[str | float, ...]], *, watched: bool
):
    """In a watch and in a run alike; its first output by the best that its spans say, else bounded."""
    assert expected == parts_of(sent, watched=watched)


@pytest.mark.parametrize("watched", [True, False])
def test_several_gateways_have_a_part_each(*, watched: bool):
    """Outermost first; one in between without a first output has its way in, the outer one the rest."""
    outer = [server("o", start_ms=10, end_ms=990), sends("o", 300)]
    middle = [server("m", "o", start_ms=20, end_ms=980), client("c", "m", 25, 970)]
    inner = [server("i", "c", start_ms=30, end_ms=970), sends("i", 250)]
    sent = {"outer": outer, "middle": middle, "inner": inner, "llm": [engine(parent="i")]}
    expected = [("outer", 65, -1, -1), ("middle", 5, 5, 100), ("inner", 20, -1, -1)]
    assert expected == parts_of(sent, watched=watched)


def test_of_one_service_the_attempt_that_led_to_the_engine_counts():
    """Not one that failed before it."""
    tries = [server("t1", "c1", start_ms=0, end_ms=35), server("t2", "c2")]
    outer = [server("o", start_ms=-5, end_ms=950), client("c1", "o", 0, 35), client("c2", "o", 36, 945)]
    gateways = parts_of({"outer": outer, "inner": tries, "llm": [engine(parent="t2")]}, watched=True)
    assert [("outer", 41), ("inner", -1)] == [part[:2] for part in gateways]


def test_a_gateway_that_states_more_than_there_was_is_not_used():
    """Its time then stays outside the engine."""
    assert [] == parts_of({"gw": [gateway("g", "client", first_ms=700.0)], "llm": [engine(parent="g")]}, watched=True)


def test_a_watch_waits_for_a_gateway_that_sends_beside_the_engine():
    """Once one was seen: its exporter may send seconds after the engine's and the client's."""
    window = TraceWindow()

    def looked(at_s: float) -> list[str]:
        requests = window.finished(NOON + round(at_s * S))
        return [gateway.service for request in requests for gateway in request.gateways]

    window.take(export([call(), engine()], at_s=1))
    window.take(export([server("g")], at_s=1, service="gw"))
    assert ["gw"] == looked(2)
    window.take(export([call(trace=b"o" * 16), engine(trace=b"o" * 16)], at_s=20))
    assert [] == looked(24)
    window.take(export([server("g", trace=b"o" * 16)], at_s=24, service="gw"))
    assert ["gw"] == looked(25)


def test_a_trace_of_many_requests_costs_no_more_than_it_has():
    """An agent's, of two hundred requests one after the other: each has its own gateway, and none another's."""
    spans: Sent = {"app": [], "gw": [], "llm": []}
    for number in range(200):
        at_ms, ids = 1000.0 * number - 200_000, [f"{kind}{number}" for kind in "cge"]
        whole = {"start_ms": at_ms + 40, "end_ms": at_ms + 940}
        spans["app"].append(call(ids[0], first_ms=300, start_ms=at_ms, end_ms=at_ms + 1000))
        spans["gw"].append(server(ids[1], ids[0], **whole))
        spans["llm"].append(engine(ids[2], ids[0], start_ms=at_ms + 50, end_ms=at_ms + 760))
    window = TraceWindow()
    for service, service_spans in spans.items():
        window.take(export(service_spans, service=service))
    requests = window.finished(NOON + S, all_of_it=True)
    assert {("gw", 0.9)} == {(gateway.service, gateway.whole_s) for request in requests for gateway in request.gateways}
    assert [1] * 200 == [len(request.gateways) for request in requests]


@pytest.mark.parametrize(
    ("parent", "spans", "ttft_ms"),
    [("", [sends("g", 300)], 260), ("lost", [sends("g", 300)], 260), ("", [], None)],
    ids=["the first of all", "a client that sends no spans", "no first output"],
)
def test_a_request_without_a_clients_span_begins_at_its_gateway(parent: str, spans: list[Span], ttft_ms: float | None):
    """All that the engine did not take is the gateway's; the network before it is not seen, and in no other part."""
    window = TraceWindow()
    window.take(export([server("g", parent), *spans], service="gw"))
    window.take(export([engine(parent="g")], service="llm"))
    ended = break_down_ended(window.finished(NOON + S, all_of_it=True))
    assert pytest.approx(0.19) == ended.whole.gateway_s[0]
    assert np.isnan([ended.whole.network_s[0], ended.parts.network_s[0]]).all()
    assert "" == ended.parts.merged[0]
    if ttft_ms is not None:
        parts_ms = [1e3 * float(column[0]) for column in (ended.parts.ttft_s, ended.parts.gateway_s)]
        assert [ttft_ms, ttft_ms - 200] == pytest.approx(parts_ms)
    assert ["gw"] == [gateway.service for gateway in ended.whole.gateways[0]]
    assert ("no_first_token" if ttft_ms is None else "") == ended.reason[0]


def test_an_engines_own_server_is_no_gateway():
    """It is instrumented twice, under one name."""
    window = TraceWindow()
    window.take(export([server("g", ""), engine(parent="g")], service="llm"))
    (request,) = window.finished(NOON + S, all_of_it=True)
    assert () == request.gateways


@pytest.mark.parametrize("watched", [True, False])
def test_a_sidecar_is_a_gateway_whatever_its_service_is_called(*, watched: bool):
    """An Envoy beside the engine bears the engine's name, and its own span may be of kind CLIENT."""
    attributes = {"guid:x-request-id": "1", "http.url": "http://llm/v1/chat/completions"}
    ingress = span("ingress", "g", "client", 40, 940, attributes=attributes)
    egress = span("router engine egress", "c", "g", 60, 930)
    assert [("llm", 20, 20, 100)] == parts_of({"llm": [ingress, egress, engine(parent="c")]}, watched=watched)


@pytest.mark.parametrize("watched", [True, False])
def test_a_call_in_the_catalogue_may_end_at_the_reply_s_headers(*, watched: bool):
    """It does not enclose the engine's span then: it counts by its parent, and by when it began."""
    early, late = (span("self", f"c{at}", "g", at, at + 20, kind=INTERNAL, attributes=POSTED) for at in (70, 600))
    sent = {"gw": [server("g"), early, late], "llm": [engine(start_ms=80, end_ms=790)]}
    assert [("gw", 30, 30, 100)] == parts_of(sent, watched=watched)
