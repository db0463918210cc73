from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from msgspec import to_builtins

from sidelight.loadgen.host.clock_sync import (
    Chrony,
    ClockState,
    KernelClock,
    clock_state,
    clock_summary,
    parse_tracking,
)
from sidelight.rundir.stats import Missing

TRACKING = (
    "A9FEA97B,169.254.169.123,4,1763740000.000000000,-0.000012000,0.000001000,0.000020000,-11.1,0.001,0.02,"
    "0.000400000,0.000100000,16.2,Normal\n"
)
ABSENT = Missing(reason="read on Linux only")


def test_this_machines_clock_is_described_or_missing():
    """Every part is a value or a reason, whatever this machine is."""
    got = clock_summary(clock_state())
    assert set(got.missing) == {name for name in ("source", "kernel", "chrony", "ptp") if getattr(got, name) is None}
    assert all(got.missing.values())
    json.dumps(to_builtins(got), allow_nan=False)


@pytest.mark.skipif(sys.platform != "linux", reason="adjtimex is Linux's")
def test_the_kernels_clock_is_read():
    """Its bound holds its estimate; a kernel without a daemon says that it is not synchronised."""
    kernel = clock_state().kernel
    if isinstance(kernel, Missing):
        pytest.skip(kernel.reason)
    assert 0 <= kernel.est_error_ms
    assert 0 <= kernel.max_error_ms


@pytest.mark.skipif(sys.platform != "linux", reason="sysfs is Linux's")
def test_sysfs_names_the_clock_source_and_ptp_clocks(tmp_path: Path):
    """A PTP clock without a name goes by its device."""
    source = tmp_path / "devices/system/clocksource/clocksource0"
    source.mkdir(parents=True)
    (source / "current_clocksource").write_text("kvm-clock\n")
    for device in ("ptp0", "ptp1"):
        (tmp_path / "class/ptp" / device).mkdir(parents=True)
    (tmp_path / "class/ptp/ptp0/clock_name").write_text("KVM virtual PTP\n")
    got = clock_state(tmp_path)
    assert ("kvm-clock", ("ptp0: KVM virtual PTP", "ptp1")) == (got.source, got.ptp)


@pytest.mark.skipif(sys.platform != "linux", reason="sysfs is Linux's")
def test_an_empty_sysfs_is_a_reason(tmp_path: Path):
    """No guess."""
    got = clock_summary(clock_state(tmp_path))
    assert ("this kernel does not name its clock source", "no PTP clock") == (
        got.missing["source"], got.missing["ptp"],
    )  # fmt: skip


def test_chronys_tracking_is_read():
    """Its bound adds dispersion and half the delay to the offset."""
    got = parse_tracking(TRACKING)
    assert isinstance(got, Chrony)
    assert ("169.254.169.123", 4) == (got.source, got.stratum)
    assert (-0.012, 0.312) == (pytest.approx(got.offset_ms), pytest.approx(got.error_ms))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "chronyc said nothing that can be read"),
        ("506 Cannot talk to daemon", "chronyc said nothing that can be read"),
        (TRACKING.replace(",4,", ",four,"), "chronyc said nothing that can be read"),
        (TRACKING.replace("Normal", "Not synchronised"), "chronyd is not synchronised"),
    ],
)
def test_what_is_no_tracking_is_missing(text: str, reason: str):
    """With the reason."""
    assert Missing(reason=reason) == parse_tracking(text)


def _kernel(*, synchronised: bool, max_error_ms: float) -> KernelClock:
    return KernelClock(synchronised=synchronised, offset_ms=0.1, max_error_ms=max_error_ms, est_error_ms=1.0)


@pytest.mark.parametrize(
    ("kernel", "chrony", "error_ms", "within", "method"),
    [
        (_kernel(synchronised=True, max_error_ms=4.0), ABSENT, 4.0, True, "a daemon that disciplines the kernel's"),
        (_kernel(synchronised=True, max_error_ms=40.0), ABSENT, 40.0, False, "a daemon that disciplines"),
        (_kernel(synchronised=False, max_error_ms=4.0), ABSENT, None, None, "none: the kernel's clock is not"),
        (_kernel(synchronised=True, max_error_ms=40.0), parse_tracking(TRACKING), 0.312, True, "chronyd, from 169.254"),
        (ABSENT, ABSENT, None, None, "unknown: read on Linux only"),
    ],
)
def test_the_best_known_bound_is_stated(
    kernel: KernelClock | Missing, chrony: Chrony | Missing, error_ms: float | None, within: bool | None, method: str
):
    """chrony's, else the kernel's where it is synchronised; missing is not zero."""
    got = clock_summary(ClockState(source="tsc", kernel=kernel, chrony=chrony, ptp=ABSENT))
    assert within == got.within_10_ms
    assert error_ms == (None if got.error_ms is None else pytest.approx(got.error_ms))
    assert got.method.startswith(method)


def test_a_missing_chrony_is_said():
    """Where there is no chronyc, that is the reason."""
    if shutil.which("chronyc"):
        pytest.skip("chronyc is here")
    assert "chronyc is not installed" == clock_summary(clock_state()).missing["chrony"]
