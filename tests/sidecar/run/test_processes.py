"""What a child process is given, and that it is started again where it dies."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from waiting import BOUND_S

from sidelight.recorded.errors import WorkerDied
from sidelight.sidecar.run.processes.child import Child
from sidelight.sidecar.run.processes.places import environment
from sidelight.sidecar.run.processes.supervised import FIRST_PAUSE_S, LONGEST_PAUSE_S, Supervised, keep_up

# Is ready, and dies of the first command, but answers it where so many have died before it.
MORTAL = """
import json, pathlib, sys
graves = pathlib.Path(__file__).with_name("graves")
died = graves.read_text() if graves.exists() else ""
print(json.dumps({"event": "ready"}), flush=True)
sys.stdin.readline()
if len(died) < DEATHS:
    graves.write_text(died + "x")
    sys.exit(3)
print(json.dumps({"event": "done", "after": len(died)}), flush=True)
"""


# The same, and each says that it could not write: some before it is asked, 2 more where it answers.
FULL = MORTAL.replace(
    """"ready"}), flush=True)""",
    """"ready"}), flush=True)
for count in range(1, 4):
    print(json.dumps({"event": "unwritten", "count": count, "reason": "full"}), flush=True)""",
).replace('"after": len(died)', '"unwritten": 5')


class Finish(msgspec.Struct):
    """A last command."""

    cmd: str = "finish"


def test_a_child_inherits_no_secret(monkeypatch: pytest.MonkeyPatch):
    """Its specification has those that it needs; who may read a process's environment is not ours to say."""
    monkeypatch.setenv("SIDELIGHT_API_KEY", "hush")
    monkeypatch.setenv("OTHER", "inherited")
    inherited = environment()
    assert ("inherited", None) == (inherited.get("OTHER"), inherited.get("SIDELIGHT_API_KEY"))


async def test_one_that_dies_again_and_again_is_started_later_and_later():
    """At most so late; one that has done its work is the last."""
    lives = iter([*"died" * 3, "over", "done"])
    pauses: list[float] = []
    deaths: list[str] = []

    async def life() -> bool:
        match next(lives):
            case "over":
                return False
            case "done":
                return True
            case _:
                raise WorkerDied("process.ended", "again")

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    await keep_up(life, lambda death: deaths.append(str(death)), pause=pause)
    assert 12 == len(deaths) == len(pauses)
    assert [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, LONGEST_PAUSE_S] == [*pauses[:3], pauses[-1]]


@pytest.mark.parametrize(
    ("deaths", "answer"),
    [(0, {"event": "done", "after": 0}), (1, {"event": "done", "after": 1}), (9, None)],
    ids=["none", "one", "all"],
)
async def test_a_child_that_dies_of_its_last_command_is_followed_by_one_other(
    deaths: int, answer: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Which gets the command again; where that dies, too, there is no answer, and the run goes on without."""
    (tmp_path / "mortal.py").write_text(MORTAL.replace("DEATHS", str(deaths)))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    events: list[str] = []

    async def begin(child: Child) -> None:
        events.append(f"begin {child.name}")

    async with Child("mortal", ["mortal"]) as child:
        supervised = Supervised(
            child,
            begin=begin,
            died=lambda death: events.append(str(death).partition(":")[0]),
            restarted=lambda: events.append("restarted"),
        )
        async with supervised:
            await supervised.ready()
            assert answer == await supervised.finish(Finish(), "done", timeout_s=BOUND_S)
    died = "mortal ended with code 3"
    assert [died, "begin mortal", "restarted", died][: 3 * deaths] == events
    assert min(deaths, 2) == supervised.deaths


async def test_what_children_that_died_could_not_write_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As they said it; what the last one could not write is in its answer."""
    (tmp_path / "mortal.py").write_text(FULL.replace("DEATHS", "1"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def begin(_: Child) -> None:
        pass

    async with Child("mortal", ["mortal"]) as child:
        async with Supervised(child, begin=begin, died=lambda _: None, restarted=lambda: None) as supervised:
            await supervised.ready()
            answer = await supervised.finish(Finish(), "done", timeout_s=BOUND_S)
        assert ({"event": "done", "unwritten": 5}, 3, 1) == (answer, supervised.unwritten, supervised.deaths)
