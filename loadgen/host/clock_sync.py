"""Synchronisation of this machine's clock and the bound on its error.

Covers distributed-testing, clock-ntp and clock-ptp.

Read once a run and recorded: stamps are moved to the wall clock by an anchor, and comparing them with another machine's
is worth what both clocks are worth. What a system does not tell is absent with a reason.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from sidelight.rundir.fields import NO_UNIT, Reason, doc
from sidelight.rundir.stats import Missing

NTP_LIMIT_MS = 10.0  # the draft's MUST for a client and a SUT on different machines

_STA_UNSYNC = 0x0040
_STA_NANO = 0x2000
_TIMEX_BYTES = 512  # struct timex has 208 bytes; room for what a later kernel may append
_CHRONY_FIELDS = 14
_CHRONY_TIMEOUT_S = 2.0


class KernelClock(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel's state of its own clock (adjtimex)."""

    synchronised: Annotated[bool, doc("Whether a daemon keeps it so (not STA_UNSYNC).")]
    offset_ms: Annotated[float, doc("What remained to be corrected when the daemon last reported.", "ms")]
    max_error_ms: Annotated[float, doc("Bound on the error, growing since the last correction.", "ms")]
    est_error_ms: Annotated[float, doc("The daemon's estimate of the error.", "ms")]


class Chrony(msgspec.Struct, frozen=True, kw_only=True):
    """The state of chronyd's tracking."""

    source: Annotated[str, doc("Its source of time.")]
    stratum: Annotated[int, doc("The source's stratum.", NO_UNIT)]
    offset_ms: Annotated[float, doc("The system clock from the source's time.", "ms")]
    error_ms: Annotated[
        float,
        doc('Bound: offset, root dispersion and half the root delay (chronyc\'s manual, "tracking").', "ms"),
    ]


class ClockSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The synchronisation of this machine's clock and the bound on its error."""

    source: Annotated[str | None, doc("The kernel's clock source.", source="draft `distributed-testing`")]
    method: Annotated[str, doc("How the clock is synchronised, in words.", source="draft `clock-method`")]
    error_ms: Annotated[
        float | None, doc("The best bound on its error: chrony's, else the kernel's where it is synchronised.", "ms")
    ]
    within_10_ms: Annotated[
        bool | None,
        doc("Whether the error is within the draft's 10 ms; null: not known.", source="draft `clock-ntp`"),
    ]
    kernel: Annotated[KernelClock | None, doc("What the kernel knows of its clock (adjtimex).")]
    chrony: Annotated[Chrony | None, doc("What chronyd tracks.")]
    ptp: Annotated[list[str] | None, doc("PTP clocks of the machine, used or not.", source="draft `clock-ptp`")]
    missing: Annotated[dict[str, Reason], doc("Why parts are null, by their names.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockState:
    """The clock of this machine; ptp names the PTP hardware clocks there are, used or not."""

    source: str | Missing
    kernel: KernelClock | Missing
    chrony: Chrony | Missing
    ptp: tuple[str, ...] | Missing


def clock_state(sysfs: Path = Path("/sys")) -> ClockState:
    """Read the state of this machine's clock; takes at most two seconds, and never raises."""
    return ClockState(source=_clock_source(sysfs), kernel=_kernel_clock(), chrony=_chrony(), ptp=_ptp_clocks(sysfs))


def parse_tracking(text: str) -> Chrony | Missing:
    """Parse the output of `chronyc -c tracking`: one line of comma-separated fields, seconds."""
    fields = text.strip().split(",")
    if len(fields) < _CHRONY_FIELDS:
        return Missing(reason="chronyc said nothing that can be read")
    try:
        stratum, offset_s, delay_s, dispersion_s = int(fields[2]), *(float(fields[at]) for at in (4, 10, 11))
    except ValueError:
        return Missing(reason="chronyc said nothing that can be read")
    if fields[13] == "Not synchronised":
        return Missing(reason="chronyd is not synchronised")
    error_s = abs(offset_s) + dispersion_s + delay_s / 2
    return Chrony(source=fields[1], stratum=stratum, offset_ms=offset_s * 1e3, error_ms=error_s * 1e3)


def clock_summary(state: ClockState) -> ClockSummary:
    """Return the clock's state as the manifest and summary.json show it."""
    error_ms, method = _error_and_method(state)
    parts = {"source": state.source, "kernel": state.kernel, "chrony": state.chrony, "ptp": state.ptp}
    return ClockSummary(
        source=state.source if isinstance(state.source, str) else None,
        method=method,
        error_ms=error_ms,
        within_10_ms=None if error_ms is None else error_ms <= NTP_LIMIT_MS,
        kernel=None if isinstance(state.kernel, Missing) else state.kernel,
        chrony=None if isinstance(state.chrony, Missing) else state.chrony,
        ptp=None if isinstance(state.ptp, Missing) else list(state.ptp),
        missing={name: value.reason for name, value in parts.items() if isinstance(value, Missing)},
    )


def _error_and_method(state: ClockState) -> tuple[float | None, str]:
    if isinstance(state.chrony, Chrony):
        return state.chrony.error_ms, f"chronyd, from {state.chrony.source} at stratum {state.chrony.stratum}"
    if isinstance(state.kernel, Missing):
        return None, f"unknown: {state.kernel.reason}"
    if not state.kernel.synchronised:
        return None, "none: the kernel's clock is not synchronised"
    return state.kernel.max_error_ms, "a daemon that disciplines the kernel's clock"


def _clock_source(sysfs: Path) -> str | Missing:
    name = sysfs / "devices/system/clocksource/clocksource0/current_clocksource"
    try:
        return name.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return Missing(reason="this kernel does not name its clock source")


def _ptp_clocks(sysfs: Path) -> tuple[str, ...] | Missing:
    names = []
    for device in sorted(sysfs.glob("class/ptp/ptp*")):
        try:
            names.append(f"{device.name}: {(device / 'clock_name').read_text(encoding='utf-8').strip()}")
        except (OSError, UnicodeDecodeError):
            names.append(device.name)
    return tuple(names) or Missing(reason="no PTP clock")


def _kernel_clock() -> KernelClock | Missing:
    """Ask adjtimex(2) without changing anything (modes = 0), which needs no privilege."""
    timex = (ctypes.c_long * (_TIMEX_BYTES // ctypes.sizeof(ctypes.c_long)))()
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (OSError, AttributeError):
        return Missing(reason="the C library has no adjtimex")
    if answer < 0:
        return Missing(reason=f"adjtimex was refused (errno {ctypes.get_errno()})")
    # struct timex: unsigned int modes, padding to a long; then long offset, freq, maxerror, esterror; int status.
    offset, max_error_us, est_error_us = timex[1], timex[3], timex[4]
    status = timex[5] & 0xFFFFFFFF
    return KernelClock(
        synchronised=not status & _STA_UNSYNC,
        offset_ms=offset / (1e6 if status & _STA_NANO else 1e3),
        max_error_ms=max_error_us / 1e3,
        est_error_ms=est_error_us / 1e3,
    )


def _chrony() -> Chrony | Missing:
    command = shutil.which("chronyc")
    if command is None:
        return Missing(reason="chronyc is not installed")
    try:
        answer = subprocess.run(
            [command, "-n", "-c", "tracking"], capture_output=True, check=False, timeout=_CHRONY_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return Missing(reason="chronyc did not answer")
    if answer.returncode:
        return Missing(reason="chronyd does not run")
    return parse_tracking(answer.stdout.decode(errors="replace"))
