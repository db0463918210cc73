"""Whose a span of another trace is, by time alone: an engine that batches is played behind a gateway that passes no
trace on, its clock is set as it likes, and each joined request is set against the span that is truly its own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest
from engine_records import Played, World, played
from hypothesis import given, settings
from hypothesis import strategies as st

from sidelight.correlator.exact.join import join
from sidelight.correlator.exact.span_matching import spans_by_time
from sidelight.correlator.exact.table import SPAN_BY_TIME
from sidelight.scraper.engines.catalogue import INNER_TIMES
from sidelight.scraper.spans.requests import EngineSpans

WORLDS = st.builds(
    World,
    requests=st.integers(20, 200),
    rate_per_s=st.sampled_from([2.0, 10.0, 50.0]),
    batch=st.sampled_from([1, 8]),
    concurrency=st.sampled_from([0, 0, 40]),
    slots=st.sampled_from([4, 32]),
    prefill_s=st.sampled_from([(0.0, 0.03), (0.01, 0.01)]),
    tokens=st.sampled_from([(20, 60), (20, 21)]),
    network_s=st.sampled_from([(0.3e-3, 0.3e-3), (30e-3, 1e-3), (150e-3, 3e-3)]),
    stalls_per_s=st.sampled_from([0.0, 2.0]),
    unmatched=st.sampled_from([0.0, 0.3]),
    lost=st.sampled_from([0.0, 0.2]),
)
CLOCKS_S = st.sampled_from([0.0, 0.02, -0.8, 1.5])


def spans_of(trial: Played, *, ahead_s: float = 0.0) -> EngineSpans:
    """The engine's records as spans of traces of their own, by a clock that is ahead."""
    timings, size = trial.timings, len(trial.timings)
    ahead_ns = round(ahead_s * 1e9)

    def texts(text: str) -> npt.NDArray[np.object_]:
        return np.array([text.format(place) for place in range(size)], dtype=np.object_)

    return EngineSpans(
        trace_id=texts("{:032x}"),
        span_id=texts("{:016x}"),
        request_id=texts("chatcmpl-{}"),
        clock=texts(""),
        machine=texts(""),
        engine=texts("vllm"),
        role=texts(""),
        arrival_ns=timings.arrival_ns + ahead_ns,
        end_ns=timings.last_token_ns + ahead_ns,
        **{f"{name}_s": getattr(timings, f"{name}_s") for name in ("queue", "ttft", "prefill", "e2e", "decode")},
        **{f"{name}_s": np.full(size, np.nan) for name in INNER_TIMES},
        input_tokens=np.full(size, -1, dtype=np.int64),
        output_tokens=np.full(size, -1, dtype=np.int64),
        fault=np.full(size, "", dtype=np.object_),
        refused={},
    )


def spans_in(trial: Played, **clock: float) -> npt.NDArray[np.int64]:
    """The span that each request was given, -1 for none."""
    return spans_by_time(trial.requests, spans_of(trial, **clock), np.arange(len(trial.timings))).row


def wrong(trial: Played, matches: npt.NDArray[np.int64]) -> int:
    """How many requests were given a span that is not theirs."""
    return int(((matches >= 0) & (matches != trial.record)).sum())


@settings(max_examples=60)
@given(WORLDS, st.integers(0, 2**32), CLOCKS_S)
def test_one_span_is_for_one_request(world: World, seed: int, ahead_s: float):
    """However the engine's clock is set and whatever batches, lost spans and other clients there are."""
    trial = played(world, seed)
    matches = spans_in(trial, ahead_s=ahead_s)
    joined = matches[matches >= 0].tolist()
    assert len(joined) == len(set(joined))
    assert wrong(trial, matches) <= 1 + len(joined) / 200


def test_a_span_of_a_time_that_no_clock_holds_fits_no_request():
    """A first token after 1e300 s is none, and no warning of numpy."""
    trial = played(World(requests=20, rate_per_s=10), 1)
    spans = spans_of(trial)
    spans = replace(spans, ttft_s=np.full_like(spans.ttft_s, 1e300))
    assert (spans_by_time(trial.requests, spans, np.arange(len(trial.timings))).row < 0).all()


def test_of_all_that_is_joined_hardly_any_is_wrong():
    """Of 48 runs of many kinds, a third with lost spans and a third with other clients: at most one in 1,000."""
    kinds = product(
        (1, 8), (0, 40), ((20, 60), (20, 21)), ((0.3e-3, 0.3e-3), (30e-3, 1e-3), (150e-3, 3e-3)), (0.0, 2.0)
    )
    runs = []
    for seed, (batch, concurrency, tokens, network_s, stalls_per_s) in enumerate(kinds):
        world = World(
            requests=150,
            rate_per_s=10,
            batch=batch,
            concurrency=concurrency,
            tokens=tokens,
            network_s=network_s,
            stalls_per_s=stalls_per_s,
            unmatched=0.3 * (seed % 3 == 1),
            lost=0.2 * (seed % 3 == 2),
        )
        trial = played(world, seed)
        runs.append((trial, spans_in(trial, ahead_s=(seed % 5 - 2) * 0.7)))
    joined = sum(int((matches >= 0).sum()) for _, matches in runs)
    assert joined > 2000
    assert 1000 * sum(wrong(*run) for run in runs) <= joined


@pytest.mark.parametrize("ahead_s", [0.0, -1.5])
@pytest.mark.parametrize(
    "world",
    [
        World(requests=300, rate_per_s=20),
        World(requests=300, rate_per_s=20, network_s=(5e-3, 1e-3)),
        World(requests=300, rate_per_s=5, network_s=(150e-3, 2e-3)),
        World(requests=40, rate_per_s=2),
    ],
    ids=["near", "a router", "a slow gateway", "few"],
)
def test_at_least_95_percent_are_joined_and_none_wrong(world: World, ahead_s: float):
    for seed in range(5):
        trial = played(world, seed)
        matches = spans_in(trial, ahead_s=ahead_s)
        assert 0 == wrong(trial, matches)
        assert int((matches >= 0).sum()) >= 0.95 * len(matches)


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.sampled_from([5.0, 50.0]))
def test_spans_of_other_clients_alone_join_nothing(seed: int, rate_per_s: float):
    """None of our requests has a span there: by chance some fit."""
    ours = played(World(requests=100, rate_per_s=rate_per_s), seed)
    others = played(World(requests=100, rate_per_s=rate_per_s), seed + 1)
    matches = spans_by_time(ours.requests, spans_of(others), np.arange(100)).row
    assert 0 == int((matches >= 0).sum())


def test_two_that_are_alike_are_joined_with_neither():
    """Sent together, and with the same times: which span is whose, nothing says, though the times would be right."""
    trial = played(World(requests=100, rate_per_s=50, batch=4, tokens=(20, 21), prefill_s=(0.01, 0.01), slots=64), 0)
    matches = spans_by_time(trial.requests, spans_of(trial), np.arange(100))
    assert 0 == wrong(trial, matches.row)
    assert matches.ambiguous.sum() > 50


def test_an_even_load_of_equal_requests_is_not_joined():
    """Ten a second, each like the next: with its clock set by 100 ms otherwise the spans would fit just as well."""
    trial = played(World(requests=1, tokens=(30, 31), prefill_s=(0.01, 0.01), network_s=(1e-3, 1e-9)), 0)
    many = np.arange(100) * 10**8

    def later(column: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return column[0] + many

    requests = replace(
        trial.requests,
        **{
            name: np.repeat(getattr(trial.requests, name), 100)
            for name in ("trace_id", "status", "endpoint_url", "input_tokens", "output_tokens", "output_tokens_source")
        },
        **{name: later(getattr(trial.requests, name)) for name in ("submit_ns", "first_output_ns", "end_ns")},
    )
    single = spans_of(trial)
    columns = {name: np.repeat(getattr(single, name), 100) for name in single.__dataclass_fields__ if name != "refused"}
    columns |= {name: later(getattr(single, name)) for name in ("arrival_ns", "end_ns")}
    matches = spans_by_time(requests, EngineSpans(**columns, refused={}), np.arange(100))
    assert {-1} == set(matches.row.tolist())
    assert {"spans of other traces would fit as well by another setting of the engine's clock"} == set(matches.reason)


def test_a_span_that_counts_other_tokens_is_another_request_s():
    """Where both sides count them: each request has its own span, except the one whose tokens differ."""
    trial = played(World(requests=40, rate_per_s=2), 0)
    spans = spans_of(trial)
    place = int(trial.record[7])
    trial.requests.output_tokens[:], trial.requests.output_tokens_source[:] = 30, "usage"
    spans.output_tokens[:] = 30
    spans.output_tokens[place] = 31
    matches = spans_by_time(trial.requests, spans, np.arange(40))
    assert (-1, "no span of another trace fits it") == (matches.row[7], matches.reason[7])
    assert 39 == int((matches.row >= 0).sum())


def test_a_run_has_the_times_of_the_spans_that_fit_and_says_that_it_is_by_time():
    trial = played(World(requests=40, rate_per_s=2), 0)
    spans = spans_of(trial)
    joined = join(trial.requests, spans)
    assert {SPAN_BY_TIME} == set(joined.source)
    assert joined.by_time.all()
    assert spans.span_id[trial.record].tolist() == joined.span_id.tolist()
    assert spans.trace_id[trial.record].tolist() == joined.trace_id.tolist()
    assert trial.timings.queue_s[trial.record].tolist() == joined.queue_s.tolist()


def test_where_most_are_joined_by_an_id_a_span_of_another_trace_is_somebody_else_s():
    """Traces get through: what is left over is not sampled, and the spans that are left are other clients'."""
    trial = played(World(requests=60, rate_per_s=2), 0)
    spans = spans_of(trial)
    trial.requests.trace_id[:40] = spans.trace_id[trial.record[:40]]
    joined = join(trial.requests, spans)
    assert (40, 0) == (int((joined.source == "trace").sum()), int(joined.by_time.sum()))
    assert {"no span of it came; its reply tells neither queue nor prefill"} == set(joined.reason[40:])
    trial.requests.trace_id[10:40] = ""
    joined = join(trial.requests, spans)
    assert (10, 50) == (int((joined.source == "trace").sum()), int(joined.by_time.sum()))
