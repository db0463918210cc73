"""What the hardware said: the records of the hardware log, and the same by device in columns.

Where a reading comes from is left to the sources (`nvml`, `rapl`, `powermetrics`, `dcgm`), what it means to `energy`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import nan

import msgspec
import numpy as np
from numpy.typing import NDArray

from scraper.missing import Missing

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
INTERVAL_S = 1.0


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
    """From this moment on a source says nothing, and why."""

    at_ns: int
    source: str
    reason: str


HardwareLogRecord = HardwareRecord | HardwareAbsence
encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[HardwareLogRecord] = msgspec.msgpack.Decoder(HardwareLogRecord)


class SourceLostError(Exception):
    """A source that answered once does not any more; the text is the reason."""


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
    at_ns: Int64
    power_w: Float64
    energy_j: Float64
    energy_range_j: float
    utilisation_ratio: Float64
    temperature_c: Float64
    memory_used_bytes: Float64
    thermal_pressure: tuple[str, ...]


def decode(payload: bytes) -> HardwareLogRecord:
    """Decode one record of the hardware log. Raises msgspec.DecodeError on anything else."""
    return _decoder.decode(payload)


def by_device(records: Iterable[HardwareLogRecord]) -> tuple[DeviceSamples, ...]:
    """Lay the readings of each device in columns, devices in the order in which they first appear."""
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
        power_w=np.array([r.power_w for r in records], dtype=np.float64),
        energy_j=np.array([r.energy_j for r in records], dtype=np.float64),
        energy_range_j=first.energy_range_j,
        utilisation_ratio=np.array([r.utilisation_ratio for r in records], dtype=np.float64),
        temperature_c=np.array([r.temperature_c for r in records], dtype=np.float64),
        memory_used_bytes=np.array([r.memory_used_bytes for r in records], dtype=np.float64),
        thermal_pressure=tuple(r.thermal_pressure for r in records),
    )
