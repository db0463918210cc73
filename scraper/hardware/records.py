"""Records of the hardware log, and the same by device in columns.

Where a reading comes from is left to the sources (`nvml`, `rapl`, `powermetrics`, `dcgm`), what it means to `energy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan

import msgspec
import numpy as np

from sidelight.rundir.columns import Floats, Ints
from sidelight.rundir.stats import Missing

INTERVAL_S = 1.0
MEASURED = ("power_w", "energy_j", "utilisation_ratio", "temperature_c", "memory_used_bytes")


class HardwareRecord(msgspec.Struct, array_like=True, frozen=True, tag="reading", kw_only=True):
    """One device at one moment; NaN where a number is unknown.

    at_ns             int64 ns Unix on the run's clock
    device            unique within its source, and the same in two sources that see the same GPU (its UUID)
    name              for people
    kind              gpu, cpu (a package), dram, ane (neural engine), part (of another device), platform (all of them)
    power_w           at that moment, or the source's own short average
    energy_j          a cumulative counter from an arbitrary start
    energy_range_j    where that counter wraps around to 0; NaN: it does not
    utilisation_ratio share of the time in which the device was busy, 0 to 1
    thermal_pressure  what macOS says instead of a temperature; empty elsewhere
    """

    at_ns: int
    source: str
    device: str
    name: str
    kind: str
    power_w: float = nan
    energy_j: float = nan
    energy_range_j: float = nan
    utilisation_ratio: float = nan
    temperature_c: float = nan
    memory_used_bytes: float = nan
    thermal_pressure: str = ""


class HardwareAbsence(msgspec.Struct, array_like=True, frozen=True, tag="absent", kw_only=True):
    """A source without readings from this moment on, and the reason."""

    at_ns: int
    source: str
    reason: str


HardwareLogRecord = HardwareRecord | HardwareAbsence
encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[HardwareLogRecord] = msgspec.msgpack.Decoder(HardwareLogRecord)


class SourceLostError(Exception):
    """The loss of a source that answered before; the text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSamples:
    """All readings of one device of one source, T of them, ascending in time; NaN where a number is unknown.

    Units and meaning are those of `HardwareRecord`. `interval_s` is the usual time between two readings.
    """

    source: str
    device: str
    name: str
    kind: str
    interval_s: float
    at_ns: Ints
    power_w: Floats
    energy_j: Floats
    energy_range_j: float
    utilisation_ratio: Floats
    temperature_c: Floats
    memory_used_bytes: Floats
    thermal_pressure: tuple[str, ...]


def decode(payload: bytes) -> HardwareLogRecord:
    """Decode one record of the hardware log. Raises msgspec.DecodeError on anything else."""
    return _decoder.decode(payload)


def by_device(records: Iterable[HardwareLogRecord]) -> tuple[DeviceSamples, ...]:
    """Return the readings of each device in columns, devices in order of first appearance."""
    groups: dict[tuple[str, str], list[HardwareRecord]] = {}
    for record in records:
        if isinstance(record, HardwareRecord):
            groups.setdefault((record.source, record.device), []).append(record)
    return tuple(_columns(sorted(group, key=lambda r: r.at_ns)) for group in groups.values())


def absences(records: Iterable[HardwareLogRecord]) -> Mapping[str, Missing]:
    """Return for each source that was absent, or fell silent, the last reason given."""
    return {record.source: Missing(record.reason) for record in records if isinstance(record, HardwareAbsence)}


def _columns(records: list[HardwareRecord]) -> DeviceSamples:
    first = records[0]
    return DeviceSamples(
        source=first.source,
        device=first.device,
        name=first.name,
        kind=first.kind,
        interval_s=INTERVAL_S,
        at_ns=np.array([r.at_ns for r in records], dtype=np.int64),
        energy_range_j=first.energy_range_j,
        thermal_pressure=tuple(r.thermal_pressure for r in records),
        **{name: np.array([getattr(r, name) for r in records], dtype=np.float64) for name in MEASURED},
    )
