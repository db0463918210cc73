"""A test of the draft against the simulated engine in virtual time: the loop of a study without sockets and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from virtual_runs import PartsSource, VirtualLoad, step_data, workload_of

from sidelight.loadgen.plan.arrivals import Arrival, schedule
from sidelight.methodology.study.findings import StudyFindings
from sidelight.methodology.study.model import Done, Finished, Procedure, Step, StepData, StudySettings
from sidelight.methodology.study.outcome import outcome
from sidelight.methodology.study.planning import decide
from sidelight.simulator.settings import EngineSettings, SimulatorSettings
from sidelight.simulator.virtual import Played, SimulatedLoad, VirtualServer

#: Requests that warm an engine up, and what passes between two steps.
_WARM_UP, _PAUSE_S = 10, 2.0


def play(
    procedure: Procedure,
    asked: StudySettings,
    settings: EngineSettings | SimulatorSettings,
    *,
    network_s: float = 0.002,
    scrape_s: float | None = 0.25,
    variants: Mapping[str, EngineSettings | SimulatorSettings] | None = None,
    parts: PartsSource = "truth",
    keep_steps: bool = False,
    most_steps: int = 200,
) -> tuple[list[Finished], StudyFindings]:
    """Play a test until it has no further step, and return its steps and what follows from them.

    Each variant is a server of its own; all have one clock. An engine is warmed up before its first step, and its
    cache, page and drift go on from step to step, as those of a real one. `network_s` is a round trip; without
    `scrape_s` there is no page. Raises AssertionError where a test does not come to an end.
    """
    configurations = variants or {"": settings}
    servers = {name: _server(each, network_s, shown=scrape_s is not None) for name, each in configurations.items()}
    finished: list[Finished] = []
    data: dict[int, StepData] = {}
    while isinstance(step := decide(procedure, asked, finished), Step):
        assert len(finished) < most_steps, f"{procedure.name} does not end: {step.label} is step {len(finished) + 1}"
        server = servers[step.variant]
        server.now_ns = max(each.now_ns for each in servers.values()) + round(_PAUSE_S * 1e9)
        if server.engine.submitted == 0 and step.warm_up != "none":
            _warm_up(server, {**asked.options, **step.options}, asked.seed)
        number = len(finished) + 1
        data[number] = run_step(
            step, server, options=asked.options, workload=procedure.workload, scrape_s=scrape_s, parts=parts,
            keep_steps=keep_steps,
        )  # fmt: skip
        came = outcome(step, data[number], procedure.rests_on)
        finished.append(Finished(number=number, run=f"steps/{number:04d}-{step.label}", step=step, outcome=came))
    assert isinstance(step, Done)
    findings = procedure.findings(asked, finished, lambda each: data[each.number])
    msgspec.json.encode(findings)  # they can be written: nothing in them is numpy's
    return finished, findings


def assert_reported(findings: StudyFindings, step: Finished, of: str) -> None:
    """Assert that the minimum report's times are those of a step, and name it as the one `of` that load."""
    for metric in ("ttft", "tpot"):
        result, known = findings.results[f"{metric}_p50_ms"], step.outcome.percentiles[f"{metric}_ms"]["p50"]
        assert (result.shown, result.ends) == (known.estimate, (known.low, known.high))
        assert result.at == f"{step.step.load_words}, {of}, step {step.number}"


def run_step(
    step: Step,
    server: VirtualServer,
    *,
    options: Mapping[str, Any] | None = None,
    workload: str | Mapping[str, Any] = "synthetic-uniform",
    scrape_s: float | None = 0.25,
    parts: PartsSource = "truth",
    keep_steps: bool = False,
) -> StepData:
    """Play one step against a server, with the options of the study, then its own; return its tables."""
    merged = _options({"workload": workload, **(options or {}), **step.options})
    if step.reset_cache:
        server.engine.reset_prefix_cache()
    load = _load(merged, step.seed, server)
    offsets_ns = None
    if step.load == "open":
        arrival = Arrival(kind=merged.get("arrival", "poisson"), rate_per_s=step.level)
        offsets_ns = schedule(arrival, seed=step.seed, count=step.requests, duration_s=step.duration).tolist()
    played: Played = server.play(
        SimulatedLoad(
            requests=load.requests(step.requests),
            offsets_ns=offsets_ns,
            concurrency=round(step.level) if step.load == "closed" else 1,
            duration_s=step.duration,
        ),
        scrape_s=scrape_s,
        keep_steps=keep_steps,
    )
    return step_data(
        played, load.planned, closed_loop=step.load == "closed", parts=parts, about={"workload": load.workload.about}
    )


def _server(settings: EngineSettings | SimulatorSettings, network_s: float, *, shown: bool) -> VirtualServer:
    whole = settings if isinstance(settings, SimulatorSettings) else SimulatorSettings(engine_settings=settings)
    return VirtualServer(whole, network_s=network_s, shown=shown)


def _load(options: Mapping[str, Any], seed: int, server: VirtualServer) -> VirtualLoad:
    body = options.get("extra_body") or {}
    return VirtualLoad(
        workload=workload_of(options, seed=seed),
        max_model_len=server.engine.settings.max_model_len,
        body=json.loads(body) if isinstance(body, str) else body,
    )


def _warm_up(server: VirtualServer, options: Mapping[str, Any], seed: int) -> None:
    load = _load(_options(options), seed + 1_000_003, server)
    server.play(SimulatedLoad(requests=load.requests(_WARM_UP), concurrency=2))


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_"): value for name, value in options.items()}
