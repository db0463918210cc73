"""The hardware section of the report: what each device used, and what a token cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from exporter.report.format import cell, percent, table

SHOWN = 16  # devices; their totals say the rest


def energy_section(hardware: Mapping[str, Any] | None) -> Iterator[RenderableType]:
    """Give the section of a summary's `hardware` object; one line where nothing was measured, nothing without one."""
    if hardware is None:
        return
    devices = hardware["devices"]
    if not devices:
        sources = ", ".join(hardware["absent"])
        yield Text(f"Power was not measured: none of {sources} is here (summary.json says why).", style="dim")
        return
    yield _table(devices, hardware)
    yield Text(_tokens(hardware), style="bold")
    covered, total = hardware["total"].get("covered_s"), hardware["total"]
    if covered is not None:
        yield Text(f"Energy over {covered:.1f} s of the window, by {total['method']}.", style="dim")
    yield Text(_absent(hardware), style="dim")
    yield Text("")


def _table(devices: list[Mapping[str, Any]], hardware: Mapping[str, Any]) -> Table:
    shown = table("Hardware", "energy, J", "mean W", "peak W", "busy", "max °C", "")
    for device in devices[:SHOWN]:
        shown.add_row(
            device["name"],
            *(cell(device[key]) for key in ("energy_j", "mean_power_w", "peak_power_w")),
            percent(device["mean_utilisation_ratio"]),
            cell(device["max_temperature_c"]),
            Text(_remark(device), style="dim"),
        )
    if len(devices) > SHOWN:
        shown.add_row(f"and {len(devices) - SHOWN} more", *("",) * 6)
    for key, label in (("gpu", "all GPUs"), ("cpu", "all CPUs"), ("total", "in all")):
        total = hardware[key]
        if total["energy_j"] is not None:
            shown.add_row(label, cell(total["energy_j"]), cell(total["mean_power_w"]), *("",) * 4, style="bold")
    return shown


def _remark(device: Mapping[str, Any]) -> str:
    missing = device.get("missing", {}).get("energy_j")
    uncounted = device.get("uncounted")
    pressure = device.get("thermal_pressure", "")
    gaps = f"{device['gap_s']:.1f} s without readings" if device.get("gap_s") else ""
    parts = (
        f"not counted: {uncounted}" if uncounted else missing or "",
        gaps,
        f"thermal pressure {pressure.lower()}" if pressure.lower() not in {"", "nominal"} else "",
    )
    return "; ".join(part for part in parts if part)


def _tokens(hardware: Mapping[str, Any]) -> str:
    """Return tokens per joule of the GPUs and in all; where there is none, why."""
    facts = []
    for key, label in (("gpu", "GPU"), ("total", "all that is counted")):
        ratio = hardware[key].get("tokens_per_joule")
        if ratio is not None:
            facts.append(f"{cell(ratio)} tokens/J ({cell(1 / ratio) if ratio else '-'} J a token) by {label}")
    if facts:
        return "; ".join(facts) + "."
    return f"No tokens per joule: {hardware['total'].get('missing', {}).get('tokens_per_joule', 'not known')}."


def _absent(hardware: Mapping[str, Any]) -> str:
    return "; ".join(f"{source}: {reason}" for source, reason in hardware["absent"].items())
