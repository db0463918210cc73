"""NVIDIA GPUs of this machine, read through NVML.

Available where the driver and `nvidia-ml-py` (the extra `nvidia`) are there.

Power is what the driver reports: since Ampere the mean over the last second, before it the moment's. Source:
https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import isnan, nan
from typing import Any

from sidelight.rundir.stats import Missing
from sidelight.scraper.hardware.records import HardwareRecord, SourceLostError

SOURCE = "nvml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU: NVML's handle, its UUID, and a name for people."""

    handle: Any
    uuid: str
    name: str


class Nvml:
    """The GPUs of one machine; holds NVML open."""

    source = SOURCE
    paces_itself = False

    def __init__(self, library: Any, gpus: tuple[Gpu, ...]) -> None:
        self._library = library
        self._gpus = gpus

    def read(self, clock_offset_ns: int) -> tuple[HardwareRecord, ...]:
        """Read every GPU, each stamped at its own read. Raises SourceLostError when none answers any more.

        What a GPU does not support is NaN; a GPU that answers nothing at all is left out.
        """
        records = [self._read(gpu, clock_offset_ns) for gpu in self._gpus]
        answered = tuple(record for record in records if record is not None)
        if not answered:
            raise SourceLostError("no GPU answers any more")
        return answered

    def close(self) -> None:
        """Shut NVML down."""
        _ask(self._library, self._library.nvmlShutdown)

    def _read(self, gpu: Gpu, clock_offset_ns: int) -> HardwareRecord | None:
        library, handle = self._library, gpu.handle
        at_ns = time.monotonic_ns() + clock_offset_ns
        power_w = _ask(library, lambda: library.nvmlDeviceGetPowerUsage(handle) / 1e3)
        energy_j = _ask(library, lambda: library.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
        busy = _ask(library, lambda: library.nvmlDeviceGetUtilizationRates(handle).gpu / 1e2)
        temperature_c = _ask(
            library, lambda: float(library.nvmlDeviceGetTemperature(handle, library.NVML_TEMPERATURE_GPU))
        )
        memory = _ask(library, lambda: float(library.nvmlDeviceGetMemoryInfo(handle).used))
        if all(isnan(value) for value in (power_w, energy_j, busy, temperature_c, memory)):
            return None
        return HardwareRecord(
            at_ns=at_ns,
            source=SOURCE,
            device=gpu.uuid,
            name=gpu.name,
            kind="gpu",
            power_w=power_w,
            energy_j=energy_j,
            utilisation_ratio=busy,
            temperature_c=temperature_c,
            memory_used_bytes=memory,
        )


def open_nvml() -> Nvml | Missing:
    """Open NVML and find the GPUs; the reason where there is none."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        return Missing("nvidia-ml-py is not installed; install sidelight[nvidia] where there are NVIDIA GPUs")
    return open_library(library)


def open_library(library: Any) -> Nvml | Missing:
    """Find the GPUs through a loaded binding (the module `pynvml`); the reason where there is none."""
    try:
        library.nvmlInit()
    except library.NVMLError as error:
        return Missing(f"no NVIDIA driver answers: {error}")
    try:
        gpus = tuple(_gpu(library, index) for index in range(library.nvmlDeviceGetCount()))
    except library.NVMLError as error:
        _ask(library, library.nvmlShutdown)
        return Missing(f"the NVIDIA driver lists no GPUs: {error}")
    if not gpus:
        _ask(library, library.nvmlShutdown)
        return Missing("the NVIDIA driver finds no GPU")
    return Nvml(library, gpus)


def _gpu(library: Any, index: int) -> Gpu:
    handle = library.nvmlDeviceGetHandleByIndex(index)
    return Gpu(
        handle=handle,
        uuid=library.nvmlDeviceGetUUID(handle),
        name=f"GPU {index} {library.nvmlDeviceGetName(handle)}",
    )


def _ask(library: Any, question: Callable[[], Any]) -> float:
    """Return the answer, NaN where the GPU or its driver does not give it."""
    try:
        answer: float = question()
    except library.NVMLError:
        return nan
    return answer
