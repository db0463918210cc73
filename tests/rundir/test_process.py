"""What a process takes of its machine: it has as many descriptors as it may, and tells of errors sparingly."""

from __future__ import annotations

import gc
import resource
import subprocess
import sys
import weakref

import pytest

from sidelight.rundir import process
from sidelight.rundir.process import COLLECT_EVERY, MOST_ERROR_BYTES, MemoryLimit, collecting_often, resident_bytes

RARELY = 100_000  # as a command collects while it begins


def test_the_limit_is_raised_as_far_as_it_may():
    """A process that begins with 64 open files has its hard limit afterwards."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    code = f"""
import resource
from sidelight.rundir.process import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}))
print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    assert f"{hard} {hard}\n" == subprocess.check_output([sys.executable, "-c", code], text=True)


def test_memory_beyond_the_limit_is_given_back_first(monkeypatch: pytest.MonkeyPatch):
    """What glibc keeps of freed memory refuses nothing; what is in use does, until it is free again."""
    monkeypatch.setattr(process, "_LOOK_EVERY_S", 0.0)
    sizes = [100, 200, 100, 200, 200, 100]
    limit = MemoryLimit(150, resident=lambda: sizes.pop(0))
    reached = [limit.is_reached()]
    reached.append(limit.is_reached())  # 200, and 100 once memory went back
    monkeypatch.setattr(process, "TRIM_EVERY_S", 0.0)
    reached.append(limit.is_reached())
    monkeypatch.setattr(process, "TRIM_EVERY_S", 1e9)
    reached.append(limit.is_reached())
    assert [False, False, True, False] == reached
    assert not sizes


@pytest.mark.skipif(sys.platform != "linux", reason="this system does not limit the memory of a process")
def test_a_process_grows_no_further_than_it_may():
    """The system refuses what is more, and the process can go on."""
    code = """
from sidelight.rundir.process import limit_growth
limit_growth(100_000_000)
assert bytes(60_000_000)
try:
    bytes(200_000_000)
except MemoryError:
    print("refused")
"""
    assert "refused\n" == subprocess.check_output([sys.executable, "-c", code], text=True)


class Cyclic:
    """Refers to itself, so that only the collector of garbage frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.skipif(resident_bytes() < 0, reason="this system does not say how much memory a process holds")
def test_garbage_is_freed_where_memory_is_short():
    """However few objects it is: the bytes that one of them holds may be most of a process's memory."""
    waiting = weakref.WeakSet[Cyclic]()
    waiting.add(Cyclic())
    assert MemoryLimit(1).is_reached()
    assert not waiting


def test_garbage_waits_for_little_where_a_process_goes_on_for_hours():
    """A command collects rarely while it begins: what it imports stays. What goes on is as it was when it is over."""
    before = gc.get_threshold()
    gc.set_threshold(RARELY)
    try:
        waiting = weakref.WeakSet[Cyclic]()
        with collecting_often():
            for _ in range(5 * COLLECT_EVERY):
                waiting.add(Cyclic())
            assert len(waiting) < 2 * COLLECT_EVERY
        assert (RARELY, *before[1:]) == gc.get_threshold()
        assert not gc.get_freeze_count()
    finally:
        gc.set_threshold(*before)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_memory_is_measured():
    """That of this process, which is more than Python itself takes."""
    assert 5_000_000 < resident_bytes() < 100_000_000_000


def written(code: str) -> str:
    """What a process that limits its errors writes to standard error."""
    done = subprocess.run(
        [sys.executable, "-c", f"import logging\nfrom sidelight.rundir import process\nprocess.limit_errors()\n{code}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr


def test_an_error_that_comes_again_and_again_is_written_once_a_minute():
    """With how often it came meanwhile; another one is written beside it."""
    assert "".join(f"{text}\n" for text in ("failed: 0", "other", "(9 times more) failed: 10")) == written(
        """
def fail(number):
    logging.getLogger("asyncio").error("failed: %d", number)
for number in range(10):
    fail(number)
logging.warning("other")
process.ERRORS_EVERY_S = 0
fail(10)
"""
    )


def test_errors_have_an_end():
    """However many kinds of them there are, no more is written than a megabyte."""
    said = written("process.ERRORS_EVERY_S = 0\nfor _ in range(20):\n    logging.error('x' * 100_000)")
    assert MOST_ERROR_BYTES * 0.8 < len(said) < MOST_ERROR_BYTES * 1.1
    assert said.endswith("more errors follow, and are not written\n")
