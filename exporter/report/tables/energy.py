"""The hardware section of the report: what each device used, and what a token cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from exporter.report.format import table
from rundir.printable.numbers import cell, percent
from scraper.hardware.summary import Device, Hardware

SHOWN = 16  # devices; their totals say the rest


def energy_section(hardware: Hardware) -> Iterator[RenderableType]:
    """Yield the section; nothing where nothing was measured, of which the summary has the reasons."""
    if not hardware.devices:
        return
    yield _table(hardware.devices, hardware)
    yield Text(_tokens(hardware), style="bold")
    total = hardware.total
    if total.covered_s is not None:
        yield Text(f"Energy over {total.covered_s:.1f} s of the window, by {total.method}.", style="dim")
    yield Text(_absent(hardware), style="dim")
    yield Text("")


def _table(devices: Sequence[Device], hardware: Hardware) -> Table:
    shown = table("Hardware", "energy, J", "mean W", "peak W", "busy", "max °C", "")
    for device in devices[:SHOWN]:
        shown.add_row(
            Text(device.name),
            *map(cell, (device.energy_j, device.mean_power_w, device.peak_power_w)),
            percent(device.mean_utilisation_ratio),
            cell(device.max_temperature_c),
            Text(_remark(device), style="dim"),
        )
    if len(devices) > SHOWN:
        shown.add_row(f"and {len(devices) - SHOWN} more", *("",) * 6)
    for total, label in ((hardware.gpu, "all GPUs"), (hardware.cpu, "all CPUs"), (hardware.total, "in all")):
        if total.energy_j is not None:
            shown.add_row(label, cell(total.energy_j), cell(total.mean_power_w), *("",) * 4, style="bold")
    return shown


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
