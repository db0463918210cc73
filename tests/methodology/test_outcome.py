"""What came of a step: rates of its steady window, what the page adds, what bound it, and what makes it void."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from engine_series import engine
from logs import request_log

from sidelight.correlator.breakdown import Parts
from sidelight.methodology.study.model import Kind, Outcome, Step, StepData
from sidelight.methodology.study.outcome import outcome
from sidelight.scraper.series.table import EndpointSeries

SECONDS = 40
SECOND = 10**9


def no_parts(size: int) -> Parts:
    """Parts of requests of which no source says any."""
    empty = {"Floats": np.nan, "Ints": -1, "Texts": "none"}
    return Parts(
        **{
            each.name: np.full(size, empty[str(each.type)], object if each.type == "Texts" else None)
            for each in fields(Parts)
        }
    )


def played(
    *pages: EndpointSeries,
    slots: int = 4,
    options: dict[str, Any] | None = None,
    rests_on: tuple[Kind, ...] = (),
    **differs: Any,
) -> Outcome:
    """A closed loop: each of the slots sends a request a second, 10 tokens long, whose first comes after 100 ms."""
    rows = [
        {
            "dispatch": 1e3 * (10 + second) + 7 * slot,
            "submit": 1e3 * (10 + second) + 7 * slot,
            "first": 1e3 * (10 + second) + 7 * slot + 100,
            "last": 1e3 * (10 + second) + 7 * slot + 1000,
            "end": 1e3 * (10 + second) + 7 * slot + 1000,
            "input": 20,
            "output": 10,
            "chunks": tuple(1e3 * (10 + second) + 7 * slot + 100 * at for at in range(1, 11)),
        }
        for second in range(SECONDS)
        for slot in range(slots)
    ]
    log = request_log(*rows)
    given: dict[str, Any] = {
        "requests": log,
        "parts": no_parts(len(log)),
        "endpoints": pages,
        "start_ns": 10 * SECOND,
        "end_ns": (10 + SECONDS) * SECOND,
        "closed_loop": True,
        "status": "complete",
        "about": {},
    }
    step = Step(kind="saturate", label=f"closed-{slots}", load="closed", level=slots, seed=1, options=options or {})
    return outcome(step, StepData(**(given | differs)), rests_on)


def page(**columns: Any) -> EndpointSeries:
    """Scrapes every second from 5 s before the load to 5 s after it."""
    at_s = np.arange(5, 15 + SECONDS)
    usual = {"waiting": 3, "running": 4, "kv": 0.3, "preemptions": 0, "started": 1000.0}
    usual |= {"finished": 4 * np.clip(at_s - 10, 0, SECONDS), "generated": 40 * np.clip(at_s - 10, 0, SECONDS)}
    return engine(at_s, **{name: np.broadcast_to(column, len(at_s)) for name, column in (usual | columns).items()})


def test_rates_are_of_the_steady_window():
    """Four requests of ten tokens a second, without the first tenth and the drain."""
    came = played(page())
    assert came.window is not None
    assert (came.window.start_ns, came.window.end_ns) == (14 * SECOND, 50 * SECOND)
    assert came.completed_per_s == pytest.approx(4, rel=0.01)
    assert came.output_tokens_per_s == pytest.approx(40, rel=0.01)
    assert came.server_tokens_per_s == pytest.approx(40)
    assert came.input_tokens_per_s == pytest.approx(80, rel=0.03)
    assert came.little_residual == pytest.approx(0, abs=0.01)
    assert came.percentiles["ttft_ms"]["p50"].estimate == pytest.approx(100)
    assert (came.void, came.foreign_ratio, came.engine_start_ns) == ("", 0.0, 1000 * SECOND)


@pytest.mark.parametrize(
    ("columns", "limit", "words"),
    [
        ({}, "seats", "while it ran 4 and no more; the KV cache is not the limit (30 % used)"),
        ({"waiting": 0}, "client", "never filled the engine"),
        ({"preemptions": np.arange(50), "kv": 1.0}, "kv_cache", "KV cache usage reached 100 %"),
        ({"running": np.tile([4, 2, 1, 2, 1], 10), "kv": 0.97}, "kv_cache", "reached 97 %"),
        ({"running": np.tile([4, 2, 1, 2, 1], 10)}, "steps", "budget of tokens"),
    ],
    ids=["seats", "client", "preempted", "full", "steps"],
)
def test_what_bound_a_step_is_read_off_the_page(columns: dict[str, Any], limit: str, words: str):
    """By the requests that waited, those that ran, and the KV cache."""
    came = played(page(**columns))
    assert came.limit == limit
    assert words in came.limit_reason


def test_without_a_page_what_bound_it_is_unknown():
    """Nothing is assumed of an engine that is not seen."""
    came = played()
    assert (came.limit, came.queued_ratio, came.foreign_ratio, came.void) == ("unknown", None, None, "")


@pytest.mark.parametrize(
    ("pages", "differs", "words"),
    [
        ((), {"doubts": {"load": "its process had no CPU"}}, "no CPU"),
        ((), {"status": "crashed"}, "ended before its load"),
        ((page(finished=5 * np.arange(50)),), {}, "were not ours"),
        ((page(started=np.repeat([1000.0, 1030.0], 25)),), {}, "engine restarted"),
    ],
    ids=["generator", "crashed", "foreign", "restart"],
)
def test_a_step_is_void(pages: tuple[EndpointSeries, ...], differs: dict[str, Any], words: str):
    """Where its numbers are not those of the engine under our load alone."""
    assert words in played(*pages, **differs).void


DOUBTS = {"gaps": "Gaps may be wrong by 4 ms.", "ttft": "TTFT may be wrong by 9 ms."}


@pytest.mark.parametrize(
    ("kind", "rests_on", "slo", "words"),
    [
        ("gaps", (), "ttft_p99<150ms", ""),
        ("gaps", ("gaps",), "", "Gaps may be"),
        ("gaps", ("ttft",), "tpot_p99<50ms", "Gaps may be"),
        ("ttft", ("gaps",), "", ""),
        ("ttft", (), "e2e_p99<2s,ttft_p99<150ms", "TTFT may be"),
    ],
)
def test_a_doubt_voids_only_a_test_that_rests_on_it(kind: Kind, rests_on: tuple[Kind, ...], slo: str, words: str):
    """Else the step counts, without the percentiles of that time."""
    came = played(options={"slo": slo}, rests_on=rests_on, doubts={kind: DOUBTS[kind]})
    assert (words in came.void, bool(came.void)) == (True, bool(words))
    assert came.doubts == {kind: DOUBTS[kind]}
    left_out = {"gaps": {"tpot_ms", "itl_ms"}, "ttft": {"ttft_ms"}}[kind]
    assert {"ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"} - left_out == set(came.percentiles)
    assert came.completed_per_s == pytest.approx(4, rel=0.01)


def test_nothing_sent_is_void():
    """A step without a request has no numbers."""
    came = played(requests=request_log(), parts=no_parts(0))
    assert (came.void, came.completed_per_s, came.window) == ("no request was sent", None, None)


def test_objectives_are_judged_by_the_requests_of_the_window():
    """Of a step whose options state them."""
    came = played(options={"slo": "ttft_p99<150ms,tpot_p99<50ms"})
    assert came.slo is not None
    assert [each.met for each in came.slo.objectives] == [True, False]
