"""Client's half of a summary, and the load generator's own error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from sidelight.correlator.load.steady import steady_throughput
from sidelight.exporter.evaluation.measured import MeasuredRun, closed_loop, engine_here
from sidelight.exporter.summary.result import Tokenizer, Workload
from sidelight.loadgen.host.clock_sync import ClockSummary
from sidelight.loadgen.host.cpu_steal import MachineLoad
from sidelight.loadgen.host.round_trip import RoundTrip
from sidelight.loadgen.requests.rates import HeldBack, cost, held_back
from sidelight.loadgen.requests.self_check.check import SelfCheck, self_check
from sidelight.loadgen.requests.self_check.nodes import Node, WorkerEnd, by_node
from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.loadgen.requests.summary import NO_POWER, ClientSummary, client_summary, grouped, output_tokens_within
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.events import PHASE_END
from sidelight.recorded.run import Run
from sidelight.rundir.stats import Missing
from sidelight.scraper.hardware.summary import Hardware, hardware_summary
from sidelight.scraper.window.window import Window


def client_of(measured_run: MeasuredRun, hardware: Hardware) -> ClientSummary:
    """Return the `client` section of a summary; energy is by the hardware's mean power."""
    run, window, measured = measured_run.run, measured_run.window, measured_run.requests
    config, watts = run.manifest["config"], hardware.gpu.mean_power_w
    slo = parse_slo(config["slo"]) if config.get("slo") else None
    client = client_summary(
        measured,
        start_ns=window.start_ns,
        end_ns=window.end_ns,
        slo=slo,
        power_watts=NO_POWER if watts is None else float(watts),
        concurrency=config.get("concurrency") if closed_loop(run) else None,
        stopped=run.status == "interrupted",
        held=_held_back(run, measured),
    )
    nodes, steady, price = _nodes(run), steady_throughput(measured, window.start_ns), config.get("price")
    return msgspec.structs.replace(
        client,
        steady=steady,
        cost=cost(price, steady, msgspec.structs.asdict(client.throughput)) if price else UNSET,
        models=grouped(measured, measured.model, window.start_ns, window.end_ns, slo)
        if len(set(measured.model.tolist())) > 1
        else UNSET,
        by_node=by_node(measured, nodes, start_ns=window.start_ns, open_loop=not closed_loop(run)) if nodes else UNSET,
    )


def _nodes(run: Run) -> list[Node]:
    """Return the nodes of --ray, and the ends of their load workers' measured phase."""
    stated = msgspec.convert(_measured_end(run).get("workers") or [], list[WorkerEnd | None])
    ends = dict(enumerate(stated))
    return [
        Node(
            name=node.clock.node,
            workers=node.clock.workers,
            ends=tuple(end for worker in node.clock.workers if (end := ends.get(worker)) is not None),
            clock_error_ms=node.line.error_ns / 1e6,
        )
        for node in run.nodes
    ]


def _measured_end(run: Run) -> Mapping[str, Any]:
    ends = (event.data for event in run.events if event.name == PHASE_END and event.data["phase"] == "measure")
    return next(ends, {})


def _held_back(run: Run, measured: RequestLog) -> HeldBack | UnsetType:
    """Return the requests held back by the cap on requests in flight; UNSET without a cap."""
    config = run.manifest["config"]
    if not config.get("concurrency") or closed_loop(run):
        return UNSET
    planned = workload(run).planned_requests
    if run.status != "complete" or planned is None:
        return held_back(measured, cap=config["concurrency"], planned=Missing("the run did not end by itself"))
    return held_back(measured, cap=config["concurrency"], planned=planned)


def self_check_of(run: Run, measured: RequestLog, window: Window) -> SelfCheck:
    """Return the load generator's error in a window, by its own records."""
    stats = [stat for stat in run.worker_stats if window.start_ns <= stat.at_ns <= window.end_ns]
    return self_check(
        measured,
        stats,
        open_loop=not closed_loop(run),
        clock=msgspec.convert(run.manifest.get("clock_state"), ClockSummary | None),
        round_trips=msgspec.convert(run.manifest.get("network_rtt_ms", []), list[RoundTrip]),
        machine=msgspec.convert(_measured_end(run).get("machine"), MachineLoad | None),
        nodes=_nodes(run),
        start_ns=window.start_ns,
    )


def workload(run: Run) -> Workload:
    """Return the summary of the workload: its requests, its tokenizer and the number of clipped lengths."""
    planned = {event.data["phase"]: event.data for event in run.events if event.name == "planned"}
    measure, manifest = planned.get("measure", {}), run.manifest
    return Workload(
        name=manifest.get("workload", {}).get("label") or manifest["config"].get("workload"),
        seed=manifest["config"].get("seed"),
        tokenizer=msgspec.convert(manifest.get("tokenizer"), Tokenizer | None),
        max_model_len=manifest.get("target", {}).get("max_model_len"),
        planned_requests=measure.get("count"),
        clipped_inputs=measure.get("clipped_inputs"),
        clipped_outputs=measure.get("clipped_outputs"),
        requests_sha256=measure.get("sha256"),
        dropped_turns=measure.get("dropped_turns"),
        missed_lengths=measure.get("missed_lengths"),
        stated=manifest.get("workload"),
        shares_prefixes=_shares_prefixes(run),
        warmup_requests=int((run.requests.phase == "warmup").sum()),
    )


def _shares_prefixes(run: Run) -> bool | None:
    """Return whether requests were meant to share prefixes: sessions, system prompts, repositories."""
    if not len(run.requests):
        return None
    classes = (run.manifest.get("workload") or {}).get("classes", ())
    shared = any(traffic_class.get("system_prompt") or traffic_class.get("shared_prefix") for traffic_class in classes)
    return bool(shared or (run.requests.session >= 0).any())


def hardware_of(measured: MeasuredRun) -> Hardware:
    """Return power, energy, and the energy of a token, in the measured window."""
    run, window = measured.run, measured.window
    generated = output_tokens_within(measured.requests, window.start_ns, window.end_ns)
    return hardware_summary(
        run.hardware,
        run.endpoints,
        window=window,
        output_tokens=None if isinstance(generated, Missing) else generated,
        engine_here=engine_here(run),
    )
