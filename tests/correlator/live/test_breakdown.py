"""Requests of production in parts: they add up, no clock has to agree with another, and nothing is guessed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import NOON, S, call, engine, export, gateway

from sidelight.correlator.live.breakdown import EndedRequests, break_down_ended
from sidelight.correlator.live.window import TraceWindow

TTFT_PARTS = ("network", "gateway", "queue", "prefill", "other")
times = st.floats(0, 5000)


def ended(*spans: Span, most_spans: int = 1000) -> EndedRequests:
    window = TraceWindow(most_spans=most_spans)
    window.take(export(spans))
    return break_down_ended(window.finished(NOON + S, all_of_it=True))


def parts_ms(table: EndedRequests) -> dict[str, float]:
    return {
        part: 1e3 * float(getattr(table.parts, f"{part}_s")[0]) for part in (*TTFT_PARTS, "engine_frontend", "ttft")
    }


def test_what_client_gateway_and_engine_measured_gives_every_part():
    """Whatever their clocks say, within ten minutes: the engine's is five minutes off, the gateway's nine."""
    table = ended(
        call(first_ms=300),
        gateway("gateway", "client", first_ms=260, clock_ms=540_000),
        engine(parent="gateway", clock_ms=-300_000),
    )
    expected = {
        "network": 40.0,
        "gateway": 60.0,
        "queue": 50.0,
        "prefill": 100.0,
        "other": 50.0,
        "engine_frontend": 50.0,
        "ttft": 300.0,
    }
    assert expected == pytest.approx(parts_ms(table))
    assert ("trace", "exact", "") == (table.parts.source[0], table.parts.quality[0], table.reason[0])


def test_the_whole_is_broken_down_beside_the_ttft():
    """What was outside the engine is then what the client's span took longer than the engine's."""
    table = ended(call(end_ms=1000), gateway("gateway", "client", end_ms=900), engine(parent="gateway", e2e_ms=710))
    whole = table.whole
    measured = {
        part: 1e3 * float(getattr(whole, f"{part}_s")[0])
        for part in ("network", "gateway", "decode", "e2e_other", "e2e")
    }
    assert {"network": 100.0, "gateway": 190.0, "decode": 500.0, "e2e_other": 60.0, "e2e": 1000.0} == pytest.approx(
        measured
    )


def test_decoding_is_the_clients_where_no_engine_says_it():
    """From its first token to the end of its span, 700 ms; the parts add up to the whole all the same."""
    silent = engine()
    del silent.attributes[next(n for n, pair in enumerate(silent.attributes) if pair.key.endswith("model_decode"))]
    whole = ended(call(first_ms=300, end_ms=1000), silent).whole
    assert ("client", 700.0) == (whole.decode_source[0], pytest.approx(1e3 * whole.decode_s[0]))
    inside_s = whole.queue_s + whole.prefill_s + whole.decode_s + whole.e2e_other_s
    assert float(whole.e2e_s[0]) == pytest.approx(float((whole.network_s + inside_s)[0]))


def test_a_gateway_without_a_first_token_is_not_separated_from_the_network():
    """What it took of the TTFT is not what it took of the whole."""
    table = ended(call(first_ms=300), gateway("gateway", "client"), engine(parent="gateway"))
    parts = parts_ms(table)
    assert (100.0, True) == (pytest.approx(parts["network"]), bool(np.isnan(parts["gateway"])))


def test_without_a_first_token_the_whole_alone_is_broken_down():
    """And the reason is counted."""
    table = ended(call(first_ms=None), engine())
    assert (False, "no_first_token") == (bool(table.parts.covered[0]), table.reason[0])
    assert ("trace", 290.0) == (table.whole.source[0], pytest.approx(1e3 * table.whole.network_s[0]))


@pytest.mark.parametrize(
    ("spans", "reason"),
    [
        ([call()], "no_engine_span"),
        ([engine()], "no_client_span"),
        ([call(failed=True)], "failed"),
        ([call(first_ms=100), engine()], "contradiction"),
        ([call(end_ms=500), engine()], "contradiction"),
    ],
)
def test_what_cannot_be_broken_down_has_a_reason(spans: Sequence[Span], reason: str):
    """Of a few that are fixed, for it becomes a label; the table then has no source."""
    table = ended(*spans)
    assert (reason, "none", "none") == (table.reason[0], table.parts.source[0], table.whole.source[0])


def test_what_was_not_waited_for_says_so():
    """It had to make room."""
    table = ended(call(trace=b"1" * 16), call(trace=b"2" * 16), most_spans=1)
    assert ["window_full", "no_engine_span"] == table.reason.tolist()


@given(way=times, gate=times, frontend=times, queue=times, prefill=times, decode=times, out=times)
def test_parts_always_add_up(
    way: float, gate: float, frontend: float, queue: float, prefill: float, decode: float, out: float
):
    """To the client's TTFT, and to the whole; and each is the truth, the gateway's to 0.01 ms, as Dynamo states it."""
    engine_ttft = frontend + queue + prefill
    first, whole = engine_ttft + way + gate, engine_ttft + decode + way + gate + out
    table = ended(
        call(first_ms=first, end_ms=whole),
        gateway("gateway", "client", first_ms=engine_ttft + gate, end_ms=engine_ttft + decode + gate),
        engine(
            parent="gateway",
            queue_ms=queue,
            prefill_ms=prefill,
            ttft_ms=engine_ttft,
            decode_ms=decode,
            e2e_ms=engine_ttft + decode,
        ),
    )
    parts = parts_ms(table)
    assert sum(parts[part] for part in TTFT_PARTS) == pytest.approx(parts["ttft"], abs=1e-9)
    truth = {"network": way, "gateway": gate, "queue": queue, "prefill": prefill, "other": frontend}
    assert truth == pytest.approx({part: parts[part] for part in TTFT_PARTS}, abs=6e-3)
    all_of_it = [table.whole.network_s, table.whole.gateway_s, table.whole.queue_s, table.whole.prefill_s]
    all_of_it += [table.whole.decode_s, table.whole.e2e_other_s]
    assert sum(float(column[0]) for column in all_of_it) == pytest.approx(float(table.whole.e2e_s[0]), abs=1e-9)
