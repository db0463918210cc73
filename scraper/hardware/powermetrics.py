"""macOS `powermetrics`: what its plists say, and the child process that writes them.

Every sample is a mean over the interval since the one before, so its energies add up to a counter without gaps. It
needs root, and on Apple silicon it knows no temperature, only a thermal pressure. Source: powermetrics(1).
"""

from __future__ import annotations

import math
import os
import plistlib
import select
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any
from xml.parsers.expat import ExpatError

from sidelight.rundir.stats import Missing
from sidelight.scraper.hardware.records import HardwareRecord, SourceLostError

SOURCE = "powermetrics"
COMMAND = ("powermetrics", "--samplers", "cpu_power,gpu_power,thermal", "-i", "1000", "-f", "plist")
_END = b"</plist>"
_PATIENCE_S = 0.25  # how long a read waits for a sample; stopping has to wait as long
_READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerSample:
    """Means over the `elapsed_s` before it. `power_w` by part: gpu, cpu, dram, ane, or package where no part is known.

    `gpu_busy_ratio` is NaN where unknown.
    """

    elapsed_s: float
    power_w: dict[str, float]
    gpu_busy_ratio: float = nan
    thermal_pressure: str = ""


def split_plists(data: bytes) -> tuple[list[bytes], bytes]:
    """Split a stream of plists with NULs between them into whole ones and the rest.

    The NUL is written before a sample, not after it, so a plist is whole once its end tag is there.
    """
    *whole, rest = data.split(_END)
    return [(part + _END).lstrip(b"\0\r\n\t ") for part in whole], rest


def parse_plist(document: bytes) -> PowerSample:
    """Read one plist. Raises ValueError when it is none, or does not tell its interval."""
    try:
        root = _dictionary(plistlib.loads(document))
    except (plistlib.InvalidFileException, ExpatError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"not a plist: {error}") from error
    elapsed_s = _number(root.get("elapsed_ns")) / 1e9
    if not elapsed_s > 0:
        raise ValueError("no elapsed_ns")
    processor, gpu = (_dictionary(root.get(key)) for key in ("processor", "gpu"))
    # Energies are mJ of the interval, powers mW; macOS 12 tells only the former, 13 and later both.
    watts = {
        part: _first(
            _number(processor.get(f"{part}_power")) / 1e3,
            _number(processor.get(f"{part}_energy")) / 1e3 / elapsed_s,
        )
        for part in ("gpu", "cpu", "dram", "ane")
    }
    package_w = _first(_number(processor.get("combined_power")) / 1e3, _number(processor.get("package_watts")))
    return PowerSample(
        elapsed_s=elapsed_s,
        power_w=_parts(watts, package_w),
        gpu_busy_ratio=1 - _number(gpu.get("idle_ratio")),
        thermal_pressure=str(root.get("thermal_pressure") or ""),
    )


class Powermetrics:
    """The running child; it writes a sample a second, and `read` hands out what came."""

    source = SOURCE
    paces_itself = True

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._pending = b""
        self._energy_j: dict[str, float] = {}

    def read(self, clock_offset_ns: int) -> tuple[HardwareRecord, ...]:
        """Wait a moment for samples and return them, stamped as they arrive; nothing when none came.

        Raises SourceLostError when the child ended (with its own last words) or writes something else.
        """
        stdout = self._process.stdout
        if stdout is None or not select.select([stdout], [], [], _PATIENCE_S)[0]:
            return ()
        data = os.read(stdout.fileno(), _READ_BYTES)
        at_ns = time.monotonic_ns() + clock_offset_ns
        if not data:
            raise SourceLostError(f"powermetrics ended: {self._last_words()}")
        documents, self._pending = split_plists(self._pending + data)
        try:
            samples = [parse_plist(document) for document in documents]
        except ValueError as error:
            raise SourceLostError(f"powermetrics wrote something else: {error}") from error
        # Should several have piled up, each ended where the next began.
        later_s = [sum(sample.elapsed_s for sample in samples[index + 1 :]) for index in range(len(samples))]
        return tuple(
            record
            for sample, before_s in zip(samples, later_s, strict=True)
            for record in self._records(sample, at_ns - round(before_s * 1e9))
        )

    def close(self) -> None:
        """End the child."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()

    def _records(self, sample: PowerSample, at_ns: int) -> Iterable[HardwareRecord]:
        for part, power_w in sample.power_w.items():
            self._energy_j[part] = self._energy_j.get(part, 0.0) + power_w * sample.elapsed_s
            yield HardwareRecord(
                at_ns=at_ns,
                source=SOURCE,
                device=part,
                name={"package": "CPU package"}.get(part, part.upper()),
                kind={"package": "cpu"}.get(part, part),
                power_w=power_w,
                energy_j=self._energy_j[part],
                utilisation_ratio=sample.gpu_busy_ratio if part == "gpu" else nan,
                thermal_pressure=sample.thermal_pressure,
            )

    def _last_words(self) -> str:
        stderr = self._process.stderr
        words = stderr.read().decode(errors="replace").split() if stderr else []
        return " ".join(words)[:200] or "without a word"


def open_powermetrics() -> Powermetrics | Missing:
    """Start `powermetrics`; the reason where it is not there or would not be allowed to measure."""
    if shutil.which(COMMAND[0]) is None:
        return Missing("no powermetrics here: it is a part of macOS")
    if os.geteuid() != 0:
        return Missing("powermetrics needs root; run sidelight with sudo to have it")
    return start(COMMAND)


def start(command: Sequence[str]) -> Powermetrics | Missing:
    """Start a program that writes plists as `powermetrics` does."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the conductor
        )
    except OSError as error:
        return Missing(f"{command[0]} cannot be started: {error.strerror}")
    return Powermetrics(process)


def _parts(watts: dict[str, float], package_w: float) -> dict[str, float]:
    """Return the power of the known parts. The package's is taken only where the CPU's is unknown: it contains it."""
    known = {part: power_w for part, power_w in watts.items() if not math.isnan(power_w)}
    if "cpu" in known or math.isnan(package_w):
        return known
    rest = {part: power_w for part, power_w in known.items() if part == "dram"}
    return {"package": package_w, **rest}


def _first(*values: float) -> float:
    return next((value for value in values if not math.isnan(value)), nan)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else nan


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
