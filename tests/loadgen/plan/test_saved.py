"""The requests of a recorded run, read from its plan and sent again."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from codes import raises

from sidelight.loadgen.plan import saved
from sidelight.loadgen.plan.fitting import PlanOrder
from sidelight.loadgen.records import PlannedRequest, append_record, plan_end
from sidelight.rundir.frames import FrameLog


def planned(index: int, body: bytes = b'{"model":"m","x":[1.0]}', **more: Any) -> PlannedRequest:
    fields: dict[str, Any] = {
        "phase": "measure", "workload_class": "c", "path": "/v1/chat/completions", "input_tokens": 5, "max_tokens": 9,
        "offset_ns": 1000 * index, **more,
    }  # fmt: skip
    return PlannedRequest(index=index, body=body, **fields)


def session(index: int) -> PlannedRequest:
    turns = tuple(planned(index + n, session=index, turn=n, think_ns=7, offset_ns=-1) for n in (1, 2))
    turns = (turns[0], msgspec.structs.replace(turns[1], whole=True))
    return planned(index, session=index, turns=turns)


def write(path: Path, requests: Sequence[PlannedRequest], *, ends: bool = True) -> Path:
    with FrameLog(path) as log:
        for request in requests:
            append_record(log, request)
        if ends:
            append_record(log, plan_end("measure"))
    return path


def replayed(
    path: Path, model: str | None = None, extra: dict[str, object] | None = None, **order: Any
) -> list[PlannedRequest]:
    async def collect() -> list[PlannedRequest]:
        plan = saved.replay(path, order=PlanOrder(**({"phase": "measure"} | order)), model=model, extra=extra)
        return [fitted.request async for fitted in plan]

    return asyncio.run(collect())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plan-measure.log"


def test_a_plan_is_read_back(path: Path):
    """Text, binary bodies, sessions with their turns, URLs, offsets; but for the headers, which it does not hold."""
    requests = [planned(7), planned(8, b"\xff\x00\x01", url=1), session(9), planned(12, '{"a":"ü"}'.encode())]
    write(path, [msgspec.structs.replace(requests[0], headers=3), *requests[1:]])
    assert requests == list(saved.read(path))
    bodies = [turn.body for request in requests for turn in (request, *request.turns)]
    digest = hashlib.sha256(b"".join(bodies)).hexdigest()
    assert saved.Saved(count=4, sha256=digest, is_timed=True) == saved.look(path)


def test_a_replay_sends_the_same_bodies_as_ordered(path: Path):
    """Fewer, renumbered, at other offsets, over several URLs, without later turns."""
    write(path, [session(5), planned(8), planned(9)])
    assert [planned(0).body] * 3 == [request.body for request in replayed(path)]
    assert [20, 23, 24] == [request.index for request in replayed(path, first_index=20)]
    assert [21, 22] == [turn.index for turn in replayed(path, first_index=20)[0].turns]
    assert [0, 1, 0] == [request.url for request in replayed(path, urls=2)]
    assert [1, 2] == [request.offset_ns for request in replayed(path, offsets_ns=np.array([1, 2]))]
    assert [0] == [request.index for request in replayed(path, count=1)]
    assert [(0, ()), (1, ()), (2, ())] == [(request.index, request.turns) for request in replayed(path, sessions=False)]
    assert {"warmup"} == {request.phase for request in replayed(path, phase="warmup")}


def test_another_model_can_be_asked_the_same(path: Path):
    """Only the model differs, in its place, and fields that are given; numbers keep their digits; a body without a
    model is left alone.
    """
    write(path, [planned(0), planned(1, b"[1]"), planned(2, b'{"a":1}'), session(3)])
    other = b'{"model":"other","x":[1.0]}'
    sent = replayed(path, model="other")
    assert [other, b"[1]", b'{"a":1}', other] == [request.body for request in sent]
    assert [other, other] == [turn.body for turn in sent[3].turns]
    changed = replayed(path, model="other", extra={"x": None, "user": "***1"})
    assert b'{"model":"other","user":"***1"}' == changed[0].body


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"path": "x"}, "request 1: path: 'x' must begin with /"),
        ({"offset_ns": -5}, "request 1: its numbers"),
        ({"max_tokens": 2**62}, "request 1: its numbers"),
        ({"path": 5}, "Expected `str`, got `int`"),
    ],
)
def test_a_request_that_cannot_be_sent_is_named(path: Path, wrong: dict[str, Any], says: str):
    """A plan may be another's."""
    write(path, [planned(0), planned(1, **wrong)])
    with pytest.raises(saved.SavedRequestsError, match=says):
        list(saved.read(path))


def test_a_plan_that_is_not_whole_is_refused(path: Path, tmp_path: Path):
    """Cut off, damaged, of no request, of something else, or not there."""
    whole = write(path, [planned(0), planned(1)]).read_bytes()
    for damaged in (whole[:20], whole[:20] + b"x" + whole[21:]):
        path.write_bytes(damaged)
        with raises("replay.damaged"):
            list(saved.read(path))
    with raises("replay.damaged"):
        saved.look(write(tmp_path / "killed", [planned(0)], ends=False))
    with raises("replay.empty"):
        saved.look(write(tmp_path / "empty", []))
    with FrameLog(tmp_path / "other") as log:
        log.append(b"no record")
    with raises("replay.unreadable"):
        saved.look(tmp_path / "other")
    with raises("replay.unreadable"):
        saved.look(tmp_path / "none")
