from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from stat import S_IMODE
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.plan import saved
from loadgen.plan.fitting import PlanOrder
from loadgen.records import PlannedRequest

ABOUT = {"name": "w", "seed": 1}


def planned(index: int, body: bytes = b'{"model":"m","x":[1.0]}', **more: Any) -> PlannedRequest:
    fields: dict[str, Any] = {
        "phase": "", "workload_class": "c", "path": "/v1/chat/completions", "input_tokens": 5, "max_tokens": 9,
        "offset_ns": 1000 * index, **more,
    }  # fmt: skip
    return PlannedRequest(index=index, body=body, **fields)


def session(index: int) -> PlannedRequest:
    turns = tuple(planned(index + n, session=index, turn=n, think_ns=7, offset_ns=-1) for n in (1, 2))
    turns = (turns[0], msgspec.structs.replace(turns[1], whole=True))
    return planned(index, session=index, turns=turns)


def replayed(path: Path, model: str | None = None, **order: Any) -> list[PlannedRequest]:
    async def collect() -> list[PlannedRequest]:
        plan = saved.replay(path, order=PlanOrder(**({"phase": "measure"} | order)), model=model)
        return [fitted.request async for fitted in plan]

    return asyncio.run(collect())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def test_what_is_saved_is_read_back(path: Path):
    """Text, binary bodies, sessions with their turns, URLs, offsets."""
    requests = [planned(0), planned(1, b"\xff\x00\x01", url=1), session(2), planned(5, '{"a":"ü\u2028"}'.encode())]
    written = saved.save(path, requests, workload=ABOUT)
    assert S_IMODE(path.stat().st_mode) == 0o600
    assert requests == list(saved.read(path))
    assert saved.Saved(count=4, sha256=hashlib.sha256(path.read_bytes()).hexdigest(), workload=ABOUT) == written
    assert written == saved.look(path)


@given(
    bodies=st.lists(st.binary(), min_size=1, max_size=5),
    lengths=st.tuples(st.integers(-1, 2**40), st.integers(0, 2**40)),
    offset_ns=st.integers(-1, 2**60),
    text=st.text(),
)
def test_writing_then_reading_is_the_identity(
    tmp_path_factory: pytest.TempPathFactory, bodies: list[bytes], lengths: tuple[int, int], offset_ns: int, text: str
):
    """Whatever the bytes of a body are."""
    path = tmp_path_factory.mktemp("saved") / "r"
    requests = [
        planned(n, body, input_tokens=lengths[0], max_tokens=lengths[1], offset_ns=offset_ns, path="/" + text)
        for n, body in enumerate(bodies)
    ]
    saved.save(path, requests, workload={})
    assert requests == list(saved.read(path))


def test_equal_requests_are_equal_files(tmp_path: Path):
    """Whatever their numbers and phase were in their run."""
    first = saved.save(tmp_path / "a", [planned(0, offset_ns=5), planned(1, offset_ns=9)], workload=ABOUT)
    again = [planned(7, phase="other", offset_ns=5), planned(8, phase="other", offset_ns=9)]
    assert first.sha256 == saved.save(tmp_path / "b", again, workload=ABOUT).sha256


def test_a_replay_sends_the_same_bodies_as_ordered(path: Path):
    """Fewer, renumbered, at other offsets, over several URLs, without later turns."""
    saved.save(path, [session(0), planned(3), planned(4)], workload=ABOUT)
    assert [planned(0).body] * 3 == [request.body for request in replayed(path)]
    assert [20, 23, 24] == [request.index for request in replayed(path, first_index=20)]
    assert [21, 22] == [turn.index for turn in replayed(path, first_index=20)[0].turns]
    assert [0, 1, 0] == [request.url for request in replayed(path, urls=2)]
    assert [1, 2] == [request.offset_ns for request in replayed(path, offsets_ns=np.array([1, 2]))]
    assert [0] == [request.index for request in replayed(path, count=1)]
    assert [(0, ()), (1, ()), (2, ())] == [(request.index, request.turns) for request in replayed(path, sessions=False)]
    assert {"warmup"} == {request.phase for request in replayed(path, phase="warmup")}


def test_another_model_can_be_asked_the_same(path: Path):
    """Only the model differs, in its place; numbers keep their digits; a body without a model is left alone."""
    saved.save(path, [planned(0), planned(1, b"[1]"), planned(2, b'{"a":1}')], workload=ABOUT)
    assert [b'{"model":"other","x":[1.0]}', b"[1]", b'{"a":1}'] == [
        request.body for request in replayed(path, model="other")
    ]


GOOD = {"index": 0, "class": "c", "path": "/p", "body": "{}", "tokens": [1, 2]}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", r"line 3: Input data was truncated"),
        ({"path": None}, r"line 3: Expected `str`, got `null` - at `\$\.path`"),
        ({"tokens": [1]}, r"line 3: Expected `array` of length 2 - at `\$\.tokens`"),
        ({"tokens": [1, -5]}, r"line 3: Expected `int` >= -1 - at `\$\.tokens\[1\]`"),
        ({"url": -1}, r"line 3: Expected `int` >= 0 - at `\$\.url`"),
        ({"path": "x"}, r"line 3: Expected `str` matching regex .* - at `\$\.path`"),
        ({"index": 5}, "line 3: index: 5 must be 1; a line was lost"),
        ({"body_base64": "?"}, r"line 3: Invalid base64 encoded string - at `\$\.body_base64`"),
        ({"bodi": "x"}, "line 3: Object contains unknown field `bodi`"),
    ],
)
def test_a_bad_line_is_named_by_number_and_field(path: Path, line: Any, says: str):
    """The lines before it were good."""
    saved.save(path, [planned(0)], workload=ABOUT)
    text = line if isinstance(line, str) else json.dumps({**GOOD, "index": 1} | line)
    with path.open("a", encoding="utf-8") as file:
        file.write(text + "\n")
    with pytest.raises(saved.SavedRequestsError, match=says):
        list(saved.read(path))


def test_a_file_of_something_else_is_refused(path: Path, tmp_path: Path):
    """Another format, an empty file, a file that is not there, a file that is there already."""
    path.write_text('{"format": "other", "workload": {}}\n', encoding="utf-8")
    with pytest.raises(saved.SavedRequestsError, match="line 1: format: 'other' must be 'sidelight requests 1'"):
        saved.look(path)
    path.write_text("", encoding="utf-8")
    with pytest.raises(
        saved.SavedRequestsError, match=r"line 1: .*must begin with the line that --save-requests writes"
    ):
        saved.look(path)
    with pytest.raises(saved.SavedRequestsError, match="No such file or directory; give a file"):
        saved.look(tmp_path / "none")
    with pytest.raises(saved.SavedRequestsError, match="already exists"):
        saved.save(path, [], workload=ABOUT)
    saved.save(tmp_path / "empty", [], workload=ABOUT)
    with pytest.raises(saved.SavedRequestsError, match="there is no request"):
        saved.look(tmp_path / "empty")
