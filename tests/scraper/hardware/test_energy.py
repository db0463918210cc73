"""Energy over a window: laws of the trapezoidal rule, counters that wrap, gaps, totals that count nothing twice."""

from __future__ import annotations

import json
from math import nan
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.rundir.stats import Missing
from sidelight.scraper.hardware.energy import Energy, counter_energy, energy, trapezoid_energy
from sidelight.scraper.hardware.records import HardwareAbsence, HardwareRecord, by_device
from sidelight.scraper.hardware.summary import gpu_names, hardware_summary
from sidelight.scraper.window.window import Window

SECOND = 1_000_000_000
START = 1_700_000_000 * SECOND


def window(start_s: float, end_s: float) -> Window:
    return Window(start_ns=START + round(start_s * SECOND), end_ns=START + round(end_s * SECOND))


def stamps(seconds: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    return START + np.round(np.asarray(seconds, dtype=np.float64) * SECOND).astype(np.int64)


def integrated(seconds: Any, watts: Any, of: Window) -> Energy:
    energy = trapezoid_energy(stamps(seconds), np.asarray(watts, dtype=np.float64), of, interval_s=1.0)
    assert isinstance(energy, Energy)
    return energy


def counted(seconds: Any, joules: Any, of: Window, *, range_j: float = nan) -> Any:
    return counter_energy(stamps(seconds), np.asarray(joules, dtype=np.float64), of, interval_s=1.0, range_j=range_j)


def reading(
    at_s: float, *, source: str = "nvml", device: str = "GPU-1", kind: str = "gpu", **values: Any
) -> HardwareRecord:
    return HardwareRecord(
        at_ns=START + round(at_s * SECOND), source=source, device=device, name=device, kind=kind, **values
    )


steps = st.lists(st.floats(0.5, 2.5), min_size=3, max_size=30)
edges = st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)).map(sorted)


@given(steps, st.floats(0, 1000), edges)
def test_constant_power_is_exact(lengths: list[float], watts: float, cuts: list[float]):
    """Whatever the spacing of the readings and wherever the window begins: energy is power times time."""
    at = np.cumsum(lengths)
    of = window(*(at[0] + cut * (at[-1] - at[0]) for cut in (cuts[0], cuts[2])))
    if of.duration_s > 0:
        energy = integrated(at, np.full(len(at), watts), of)
        assert pytest.approx(watts * of.duration_s, rel=1e-9, abs=1e-9) == energy.energy_j
        assert pytest.approx(of.duration_s, rel=1e-9) == energy.covered_s


@given(steps, st.floats(0, 100), st.floats(0, 50), edges)
def test_a_linear_ramp_is_exact(lengths: list[float], watts: float, per_s: float, cuts: list[float]):
    """The edges of the window are interpolated between readings: a ramp's energy is its power in the middle."""
    at = np.cumsum(lengths)
    begin, end = (at[0] + cut * (at[-1] - at[0]) for cut in (cuts[0], cuts[2]))
    of = window(begin, end)
    if of.duration_s > 1e-3:
        energy = integrated(at, watts + per_s * at, of)
        assert pytest.approx((watts + per_s * (begin + end) / 2) * (end - begin), rel=1e-5, abs=1e-5) == energy.energy_j


@given(steps, st.data(), edges)
def test_adjacent_windows_add_up(lengths: list[float], data: st.DataObject, cuts: list[float]):
    """The energy of a window is that of its two halves, wherever it is cut."""
    at = np.cumsum(lengths)
    watts = np.array(data.draw(st.lists(st.floats(0, 700), min_size=len(at), max_size=len(at))))
    begin, middle, end = (round((at[0] + cut * (at[-1] - at[0])) * SECOND) / SECOND for cut in cuts)
    if begin < middle < end:
        whole, first, second = (
            integrated(at, watts, window(*of)) for of in ((begin, end), (begin, middle), (middle, end))
        )
        assert pytest.approx(whole.energy_j, rel=1e-6, abs=1e-6) == first.energy_j + second.energy_j


def test_the_windows_edges_are_interpolated():
    """Between 100 W and 200 W a second later, the half second in the middle saw 150 W."""
    energy = integrated([0, 1], [100, 200], window(0.25, 0.75))
    assert pytest.approx(75.0) == energy.energy_j
    assert pytest.approx(0.5) == energy.covered_s
    assert pytest.approx(150.0) == energy.peak_power_w


def test_what_no_reading_encloses_is_not_covered():
    """Readings that begin two seconds late and end early leave their part of the window out, and say so."""
    energy = integrated([2, 3, 4, 5], [100, 100, 100, 100], window(0, 10))
    assert (300.0, 3.0) == (energy.energy_j, energy.covered_s)
    assert 100.0 == energy.mean_power_w


def test_a_gap_is_reported_and_not_bridged():
    """More than three intervals without a reading are no energy, one lost reading is bridged."""
    energy = integrated([0, 1, 2, 6, 7, 9], [100] * 6, window(0, 9))
    assert (500.0, 5.0) == (energy.energy_j, energy.covered_s)
    assert (1, 4.0) == (energy.gaps, energy.gap_s)


def test_a_reading_without_a_number_is_no_reading():
    """NaN between two numbers is as if there had been no reading."""
    assert 400.0 == integrated([0, 1, 2], [100, nan, 300], window(0, 2)).energy_j


def test_a_window_without_readings_has_no_energy():
    """One reading in it is not enough, none even less."""
    reason = "fewer than two readings in a row cover any of the window"
    energy = trapezoid_energy(stamps([1]), np.array([100.0]), window(0, 2), interval_s=1.0)
    assert Missing(reason) == energy
    assert Missing("no measured window") == trapezoid_energy(
        stamps([0, 1]), np.array([1.0, 1.0]), window(1, 1), interval_s=1.0
    )


def test_a_counter_is_exact_between_its_readings():
    """Whatever power did between them; the peak is the highest mean between two readings."""
    energy = counted([0, 1, 2, 3], [10, 60, 70, 100], window(0, 3))
    assert (90.0, 50.0, "counter") == (energy.energy_j, energy.peak_power_w, energy.method)


@given(st.lists(st.floats(1, 100), min_size=2, max_size=40), st.floats(150, 400))
def test_a_counter_that_wraps_around_counts_on(used: list[float], range_j: float):
    """A counter modulo its range gives the energy of the one that never wraps."""
    total = np.concatenate([[0.0], np.cumsum(used)])
    at = np.arange(len(total))
    energy = counted(at, total % range_j, window(0, len(used)), range_j=range_j)
    assert pytest.approx(sum(used), rel=1e-6) == energy.energy_j


def test_a_counter_that_was_reset_is_not_covered_there():
    """Without a range what was used around a restart is unknown."""
    energy = counted([0, 1, 2, 3], [900, 1000, 5, 105], window(0, 3))
    assert (200.0, 2.0) == (energy.energy_j, energy.covered_s)


def test_a_counter_that_stands_still_is_no_energy():
    """Nothing that runs uses nothing: a counter that does not move is dead, as in some virtual machines."""
    assert Missing("its energy counter did not move") == counted([0, 1, 2], [7, 7, 7], window(0, 2))


def test_a_counter_goes_before_power_and_power_before_a_dead_counter():
    """Both are there: the counter's difference; a dead counter: the trapezoid."""
    alive = [reading(s, power_w=100.0, energy_j=90.0 * s) for s in range(4)]
    dead = [reading(s, power_w=100.0, energy_j=90.0) for s in range(4)]
    by_counter, by_power = (energy(by_device(records)[0], window(0, 3)) for records in (alive, dead))
    assert ("counter", 270.0, 100.0) == (by_counter.method, by_counter.energy_j, by_counter.peak_power_w)
    assert ("trapezoid", 300.0) == (by_power.method, by_power.energy_j)


def test_a_summary_counts_packages_and_memory_once():
    """Two packages and their DRAM are the CPU's total; cores are in a package, psys holds all of them."""
    zones = {
        "package-0": ("cpu", 50.0),
        "package-0/core": ("part", 40.0),
        "package-0/dram": ("dram", 10.0),
        "package-1": ("cpu", 60.0),
        "psys": ("platform", 200.0),
    }
    records = [
        reading(s, source="rapl", device=device, kind=kind, energy_j=watts * s)
        for s in range(11)
        for device, (kind, watts) in zones.items()
    ]
    hardware = hardware_summary(records, window=window(0, 10), output_tokens=2400)
    assert 1200.0 == hardware.cpu.energy_j == hardware.total.energy_j
    assert ["package-0", "package-0/dram", "package-1"] == hardware.total.devices
    assert 2.0 == hardware.total.tokens_per_joule == hardware.total.tokens_per_s_per_watt
    assert "no GPU was measured" == hardware.gpu.missing["energy_j"]
    uncounted = {device.device: device.uncounted for device in hardware.devices}
    assert "it contains the packages, which are counted" == uncounted["psys"]
    assert "a part of its package" == uncounted["package-0/core"]


def test_a_summary_keeps_gpu_and_cpu_apart():
    """The GPU's tokens per joule are by its own energy, those in all by both."""
    records = [
        record
        for s in range(11)
        for record in (
            reading(s, power_w=300.0, utilisation_ratio=0.5, temperature_c=60.0 + s, memory_used_bytes=2.0**30),
            reading(s, source="rapl", device="package-0", kind="cpu", energy_j=100.0 * s),
        )
    ]
    hardware = hardware_summary(records, window=window(0, 10), output_tokens=12000)
    assert (3000.0, 1000.0, 4000.0) == tuple(getattr(hardware, key).energy_j for key in ("gpu", "cpu", "total"))
    assert (4.0, 12.0, 3.0) == tuple(getattr(hardware, key).tokens_per_joule for key in ("gpu", "cpu", "total"))
    assert ("trapezoid", "counter", "mixed") == tuple(getattr(hardware, key).method for key in ("gpu", "cpu", "total"))
    gpu = hardware.devices[0]
    assert (0.5, 70.0, 2.0**30) == tuple(
        getattr(gpu, key) for key in ("mean_utilisation_ratio", "max_temperature_c", "max_memory_used_bytes")
    )


def test_a_total_without_one_of_its_devices_has_no_tokens_per_joule():
    """A GPU whose power is not known would make every token look cheaper."""
    records = [
        record
        for s in range(11)
        for record in (reading(s, power_w=300.0), reading(s, device="GPU-2", temperature_c=50.0))
    ]
    total = hardware_summary(records, window=window(0, 10), output_tokens=100).total
    assert 3000.0 == total.energy_j
    assert {"GPU-2": "it reports no power"} == total.without
    assert total.tokens_per_joule is None
    assert "the energy of GPU-2 is not known" == total.missing["tokens_per_joule"]


def test_readings_of_a_small_part_of_the_window_give_no_tokens_per_joule():
    """Half a window says nothing of the other half."""
    records = [reading(s, power_w=300.0) for s in range(6)]
    total = hardware_summary(records, window=window(0, 10), output_tokens=100).total
    assert (1500.0, 5.0) == (total.energy_j, total.covered_s)
    assert "readings cover 5.0 s of the 10.0 s only" == total.missing["tokens_per_s_per_watt"]


def test_the_hardware_of_another_machine_is_not_the_engines():
    """What the client's machine used stands there, in no total."""
    records = [reading(s, power_w=300.0) for s in range(11)]
    hardware = hardware_summary(records, window=window(0, 10), output_tokens=100, engine_here=False)
    assert "the engine runs on another machine" == hardware.devices[0].uncounted
    assert hardware.total.energy_j is None


def test_the_engines_gpus_are_named_once_each():
    """However often each was read; those of another machine are not the engine's, nor is a CPU a GPU."""
    records = [*(reading(at, device=name, power_w=1.0) for at in (0, 1) for name in ("GPU-1", "GPU-2")),
               reading(0, source="rapl", device="package-0", kind="cpu", energy_j=1.0)]  # fmt: skip
    assert ["GPU-1", "GPU-2"] == gpu_names(records, (), engine_here=True)
    assert [] == gpu_names(records, (), engine_here=False)


def test_a_summary_without_hardware_says_what_is_absent():
    """Every source that was looked for, with its reason; no zero anywhere; strict JSON."""
    records = [HardwareAbsence(at_ns=START, source="rapl", reason="no RAPL zone")]
    hardware = hardware_summary(records, window=window(0, 10), output_tokens=None)
    assert {"rapl": "no RAPL zone", "dcgm": "no scraped page has DCGM_FI_DEV_POWER_USAGE"} == hardware.absent
    assert [] == hardware.devices
    assert "no device was measured" == hardware.total.missing["energy_j"]
    plain = msgspec.to_builtins(hardware)
    assert plain == json.loads(json.dumps(plain, allow_nan=False))


def test_the_worst_thermal_pressure_of_the_window_is_kept():
    """macOS has no temperature; one heavy second shows."""
    levels = ["Nominal", "Heavy", "Nominal", "Critical"]
    records = [reading(s, power_w=30.0, thermal_pressure=level) for s, level in enumerate(levels)]
    hardware = hardware_summary(records, window=window(0, 2), output_tokens=None)
    assert "Heavy" == hardware.devices[0].thermal_pressure
