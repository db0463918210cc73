"""What of a step's measurements a study does not trust."""

from __future__ import annotations

import pytest
from logs import request_log

from loadgen.host.cpu_steal import MachineLoad
from loadgen.records import WorkerStat
from loadgen.requests.self_check import self_check
from methodology.study.model import Kind
from sidecar.study.data import doubts

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
        (0, 5.0, True, ["gaps"]),
        (0, 30.0, True, ["ttft", "gaps"]),
        (110, 30.0, False, ["ttft", "gaps"]),
        (0, 70.0, False, ["load", "ttft", "gaps"]),
    ],
)
def test_each_kind_is_doubted_by_itself(late_ms: float, delay_ms: float, open_loop: bool, kinds: list[Kind]):
    """Late requests spoil the load of an open loop, late workers that of a closed one; both say what was busy."""
    reasons = doubted(late_ms=late_ms, delay_ms=delay_ms, open_loop=open_loop)
    assert kinds == list(reasons)
    assert all("97 % busy" in reason and reason.endswith(".") for reason in reasons.values())
