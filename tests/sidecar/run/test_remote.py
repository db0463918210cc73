"""Load workers behind an agent: their lines, their share of a plan, and the way home of their files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from waiting import BOUND_S

from sidelight.loadgen.driver import is_share
from sidelight.loadgen.records import PlannedRequest, append_record, plan_end, read_plan
from sidelight.recorded.errors import WorkerDied
from sidelight.rundir.child import ChildSpec
from sidelight.rundir.clock import AnchoredClock
from sidelight.rundir.frames import FrameLog
from sidelight.sidecar.run.processes.agent import Agent
from sidelight.sidecar.run.processes.child import Child
from sidelight.sidecar.run.processes.remote import Link, RemotePlace

# Writes to the file of its specification what it is sent, says how long that was, and leaves at the end of its input.
SCRIBE = """
import json, os, sys
spec = json.loads(sys.stdin.readline())
os.dup2(os.open(spec["stderr"], os.O_WRONLY | os.O_CREAT), 2)
print(json.dumps({"event": "ready"}), flush=True)
with open(spec["out"], "ab") as out:
    for line in sys.stdin.buffer:
        out.write(line)
        out.flush()
        print(json.dumps({"event": "written", "count": len(line)}), flush=True)
    out.write(b"the end")
sys.exit(json.loads(line)["code"])
"""


class ScribeSpec(ChildSpec, frozen=True, kw_only=True):
    """Where to write."""

    out: str


class Words(msgspec.Struct):
    """A line to write, and what to end with where it is the last."""

    text: str
    code: int = 0


class Cable:
    """A link to an agent of this process, that can break: for a moment after some answers, or for good."""

    def __init__(self, agent: Agent, *, breaks_after: int = 0) -> None:
        self.is_cut, self.streams = False, 0
        self._agent, self._left = agent, breaks_after
        self.link = Link(node="east", lost=self._lost, call=self._call, stream=self._stream)

    def _lost(self) -> str:
        return "is lost: the cable is cut" if self.is_cut else ""

    def _check(self) -> None:
        if self.is_cut:
            raise WorkerDied("process.ended", self._lost())

    async def _call(self, name: str, *arguments: Any) -> Any:
        self._check()
        return await getattr(self._agent, name)(*arguments)

    async def _stream(self, name: str, arguments: Callable[[], tuple[Any, ...]]) -> AsyncIterator[Any]:
        while True:
            self.streams += 1
            async with aclosing(getattr(self._agent, name)(*arguments())) as answers:
                async for answer in answers:
                    self._check()
                    yield answer
                    self._left -= 1
                    if self._left >= 0:
                        break  # and is asked again
                else:
                    return


@pytest.fixture
def scribe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "scribe.py").write_text(SCRIBE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@asynccontextmanager
async def writing(cable: Cable, home: Path) -> AsyncIterator[Child]:
    """Start a scribe behind an agent."""
    place = RemotePlace(link=cable.link, apart_ns=5, round_trip_s=0.0)
    async with Child("scribe", ["scribe"], place=place) as child:
        await child.begin(ScribeSpec(out=place.path_there(home / "out.log")), stderr=home / "scribe.stderr")
        await child.expect("ready", timeout_s=BOUND_S)
        yield child


@pytest.fixture
async def agent():
    there = Agent()
    yield there
    await there.leave()


@pytest.mark.usefixtures("scribe")
@pytest.mark.parametrize("breaks_after", [0, 9], ids=["sound", "breaking"])
async def test_lines_and_files_come_whole_through_an_agent(agent: Agent, tmp_path: Path, breaks_after: int):
    """Once each, also where the link breaks after each answer and is asked again; nothing stays there."""
    cable = Cable(agent, breaks_after=breaks_after)
    words = [Words(text=f"{number} of seven") for number in range(7)]
    async with writing(cable, tmp_path) as child:
        for each in words:
            await child.send(each)
            assert len(msgspec.json.encode(each)) + 1 == (await child.expect("written", timeout_s=BOUND_S))["count"]
    assert (
        b"".join(msgspec.json.encode(each) + b"\n" for each in words) + b"the end"
        == (tmp_path / "out.log").read_bytes()
    )
    assert not os.path.exists(child.place.path_there(tmp_path / "out.log"))  # noqa: ASYNC240, PTH110
    assert (cable.streams > 2) == bool(breaks_after)


@pytest.mark.usefixtures("scribe")
async def test_the_end_of_a_worker_behind_an_agent_is_known(agent: Agent, tmp_path: Path):
    """By its code and its last error, which came home before."""
    async with writing(Cable(agent), tmp_path) as child:
        await child.send(ChildSpec())
        child._pipes.close()
        with pytest.raises(
            WorkerDied, match=r"^scribe on node east ended with code 1: KeyError: 'code' \(full output in .*stderr\)"
        ):
            await child.expect("more", timeout_s=BOUND_S)


@pytest.mark.usefixtures("scribe")
async def test_a_node_that_is_lost_is_the_end_of_its_worker(agent: Agent, tmp_path: Path):
    """Which names the node; what had come home by then stays."""
    cable = Cable(agent)
    async with writing(cable, tmp_path) as child:
        await child.send(Words(text="first"))
        async with asyncio.timeout(BOUND_S):
            while not (tmp_path / "out.log").exists():  # noqa: ASYNC110  files have no event
                await asyncio.sleep(0.01)
        cable.is_cut = True
        with pytest.raises(WorkerDied, match=r"^scribe on node east is lost: the cable is cut$"):
            await child.expect("more", timeout_s=BOUND_S)
    assert b"first" in (tmp_path / "out.log").read_bytes()


@pytest.mark.usefixtures("scribe")
@pytest.mark.parametrize("seats", [None, 3])
async def test_shares_of_a_plan_are_the_plan(agent: Agent, tmp_path: Path, seats: int | None):
    """Each worker gets its own requests, and all of them together are all."""
    planned = [PlannedRequest(index=index, phase="measure", body=b"x" * index) for index in range(50)]
    plan = tmp_path / "plan-measure.log"
    with FrameLog(plan) as log:
        for each in (*planned, plan_end("measure")):
            append_record(log, each)
    given: list[PlannedRequest] = []
    for worker in range(3):
        place = RemotePlace(link=Cable(agent).link, apart_ns=0, round_trip_s=0.0)
        async with Child("scribe", ["scribe"], place=place):  # which waits: files of one that has ended are forgotten

            def share(each: PlannedRequest, worker: int = worker) -> bool:
                return is_share(each, workers=3, worker=worker, seats=seats)

            there = list(read_plan(await place.deliver(plan, share)))
        assert [each for each in planned if share(each)] == there
        given += there
    assert planned == sorted(given, key=lambda each: each.index)


async def test_a_place_elsewhere_has_a_clock_of_its_own(agent: Agent):
    """Its stamps are made in the time of the run."""
    place = RemotePlace(link=Cable(agent).link, apart_ns=-70, round_trip_s=0.0)
    assert 30 == place.offset_ns(AnchoredClock(offset_ns=100))
