"""Each request's parts: from which source, summing to what the client waited, what is merged where a source is mute."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import recordings
from hypothesis import given
from hypothesis import strategies as st

from sidelight.correlator.attribute import attribute
from sidelight.correlator.breakdown import SOURCES, Parts, break_down
from sidelight.correlator.estimate.table import Attribution, nothing
from sidelight.correlator.exact.clock_offset import ClockOffsets, clock_offsets
from sidelight.correlator.exact.join import join
from sidelight.correlator.exact.table import Joined, unjoined
from sidelight.correlator.parts import SHARED_PARTS, STATED_PARTS
from sidelight.correlator.statistics.accuracy import PartError, agreement
from sidelight.recorded.gateway_spans import GatewaySpan
from sidelight.rundir.columns import take
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.catalogue import INNER_TIMES
from sidelight.scraper.spans.requests import EngineSpans, engine_spans

Floats = npt.NDArray[np.float64]
MS = 10**6
SUBMIT_NS = 1000 * MS
TTFT_PARTS = ("network_s", "gateway_s", "queue_s", "prefill_s", "other_s")


@pytest.fixture(scope="module")
def main() -> Any:
    return recordings.recording("main")


@pytest.fixture(scope="module")
def edges() -> Any:
    return recordings.recording("edges")


def parts_of(run: Any, *, spans: EngineSpans | None = None) -> Parts:
    """Put a recorded run's times together; other spans than its own stand in for them."""
    joined = join(run.requests, run.spans if spans is None else spans)
    clocks = clock_offsets(run.requests, joined)
    return break_down(run.requests, joined, attribute(run.requests, run.endpoints), clocks)


def off_by_ms(parts: Parts) -> float:
    """The most by which the parts of a TTFT differ from it."""
    whole = np.sum([np.nan_to_num(getattr(parts, name)) for name in TTFT_PARTS], axis=0)
    return 1e3 * float(np.abs(whole - parts.ttft_s)[parts.covered].max(initial=0.0))


def seconds(*expected: float) -> Any:
    """Return times that are the same but for rounding, which differences of seconds have."""
    return pytest.approx(list(expected), rel=1e-12, abs=0, nan_ok=True)


def requests(*rows: dict[str, float]) -> Any:
    """Requests that waited 100 ms for the first output and token and 500 for the last, but for what is said; in ms."""
    usual = {"dispatch": -5.0, "submit": 0.0, "first_output": 100.0, "first_token": 100.0, "last_token": 500.0}
    names = {**usual, "end": 510.0}
    records = [
        {f"{name}_ns": SUBMIT_NS + int(row.get(name, ms) * MS) for name, ms in names.items() if row.get(name, ms) >= -9}
        for row in rows
    ]
    return recordings.request_log(records)


def joined(*rows: dict[str, Any]) -> Joined:
    """What was joined: nothing, but for what is said, in seconds."""
    table = unjoined(len(rows))
    table.reason[:] = "no spans came"
    for place, row in enumerate(rows):
        for name, value in row.items():
            getattr(table, name)[place] = value
    return table


SPAN = {"source": "trace", "reason": "", "queue_s": 0.02, "prefill_s": 0.05, "decode_s": 0.395, "ttft_s": 0.09}


def test_every_request_of_a_recording_is_broken_down_by_its_trace(main: Any):
    """397 of 397; queue, prefill and decode are the joined ones to the bit, and the parts sum to the client's wait."""
    parts, exact = parts_of(main), join(main.requests, main.spans)

    assert ["trace"] * 397 == parts.source.tolist()
    for name in ("queue_s", "prefill_s", "decode_s"):
        assert getattr(exact, name).tobytes() == getattr(parts, name).tobytes()
    assert off_by_ms(parts) < 1e-6
    assert {""} == set(parts.merged)
    assert {0.0} == set(parts.error_s)
    assert {"exact"} == set(parts.quality)


def test_nothing_of_a_recording_happens_before_its_cause(main: Any):
    """By the offset that is stated, each request arrives after it was sent, and its answer leaves before it came."""
    parts = parts_of(main)

    assert (parts.request_network_s >= 0).all()
    assert (parts.response_network_s >= 0).all()
    assert (parts.arrival_ns >= main.requests.submit_ns).all()
    assert (parts.engine_first_token_ns <= main.requests.first_output_ns).all()
    assert float(np.abs(parts.request_network_s + parts.response_network_s - parts.network_s).max()) < 1e-9


@pytest.mark.parametrize(
    ("phase", "source", "quality", "why"),
    [
        ("n2", "trace", "exact", ""),
        ("no_traceparent", "trace", "exact", ""),
        ("unsampled", "response", "exact", ""),
        ("unknown_model", "none", "none", "the server answered HTTP 404"),
        ("cancel_decode", "histogram", "prior", "the engine did not end it, so that its histograms do not hold it"),
    ],
)
def test_every_odd_case_ends_in_its_source(edges: Any, phase: str, source: str, quality: str, why: str):
    """As `join` has it, or in an estimate; one that rests on no observation is flagged as such. Or in none, and why."""
    parts = parts_of(edges)
    here = edges.requests.workload_class == phase
    assert here.any()
    assert {(source, quality, why)} == set(
        zip(parts.source[here], parts.quality[here], parts.reason[here], strict=True)
    )
    assert off_by_ms(parts) < 1e-6


def test_a_reply_in_one_piece_has_its_engine_times_and_no_ttft(edges: Any):
    """What passed outside the engine is by the end-to-end times."""
    parts = take(parts_of(edges), edges.requests.workload_class == "nonstream")
    assert np.isnan(parts.ttft_s).all()
    assert np.isnan(parts.other_s).all()
    assert np.isfinite([parts.queue_s, parts.prefill_s, parts.decode_s, parts.network_s, parts.e2e_other_s]).all()
    assert (parts.network_s > 0).all()
    assert {""} == set(parts.merged)


def test_replies_give_queue_and_prefill_and_the_rest_is_merged(edges: Any):
    """Unsampled requests have no span: where the network ends and the engine begins is unknown, and not guessed."""
    parts = take(parts_of(edges), edges.requests.workload_class == "unsampled")
    assert {"network and engine frontend"} == set(parts.merged)
    assert np.isnan([parts.network_s, parts.request_network_s, parts.engine_frontend_s]).all()
    assert parts.other_s.tolist() == (parts.ttft_s - (parts.queue_s + parts.prefill_s)).tolist()


def test_replies_agree_with_spans_for_every_request(main: Any):
    """Their rest is what spans divide into network and the engine's front end."""
    by_span, by_reply = parts_of(main), parts_of(main, spans=engine_spans([]))

    assert ["response"] * 397 == by_reply.source.tolist()
    assert float(np.abs(by_reply.other_s - by_span.other_s - by_span.network_s).max()) < 1e-9


def test_spans_go_before_estimates_request_by_request(main: Any):
    """Every other span withheld: the rest stays exact, what is without is estimated."""
    half = np.isin(main.spans.trace_id, main.requests.trace_id[::2])
    columns = {
        field.name: getattr(main.spans, field.name)[half] for field in fields(EngineSpans) if field.name != "refused"
    }
    silent = np.full(397, np.nan)
    mute = replace(main.requests, server_queue_ms=silent, server_prefill_ms=silent, server_decode_ms=silent)
    joined_ = join(mute, EngineSpans(**columns, refused={}))
    parts = break_down(mute, joined_, attribute(mute, main.endpoints))

    assert {"trace"} == set(parts.source[::2])
    assert {"histogram"} == set(parts.source[1::2])
    assert off_by_ms(parts) < 1e-6


def test_a_span_gives_every_part():
    """100 ms of which the engine knows 90: 10 outside, 20 queue, 50 prefill, 20 in the engine and neither."""
    clocks = ClockOffsets(by_engine={}, offset_ns=np.zeros(1), error_ns=np.full(1, MS / 2))
    arrived = joined({**SPAN, "arrival_ns": SUBMIT_NS + 4 * MS})
    parts = break_down(requests({}), arrived, nothing(1, "no scrapes"), clocks)

    shown = (
        "send_s",
        "request_network_s",
        "response_network_s",
        "network_s",
        "engine_frontend_s",
        "other_s",
        "e2e_s",
        "e2e_other_s",
    )
    expected = [0.005, 0.004, 0.006, 0.01, 0.02, 0.02, 0.5, 0.025]
    assert seconds(*expected) == [getattr(parts, name)[0] for name in shown]
    assert np.isnan(parts.gateway_s[0])
    assert (SUBMIT_NS + 4 * MS, SUBMIT_NS + 94 * MS) == (parts.arrival_ns[0], parts.engine_first_token_ns[0])
    assert 0.0005 == parts.network_split_error_s[0]


def test_what_engines_state_besides_are_parts_of_other():
    """Each of INNER_TIMES is a part, and beyond the engine's own TTFT is not believed."""
    assert set(INNER_TIMES) == {part.name for part in STATED_PARTS}
    for part in set(STATED_PARTS) - set(SHARED_PARTS):
        name = f"{part.name}_s"
        span = SPAN | {name: 0.004}
        stated = break_down(requests({}, {}), joined(span, span | {name: 0.2}), nothing(2, "no scrapes"))
        without = break_down(requests({}), joined(SPAN), nothing(1, "no scrapes"))
        assert seconds(0.004, np.nan) == stated.seconds(part).tolist()
        assert seconds(without.other_s[0], without.other_s[0]) == stated.other_s.tolist()
        assert seconds(without.engine_frontend_s[0] - 0.004) == stated.engine_frontend_s[:1].tolist()


def test_what_rounding_leaves_of_a_whole_is_nothing():
    """0.3 - 0.1 - 0.2 is not 0 in floating point: no view shows a part of 3e-17 s."""
    row = {**SPAN, "queue_s": 0.1, "prefill_s": 0.2, "ttft_s": 0.3}
    parts = break_down(requests({"first_output": 300.0, "first_token": 300.0}), joined(row), nothing(1, ""))

    assert [0.0, 0.0, 0.0] == [parts.network_s[0], parts.engine_frontend_s[0], parts.other_s[0]]


def test_decoding_is_the_clients_where_no_source_says_it():
    """First to last token, which would be in other; not of a reply in one piece, nor where nothing else is known."""
    silent, whole = {**SPAN, "decode_s": np.nan}, dict.fromkeys(("first_output", "first_token", "last_token"), -10.0)
    parts = break_down(requests({}, {}, whole, {}), joined(SPAN, silent, silent, {}), nothing(4, ""))

    assert ["trace", "client", "none", "none"] == parts.decode_source.tolist()
    assert seconds(0.395, 0.4) == parts.decode_s[:2].tolist()
    assert seconds(0.025, 0.02) == parts.e2e_other_s[:2].tolist()
    assert np.isnan(parts.decode_s[2:]).all()


def test_blank_output_is_a_part_of_other():
    """The engine spoke at 100 ms, but nothing that shows before 130."""
    parts = break_down(requests({"first_token": 130.0}), joined(SPAN), nothing(1, ""))

    assert seconds(0.03, 0.02, 0.05) == [parts.blank_output_s[0], parts.engine_frontend_s[0], parts.other_s[0]]
    assert np.isnan([parts.request_network_s[0], parts.response_network_s[0]]).all()


def test_a_gateways_time_is_taken_out_of_the_networks():
    gateway = GatewaySpan(service="g", whole_s=0.5, request_s=0.001, first_s=0.093, first_by="attribute")
    parts = break_down(requests({}), joined(SPAN), nothing(1, ""), gateways=[(gateway,)])

    assert seconds(0.007, 0.003, 0.02) == [parts.network_s[0], parts.gateway_s[0], parts.other_s[0]]


@pytest.mark.parametrize(
    ("columns", "merged", "other_s"),
    [
        ({**SPAN, "ttft_s": np.nan}, "network and engine frontend", 0.03),
        ({**SPAN, "queue_s": np.nan}, "queue and engine frontend", 0.04),
        ({**SPAN, "queue_s": np.nan, "ttft_s": np.nan}, "network, queue and engine frontend", 0.05),
        ({**SPAN, "prefill_s": np.nan}, "prefill and engine frontend", 0.07),
        ({**SPAN, "ttft_s": 0.115}, "network and engine frontend", 0.03),
        ({**SPAN, "ttft_s": 0.04}, "network and engine frontend", 0.03),
    ],
)
def test_unknown_parts_are_merged_and_named(columns: dict[str, Any], merged: str, other_s: float):
    """Also where the engine's TTFT is longer than the client's, or shorter than its own parts, by over 10 ms."""
    parts = break_down(requests({}), joined(columns), nothing(1, ""))

    assert merged == parts.merged[0]
    assert seconds(other_s) == [parts.other_s[0]]
    assert off_by_ms(parts) < 1e-12


def test_a_round_trip_explains_no_more_than_there_is():
    """What it leaves is in proxies and HTTP; of a network that is shorter it is all, of one below zero nothing."""
    rows = [{}, {"first_output": 90.02}, {"first_output": 89.9}, {}]
    trips_s = np.array([0.001, 0.001, 0.001, np.nan])
    parts = break_down(requests(*rows), joined(*[SPAN] * 4), nothing(4, ""), round_trip_s=trips_s)
    assert pytest.approx([0.001, 0.00002, 0.0], abs=1e-12) == parts.round_trip_s[:3].tolist()
    assert pytest.approx([0.009, 0.0, -0.0001], abs=1e-12) == parts.beyond_round_trip_s[:3].tolist()
    assert np.isnan([parts.round_trip_s[3], parts.beyond_round_trip_s[3]]).all()


def test_a_late_stamp_shows_as_a_network_below_zero():
    """By how much, and the sum holds."""
    parts = break_down(requests({}), joined({**SPAN, "ttft_s": 0.1004}), nothing(1, ""))

    assert pytest.approx(-0.0004) == parts.network_s[0]
    assert off_by_ms(parts) < 1e-9


def test_no_source_has_both_reasons():
    """Why the scrapes do not suffice, and why nothing was joined; without a first token the latter alone."""
    parts = break_down(requests({}), joined({}), nothing(1, "no scrape succeeded"))

    assert ("none", "no scrape succeeded; no spans came") == (parts.source[0], parts.reason[0])
    assert np.isnan([parts.other_s[0], parts.network_s[0], parts.error_s[0]]).all()


def test_estimates_without_the_network_merge_it():
    """As those of several engines."""
    guess = replace(
        nothing(1, ""),
        queue_s=np.array([0.02]),
        queue_sd_s=np.array([0.001]),
        prefill_s=np.array([0.05]),
        prefill_sd_s=np.array([0.002]),
        engine_frontend_s=np.array([0.03]),
        engine_frontend_sd_s=np.array([0.003]),
        quality=np.array(["shared"], dtype=np.object_),
    )
    parts = break_down(requests({}), joined({}), guess)

    assert ("histogram", "network and engine frontend", "shared") == (
        parts.source[0],
        parts.merged[0],
        parts.quality[0],
    )
    assert (pytest.approx(0.03), pytest.approx(0.003)) == (parts.other_s[0], parts.error_s[0])


MAYBE_S = st.one_of(st.just(float("nan")), st.floats(0, 1e3))


@st.composite
def tables(draw: st.DrawFn) -> tuple[Any, Joined, Attribution]:
    """Requests with any stamps, joined with anything and estimated as anything."""
    size = draw(st.integers(0, 8))
    waits = [draw(st.tuples(*[st.floats(0, 1e5)] * 4)) for _ in range(size)]
    rows = [
        {"first_output": first, "first_token": first + blank, "last_token": first + blank + decode, "end": decode + end}
        for first, blank, decode, end in waits
    ]
    spans: list[dict[str, Any]] = []
    for row in rows:
        source = draw(st.sampled_from(("trace", "request id", "response", "none")))
        names = ("queue_s", "prefill_s", "decode_s", "ttft_s", "e2e_s")
        spans.append({"source": source} | ({} if source == "none" else {name: draw(MAYBE_S) for name in names}))
        if draw(st.booleans()):
            row["first_token"] = row["last_token"] = row["first_output"] = -10.0
    names = [field.name for field in fields(Attribution) if field.name.endswith("_s")]
    guess = replace(
        nothing(size, "why"),
        **{name: np.array([draw(MAYBE_S) for _ in range(size)]) for name in names},
        quality=np.array([draw(st.sampled_from(("shared", "prior", "none"))) for _ in range(size)], dtype=np.object_),
    )
    return requests(*rows), joined(*spans), guess


@given(tables())
def test_the_parts_always_sum_to_the_whole(drawn: tuple[Any, Joined, Attribution]):
    """Whichever parts are known; of a request without a source none is."""
    log, exact, guess = drawn
    parts = break_down(log, exact, guess)

    assert off_by_ms(parts) < 1e-6
    assert set(parts.source) <= set(SOURCES)
    silent = parts.source == "none"
    assert np.isnan([parts.other_s[silent], parts.e2e_other_s[silent]]).all()
    merged = np.isnan(parts.network_s) | np.isnan(parts.queue_s) | np.isnan(parts.prefill_s)
    assert (parts.merged[parts.covered & merged] != "").all()


def test_the_method_measures_itself_where_there_is_both():
    """Two requests, of which the estimate of one is off by 10 ms of 20 + 20 of truth, beyond its interval."""
    exact = break_down(requests({}, {}), joined(SPAN, SPAN), nothing(2, "no scrapes"))
    guess = replace(
        nothing(2, ""),
        queue_s=np.array([0.02, 0.03]),
        queue_sd_s=np.array([0.0, 0.001]),
        quality=np.array(["exact", "shared"], dtype=np.object_),
    )

    errors = agreement(exact, guess)

    assert isinstance(errors, dict)
    assert {
        "queue": PartError(
            compared=2, wape=pytest.approx(0.25), p95_ms=pytest.approx(9.5), covered_90=0.5, exact_but_wrong=0
        )
    } == errors
    assert Missing("no scrapes") == agreement(exact, nothing(2, "no scrapes"))
    neither = break_down(requests({}), joined({}), nothing(1, "no scrapes"))
    assert Missing("no request has exact times to measure the estimates by") == agreement(
        neither, nothing(1, "no scrapes")
    )
