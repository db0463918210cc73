"""What a step's run directory says of it beside its tables, and what of its measurements a study does not trust."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from logs import request_log

from sidelight.correlator.opening import open_run
from sidelight.exporter.evaluation.measured import window_of
from sidelight.exporter.evaluation.times import correlated
from sidelight.loadgen.host.cpu_steal import MachineLoad
from sidelight.loadgen.records import WorkerStat
from sidelight.loadgen.requests.self_check.check import self_check
from sidelight.methodology.execution.data import data_of, doubts
from sidelight.methodology.study.model import Kind
from sidelight.scraper.hardware.records import HardwareRecord

BUSY = MachineLoad(steal_ratio=0.0, busy_ratio=0.97)


def doubted(*, late_ms: float, delay_ms: float, open_loop: bool) -> dict[Kind, str]:
    """Requests 100 ms apart that took 1,200 ms and left so late, by a worker whose timers were so late."""
    log = request_log(
        *(
            {
                "scheduled": at, "dispatch": at + late_ms, "submit": at + late_ms, "first": at + 1000,
                "last": at + 1200, "end": at + 1200, "chunks": (at + 1000, at + 1100, at + 1200),
            }
            for at in range(0, 1000, 100)
        )
    )  # fmt: skip
    stats = [WorkerStat(worker=0, at_ns=10**8 * at, cpu_ns=0, loop_delay_ns=round(1e6 * delay_ms)) for at in range(10)]
    return doubts(self_check(log, stats, open_loop=open_loop, machine=BUSY), log)


@pytest.mark.parametrize(
    ("late_ms", "delay_ms", "open_loop", "kinds"),
    [
        (90, 1.0, True, []),
        (110, 1.0, True, ["load"]),
        (0, 5.0, True, []),
        (0, 30.0, True, ["gaps"]),
        (0, 130.0, True, ["ttft", "gaps"]),
        (110, 30.0, False, ["gaps"]),
        (0, 70.0, False, ["load", "gaps"]),
        (0, 130.0, False, ["load", "ttft", "gaps"]),
    ],
)
def test_each_kind_is_doubted_by_itself(late_ms: float, delay_ms: float, open_loop: bool, kinds: list[Kind]):
    """Late requests spoil the load of an open loop, late workers that of a closed one; both say what was busy.

    Times are spoilt by an error of a tenth of their median, not by less.
    """
    reasons = doubted(late_ms=late_ms, delay_ms=delay_ms, open_loop=open_loop)
    assert kinds == list(reasons)
    assert all("97 % busy" in reason and reason.endswith(".") for reason in reasons.values())


def test_the_power_of_gpus_is_known_of_a_step():
    """Their mean over its window, which a sweep divides the tokens by."""
    run = open_run(Path(__file__).parents[2] / "golden" / "vllm_plain")
    window = window_of(run)
    readings = tuple(
        HardwareRecord(at_ns=at_ns, source="nvml", device=gpu, name="H100", kind="gpu", power_w=watts)
        for at_ns in range(window.start_ns - 10**9, window.end_ns + 2 * 10**9, 10**9)
        for gpu, watts in (("GPU-1", 300.0), ("GPU-2", 200.0))
    )
    about = data_of(replace(run, hardware=readings), correlated(run).parts).about
    assert about["gpu_power_watts"] == pytest.approx(500)
    assert about["gpus"] == ["H100", "H100"]
