"""The sources of hardware readings on real directories and pages, and the task that records them."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import isnan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import BOUND_S

from sidelight.rundir.frames import Unwritten, read_frames
from sidelight.rundir.stats import Missing
from sidelight.scraper.exposition import parse
from sidelight.scraper.hardware import dcgm
from sidelight.scraper.hardware.energy import energy
from sidelight.scraper.hardware.nvml import open_library, open_nvml
from sidelight.scraper.hardware.powermetrics import open_powermetrics
from sidelight.scraper.hardware.rapl import open_rapl
from sidelight.scraper.hardware.records import (
    HardwareAbsence,
    HardwareLogRecord,
    HardwareRecord,
    SourceLostError,
    decode,
    encode,
)
from sidelight.scraper.hardware.sampler import record, sample
from sidelight.scraper.window.window import Window

SECOND = 1_000_000_000
DCGM_PAGE = """# HELP DCGM_FI_DEV_GPU_TEMP GPU temperature (in C).
# TYPE DCGM_FI_DEV_GPU_TEMP gauge
DCGM_FI_DEV_GPU_TEMP{{{first}}} {temperature}
DCGM_FI_DEV_GPU_TEMP{{{second}}} 41
# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{{{first}}} {power}
DCGM_FI_DEV_POWER_USAGE{{{second}}} 55.011000
# HELP DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION Total energy consumption since boot (in mJ).
# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{first}}} {energy}
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{{first}}} 83
# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{{{first}}} 1024
"""
FIRST = 'gpu="0",UUID="GPU-5b4e07f6",device="nvidia0",modelName="NVIDIA L40S",Hostname="node"'
SECOND_GPU = 'gpu="1",UUID="GPU-1f027ee8",device="nvidia1",modelName="NVIDIA L40S",Hostname="node"'


def zone(root: Path, directory: str, name: str, energy_uj: int, range_uj: int = 262_143_328_850) -> Path:
    path = root / directory
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return path / "energy_uj"


def reason_of(source: object) -> str:
    assert isinstance(source, Missing)
    return source.reason


def opened(source: Any) -> Any:
    assert not isinstance(source, Missing)
    return source


@contextmanager
def unprivileged() -> Iterator[None]:
    """Be an ordinary user inside the block, also where the tests run as root."""
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_rapl_zones_are_named_under_their_package(tmp_path: Path):
    """Packages, what is in them, DRAM beside them, the platform; the same package through MMIO is left out."""
    zone(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    zone(tmp_path, "intel-rapl:0:0", "core", 3_000_000)
    zone(tmp_path, "intel-rapl:0:1", "dram", 1_000_000)
    zone(tmp_path, "intel-rapl:1", "psys", 9_000_000)
    zone(tmp_path, "intel-rapl-mmio:0", "package-0", 5_000_000)
    (tmp_path / "intel-rapl").mkdir()
    source = opened(open_rapl(tmp_path))
    records = source.read(0)
    assert [
        ("package-0", "cpu", 5.0, 262143.32885),
        ("package-0/core", "part", 3.0, 262143.32885),
        ("package-0/dram", "dram", 1.0, 262143.32885),
        ("psys", "platform", 9.0, 262143.32885),
    ] == [(record.device, record.kind, record.energy_j, record.energy_range_j) for record in records]
    assert all(isnan(record.power_w) for record in records)


def test_rapl_that_only_root_may_read_is_absent():
    """As the kernel has it since 2020; the reason says so."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        zone(Path(name), "intel-rapl:0", "package-0", 1).chmod(0)
        with unprivileged():
            source = open_rapl(Path(name))
    assert Missing("energy_uj is readable by root only") == source


def test_rapl_is_absent_where_there_is_none(tmp_path: Path):
    """No such directory, or one without zones: two different reasons."""
    assert "RAPL needs Linux on an Intel or AMD processor" in reason_of(open_rapl(tmp_path / "powercap"))
    assert "as in most virtual machines and containers" in reason_of(open_rapl(tmp_path))


def test_a_rapl_zone_that_says_no_number_is_passed_over(tmp_path: Path):
    """The others are read all the same."""
    zone(tmp_path, "intel-rapl:0", "package-0", 1_000_000)
    zone(tmp_path, "intel-rapl:1", "package-1", 1).write_text("")
    source = opened(open_rapl(tmp_path))
    assert ["package-0"] == [record.device for record in source.read(0)]


def test_nvml_without_its_binding_or_driver_is_absent():
    """Whichever of the two this machine lacks, the reason names it."""
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has an NVIDIA driver")
    installed = importlib.util.find_spec("pynvml") is not None
    assert ("no NVIDIA driver answers" if installed else "nvidia-ml-py is not installed") in reason_of(open_nvml())


class NotSupportedError(Exception):
    """What the binding raises."""


def binding(**changed: Any) -> SimpleNamespace:
    """A stand-in for the module `pynvml` with two GPUs, the second of which supports little."""

    def supported(value: Any) -> Any:
        def ask(handle: int, *_: object) -> Any:
            if handle:
                raise NotSupportedError
            return value

        return ask

    functions = {
        "NVMLError": NotSupportedError,
        "NVML_TEMPERATURE_GPU": 0,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetName": lambda _: "NVIDIA L40S",
        "nvmlDeviceGetPowerUsage": supported(287_500),
        "nvmlDeviceGetTotalEnergyConsumption": supported(5_551_899_580),
        "nvmlDeviceGetUtilizationRates": lambda _: SimpleNamespace(gpu=83, memory=40),
        "nvmlDeviceGetTemperature": supported(61),
        "nvmlDeviceGetMemoryInfo": supported(SimpleNamespace(used=2**34)),
    }
    return SimpleNamespace(**{**functions, **changed})


def test_nvml_readings_are_in_our_units():
    """mW, mJ and percent become W, J and a ratio; what a GPU does not support is not a number."""
    source = opened(open_library(binding()))
    full, poor = source.read(0)
    assert ("GPU-0", "GPU 0 NVIDIA L40S", "gpu") == (full.device, full.name, full.kind)
    assert (287.5, 5_551_899.58, 0.83, 61.0, 2.0**34) == (
        full.power_w,
        full.energy_j,
        full.utilisation_ratio,
        full.temperature_c,
        full.memory_used_bytes,
    )
    assert (0.83, True) == (poor.utilisation_ratio, isnan(poor.power_w))


def test_nvml_whose_gpus_are_all_gone_is_lost():
    """One that fell off the bus answers nothing; when none answers the source has nothing more to say."""
    library = binding(nvmlDeviceGetCount=lambda: 1)
    source = opened(open_library(library))

    def gone(*_: object) -> Any:
        raise NotSupportedError

    for name in ("PowerUsage", "TotalEnergyConsumption", "UtilizationRates", "Temperature", "MemoryInfo"):
        setattr(library, f"nvmlDeviceGet{name}", gone)
    with pytest.raises(SourceLostError, match="no GPU answers any more"):
        source.read(0)


def test_powermetrics_is_absent_elsewhere():
    """It is a part of macOS."""
    if sys.platform == "darwin":
        pytest.skip("this is macOS")
    assert Missing("no powermetrics here: it is a part of macOS") == open_powermetrics()


def scraped(pages: list[str]) -> tuple[Any, Any, Any]:
    parsed = [parse(page) for page in pages]
    at_ns = np.arange(len(pages), dtype=np.int64) * SECOND
    return parsed[0].series, at_ns, np.array([page.values for page in parsed])


def test_a_dcgm_page_gives_samples_by_gpu():
    """W, mJ, percent, degrees and MiB become our units; what a GPU lacks is not a number."""
    pages = [
        DCGM_PAGE.format(first=FIRST, second=SECOND_GPU, temperature=60, power=280 + s, energy=5_000_000 + 280_000 * s)
        for s in range(3)
    ]
    first, second = dcgm.device_samples(*scraped(pages))
    assert ("dcgm", "GPU-5b4e07f6", "GPU 0 NVIDIA L40S", "gpu") == (first.source, first.device, first.name, first.kind)
    assert [5280.0, 5560.0] == first.energy_j.tolist()  # how old the first page's value was is unknown
    assert [281.0, 282.0] == first.power_w.tolist()
    assert pytest.approx((0.83, 60.0, 2.0**30)) == (
        first.utilisation_ratio[0],
        first.temperature_c[0],
        first.memory_used_bytes[0],
    )
    assert [55.011] * 3 == second.power_w.tolist()
    assert np.isnan(second.energy_j).all()


def test_a_dcgm_exporter_that_is_scraped_more_often_than_it_asks_repeats_itself():
    """Only the scrapes at which its counter moved are samples: three seconds apart here."""
    pages = [
        DCGM_PAGE.format(first=FIRST, second=SECOND_GPU, temperature=60, power=100, energy=300_000 * (s // 3))
        for s in range(13)
    ]
    first = dcgm.device_samples(*scraped(pages))[0]
    assert [3 * SECOND, 6 * SECOND, 9 * SECOND, 12 * SECOND] == first.at_ns.tolist()
    used = opened(energy(first, Window(start_ns=4 * SECOND, end_ns=11 * SECOND)))
    assert (700.0, 7.0) == (pytest.approx(used.energy_j), pytest.approx(used.covered_s))


def test_dcgms_blank_values_are_no_numbers():
    """The exporter writes them where the driver does not know."""
    page = DCGM_PAGE.format(
        first=FIRST,
        second=SECOND_GPU,
        temperature=2147483632,
        power="140737488355328.000000",
        energy=9223372036854775794,
    )
    first = dcgm.device_samples(*scraped([page]))[0]
    assert all(np.isnan(column).all() for column in (first.temperature_c, first.power_w, first.energy_j))


def test_the_mig_instances_of_a_gpu_are_one_gpu():
    """They repeat the whole GPU's power: it counts once."""
    page = "# TYPE DCGM_FI_DEV_POWER_USAGE gauge\n" + "".join(
        f'DCGM_FI_DEV_POWER_USAGE{{gpu="0",UUID="GPU-1",GPU_I_ID="{instance}"}} 250\n' for instance in (3, 5)
    )
    (gpu,) = dcgm.device_samples(*scraped([page]))
    assert [250.0] == gpu.power_w.tolist()


def test_another_page_has_no_gpus():
    """An engine's page is not a DCGM exporter's."""
    assert () == dcgm.device_samples(
        *scraped(["# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n"])
    )


class Counting:
    """A source that counts its reads, and can fail or stop the sampling at one of them."""

    source = "counting"
    paces_itself = False

    def __init__(self, *, fail_at: int = -1, called: Any = None) -> None:
        self.reads = 0
        self.closed = False
        self.threads: set[int] = set()
        self._fail_at = fail_at
        self._called = called

    def read(self, clock_offset_ns: int) -> tuple[HardwareRecord, ...]:
        self.reads += 1
        self.threads.add(threading.get_ident())
        if self._called is not None:
            self._called(self.reads)
        if self.reads == self._fail_at:
            raise SourceLostError("the cable was pulled")
        at_ns = time.monotonic_ns() + clock_offset_ns
        return (HardwareRecord(at_ns=at_ns, source=self.source, device="d", name="D", kind="gpu", power_w=1.0),)

    def close(self) -> None:
        self.closed = True


async def test_sampling_records_absences_then_readings():
    """What is absent stands first; readings are taken in threads, at once and at every tick, once more at the end."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    records: list[HardwareLogRecord] = []
    source = Counting(called=lambda reads: reads == 3 and loop.call_soon_threadsafe(stopping.set))
    async with asyncio.timeout(BOUND_S):
        await sample(
            [source],
            records.append,
            clock_offset_ns=0,
            stopping=stopping,
            interval_s=0.01,
            absent={"nvml": Missing("no driver")},
        )
    absence, *readings = records
    assert ("nvml", "no driver") == (absence.source, absence.reason)
    assert source.reads == len(readings) >= 4
    assert source.closed
    assert threading.get_ident() not in source.threads


async def test_a_source_that_is_lost_is_recorded_and_the_others_go_on():
    """One reading, then the reason; the other source is read until the end."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    records: list[HardwareLogRecord] = []
    lost = Counting(fail_at=2)
    well = Counting(called=lambda reads: reads == 5 and loop.call_soon_threadsafe(stopping.set))
    async with asyncio.timeout(BOUND_S):
        await sample([lost, well], records.append, clock_offset_ns=0, stopping=stopping, interval_s=0.01)
    assert ["the cable was pulled"] == [record.reason for record in records if isinstance(record, HardwareAbsence)]
    assert (2, True) == (lost.reads, lost.closed)
    assert well.reads >= 5


async def test_sampling_without_sources_ends_at_once():
    """What is absent is recorded, and no stop is waited for."""
    records: list[HardwareLogRecord] = []
    async with asyncio.timeout(BOUND_S):
        await sample([], records.append, clock_offset_ns=7, stopping=asyncio.Event(), absent={"rapl": Missing("none")})
    assert ["rapl"] == [record.source for record in records]


async def test_a_log_of_this_machine_names_every_source(tmp_path: Path):
    """Each source that was looked for stands in the log, with readings or with the reason why not."""
    stopping = asyncio.Event()
    stopping.set()
    unwritten = Unwritten(print)
    async with asyncio.timeout(BOUND_S):
        await record(tmp_path / "hardware.log", clock_offset_ns=0, stopping=stopping, unwritten=unwritten)
    assert 0 == unwritten.count
    records = [decode(payload) for payload in read_frames(tmp_path / "hardware.log")]
    assert {"nvml", "rapl", "powermetrics"} == {record.source for record in records}
    assert all(record.reason for record in records if isinstance(record, HardwareAbsence))


@given(st.floats(), st.text())
def test_the_log_says_what_was_written(power_w: float, name: str):
    """NaN stays NaN."""
    record = HardwareRecord(at_ns=1, source="rapl", device="d", name=name, kind="cpu", power_w=power_w)
    assert repr(record) == repr(decode(encode(record)))
