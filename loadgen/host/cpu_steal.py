"""Steal time: the processor time that a hypervisor gave to other guests. Latencies are to be read beside it.

A hypervisor that runs another guest stops everything here at once; none of our stamps can tell that from a slow server.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from sidelight.rundir import fields
from sidelight.rundir.fields import UNSET, Ratio, doc
from sidelight.rundir.stats import Missing

_STEAL = 7  # user nice system idle iowait irq softirq steal guest guest_nice: proc(5); guest stands within user
_FIELDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTicks:
    """Clock ticks of all processors since boot."""

    total: int
    idle: int
    steal: int


class MachineLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The use of this machine's processors during a phase."""

    steal_ratio: Annotated[
        Ratio | None,
        doc("Processor time that a hypervisor gave to other guests, over all.", "ratio", source="proc(5)"),
    ]
    busy_ratio: Annotated[
        Ratio | None, doc("Processor time that was used on this machine, over all.", "ratio", source="proc(5)")
    ]
    missing: fields.Missing = UNSET


def read_ticks(stat: Path = Path("/proc/stat")) -> CpuTicks | Missing:
    """Read them now; Missing where the system does not tell."""
    try:
        return parse_stat(stat.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return Missing(reason="this system has no /proc/stat")


def parse_stat(text: str) -> CpuTicks | Missing:
    """Read the text of /proc/stat: its first line adds up all processors."""
    name, *words = text.partition("\n")[0].split() or [""]
    if name != "cpu" or len(words) < _FIELDS or not all(word.isdigit() for word in words[:_FIELDS]):
        return Missing(reason="/proc/stat tells no steal time")
    ticks = [int(word) for word in words[:_FIELDS]]
    return CpuTicks(total=sum(ticks), idle=ticks[3] + ticks[4], steal=ticks[_STEAL])


def machine_load(before: CpuTicks | Missing, after: CpuTicks | Missing) -> MachineLoad:
    """Return steal time and busy time between two readings, as ratios of all processor time."""
    if isinstance(before, Missing):
        return _absent(before.reason)
    if isinstance(after, Missing):
        return _absent(after.reason)
    total = after.total - before.total
    if total <= 0:
        return _absent("no processor time passed between two readings")
    # idle and iowait may go backwards by a tick or two: proc(5).
    idle, steal = max(after.idle - before.idle, 0), max(after.steal - before.steal, 0)
    return MachineLoad(steal_ratio=min(steal / total, 1.0), busy_ratio=max(total - idle - steal, 0) / total)


def _absent(reason: str) -> MachineLoad:
    return MachineLoad(steal_ratio=None, busy_ratio=None, missing=reason)
