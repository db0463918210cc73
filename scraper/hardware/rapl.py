"""Linux RAPL: the energy counters of Intel's and AMD's processors under /sys/class/powercap.

Each zone has a name and `energy_uj`, a counter of microjoules that wraps around after `max_energy_range_uj`. Source:
https://www.kernel.org/doc/html/latest/power/powercap/powercap.html
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from sidelight.rundir.stats import Missing
from sidelight.scraper.hardware.records import HardwareRecord, SourceLostError

ROOT = Path("/sys/class/powercap")
SOURCE = "rapl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """One counter: its directory, its name under its package, what it measures, and where it wraps, in joules."""

    path: Path
    device: str
    kind: str
    range_j: float


class Rapl:
    """The readable zones of one machine."""

    source = SOURCE
    paces_itself = False

    def __init__(self, zones: tuple[Zone, ...]) -> None:
        self._zones = zones

    def read(self, clock_offset_ns: int) -> tuple[HardwareRecord, ...]:
        """Read every counter, each stamped at its own read. Raises SourceLostError."""
        try:
            return tuple(_read(zone, clock_offset_ns) for zone in self._zones)
        except (OSError, ValueError) as error:
            raise SourceLostError(f"energy_uj cannot be read any more: {error}") from error

    def close(self) -> None:
        """Do nothing: no file is held open."""


def open_rapl(root: Path = ROOT) -> Rapl | Missing:
    """Find the zones that can be read; the reason where there is none.

    `intel-rapl-mmio` shows the same package a second time and is left out.
    """
    if not root.is_dir():
        return Missing(f"no {root} here: RAPL needs Linux on an Intel or AMD processor")
    paths = sorted(root.glob("intel-rapl:*"))
    if not paths:
        return Missing(f"no RAPL zone under {root}, as in most virtual machines and containers")
    zones: list[Zone] = []
    problems: list[str] = []
    for path in paths:
        try:
            zones.append(_zone(root, path))
        except PermissionError:
            problems.append("energy_uj is readable by root only")
        except (OSError, ValueError) as error:
            problems.append(f"{path.name} cannot be read: {error}")
    return Rapl(tuple(zones)) if zones else Missing(problems[0])


def _zone(root: Path, path: Path) -> Zone:
    """Describe one zone, having read its counter once. Raises OSError, ValueError."""
    name = (path / "name").read_text().strip()
    parts = path.name.split(":")
    package = (root / ":".join(parts[:2]) / "name").read_text().strip() if len(parts) > 2 else ""
    _counter_j(path / "energy_uj")
    return Zone(
        path=path / "energy_uj",
        device=f"{package}/{name}" if package else name,
        kind=_kind(name, inside=bool(package)),
        range_j=_counter_j(path / "max_energy_range_uj"),
    )


def _kind(name: str, *, inside: bool) -> str:
    # DRAM stands under a package, but is not in the package's counter; core and uncore are.
    if name == "dram":
        return "dram"
    if name == "psys":
        return "platform"
    return "part" if inside else "cpu"


def _read(zone: Zone, clock_offset_ns: int) -> HardwareRecord:
    energy_j = _counter_j(zone.path)
    return HardwareRecord(
        at_ns=time.monotonic_ns() + clock_offset_ns,
        source=SOURCE,
        device=zone.device,
        name=f"CPU {zone.device}",
        kind=zone.kind,
        energy_j=energy_j,
        energy_range_j=zone.range_j,
    )


def _counter_j(path: Path) -> float:
    return int(path.read_text()) / 1e6
