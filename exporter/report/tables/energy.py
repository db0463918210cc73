"""The hardware section of the report: what each device used, and what a token cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sidelight.exporter.document import BLANK, Block, Prose, Row, numbers, table, words
from sidelight.rundir.printable.numbers import cell, percent
from sidelight.scraper.hardware.summary import Device, Hardware

SHOWN = 16  # devices; their totals say the rest


def energy_section(hardware: Hardware) -> Iterator[Block]:
    """Yield the section; nothing where nothing was measured, of which the summary has the reasons."""
    if not hardware.devices:
        return
    columns = (
        *numbers("energy, J", "mean W", "peak W", show=cell),
        *numbers("busy", show=percent),
        *numbers("max °C", show=cell),
        words(""),
    )
    yield table("Hardware", columns, _rows(hardware.devices, hardware))
    yield Prose(_tokens(hardware), "strong")
    total = hardware.total
    if total.covered_s is not None:
        yield Prose(f"Energy over {total.covered_s:.1f} s of the window, by {total.method}.", "note")
    yield Prose(_absent(hardware), "note")
    yield BLANK


def _rows(devices: Sequence[Device], hardware: Hardware) -> Iterator[Row]:
    for device in devices[:SHOWN]:
        power = device.energy_j, device.mean_power_w, device.peak_power_w
        busy, heat = device.mean_utilisation_ratio, device.max_temperature_c
        yield Row((device.name, *power, busy, heat, _remark(device)))
    if len(devices) > SHOWN:
        yield Row((f"and {len(devices) - SHOWN} more",))
    for total, label in ((hardware.gpu, "all GPUs"), (hardware.cpu, "all CPUs"), (hardware.total, "in all")):
        if total.energy_j is not None:
            yield Row((label, total.energy_j, total.mean_power_w), "strong")


def _remark(device: Device) -> str:
    missing = (device.missing or {}).get("energy_j")
    pressure = (device.thermal_pressure or "").lower()
    parts = (
        f"not counted: {device.uncounted}" if device.uncounted else missing or "",
        f"{device.gap_s:.1f} s without readings" if device.gap_s else "",
        f"thermal pressure {pressure}" if pressure not in {"", "nominal"} else "",
    )
    return "; ".join(part for part in parts if part)


def _tokens(hardware: Hardware) -> str:
    """Return tokens per joule of the GPUs and in all; where there is none, why."""
    facts = []
    for total, label in ((hardware.gpu, "GPU"), (hardware.total, "all that is counted")):
        ratio = total.tokens_per_joule
        if ratio is not None:
            facts.append(f"{cell(ratio)} tokens/J ({cell(1 / ratio) if ratio else '-'} J a token) by {label}")
    if facts:
        return "; ".join(facts) + "."
    return f"No tokens per joule: {(hardware.total.missing or {}).get('tokens_per_joule', 'not known')}."


def _absent(hardware: Hardware) -> str:
    return "; ".join(f"{source}: {reason}" for source, reason in hardware.absent.items())
