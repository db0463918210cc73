from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import request_log
from msgspec import to_builtins

from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.loadgen.requests.summary import INPUT_TOKEN_EDGES, TailRatios, client_summary

THREE = {
    "dispatch": 99, "submit": 100, "first": 120, "last": 140, "end": 145, "output": 3, "input": 7,
    "chunks": (120, 125, 140), "class": "short",
}  # fmt: skip

ROWS = st.builds(
    lambda name, status, ttft, tokens, declared: {
        "submit": 0, "first": ttft, "last": ttft + 10, "end": ttft + 10, "class": name, "status": status,
        "input": tokens, "declared": declared, "output": 2,
    },
    st.sampled_from(["short", "long", ""]), st.sampled_from(["ok", "failed", "refused", "cancelled", "in_flight"]),
    st.integers(1, 1000), st.sampled_from([-1, 0, 255, 256, 4095, 4096, 100_000]), st.sampled_from([-1, 300]),
)  # fmt: skip


@settings(max_examples=40)
@given(st.lists(ROWS, max_size=30))
def test_classes_partition_the_whole(rows: list[dict[str, object]]):
    """Counts, samples and rates of the classes add up to those of all."""
    log = request_log(*rows)
    whole = client_summary(log, slo=parse_slo("ttft<300ms"))
    classes = whole.classes.values()
    for name, count in to_builtins(whole.requests).items():
        assert count == sum(getattr(each.requests, name) or 0 for each in classes)
    assert whole.ttft_ms.count == sum(each.ttft_ms.count for each in classes)
    for name in ("requests_per_s", "output_tokens_per_s", "goodput_requests_per_s"):
        if getattr(whole.throughput, name) is not None:
            rates = [getattr(each.throughput, name) for each in classes]
            assert getattr(whole.throughput, name) == pytest.approx(sum(rates))
    json.dumps(to_builtins(whole), allow_nan=False)


@settings(max_examples=40)
@given(st.lists(ROWS, max_size=30))
def test_input_lengths_partition_the_whole(rows: list[dict[str, object]]):
    """Each request that ended ok is in exactly one range, or its length is unknown."""
    log = request_log(*rows)
    got = client_summary(log).by_input_tokens
    counted = sum(each.requests for each in got.bins) + got.unknown
    assert int((log.status == "ok").sum()) == counted == got.by_usage + got.by_declared + got.unknown


@pytest.mark.parametrize(
    ("tokens", "place"), [(0, 0), (255, 0), (256, 1), (511, 1), (512, 2), (1024, 3), (2048, 4), (4096, 5), (10**6, 5)]
)
def test_ranges_are_the_drafts(tokens: int, place: int):
    """[0,256) [256,512) [512,1024) [1024,2048) [2048,4096) [4096,)."""
    got = client_summary(request_log(THREE | {"input": tokens})).by_input_tokens.bins
    assert [at == place for at in range(6)] == [each.requests == 1 for each in got]
    assert [*INPUT_TOKEN_EDGES[1:], None] == [each.below_tokens for each in got]


def test_jitter_and_pause_are_a_requests_own():
    """The deviation of its gaps, and the longest of them."""
    got = client_summary(request_log(THREE, THREE | {"chunks": (120, 140)}))
    assert (1, pytest.approx(50**0.5)) == (got.jitter_ms.count, got.jitter_ms.mean)
    assert (2, 20.0, 15.0) == tuple(getattr(got.max_pause_ms, name) for name in ("count", "max", "min"))


def test_the_tail_is_p99_over_p50():
    """As the draft's indicator of how heavy it is."""
    rows = [THREE | {"first": 100 + ttft} for ttft in (10, 10, 30)]
    got = client_summary(request_log(*rows)).tail_p99_over_p50
    assert pytest.approx(2.96) == got.ttft_ms
    assert TailRatios(ttft_ms=None, e2e_ms=None, itl_ms=None) == client_summary(request_log()).tail_p99_over_p50


def test_without_an_objective_there_is_no_slo():
    """Null, since nothing was asked for."""
    assert client_summary(request_log(THREE)).slo is None
    assert client_summary(request_log(THREE), slo=parse_slo("ttft<1s")).slo.met is True
