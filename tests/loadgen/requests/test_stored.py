"""Requests that have left memory are the same as those that are in it."""

from __future__ import annotations

import random
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import fields
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from sidelight.loadgen.records import PlannedRequest, RequestPart
from sidelight.loadgen.requests import metrics
from sidelight.loadgen.requests.metrics import RequestMetrics, request_metrics, with_possible_times
from sidelight.loadgen.requests.table import fold as fold_module
from sidelight.loadgen.requests.table import readers
from sidelight.loadgen.requests.table.fold import RequestFold
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.loadgen.transports.packing import pack
from sidelight.rundir.columns import concat, take

if TYPE_CHECKING:
    from conftest import Wire

REQUESTS = 60
IN_MEMORY = 100_000
COLUMNS = tuple(column.name for column in fields(RequestLog))
METRICS = (
    "ttft_ms",
    "tpot_ms",
    "e2e_ms",
    "request_output_tps",
    "itl_mean_ms",
    "jitter_ms",
    "max_pause_ms",
    "itl_ms",
    "gap_count",
    "itl_end_ns",
)


def record(wire: type[Wire], seed: int) -> tuple[list[PlannedRequest], list[RequestPart]]:
    """Make up a run in the order in which it is logged: some replies have two choices, some none, some do not end."""
    rng = random.Random(seed)
    parts = []
    for index in rng.sample(range(REQUESTS), REQUESTS):
        head, _, body = wire.answer(rng.randrange(6)).partition(b"\r\n\r\n")
        if rng.random() < 0.2:
            body = body.replace(b'"index":0', b'"index":1', 2)
        submit_ns = 10**18 + rng.randrange(10**10)
        size = rng.randrange(len(body)) if rng.random() < 0.1 else len(body)
        ends = sorted({*rng.sample(range(1, len(body)), 7), len(body)})
        ends = [end for end in ends if end < size] + [size]
        stamps_ns = sorted(submit_ns + rng.randrange(10**9) for _ in ends)
        is_refused = rng.random() < 0.1
        reads = (array("q"), array("q"), b"") if is_refused else (array("q", stamps_ns), array("q", ends), body[:size])
        packed = pack(*reads)
        parts.append(
            RequestPart(
                index=index, last=rng.random() < 0.9, url=f"http://h{index % 3}/v1", worker=index % 2,
                scheduled_ns=-1 if index % 5 == 0 else submit_ns - 9, dispatch_ns=submit_ns - 5,
                connected_ns=-1 if is_refused else submit_ns - 2, submit_ns=-1 if is_refused else submit_ns,
                status=0 if is_refused else 200, head=b"" if is_refused else head + b"\r\n\r\n",
                error="connect: refused" if is_refused else "", end_ns=submit_ns + 10**9, reads_ns=packed.reads_ns,
                read_ends=packed.read_ends, body=packed.body, packing=packed.packing,
            )
        )  # fmt: skip
    plan = [
        PlannedRequest(index=index, phase="measure", workload_class=f"c{index % 4}", input_tokens=index, max_tokens=6)
        for index in range(REQUESTS - 3)
    ]
    return plan, parts


def fold_of(wire: type[Wire], seed: int, rows_in_memory: int) -> RequestFold:
    plan, parts = record(wire, seed)
    fold = RequestFold(run_id="r", rows_in_memory=rows_in_memory)
    for planned in plan:
        fold.plan(planned)
    for part in parts:
        fold.add(part)
    return fold


def assert_same(
    expected: RequestLog | RequestMetrics, actual: RequestLog | RequestMetrics, names: Sequence[str] = COLUMNS
) -> None:
    for name in names:
        held, stored = getattr(expected, name), getattr(actual, name)
        assert held.dtype == stored.dtype, name
        np.testing.assert_array_equal(held, stored, name)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rows_in_memory", [1, 7, 25])
def test_every_column_is_the_same_in_memory_and_in_files(wire: type[Wire], seed: int, rows_in_memory: int):
    """As are some of the rows, in another order too, and what is computed from them."""
    rng = np.random.default_rng(seed)
    held, stored = (fold_of(wire, seed, rows).table() for rows in (IN_MEMORY, rows_in_memory))
    assert_same(held, stored)
    mask, order = rng.random(len(held)) < 0.5, rng.permutation(len(held))
    for first, second in ((take(held, mask), take(stored, mask)), (take(held, order), take(stored, order))):
        assert len(first) == len(second)
        assert_same(first, second)
        assert_same(take(first, first.status == "ok"), take(second, second.status == "ok"))
        assert_same(with_possible_times(first), with_possible_times(second))
        assert_same(request_metrics(first), request_metrics(second), METRICS)
    assert_same(concat([held, held]), concat([stored, stored]))


@pytest.mark.parametrize("chunks", [1, 5, 40])
def test_gaps_are_the_same_whatever_is_looked_at_together(
    wire: type[Wire], chunks: int, monkeypatch: pytest.MonkeyPatch
):
    """A stretch has whole requests: those of one that is larger alone."""
    log = fold_of(wire, 3, IN_MEMORY).table()
    whole = request_metrics(log)
    assert len(whole.itl_ms) > 40
    assert len(whole.itl_end_ns) == len(whole.itl_ms)
    monkeypatch.setattr(metrics, "STRETCH_CHUNKS", chunks)
    assert_same(whole, request_metrics(log), METRICS)


def test_requests_that_are_followed_are_given_once_before_they_are_stored(wire: type[Wire]):
    """However few stay in memory, and whenever they are asked for."""
    plan, parts = record(wire, 1)
    fold = RequestFold(run_id="r", follow=True, rows_in_memory=2)
    for planned in plan:
        fold.plan(planned)
    given: list[int] = []
    for place, part in enumerate(parts):
        fold.add(part)
        if place % 9 == 0:
            given += fold.ended().index.tolist()
    given += fold.ended().index.tolist()
    assert [part.index for part in parts if part.last] == given
    assert_same(fold_of(wire, 1, IN_MEMORY).table(), fold.table())


def test_where_no_file_can_be_written_requests_stay_in_memory(
    wire: type[Wire], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """As on a full disk."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    fold = fold_of(wire, 2, 3)
    assert_same(fold_of(wire, 2, IN_MEMORY).table(), fold.table())


@pytest.mark.parametrize("is_killed", [False, True])
def test_other_processes_read_what_one_alone_reads(
    wire: type[Wire], monkeypatch: pytest.MonkeyPatch, *, is_killed: bool
):
    """Also when they are killed. A request that no worker has written is refused, with the name of its log."""
    monkeypatch.setattr(fold_module, "READ_ALONE", 10)
    monkeypatch.setattr(readers, "TASK_REQUESTS", 4)
    plan, parts = record(wire, 5)
    fold, killed = RequestFold(run_id="r", processes=2, rows_in_memory=20), list[None]()
    for planned in plan:
        fold.plan(planned)
    for part in parts:
        fold.add(part)
        if is_killed and len(processes := active_children()) == 2:
            killed += [process.kill() for process in processes]
    bad = RequestPart(index=REQUESTS, last=True, body=b"not packed", reads_ns=b"12345678", read_ends=b"12345678")
    fold.add(bad, "requests-3.log")
    assert_same(fold_of(wire, 5, IN_MEMORY).table(), fold.table())
    assert [("requests-3.log", ValueError)] == [(origin, type(error)) for origin, error in fold.refused]
    assert [] == active_children()
    assert is_killed == bool(killed)
