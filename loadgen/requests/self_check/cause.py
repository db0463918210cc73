"""The likely cause of a load generator's lateness, and its remedy."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, UnsetType

from sidelight.loadgen.host.cpu_steal import MachineLoad
from sidelight.rundir.fields import doc

# A worker goes round its loop in the last millisecond before a submission is due, so that at a high rate a busy one may
# be on time; its CPU use is a cause only of what was late.
BUSY_WORKER = 0.85
BUSY_MACHINE = 0.9
STOLEN = 0.02


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of the load generator's lateness, and its remedy."""

    kind: Annotated[
        Literal["worker", "steal", "machine", "unknown"],
        doc(
            "`worker`: a load worker used 85 % of a core or more; `steal`: a hypervisor took 2 % of the "
            "processor time or more; `machine`: the machine was 90 % busy, the workers were not; else `unknown`."
        ),
    ]
    text: Annotated[str, doc("What is known, as a clause.")]
    cure: Annotated[str, doc("What helps, as a sentence.")]
    node: Annotated[str | UnsetType, doc("The node with the latest load workers; absent without nodes.")] = UNSET


def cause_on(node: str, busiest_worker: float | None, machine: MachineLoad | None) -> Cause:
    """Return the cause of lateness on a node."""
    known = cause(busiest_worker, machine)
    text = f"on node {node}, {known.text.replace('this machine', 'that machine')}"
    return msgspec.structs.replace(known, text=text, node=node)


def cause(busiest_worker: float | None, machine: MachineLoad | None) -> Cause:
    """Return the cause of lateness.

    It follows from the busiest worker's share of a core and the machine's load meanwhile.
    """
    worker = 0.0 if busiest_worker is None else busiest_worker
    busy = machine.busy_ratio if machine is not None else None
    stolen = machine.steal_ratio if machine is not None else None
    if worker >= BUSY_WORKER:
        crowded = busy is not None and busy >= BUSY_MACHINE
        return Cause(
            kind="worker",
            text=f"a load worker used {100 * worker:.0f} % of a core",
            cure=f"Use more of them (--workers){', on a machine with idle processors' if crowded else ''}.",
        )
    if stolen is not None and stolen >= STOLEN:
        return Cause(
            kind="steal",
            text=f"a hypervisor gave {100 * stolen:.0f} % of this machine's processor time to other guests",
            cure="Run the load generator on a machine that does not share its processors.",
        )
    use = f"the busiest load worker used {100 * worker:.0f} % of a core"
    if busy is not None and busy >= BUSY_MACHINE:
        return Cause(
            kind="machine",
            text=f"other processes took the processor (this machine was {100 * busy:.0f} % busy, {use})",
            cure="Run the load generator on another machine, or keep processors free for it.",
        )
    known = "how busy it was is not known" if busy is None else f"it was {100 * busy:.0f} % busy"
    return Cause(
        kind="unknown",
        text=f"the load generator was held up on this machine for a reason that is not known ({known}, {use})",
        cure="Run the load generator on a machine with nothing else to do.",
    )
