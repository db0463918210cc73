"""How sure the answer is, and how far the load generator can be trusted: how late it was, and how busy."""

from __future__ import annotations

from collections.abc import Iterator

from exporter.document import Cell, Table, numbers, table
from exporter.report.method import generator_verdict
from exporter.summary.result import Summary
from loadgen.requests.self_check.check import SelfCheck
from rundir.printable.numbers import percent


def how_sure(summary: Summary) -> Iterator[str]:
    """Yield the reason for a missing queue threshold, and the verdict on the load generator."""
    tail = summary.correlation.tail_attribution
    unknown = not tail.missing and tail.largest == "queue" and tail.threshold and tail.threshold.missing
    if not summary.correlation.missing and unknown:
        every = summary.config.get("scrape_interval")
        age = f" (pages were read every {every:g} s)" if every else ""
        yield f"No queue length can be given from which requests are slow: {unknown}{age}."
    if not summary.watch:
        yield generator_verdict(summary)


def generator_table(check: SelfCheck) -> Table:
    """Return a table of the load generator's lateness, its CPU use and its machine's load."""
    left_late = check.arrivals.late_ms if check.arrivals else check.schedule_lateness_ms
    late = (
        ("requests left after their time, ms", left_late),
        ("timers fired late (loop delay), ms", check.loop_delay_ms),
        ("bytes waited to be read, ms", check.read_lateness_ms),
    )
    ratios = [("CPU of the busiest worker, of a core", check.cpu_ratio.max)]
    if check.machine is not None:
        ratios.append(("machine busy", check.machine.busy_ratio))
        ratios.append(("stolen by other virtual machines", check.machine.steal_ratio))
    rows: list[tuple[Cell, ...]] = [(label, ms.p50, ms.p99, ms.max) for label, ms in late if ms.max is not None]
    rows += [(label, "", "", "", ratio) for label, ratio in ratios if isinstance(ratio, float)]
    return table("Load generator", (*numbers("p50", "p99", "max"), *numbers("of the run", show=percent)), rows)
