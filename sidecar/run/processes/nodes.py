"""Nodes of a Ray cluster, with an agent on each: opened once a command, for all of its runs.

Ray places the agents, reaches them and notices their deaths; a cluster is neither started nor stopped here. Nothing
else imports it, and this module only where --ray is given.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sidelight.loadgen.plan.rates import pace_of
from sidelight.recorded.errors import ConfigurationError, TargetIncompatible, TargetUnreachable, WorkerDied
from sidelight.rundir.printable.numbers import count_of
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.progress.reporter import Progress
from sidelight.sidecar.run.processes.agent import Agent
from sidelight.sidecar.run.processes.remote import Link, RemotePlace
from sidelight.sidecar.version import VERSION

CONNECT_TIMEOUT_S = 5.0
PLACED_TIMEOUT_S = 20.0
AGENT_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 5.0
ASKED_AGAIN_S = 5.0  # an agent that is not reached, before it counts as lost
SILENT_S = 10.0  # an agent that does not answer; a network that is back after 3 s is used again after 6
PAUSE_S = 0.2
BLOCKS_UNDER_WAY = 4
HOME_BYTES_PER_S = 50e6  # of logs: half of what one conductor took in blocks of 4 MiB
TOKEN_BYTES = 100  # of a streamed reply in a log, at most: 34 of chunks that come together, 100 of ones apart
# Without its head Ray would end this process after 60 s, with all that is to be reported; nodes end by then. What Ray
# refuses it tries 20 times, a second each, and says each time.
OF_RAY = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600", "RAY_NUM_REDIS_GET_RETRIES": "3"}
REASONS = {
    "ActorDiedError": "its agent died",
    "ActorUnavailableError": "its agent is not reached",
    "TimeoutError": f"its agent has not answered for {SILENT_S:g} s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The nodes of a command: links to their agents, and what each says of itself. `workers` run on each.

    Of nodes that were `lost` the reason.
    """

    links: tuple[Link, ...]
    facts: tuple[Mapping[str, Any], ...]
    workers: int
    lost: dict[str, str] = field(default_factory=dict)

    def places(self) -> list[RemotePlace]:
        """Return new places for load workers, on the nodes that are not lost."""
        return [
            RemotePlace(link=link) for link in self.links if link.node not in self.lost for _ in range(self.workers)
        ]


@contextmanager
def opened(options: RunOptions, progress: Progress) -> Iterator[Nodes]:
    """Open the nodes of --ray while the context is open. Raises SidelightError, in one line."""
    _require_way_home(options)
    ray = _connected(str(options.ray))
    there: dict[str, Any] = {}
    lost: dict[str, str] = {}
    try:
        agents, addresses = _placed(ray, options)
        there = dict(zip(map(str, addresses), agents, strict=True))
        facts = _facts(ray, agents, options)
        names = [f"{each['host']}-{number}" for number, each in enumerate(facts)]
        workers = count_of(options.workers, "load worker")
        progress.stage(f"{count_of(len(agents), 'node')} of Ray, with {workers} on each: {', '.join(names)}")
        for each in facts:
            if each["niceness"] > os.getpriority(os.PRIO_PROCESS, 0):
                progress.warn(
                    f"load workers on {each['host']} have niceness {each['niceness']}, and are late wherever others "
                    "run; start Ray there with RAY_worker_niceness=0"
                )
        there = dict(zip(names, agents, strict=True))
        links = tuple(
            _link(ray, agent, name, address, lost)
            for (name, agent), address in zip(there.items(), addresses, strict=True)
        )
        yield Nodes(links=links, facts=facts, workers=options.workers, lost=lost)
    finally:
        if leaving := [agent.leave.remote() for name, agent in there.items() if name not in lost]:
            ray.wait(leaving, num_returns=len(leaving), timeout=LEAVE_TIMEOUT_S)
        ray.shutdown()


def _require_way_home(options: RunOptions) -> None:
    """Raise ConfigurationError for more logs a second than come home.

    Known of plain rates and lengths alone.
    """
    pace, tokens = pace_of(options.rate), options.output_tokens or ""
    bytes_per_s = (
        max(pace.per_s or 0.0, pace.to_per_s or 0.0) * TOKEN_BYTES * (int(tokens) if tokens.isdecimal() else 0)
    )
    if bytes_per_s > HOME_BYTES_PER_S:
        raise ConfigurationError(
            "ray.logs",
            f"--ray {options.ray}: --rate {options.rate} with --output-tokens {tokens} makes about "
            f"{bytes_per_s / 1e6:,.0f} MB/s of logs, and {HOME_BYTES_PER_S / 1e6:.0f} MB/s come home; lower one, or "
            "run several commands on as many machines, each with its own nodes (--node-label)",
        )


def _connected(address: str) -> Any:
    """Return Ray, connected to a cluster. Raises ConfigurationError, TargetUnreachable, TargetIncompatible."""
    for name, value in OF_RAY.items():
        os.environ.setdefault(name, value)  # it reads them where it is imported
    try:
        # Before Ray starts anything: without it Ray's own processes would die, and say why in their logs alone.
        import opentelemetry.metrics  # noqa: F401, PLC0415
        import ray  # noqa: PLC0415  most runs have none
    except ImportError as error:
        raise ConfigurationError(
            "ray.absent", f"--ray {address}: {error}; install it with: pip install 'sidelight[ray]'"
        ) from error
    if address != "auto":
        try:
            socket.create_connection(_address(address), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise TargetUnreachable(
                "ray.unreachable", f"--ray {address}: {error.strerror or error}; give the address of a cluster's head"
            ) from error
    try:
        # What it hears of nodes it would print among our results on standard output, whatever log_to_driver says.
        ray._private.worker.print_to_stdstream = lambda *_, **__: None  # noqa: SLF001  there is no setting
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except ConnectionError as error:
        cure = "start a cluster with: ray start --head" if address == "auto" else "is RAY_AUTH_TOKEN the cluster's?"
        raise TargetUnreachable("ray.unreachable", f"--ray {address}: {_one_line(error)}; {cure}") from error
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise TargetIncompatible("ray.refused", f"--ray {address}: {_one_line(error)}") from error
    return ray


def _placed(ray: Any, options: RunOptions) -> tuple[list[Any], list[tuple[str, int]]]:
    """Return an agent on each node, and the address of Ray there.

    An agent has a processor for each of its workers. Raises ConfigurationError.
    """
    from ray.util.placement_group import placement_group, placement_group_table  # noqa: PLC0415  as above
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415

    processors = count_of(options.workers, "processor")
    labels = dict(label.split("=", 1) for label in options.node_label)
    alive = [node for node in ray.nodes() if node["Alive"]]
    fit = [
        node
        for node in alive
        if node["Resources"].get("CPU", 0) >= options.workers and labels.items() <= node.get("Labels", {}).items()
    ]
    count = options.nodes or len(fit)
    labelled = f" and the labels {', '.join(options.node_label)}" if labels else ""
    if not fit or len(fit) < count:
        raise ConfigurationError(
            "ray.nodes",
            f"--ray {options.ray}: {len(fit)} of its {count_of(len(alive), 'node')} have {processors}{labelled}, "
            f"and {max(count, 1)} are needed; lower --nodes or --workers, or add nodes",
        )
    select = {"bundle_label_selector": [labels] * count} if labels else {}
    group = placement_group([{"CPU": options.workers}] * count, strategy="STRICT_SPREAD", **select)
    if not group.wait(timeout_seconds=PLACED_TIMEOUT_S):
        raise ConfigurationError(
            "ray.busy",
            f"--ray {options.ray}: not {count_of(count, 'node')} have {processors} free within "
            f"{PLACED_TIMEOUT_S:g} s; wait for other jobs, or lower --nodes or --workers",
        )
    kind = ray.remote(Agent)
    address = {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in alive}
    chosen = placement_group_table(group)["bundles_to_node_id"]
    agents = [
        kind.options(
            num_cpus=options.workers,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
        ).remote()
        for number in range(count)
    ]
    return agents, [address[chosen[number]] for number in range(count)]


def _facts(ray: Any, agents: Sequence[Any], options: RunOptions) -> tuple[Mapping[str, Any], ...]:
    """Return the facts of each node. Raises ConfigurationError for one that cannot send its share."""
    connections = math.ceil((options.concurrency or 0) / len(agents)) if options.closed_loop else 0
    asked = [agent.about.remote(list(options.url), options.workers, connections) for agent in agents]
    try:
        facts = ray.get(asked, timeout=AGENT_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        raise TargetIncompatible(
            "ray.agent",
            f"--ray {options.ray}: no agent could be started on a node: {_one_line(error)}; install Sidelight "
            f"{VERSION} on each node",
        ) from error
    for each in facts:
        if each["sidelight"] != VERSION:
            raise ConfigurationError(
                "ray.version",
                f"--ray {options.ray}: {each['host']} has Sidelight {each['sidelight']}, this is {VERSION}; install "
                "the same on each node",
            )
        if each["shortage"]:
            raise ConfigurationError("load.files-or-ports", f"--ray {options.ray}: {each['host']}: {each['shortage']}")
    return tuple(facts)


def _link(ray: Any, agent: Any, node: str, address: tuple[str, int], lost: dict[str, str]) -> Link:
    """Return the link to an agent. One that is not reached is asked again for a while, before its node is lost.

    Not where nothing listens at the `address` of Ray on its node: that has ended, and its agent with it.
    """
    unavailable = ray.exceptions.ActorUnavailableError
    head = ray.get_runtime_context().gcs_address

    async def failed(error: Exception) -> WorkerDied:
        reason = REASONS.get(type(error).__name__) or _one_line(error)
        if await asyncio.to_thread(_is_refused, _address(head)):
            reason += f", after Ray's head at {head} had ended"
        lost.setdefault(node, reason)
        return gone()

    def gone() -> WorkerDied:
        return WorkerDied("process.ended", end())

    def end() -> str:
        return f"is lost: {lost[node]}" if node in lost else ""

    async def again(since_s: float, error: Exception) -> None:
        is_late = asyncio.get_running_loop().time() - since_s > ASKED_AGAIN_S
        if is_late or await asyncio.to_thread(_is_refused, address):
            raise await failed(error)
        await asyncio.sleep(PAUSE_S)

    async def call(name: str, *arguments: Any) -> Any:
        since_s = asyncio.get_running_loop().time()
        while True:
            if node in lost:
                raise gone()
            try:
                async with asyncio.timeout(SILENT_S):
                    return await getattr(agent, name).remote(*arguments)
            except unavailable as error:
                await again(since_s, error)
            except (TimeoutError, ray.exceptions.RayError) as error:
                raise await failed(error) from error

    async def stream(name: str, arguments: Callable[[], tuple[Any, ...]]) -> AsyncIterator[Any]:
        method = getattr(agent, name).options(
            num_returns="streaming", _generator_backpressure_num_objects=BLOCKS_UNDER_WAY
        )
        since_s = math.inf
        while True:
            try:
                async for answer in method.remote(*arguments()):
                    since_s = math.inf
                    yield await answer
            except unavailable as error:
                since_s = min(since_s, asyncio.get_running_loop().time())
                await again(since_s, error)
            except ray.exceptions.RayError as error:
                raise await failed(error) from error
            else:
                return

    return Link(node=node, lost=end, call=call, stream=stream)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


def _is_refused(address: tuple[str, int]) -> bool:
    """Return whether a machine says that nothing listens at an address."""
    try:
        socket.create_connection(address, CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def _one_line(error: Exception) -> str:
    """Return the first sentence of an error of Ray, or of its cause."""
    lines = [" ".join(line.split()) for line in str(getattr(error, "cause", None) or error).splitlines()]
    return next((line.partition(". ")[0] for line in lines if line), type(error).__name__)[:200]
