"""Hardware use during the load: the `hardware` object of a summary.

It has devices, totals and tokens per joule.

Tokens per second per watt is the output token rate of the window over the mean power of what is counted; tokens per
joule is the same number by its other name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from msgspec import Struct, UnsetType

from sidelight.rundir.fields import NO_UNIT, UNSET, Amount, Count, Ratio, Reasons, doc
from sidelight.rundir.stats import Missing
from sidelight.scraper.hardware import dcgm
from sidelight.scraper.hardware.energy import Energy, Method, energy, inside
from sidelight.scraper.hardware.records import DeviceSamples, HardwareLogRecord, absences, by_device
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.window.window import Window

COVERED = 0.9  # the part of a window that must be covered before a ratio speaks of all of it
# macOS, from cool to hot.
PRESSURES = ("", "nominal", "light", "moderate", "fair", "serious", "heavy", "critical", "trapping", "sleeping")
RATIOS = ("tokens_per_joule", "tokens_per_s_per_watt")
UNKNOWN = ("energy_j", "mean_power_w", *RATIOS, "method", "covered_s")
Measured = tuple[DeviceSamples, Energy | Missing]


class Device(Struct, frozen=True, kw_only=True):
    """One device over the measured window; null where a number is missing."""

    source: Annotated[str, doc("What read it: nvml, rapl, powermetrics or dcgm.")]
    device: Annotated[str, doc("Identifies the device within its source; of a GPU its UUID.")]
    name: Annotated[str, doc("Its name for people.")]
    kind: Annotated[
        str, doc("What it covers: gpu, cpu (a package), dram, ane, part (of a package), platform (psys: all packages).")
    ]
    energy_j: Annotated[Amount | None, doc("Energy used in covered_s.", "J")]
    mean_power_w: Annotated[Amount | None, doc("energy_j over covered_s.", "W")]
    peak_power_w: Annotated[
        Amount | None,
        doc("Highest power read in the window; of an energy counter, the highest mean of an interval.", "W"),
    ]
    method: Annotated[Method | None, doc("Difference of an energy counter, or power integrated by trapezoids.")]
    covered_s: Annotated[Amount | None, doc("Part of the window between readings at most three intervals apart.", "s")]
    gaps: Annotated[Count | UnsetType, doc("Number of longer intervals without a reading.", "gaps")] = UNSET
    gap_s: Annotated[Amount | UnsetType, doc("Their length inside the window; it is not covered.", "s")] = UNSET
    mean_utilisation_ratio: Annotated[Ratio | None, doc("Mean of the readings in the window.", NO_UNIT)]
    max_temperature_c: Annotated[float | None, doc("Highest reading in the window.", "degrees Celsius")]
    max_memory_used_bytes: Annotated[Amount | None, doc("Highest reading in the window.", "bytes")]
    thermal_pressure: Annotated[str | UnsetType, doc("Worst level in the window, as macOS names it.")] = UNSET
    uncounted: Annotated[str | UnsetType, doc("Why the totals leave it out; absent where they count it.")] = UNSET
    missing: Reasons = UNSET


class DevicesTotal(Struct, frozen=True, kw_only=True):
    """Devices added up over the measured window; null where a number is missing."""

    devices: Annotated[list[str], doc("Names of the devices that are added up.")]
    energy_j: Annotated[Amount | None, doc("Sum of their energies.", "J")]
    mean_power_w: Annotated[Amount | None, doc("Sum of their mean powers.", "W")]
    tokens_per_joule: Annotated[
        Amount | None, doc("Output tokens of the window over its length times mean_power_w.", "tokens/J")
    ]
    tokens_per_s_per_watt: Annotated[
        Amount | None, doc("Output tokens/s over mean_power_w: the same number.", "tokens/s/W")
    ]
    method: Annotated[Literal["counter", "trapezoid", "mixed"] | None, doc("How the energies were measured.")]
    covered_s: Annotated[Amount | None, doc("Least coverage of the window by any of their readings.", "s")]
    without: Annotated[dict[str, str] | UnsetType, doc("Devices whose energy is not known, and why.")] = UNSET
    missing: Reasons = UNSET


class Hardware(Struct, frozen=True, kw_only=True):
    """Hardware use over the measured window."""

    devices: Annotated[list[Device], doc("Every device that was read, counted in a total or not.")]
    gpu: Annotated[DevicesTotal, doc("All GPUs.")]
    cpu: Annotated[DevicesTotal, doc("CPU packages and their memory.")]
    total: Annotated[DevicesTotal, doc("All that is counted, nothing twice.")]
    absent: Annotated[dict[str, str], doc("Sources without readings, and why.")]


def hardware_summary(
    records: Sequence[HardwareLogRecord],
    endpoints: Sequence[EndpointSeries] = (),
    *,
    window: Window,
    output_tokens: float | None,
    engine_here: bool = True,
) -> Hardware:
    """Return the `hardware` object of a summary: devices, totals and what is absent; missing numbers have a reason.

    `records` is the hardware log; `endpoints` may hold DCGM exporters. `output_tokens` were generated in the window.
    `engine_here`: whether the engine runs on the machine of the log; if not, its devices stand there uncounted.

    In the totals nothing counts twice: of a GPU that two sources see the first counts; parts of a package and a
    platform counter (psys), which contains packages, are shown and not counted; a platform counts where it is alone.
    """
    local = by_device(records)
    remote = [gpu for e in endpoints for gpu in dcgm.device_samples(e.series, e.at_ns, e.values)]
    measured = [(samples, energy(samples, window)) for samples in (*local, *remote)]
    uncounted = _uncounted(measured, {samples.source for samples in local} if not engine_here else set())
    devices = [_device(samples, used, window, why) for (samples, used), why in zip(measured, uncounted, strict=True)]
    counted = [pair for pair, why in zip(measured, uncounted, strict=True) if not why]
    absent = {source: missing.reason for source, missing in absences(records).items()}
    if not remote:
        absent["dcgm"] = f"no scraped page has {dcgm.POWER}"
    return Hardware(
        devices=devices,
        gpu=_total([pair for pair in counted if pair[0].kind == "gpu"], window, output_tokens, "GPU"),
        cpu=_total([pair for pair in counted if pair[0].kind in {"cpu", "dram"}], window, output_tokens, "CPU"),
        total=_total(counted, window, output_tokens, "device"),
        absent=absent,
    )


def gpu_names(
    records: Sequence[HardwareLogRecord], endpoints: Sequence[EndpointSeries], *, engine_here: bool
) -> list[str]:
    """Return the names of the engine's GPUs that were read, each once; arguments as `hardware_summary` has them."""
    local = by_device(records) if engine_here else ()
    remote = [gpu for e in endpoints for gpu in dcgm.device_samples(e.series, e.at_ns, e.values)]
    return list({each.device: each.name for each in (*remote, *local) if each.kind == "gpu"}.values())


def _uncounted(measured: Sequence[Measured], elsewhere: set[str]) -> list[str]:
    """Return for each device why the totals leave it out; empty where they do not."""
    packages = any(samples.kind == "cpu" and isinstance(used, Energy) for samples, used in measured)
    # Of two sources that see one GPU the first that knows its energy, else the first.
    readers: dict[str, DeviceSamples] = {}
    for samples, _ in sorted(measured, key=lambda pair: isinstance(pair[1], Missing)):
        if samples.kind == "gpu" and samples.source not in elsewhere:
            readers.setdefault(samples.device, samples)
    reasons = []
    for samples, used in measured:
        first = readers.get(samples.device, samples)
        if samples.source in elsewhere:
            reason = "the engine runs on another machine"
        elif first is not samples:
            reason = f"{first.source} reads the same GPU"
        elif samples.kind == "part":
            reason = "a part of its package"
        elif samples.kind == "platform" and packages:
            reason = "it contains the packages, which are counted"
        elif samples.kind == "dram" and isinstance(used, Missing):
            reason = used.reason
        else:
            reason = ""
        reasons.append(reason)
    return reasons


def _device(samples: DeviceSamples, used: Energy | Missing, window: Window, uncounted: str) -> Device:
    missing: dict[str, str] = {}
    if isinstance(used, Missing):
        missing["energy_j"] = used.reason
    known = used if isinstance(used, Energy) else None
    values: dict[str, float | None] = {}
    for name, column, statistic, reason in (
        ("mean_utilisation_ratio", samples.utilisation_ratio, np.mean, "it reports no utilisation"),
        ("max_temperature_c", samples.temperature_c, np.max, "it reports no temperature"),
        ("max_memory_used_bytes", samples.memory_used_bytes, np.max, "it reports no memory use"),
    ):
        readings = inside(samples, column, window)
        values[name] = float(statistic(readings)) if len(readings) else None
        if not len(readings):
            missing[name] = "no reading in the window" if np.isfinite(column).any() else reason
    return Device(
        source=samples.source,
        device=samples.device,
        name=samples.name,
        kind=samples.kind,
        energy_j=known.energy_j if known else None,
        mean_power_w=known.mean_power_w if known else None,
        peak_power_w=known.peak_power_w if known else None,
        method=known.method if known else None,
        covered_s=known.covered_s if known else None,
        gaps=known.gaps if known else UNSET,
        gap_s=known.gap_s if known else UNSET,
        **values,
        thermal_pressure=_worst_pressure(samples, window) or UNSET,
        uncounted=uncounted or UNSET,
        missing=missing or UNSET,
    )


def _total(counted: Sequence[Measured], window: Window, output_tokens: float | None, what: str) -> DevicesTotal:
    """Add up devices: energies, mean powers; covered is what the least covered of them is."""
    used = [(samples, energy_used) for samples, energy_used in counted if isinstance(energy_used, Energy)]
    without = {samples.name: missing.reason for samples, missing in counted if isinstance(missing, Missing)}
    if not used:
        reason = "; ".join(f"{name}: {why}" for name, why in without.items()) or f"no {what} was measured"
        missing = dict.fromkeys(UNKNOWN, reason)
        return DevicesTotal(devices=[], **dict.fromkeys(UNKNOWN), without=without or UNSET, missing=missing)
    methods = {energy_used.method for _, energy_used in used}
    power_w = sum(energy_used.mean_power_w for _, energy_used in used)
    covered_s = min(energy_used.covered_s for _, energy_used in used)
    ratio = _tokens_per_joule(output_tokens, window, power_w, covered_s, without)
    return DevicesTotal(
        devices=[samples.name for samples, _ in used],
        energy_j=sum(energy_used.energy_j for _, energy_used in used),
        mean_power_w=power_w,
        **dict.fromkeys(RATIOS, None if isinstance(ratio, Missing) else ratio),
        method=methods.pop() if len(methods) == 1 else "mixed",
        covered_s=covered_s,
        without=without or UNSET,
        missing=dict.fromkeys(RATIOS, ratio.reason) if isinstance(ratio, Missing) else UNSET,
    )


def _tokens_per_joule(
    output_tokens: float | None, window: Window, power_w: float, covered_s: float, without: Mapping[str, str]
) -> float | Missing:
    if output_tokens is None:
        return Missing("how many tokens were generated is not known")
    if without:
        return Missing(f"the energy of {', '.join(without)} is not known")
    if not power_w > 0:
        return Missing("the power read is 0 W")
    if covered_s < COVERED * window.duration_s:
        return Missing(f"readings cover {covered_s:.1f} s of the {window.duration_s:.1f} s only")
    return output_tokens / (power_w * window.duration_s)


def _worst_pressure(samples: DeviceSamples, window: Window) -> str:
    levels = {samples.thermal_pressure[row] for row in np.flatnonzero(window.holds(samples.at_ns))}
    return max(
        levels, key=lambda level: PRESSURES.index(level.lower()) if level.lower() in PRESSURES else 0, default=""
    )
