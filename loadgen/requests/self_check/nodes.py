"""Load workers by node: the requests of each node, how punctual it was, and what else its processors did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np

from sidelight.loadgen.host.clock_sync import NTP_LIMIT_MS
from sidelight.loadgen.host.cpu_steal import MachineLoad
from sidelight.loadgen.records import WorkerStat
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.self_check.cause import Cause, cause_on
from sidelight.loadgen.requests.self_check.sentences import ms
from sidelight.loadgen.requests.self_check.workers import cpu_ratio, loop_delays_ms
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import take
from sidelight.rundir.fields import Count, doc
from sidelight.rundir.stats import Statistics, describe

LEAST_REQUESTS = 10  # with a TTFT: the median of fewer may be chance
SLOWER = 2.0  # times the others


class WorkerEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a phase of a load worker: when it had its order, and its machine's load since then."""

    ordered_ns: int
    machine: MachineLoad | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node, its load workers by number, their ends of a phase, and its clock. Lost workers have no end."""

    name: str
    workers: tuple[int, ...]
    ends: tuple[WorkerEnd, ...]
    clock_error_ms: float | None = None


class NodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that the load workers of one node sent, and how punctual these were."""

    node: Annotated[str, doc("Its name: the host's, and its number.")]
    workers: Annotated[list[int], doc("Its load workers, by number.")]
    sent: Annotated[Count, doc("Requests dispatched.", "requests")]
    ok: Annotated[Count, doc("Those that succeeded.", "requests")]
    ttft_ms: Annotated[Statistics, doc("first token - submit", "ms")]
    first_late_ms: Annotated[
        float | None,
        doc("Lateness of its first submission: after its scheduled time, in a closed loop after the start.", "ms"),
    ]
    order_ms: Annotated[
        float | None,
        doc("When its last worker had its order, from the start of the load: below 0 is in time; null: unknown.", "ms"),
    ]
    late_orders: Annotated[Count, doc("Its workers whose order came after the start of the load.", "workers")]
    clock_error_ms: Annotated[float | None, doc("Bound on the error of its clock; null: unknown.", "ms")]
    machine: Annotated[MachineLoad | None, doc("What used its processors; null: unknown.")]


def by_node(log: RequestLog, nodes: Sequence[Node], *, start_ns: int, open_loop: bool) -> list[NodeSummary]:
    """Return the summary of each node's requests; the phase began at `start_ns`."""
    return [_summary(take(log, np.isin(log.worker, node.workers)), node, start_ns, open_loop) for node in nodes]


def _summary(log: RequestLog, node: Node, start_ns: int, open_loop: bool) -> NodeSummary:
    ok = take(log, log.status == "ok")
    orders_ms = [(end.ordered_ns - start_ns) / 1e6 for end in node.ends]
    late_ms = None
    if len(log):
        first = int(log.dispatch_ns.argmin())
        late_ms = (int(log.dispatch_ns[first]) - (int(log.scheduled_ns[first]) if open_loop else start_ns)) / 1e6
    return NodeSummary(
        node=node.name,
        workers=list(node.workers),
        sent=len(log),
        ok=len(ok),
        ttft_ms=describe(request_metrics(ok).ttft_ms, "no request succeeded"),
        first_late_ms=late_ms,
        order_ms=max(orders_ms, default=None),
        late_orders=sum(order_ms > 0 for order_ms in orders_ms),
        clock_error_ms=node.clock_error_ms,
        machine=node.ends[0].machine if node.ends else None,
    )


def unknown_clocks(nodes: Sequence[NodeSummary]) -> list[NodeSummary]:
    """Return the nodes with a clock beyond the draft's limit."""
    return [node for node in nodes if (node.clock_error_ms or 0.0) > NTP_LIMIT_MS]


def clock_line(node: NodeSummary) -> str:
    """Return the sentence on a clock beyond the limit."""
    return (
        f"the clock of node {node.node} is known to {node.clock_error_ms or 0.0:.1f} ms only: times across machines "
        "are off by as much, and the run complies with no test"
    )


def cause_of(stats: Sequence[WorkerStat], nodes: Sequence[Node]) -> Cause:
    """Return the cause of lateness on the node with the latest worker."""
    by_lateness = [([stat for stat in stats if stat.worker in node.workers], node) for node in nodes]
    ticks, latest = max(by_lateness, key=lambda each: float(loop_delays_ms(each[0]).max(initial=-1.0)))
    machine = latest.ends[0].machine if latest.ends else None
    return cause_on(latest.name, cpu_ratio(ticks).max, machine)


def late_orders(nodes: Sequence[NodeSummary]) -> Iterator[str]:
    """Yield a sentence for each node with a late order."""
    for node in nodes:
        if node.late_orders:
            yield (
                f"the order to begin reached {node.late_orders} of {len(node.workers)} load workers on "
                f"node {node.node} up to {ms(node.order_ms or 0.0)} after the load's start: what was due before that "
                "left late"
            )


def slower_nodes(nodes: Sequence[NodeSummary]) -> Iterator[str]:
    """Yield a sentence for each node with a much longer TTFT than the others."""
    known = [(node.node, node.ttft_ms.p50, node.ttft_ms.count) for node in nodes]
    medians_ms = {name: p50 for name, p50, count in known if p50 and count and count >= LEAST_REQUESTS}
    for name, p50 in medians_ms.items():
        others = [other for each, other in medians_ms.items() if each != name]
        if others and p50 >= SLOWER * (typical := float(np.median(others))):
            yield (
                f"node {name} is {p50 / typical:.2g} times slower: the median TTFT of its requests is {ms(p50)}, that "
                f"of the other nodes {ms(typical)}; look at its way to the engine"
            )
