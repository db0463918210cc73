"""NVIDIA GPUs through a scraped DCGM exporter: the same columns as from any other source.

The exporter asks the driver every 30 s by default, however often it is scraped. Where it exposes the energy
counter, which never rests, only the scrapes at which that moved are samples: the others repeat an old one.
Source: https://docs.nvidia.com/datacenter/dcgm/latest/dcgm-api/dcgm-api-field-ids.html
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sidelight.rundir.columns import Floats, Ints
from sidelight.scraper.exposition import Series
from sidelight.scraper.hardware.records import MEASURED, DeviceSamples

SOURCE = "dcgm"
POWER = "DCGM_FI_DEV_POWER_USAGE"
ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"
BUSY = "DCGM_FI_DEV_GPU_UTIL"
TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
MEMORY = "DCGM_FI_DEV_FB_USED"
# What one exposed unit is: mJ, percent and MiB; in the order of MEASURED.
SCALES = {POWER: 1.0, ENERGY: 1e-3, BUSY: 1e-2, TEMPERATURE: 1.0, MEMORY: 2.0**20}
# DCGM's "blank" values mean: not known. The smallest for int32, float64 and int64 fields.
BLANKS = {POWER: 2.0**47, ENERGY: float(0x7FFFFFFFFFFFFFF0), **dict.fromkeys((BUSY, TEMPERATURE, MEMORY), 2.0**31 - 16)}


def device_samples(series: Sequence[Series], at_ns: Ints, values: Floats) -> tuple[DeviceSamples, ...]:
    """Return the GPUs that one endpoint's scrapes show, in the order in which they appear; none on any other page.

    `at_ns` is int64[T], `values` float64[T, N] as in `EndpointSeries`. A GPU is its UUID (its index and host where
    there is none): the columns of its MIG instances and of the pods that had it one after another are one GPU's.
    """
    columns: dict[str, dict[str, list[int]]] = {}
    names: dict[str, str] = {}
    for column, labelled in enumerate(series):
        if labelled.name in SCALES:
            labels = dict(labelled.labels)
            device = labels.get("UUID") or f"{labels.get('Hostname', '')} gpu {labels.get('gpu', '')}".strip()
            names.setdefault(device, f"GPU {labels.get('gpu', '')} {labels.get('modelName', '')}".strip())
            columns.setdefault(device, {}).setdefault(labelled.name, []).append(column)
    return tuple(
        _gpu(device, names[device], device_columns, at_ns, values)
        for device, device_columns in columns.items()
        if len(at_ns) and (POWER in device_columns or ENERGY in device_columns)
    )


def _gpu(device: str, name: str, columns: Mapping[str, Sequence[int]], at_ns: Ints, values: Floats) -> DeviceSamples:
    quantity = {metric: _known(metric, columns.get(metric, ()), values) for metric in SCALES}
    sampled = _moved(quantity[ENERGY])
    at = at_ns[sampled]
    spacing_s = np.diff(at) / 1e9
    return DeviceSamples(
        source=SOURCE,
        device=device,
        name=name,
        kind="gpu",
        interval_s=float(np.median(spacing_s)) if len(spacing_s) else 0.0,
        at_ns=at,
        energy_range_j=np.nan,
        **dict(zip(MEASURED, (quantity[metric][sampled] for metric in SCALES), strict=True)),
        thermal_pressure=("",) * len(at),
    )


def _known(metric: str, columns: Sequence[int], values: Floats) -> Floats:
    """Return a quantity [T], at each scrape from its first column with a number."""
    quantity = np.full(len(values), np.nan)
    for column in columns:
        exposed = values[:, column]
        usable = np.isnan(quantity) & np.isfinite(exposed) & (exposed < BLANKS.get(metric, np.inf))
        quantity[usable] = exposed[usable] * SCALES[metric]
    return quantity


def _moved(energy_j: Floats) -> Ints:
    """Return the rows at which the counter moved; every row without a counter, or with one that stands still.

    How old the first page's value was is unknown, so it does not count as a sample.
    """
    known = np.flatnonzero(np.isfinite(energy_j))
    moved = known[1:][np.diff(energy_j[known]) != 0]
    return moved if len(moved) else np.arange(len(energy_j))
