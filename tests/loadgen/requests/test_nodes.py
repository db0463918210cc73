"""Requests by node: a slow node is named, an order that came late is counted, lateness is blamed on its node."""

from __future__ import annotations

import numpy as np
import pytest
from logs import request_log

from sidelight.loadgen.host.cpu_steal import MachineLoad
from sidelight.loadgen.records import WorkerStat
from sidelight.loadgen.requests.self_check.check import self_check
from sidelight.loadgen.requests.self_check.nodes import Node, WorkerEnd, by_node, late_orders, slower_nodes
from sidelight.loadgen.requests.summary import client_summary

MS = 1_000_000
BUSY, IDLE = MachineLoad(steal_ratio=0.0, busy_ratio=0.97), MachineLoad(steal_ratio=0.0, busy_ratio=0.1)
NAMES = ("alpha-0", "beta-1", "gamma-2", "delta-3")


def nodes(*ordered_ms: float) -> list[Node]:
    """Return nodes of one load worker each, which had their orders at these times; the last one's machine is busy."""
    machines = [IDLE] * (len(ordered_ms) - 1) + [BUSY]
    return [
        Node(name=NAMES[worker], workers=(worker,), ends=(WorkerEnd(ordered_ns=round(at_ms * MS), machine=machine),))
        for worker, (at_ms, machine) in enumerate(zip(ordered_ms, machines, strict=True))
    ]


def sent(*ttft_ms: float, times: int = 50) -> tuple[dict[str, object], ...]:
    """Return requests of workers with these TTFTs, in turn, 1 % longer each time, submitted 2 ms late."""
    return tuple(
        {
            "scheduled": 10 * at, "dispatch": 10 * at + 2, "submit": 10 * at + 2, "worker": at % len(ttft_ms),
            "first": 10 * at + 2 + ttft_ms[at % len(ttft_ms)] * 1.01 ** (at // len(ttft_ms)), "end": 20_000.0,
        }
        for at in range(1, 1 + times * len(ttft_ms))
    )  # fmt: skip


def test_one_of_four_nodes_that_is_ten_times_slower_is_named():
    """The p99 of the whole is that of all requests; the mean of the nodes' p99 is less than half of it."""
    log = request_log(*sent(40.0, 40.0, 40.0, 400.0))
    got = by_node(log, nodes(-1, -1, -1, -1), start_ns=0, open_loop=True)
    assert (50, 50, 50, 50) == tuple(node.ok for node in got)
    assert 2.0 == got[1].first_late_ms
    (sentence,) = slower_nodes(got)
    assert sentence.startswith("node delta-3 is 10 times slower: ")
    ttft_ms = (log.first_token_ns - log.submit_ns) / MS
    whole = client_summary(log).ttft_ms.p99
    assert pytest.approx(np.quantile(ttft_ms, 0.99)) == whole
    assert np.mean([node.ttft_ms.p99 for node in got]) < 0.5 * whole


@pytest.mark.parametrize(
    "rows", [sent(40.0, 60.0, 40.0, 40.0), sent(40.0, 400.0, times=9), sent(40.0)], ids=["alike", "few", "one"]
)
def test_nodes_that_are_alike_are_not_compared(rows: tuple[dict[str, object], ...]):
    """Nor the few requests of a short run, nor a node that is alone."""
    count = 1 + max(int(str(row["worker"])) for row in rows)
    assert [] == list(slower_nodes(by_node(request_log(*rows), nodes(*[0] * count), start_ns=0, open_loop=True)))


def test_an_order_that_came_late_is_counted():
    """One that came in time is not, whenever that was."""
    hosts = nodes(-80.0, 35.0)
    got = by_node(request_log(*sent(40.0, 40.0)), hosts, start_ns=0, open_loop=True)
    assert [(-80.0, 0), (35.0, 1)] == [(node.order_ms, node.late_orders) for node in got]
    (sentence,) = late_orders(got)
    assert "1 of 1 load workers on node beta-1 up to 35.0 ms after" in sentence
    assert 1 == self_check(request_log(*sent(40.0, 40.0)), [], open_loop=True, nodes=hosts).late_orders


def test_lateness_is_blamed_on_its_node():
    """On the one whose workers were latest, by its own machine."""
    stats = [
        WorkerStat(worker=worker, at_ns=tick * 200 * MS, cpu_ns=tick * MS, loop_delay_ns=delay_ms * MS)
        for worker, delay_ms in ((0, 1), (1, 40))
        for tick in range(10)
    ]
    got = self_check(request_log(*sent(10.0, 10.0)), stats, open_loop=True, machine=IDLE, nodes=nodes(-1, -1)).cause
    assert got is not None
    assert ("machine", "beta-1") == (got.kind, got.node)
    assert "that machine was 97 % busy" in got.text
