"""The requests of a watch out of its logs: as they were when it went, in bounded memory."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from sent_spans import NOON, S, call, engine, export, gateway

from sidelight.correlator.replay import Replay, Replayed
from sidelight.scraper.spans.log import ExportRecord, ReceiverCounts, StateRecord


def state(name: str, at_s: float) -> StateRecord:
    return StateRecord(at_ns=NOON + round(at_s * S), state=name, counts=ReceiverCounts())


def replayed(*records: ExportRecord | StateRecord, deaths_s: tuple[float, ...] = (), most: int = 1000) -> Replayed:
    deaths_ns = [NOON + round(death_s * S) for death_s in deaths_s]
    replay = Replay([], deaths_ns, nullcontext, most_requests=most)
    for record in records:
        replay.take(record)
    return replay.replayed()


def test_a_row_is_what_the_clients_span_says_beside_where_the_wait_went():
    """Stamps by the client's clock, what no span says is missing; a request without a client's span is only counted."""
    of = replayed(
        export([call(), gateway("gate", "client", first_ms=260), engine(parent="gate")]),
        export([engine("other", parent="nobody", trace=b"o" * 16)], at_s=2.0),
    )
    rows, parts = of.requests, of.parts
    assert [(b"t" * 16).hex()] == rows.trace_id.tolist()
    assert ("ok", NOON, NOON + 300 * 10**6, NOON + S) == (
        rows.status[0],
        rows.submit_ns[0],
        rows.first_token_ns[0],
        rows.end_ns[0],
    )
    assert (-1, "", "") == (rows.last_token_ns[0], rows.request_id[0], rows.error[0])
    assert (0.05, 0.06, "trace") == (
        pytest.approx(parts.queue_s[0]),
        pytest.approx(parts.gateway_s[0]),
        parts.source[0],
    )
    assert ({"no_client_span": 1}, 2) == (of.missing, of.engine_spans)
    assert {"queue": pytest.approx(50), "prefill": pytest.approx(100)} == of.engine_only_ms


def test_an_error_is_named_by_its_kind():
    """As the convention has it; where the span does not say which, it is an error all the same."""
    timed_out = call(trace=b"1" * 16)
    timed_out.attributes.add(key="error.type").value.string_value = "timeout: \x1b[31m10 s"
    rows = replayed(export([timed_out, call(trace=b"2" * 16, failed=True)])).requests
    assert ["failed", "failed"] == rows.status.tolist()
    assert ["timeout [31m10 s", "error"] == [error.partition(":")[0] for error in rows.error]


@pytest.mark.parametrize("off_s", [-300, 300])
def test_a_client_with_another_clock_is_put_on_ours(off_s: int):
    """A span cannot end in the future, and exporters do not keep one for minutes: it ended about when it came."""
    rows = replayed(export([call(clock_ms=1000 * off_s), engine()], at_s=2.0)).requests
    assert (NOON + 2 * S, NOON + S) == (rows.end_ns[0], rows.submit_ns[0])


def test_nothing_is_given_up_while_no_receiver_ran():
    """The engine's span was sent again, a minute after that of its client, when a receiver was there again."""
    halves = [export([call()]), state("started", 59.0), export([engine()], at_s=60.0)]
    assert ["none"] == replayed(*halves).parts.source.tolist()
    assert ["trace"] == replayed(*halves, deaths_s=(1.5,)).parts.source.tolist()


def test_an_engines_span_that_comes_late_makes_no_second_request():
    """Its client's was given up, and is counted as such."""
    late = replayed(export([call()]), export([engine()], at_s=40.0))
    assert ({"no_engine_span": 1}, 1, 1) == (late.missing, len(late.requests), late.engine_spans)


def test_the_oldest_requests_make_room():
    """How many is said, and the results begin behind them."""
    number = 3 * 4096
    exports = [
        export([call(trace=(n + 1).to_bytes(16)) for n in range(begin, begin + 512)], at_s=1 + begin / 100)
        for begin in range(0, number, 512)
    ]
    of = replayed(*exports, most=4096)
    assert (number, True) == (of.dropped + len(of.requests), of.shortened)
    assert 4096 <= len(of.requests) <= 2 * 4096
    assert len(of.requests) == len(of.parts) == len(of.attribution)
    assert of.from_ns == of.requests.end_ns.min()
    assert np.array_equal(np.arange(len(of.requests)), of.requests.index)
