"""Spans come in any order and at any time; each request comes out once, when its spans are there."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import CLIENT, INTERNAL, NOON, SERVER, S, call, engine, export, gateway, span

from sidelight.correlator.live import traces
from sidelight.correlator.live.traces import TracedRequest
from sidelight.correlator.live.window import KEEP_S, TraceWindow
from sidelight.recorded import gateway_spans
from sidelight.recorded.client_spans import chain

Outline = tuple[str, str, list[str]]


def outlines(requests: Sequence[TracedRequest]) -> list[Outline]:
    """Return requests as the ids of their spans: client and engines, and whether there is a gateway."""

    def name(key: bytes) -> str:
        return key.decode().strip(".")

    return sorted(
        (
            name(request.client.span_id) if request.client else "",
            "gateway" if request.gateways else "",
            sorted(name(engine_span.span.span_id) for engine_span in request.engine),
        )
        for request in requests
    )


def finished(window: TraceWindow, at_s: float) -> list[Outline]:
    return outlines(window.finished(NOON + round(at_s * S)))


def everything(spans: Sequence[Span]) -> list[Outline]:
    window = TraceWindow()
    window.take(export(spans))
    return outlines(window.finished(NOON + S, all_of_it=True))


def test_a_request_comes_out_once_its_spans_are_all_there():
    """A second of quiet after the last of them, for the choices of a request come one by one; and only once."""
    window = TraceWindow()
    window.take(export([engine()], at_s=1))
    window.take(export([call()], at_s=3))
    assert [] == finished(window, 3.9)
    assert [("client", "", ["engine"])] == finished(window, 4)
    assert [] == finished(window, 20)


def test_the_steps_of_a_search_are_awaited_for_as_long_as_an_exporter_waits():
    """They are sent while it goes on, and no span says how many there are: the last may come behind the client's."""
    steps = [engine(f"step-{step}") for step in range(3)]
    for number, step in enumerate(steps):
        step.attributes.add(key="gen_ai.request.id").value.string_value = f"cmpl-a-{number}f-beam-0"
    window = TraceWindow()
    window.take(export(steps[:1], at_s=1))
    window.take(export(steps[1:2], at_s=6))
    window.take(export([call()], at_s=8))
    assert [] == finished(window, 10.5)
    window.take(export(steps[2:], at_s=11))
    assert [] == finished(window, 16.9)
    assert [("client", "", ["step-0", "step-1", "step-2"])] == finished(window, 17)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [([engine()], ("", "", ["engine"])), ([call()], ("client", "", []))],
    ids=["engine", "client"],
)
def test_what_lacks_a_span_is_waited_for_six_seconds(spans: list[Span], expected: Outline):
    """Longer than any exporter waits."""
    window = TraceWindow()
    window.take(export(spans, at_s=1))
    assert [] == finished(window, 6.9)
    assert [expected] == finished(window, 7)


def test_no_request_is_blamed_for_the_time_without_a_receiver():
    """What was open then is waited for from the moment at which there is one again."""
    window = TraceWindow()
    window.take(export([engine()], at_s=1))
    window.missed(NOON + 20 * S)
    assert [] == finished(window, 25)
    window.take(export([call()], at_s=25))
    assert [("client", "", ["engine"])] == finished(window, 26)


def test_the_client_is_the_outermost_call_of_a_model():
    """A gateway below it is distinguished; a span of neither kind only leads to it."""
    spans = [
        call("client"),
        span("connect", "step", "client", kind=INTERNAL),
        gateway("gateway", "step"),
        engine(parent="gateway"),
    ]
    assert [("client", "gateway", ["engine"])] == everything(spans)


def test_a_workflow_is_no_client_of_the_calls_in_it():
    """Whether it holds several or one: what else it does is not waiting for an engine."""
    work = span("POST /ask", "work", kind=SERVER, end_ms=5000)
    first, second = call("call-1", "work"), call("call-2", "work", start_ms=2000, end_ms=3000)
    engines = [engine("engine-1", "call-1"), engine("engine-2", "call-2", start_ms=2050, end_ms=2700)]
    assert [("call-1", "", ["engine-1"]), ("call-2", "", ["engine-2"])] == everything([work, first, second, *engines])
    assert [("call-1", "", ["engine-1"])] == everything([work, first, engines[0]])


def test_without_a_call_of_a_model_the_client_is_the_nearest_span():
    """A plain HTTP client's, whatever is above it."""
    spans = [span("work", "work", kind=SERVER), span("POST", "http", "work"), engine(parent="http")]
    assert [("http", "", ["engine"])] == everything(spans)


@pytest.mark.parametrize("parent", ["", "lost"])
def test_without_parents_the_client_is_the_span_around_the_engines(parent: str):
    """In the same trace; 50 ms are what clocks may differ by. A span outside it belongs to another client."""
    assert [("client", "", ["engine"])] == everything([call(), engine(parent=parent, clock_ms=-90)])
    apart = everything([call(), engine(parent=parent, clock_ms=-110)])
    assert [("", "", ["engine"]), ("client", "", [])] == apart


def test_the_choices_of_a_request_come_out_with_it():
    """Below one client's span there may be several of the engine's: n > 1, or engines that share the work."""
    spans = [call(), engine("choice-0"), engine("choice-1")]
    assert [("client", "", ["choice-0", "choice-1"])] == everything(spans)


def test_a_health_probe_is_no_request():
    """SGLang serves it like one, and its spans are as a request's but for the id."""
    attributes = {"module": "sglang::request", "gen_ai.request.id": "HEALTH_CHECK_1795318691.5"}
    window = TraceWindow()
    window.take(export([span(" Req HEALTH_C", "probe", kind=INTERNAL, attributes=attributes)]))
    assert ([], 1) == (finished(window, 60), window.probes)


def test_a_span_that_came_twice_counts_once():
    """An exporter that heard no answer sends again, after the request came out too."""
    window = TraceWindow()
    for at_s in (1, 2, 20):
        window.take(export([call(), engine()], at_s=at_s))
        window.finished(NOON + round((at_s + 10) * S))
    assert 4 == window.repeated


@pytest.mark.parametrize("again_s", [5, 30, 40, 59, 61, 150, 300])
def test_a_span_that_comes_again_late_loses_no_request(again_s: int):
    """Nor does it make another: an exporter sends again for five minutes, when its trace is the oldest, or gone."""
    window, came = TraceWindow(), 0
    for at_s in range(400):
        if at_s in (0, again_s):
            window.take(export([call(trace=b"\xff" * 16)], at_s=at_s))
        trace = (at_s + 1).to_bytes(2) * 8
        window.take(export([call(trace=trace), engine(trace=trace)], at_s=at_s))
        came += len(finished(window, at_s))
    came += len(window.finished(NOON + 400 * S, all_of_it=True))
    assert (400 + 1, 1) == (came, window.repeated)
    assert [] == window.finished(NOON + 500 * S)
    assert {"spans": 0, "traces": 0, "pending": 0} == window.sizes


def test_that_a_span_came_is_known_for_a_time_and_of_so_many(monkeypatch: pytest.MonkeyPatch):
    """Not longer than exporters try; the oldest are forgotten first."""
    monkeypatch.setattr("sidelight.correlator.live.window.MOST_KNOWN", 40)
    window = TraceWindow()

    def send(number: int, at_s: float) -> int:
        before = window.repeated
        window.finished(NOON + round(at_s * S))
        window.take(export([call(trace=number.to_bytes(16), clock_ms=1e3 * at_s)], at_s=at_s))
        return window.repeated - before

    assert [0, 1] == [send(1, at_s) for at_s in (0, 200)]
    assert [1, 0] == [send(1, at_s) for at_s in (400, 1000)]
    assert 0 == sum(send(number, 5000 + number) for number in range(2, 400))
    assert [0, 1] == [send(number, 5400) for number in (2, 320)]


def test_a_trace_that_is_older_than_its_place_is_forgotten_too():
    """Stamps of others may go back: nothing is left behind, and nothing raises."""
    window = TraceWindow()
    window.take(export([call(trace=b"B" * 16)], at_s=100))
    window.take(export([call(trace=b"A" * 16)], at_s=1))
    assert 2 == len(window.finished(NOON + 120 * S))
    assert {"spans": 1, "traces": 1, "pending": 0} == window.sizes


def test_a_span_that_breaks_the_rules_is_counted_by_the_receiver_alone():
    """It belongs to no request; nor does one whose clock is an hour off."""
    window = TraceWindow()
    assert 3 == window.take(export([call(trace=b"short"), call(end_ms=-5), engine(clock_ms=3_600_000)]))
    assert [] == window.finished(NOON, all_of_it=True)


def test_the_oldest_make_room_and_are_counted_as_evicted():
    """However many spans come, as many are kept as was said."""
    window = TraceWindow(most_spans=10)
    for number in range(25):
        window.take(export([call(trace=bytes([number + 1]) * 16)], at_s=1))
        assert window.sizes["spans"] <= 10
    requests = window.finished(NOON + 100 * S, all_of_it=True)
    assert (25, 15, 15) == (len(requests), sum(request.evicted for request in requests), window.evicted)


def test_what_an_engine_writes_at_length_is_not_kept():
    """A prompt in an attribute costs no memory, and whatever comes is bounded in bytes too."""
    window = TraceWindow(most_bytes=4000)
    for number in range(20):
        long_span = engine(trace=bytes([number + 1]) * 16)
        long_span.attributes.add(key="prompt").value.string_value = "x" * 100_000
        window.take(export([long_span]))
    assert 9 <= window.sizes["spans"] < 20
    assert 20 == window.sizes["spans"] + window.evicted


def test_a_trace_that_never_ends_loses_its_oldest_spans():
    """An agent that works for hours in one trace costs no more than others."""
    window = TraceWindow()
    for minute in range(10):
        at_s = minute * KEEP_S
        window.take(export([call(f"call-{minute}", "work"), engine(f"e-{minute}", f"call-{minute}")], at_s=at_s))
        window.finished(NOON + round((at_s + 7) * S))
        assert window.sizes["spans"] <= 4
    assert [] == window.finished(NOON + 10_000 * S)
    assert {"spans": 0, "traces": 0, "pending": 0} == window.sizes


def test_a_trace_of_a_thousand_calls_is_read_through_once(monkeypatch: pytest.MonkeyPatch):
    """And not once a call, for who is behind it: ten thousand calls in one export took a minute."""
    steps: list[object] = []
    monkeypatch.setattr(traces, "chain", lambda *trace: [steps.append(trace), chain(*trace)][1])
    calls = [call(f"c{number}") for number in range(1000)]
    inner = [span("handle", f"i{number}", f"s{number}", kind=SERVER) for number in range(0, 1000, 2)]
    window = TraceWindow()
    window.take(export([*calls, *(span("POST", f"s{number}", f"c{number}", kind=SERVER) for number in range(1000))]))
    window.take(export(inner, service="inner"))
    requests = window.finished(NOON + 20 * S)
    assert 500 == sum(request.ends_at == "inner" for request in requests)
    assert 1000 == len(requests)
    assert len(steps) <= 5 * 2500


def test_a_trace_that_never_ends_forgets_when_replies_were_sent():
    """By a server whose own span comes, or does not: after an hour it takes no more memory than after ten minutes."""
    window = TraceWindow()

    def serve(minute: int) -> None:
        body = {"asgi.event.type": "http.response.body"}
        served = [f"{minute:02}-{number}" for number in range(40)]
        sent = [
            span("POST http send", f"s{name}", name, kind=INTERNAL, attributes=body, clock_ms=1e3 * minute * KEEP_S)
            for name in served
        ]
        window.take(
            export(
                [*sent, *(span("POST", name, kind=SERVER, clock_ms=1e3 * minute * KEEP_S) for name in served[::2])],
                at_s=minute * KEEP_S,
            )
        )
        window.finished(NOON + round((minute * KEEP_S + 7) * S))

    def kept_bytes() -> int:
        of_gateways = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, gateway_spans.__file__)])
        return sum(statistic.size for statistic in of_gateways.statistics("filename"))

    tracemalloc.start()
    try:
        for minute in range(10):
            serve(minute)
        after_ten_minutes = kept_bytes()
        for minute in range(10, 60):
            serve(minute)
        after_an_hour = kept_bytes()
    finally:
        tracemalloc.stop()
    assert after_an_hour <= 2 * after_ten_minutes


def test_spans_that_are_each_others_parents_end_no_watch():
    """A loop is followed once around."""
    loop = [call("a", "b"), call("b", "a"), engine(parent="a")]
    assert [("b", "", ["engine"])] == everything(loop)


@given(
    order=st.permutations(range(9)),
    sizes=st.lists(st.integers(1, 4), min_size=9, max_size=9),
    looks=st.lists(st.booleans(), min_size=9, max_size=9),
)
def test_the_order_of_coming_changes_nothing(order: list[int], sizes: list[int], looks: list[bool]):
    """Three requests in two traces, in any order, in exports of any size, looked for in between or not."""
    other = b"o" * 16
    spans = [
        call("c1", "work"),
        gateway("g1", "c1"),
        engine("e1", "g1"),
        call("c2", "work"),
        engine("e2", "c2"),
        call("c3", trace=other),
        engine("e3", "c3", trace=other),
        engine("e4", "c3", trace=other),
        span("work", "work", kind=CLIENT),
    ]
    window, finished, rest = TraceWindow(), [], [spans[place] for place in order]
    for size, look in zip(sizes, looks, strict=True):
        if rest:
            window.take(export(rest[:size]))
            rest = rest[size:]
        if look:  # all of it within the second of quiet
            finished += outlines(window.finished(NOON + S))
    finished += outlines(window.finished(NOON + 100 * S))
    assert [("c1", "gateway", ["e1"]), ("c2", "", ["e2"]), ("c3", "", ["e3", "e4"])] == sorted(finished)
