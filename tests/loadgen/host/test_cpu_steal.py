from __future__ import annotations

import sys
from pathlib import Path

import pytest
from msgspec import to_builtins

from sidelight.loadgen.host.cpu_steal import CpuTicks, machine_load, parse_stat, read_ticks
from sidelight.rundir.stats import Missing

STAT = "cpu  100 1 20 800 30 2 3 44 5 6\ncpu0 50 0 10 400 15 1 1 22 2 3\nintr 1\n"


def test_the_first_line_adds_up_all_processors():
    """Guest time stands within user time and is not counted again."""
    assert CpuTicks(total=1000, idle=830, steal=44) == parse_stat(STAT)


@pytest.mark.parametrize("text", ["", "cpu 1 2 3\n", "cpu0 1 2 3 4 5 6 7 8\n", "cpu a b c d e f g h\n"])
def test_a_machine_without_steal_time_is_missing(text: str):
    """Old kernels, and files other than /proc/stat."""
    assert Missing(reason="/proc/stat tells no steal time") == parse_stat(text)


def test_without_a_proc_there_is_a_reason(tmp_path: Path):
    """As on macOS."""
    got = machine_load(read_ticks(tmp_path / "stat"), CpuTicks(total=1, idle=1, steal=0))
    assert {"steal_ratio": None, "busy_ratio": None, "missing": "this system has no /proc/stat"} == to_builtins(got)


@pytest.mark.parametrize(
    ("after", "steal", "busy"),
    [
        ((1100, 880, 54), 0.1, 0.4),
        ((1100, 930, 44), 0.0, 0.0),
        ((1100, 829, 44), 0.0, 1.0),
        ((1000, 830, 44), None, None),
    ],
)
def test_steal_is_a_share_of_all_processor_time(after: tuple[int, int, int], steal: float | None, busy: float | None):
    """Between two readings; idle time that went backwards gives no share."""
    total, idle, stolen = after
    got = machine_load(CpuTicks(total=1000, idle=830, steal=44), CpuTicks(total=total, idle=idle, steal=stolen))
    assert (steal, busy) == (got.steal_ratio, got.busy_ratio)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_this_machine_has_its_ticks():
    """Its ticks only grow."""
    before, after = read_ticks(), read_ticks()
    if isinstance(before, Missing) or isinstance(after, Missing):
        pytest.skip("this kernel tells no steal time")
    assert before.total <= after.total
