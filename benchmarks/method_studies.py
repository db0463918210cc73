"""Studies of the simulated engine in virtual time, beside the truth: what sections of `methodology.py` count.

Each case is a pure function of its numbers, and its result a line of JSON in a file where one is given: a benchmark
that was stopped goes on from there, and a larger one adds to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from queues import served, took
from recordings import log_of
from virtual_runs import VirtualLoad, workload_of
from virtual_study import play, run_step

from sidelight.correlator.breakdown import break_down
from sidelight.correlator.estimate.table import nothing
from sidelight.correlator.exact.table import unjoined
from sidelight.correlator.load.stability import Stability
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.methodology.procedures.throughput import THROUGHPUT
from sidelight.methodology.procedures.ttft import TTFT
from sidelight.methodology.search import AT_SLO, LONG_S
from sidelight.methodology.study.model import Done, Finished, Parameters, Scale, Step, StepData, StudySettings
from sidelight.methodology.study.outcome import outcome
from sidelight.methodology.study.planning import decide
from sidelight.methodology.study.saturation import measured_capacity, saturation
from sidelight.rundir.columns import Floats, take
from sidelight.simulator.settings import EngineSettings, SimulatorSettings
from sidelight.simulator.virtual import EPOCH_NS, SimulatedLoad, VirtualServer

Result = dict[str, Any]

# Engines that differ in what binds them and in how long requests take.
ENGINES = {
    "demo": EngineSettings(),
    "max_num_seqs 4": EngineSettings(max_num_seqs=4),
    "max_num_seqs 32": EngineSettings(max_num_seqs=32),
    "max_num_seqs 64, kv_blocks 512": EngineSettings(max_num_seqs=64, kv_blocks=512),
    "max_num_seqs 64, kv_blocks 1024": EngineSettings(max_num_seqs=64, kv_blocks=1024),
    "max_num_batched_tokens 256": EngineSettings(max_num_batched_tokens=256),
    "slow 2": EngineSettings(slow=2.0),
    "max_num_seqs 8, slow 0.5": EngineSettings(slow=0.5, max_num_seqs=8),
}
#: B of a comparison, beside the demo engine.
SECONDS = {
    "5 % slower": EngineSettings(slow=1.05),
    "10 % slower": EngineSettings(slow=1.1),
    "equal": EngineSettings(),
    "equal, both drift 5 %/h": EngineSettings(drift_per_h=0.05),
}
SATURATED, LONG = 20_000, 10_000  # requests of a run that is the truth
OBJECTIVE_MS = 500.0
LEAST_GAIN, CLEAR = 0.02, 2.0  # of what binds: its own, and over the next one's


@dataclass(slots=True)
class Ledger:
    """Results that are known, by section and case, and the file that has them."""

    path: Path | None = None
    known: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is not None and self.path.exists():
            for line in self.path.read_text().splitlines():
                entry = json.loads(line)
                self.known[json.dumps(entry["case"])] = entry["result"]

    def get(self, *case: str | float, of: Callable[[], Result]) -> Result:
        """Return the result of a case, from the file where it is there."""
        key = json.dumps(case)
        if key not in self.known:
            self.known[key] = of()
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps({"case": case, "result": self.known[key]}) + "\n")
        return self.known[key]


def server_of(settings: EngineSettings, *, shown: bool = True) -> VirtualServer:
    return VirtualServer(SimulatorSettings(engine_settings=settings), network_s=0.002, shown=shown)


def a_step(rate: float, seed: int, *, seconds: float | None = 60.0, requests: int | None = None) -> Step:
    return Step(kind="level", label="open", load="open", level=rate, duration=seconds, requests=requests, seed=seed)


# What a full engine serves


def full(settings: EngineSettings, *, requests: int, concurrency: int) -> Result:
    """Return requests and tokens a second of a closed loop, without its ramp and its drain."""
    load = VirtualLoad(workload=workload_of({}, seed=99), max_model_len=settings.max_model_len)
    sent = SimulatedLoad(requests=load.requests(requests), concurrency=concurrency)
    played = server_of(settings, shown=False).play(sent)
    ends = np.sort([each.end_ns for each in played.exchanges])
    tokens = np.concatenate([np.array(each.token_ns) for each in played.exchanges])
    first, last = int(ends[concurrency]), int(ends[-concurrency])
    seconds = (last - first) / 1e9
    inside = int(((tokens > first) & (tokens <= last)).sum())
    return {"per_s": (len(ends) - 2 * concurrency) / seconds, "tokens_per_s": inside / seconds}


def truth_of(ledger: Ledger, name: str) -> Result:
    """Return what an engine serves when it is full."""
    settings = ENGINES[name]
    return ledger.get(
        "full", name, of=lambda: full(settings, requests=SATURATED, concurrency=4 * settings.max_num_seqs)
    )


# Throughput


def limit(ledger: Ledger, name: str, number: int) -> Result:
    """Return what a throughput study of 60 s a step says of the limit; each has requests of its own."""
    seed = 1000 * list(ENGINES).index(name) + number

    def study() -> Result:
        asked = _asked_throughput("short", 60.0, seed)
        settings = replace(ENGINES[name], seed=1000 + seed)
        steps, findings = play(THROUGHPUT, asked, settings, scrape_s=1.0, parts="none")
        result = findings.results["limit_output_tokens_per_s"]
        minutes = sum(each.step.duration or 0 for each in steps) / 60
        return {"value": result.value, "ci95": result.ci95, "steps": len(steps), "minutes": minutes}

    return ledger.get("limit", name, number, of=study)


def at_objective(ledger: Ledger, name: str, seconds: float, seed: int) -> Result:
    """Return the load at P99 < 500 ms by a throughput study, of the letter's scale where its steps are long."""

    def study() -> Result:
        scale: Scale = "letter" if seconds >= LONG_S else "short"
        asked = _asked_throughput(scale, seconds, seed, slo=f"ttft_p99<{OBJECTIVE_MS:g}ms")
        steps, findings = play(THROUGHPUT, asked, ENGINES[name], scrape_s=1.0, parts="none")
        result = findings.results["slo_requests_per_s"]
        at_it = sum(each.step.kind == AT_SLO for each in steps)
        return {"value": result.value, "ci95": result.ci95, "steps": len(steps), "slo_steps": at_it}

    return ledger.get("slo", name, seconds, seed, of=study)


def _asked_throughput(scale: Scale, seconds: float, seed: int, *, slo: str | None = None) -> StudySettings:
    parameters = Parameters(duration=seconds, min=0.01, max=10_000.0, increment=0.01, slo=slo)
    return StudySettings(test="throughput", scale=scale, parameters=parameters, seed=seed)


def load_at_objective(ledger: Ledger, name: str) -> Result:
    """Return the load, requests/s, at which the P99 of the TTFT of long runs is 500 ms.

    By a straight line through the logarithms of twelve runs' P99, at 94 to 106 % of where three coarse runs have it.
    """
    per_s = truth_of(ledger, name)["per_s"]

    def search() -> Result:
        coarse = _crossing(name, per_s * np.array([0.45, 0.6, 0.75]), seed=7)
        return {"per_s": _crossing(name, coarse * np.repeat([0.94, 0.98, 1.02, 1.06], 3), seed=20)}

    return ledger.get("load at the objective", name, of=search)


def _crossing(name: str, rates: Floats, *, seed: int) -> float:
    logs = [math.log(_long_p99_ms(name, rate, seed + at)) for at, rate in enumerate(rates.tolist())]
    slope, height = np.polyfit(rates, logs, 1)
    return float((math.log(OBJECTIVE_MS) - height) / slope)


def _long_p99_ms(name: str, rate: float, seed: int) -> float:
    """Return the P99 of the TTFT of a long open loop, without its first tenth."""
    step = a_step(rate, seed, seconds=None, requests=LONG)
    data = run_step(step, server_of(ENGINES[name], shown=False), scrape_s=None, parts="none")
    return float(np.quantile(request_metrics(data.requests).ttft_ms[LONG // 10 :], 0.99))


# What binds


def binding(ledger: Ledger, number: int) -> Result:
    """Return what a drawn setting's study says of what binds, and the truth: what would raise the throughput, doubled.

    Settings in which nothing would, or two things nearly as much, are drawn again.
    """

    def study() -> Result:
        random = np.random.default_rng([5, number])
        for draws in range(1, 100):
            seats, blocks, clients = (
                round(math.exp(random.uniform(math.log(low), math.log(high))))
                for low, high in ((2, 64), (128, 2048), (4, 128))
            )
            gains = _gains(seats, blocks, clients)
            truth, following = sorted(gains, key=lambda each: -gains[each])[:2]
            if gains[truth] >= LEAST_GAIN and gains[truth] >= CLEAR * gains[following]:
                said, evidence = _what_binds(_engine(seats, blocks, seed=number), clients, number)
                return {
                    "seats": seats, "blocks": blocks, "clients": clients, "draws": draws, "truth": truth, "said": said,
                    "evidence": evidence, "gains": gains,
                }  # fmt: skip
        raise AssertionError("no setting is clear")

    return ledger.get("binding", number, of=study)


def _engine(seats: int, blocks: int, *, seed: int = 0) -> EngineSettings:
    return EngineSettings(max_num_seqs=seats, kv_blocks=blocks, max_model_len=2048, seed=seed)


def _gains(seats: int, blocks: int, clients: int) -> dict[str, float]:
    """Return by how much the throughput rises if one of the three is doubled."""
    changes = {"": (1, 1, 1), "seats": (2, 1, 1), "kv_cache": (1, 2, 1), "client": (1, 1, 2)}
    served = {
        name: full(_engine(seats * times[0], blocks * times[1]), requests=1200, concurrency=clients * times[2])
        for name, times in changes.items()
    }
    return {name: each["tokens_per_s"] / served[""]["tokens_per_s"] - 1 for name, each in served.items() if name}


def _what_binds(settings: EngineSettings, clients: int, seed: int) -> tuple[str | None, str]:
    """Return what a throughput study names as what binds, by its closed loops: the open ones change nothing."""

    def closed(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
        return saturation(asked, finished, confirm=True) or Done(reason="the closed loops have ended")

    parameters = Parameters(duration=60.0, concurrency=clients)
    asked = StudySettings(test="throughput", scale="short", parameters=parameters, seed=seed)
    steps, _ = play(replace(THROUGHPUT, next_step=closed), asked, settings, scrape_s=1.0, parts="none")
    limit = measured_capacity(steps)
    return (limit.limit, limit.reason) if limit else (None, "no step served")


# Verdicts


def verdict(ledger: Ledger, name: str, share: float, repeat: int) -> Result:
    """Return the verdict of a step of 60 s, and the load in tokens that it really was, as a share of the truth."""
    truth = truth_of(ledger, name)

    def step() -> Result:
        seed = 10_000 * list(ENGINES).index(name) + round(1000 * share) + 1_000_000 * (1 + repeat)
        asked = a_step(share * truth["per_s"], seed)
        data = run_step(asked, server_of(replace(ENGINES[name], seed=seed)), scrape_s=1.0, parts="none")
        judged = outcome(asked, data).stability or Stability(verdict=None, reason="not judged")
        offered = float(data.requests.max_tokens.sum()) / 60.0
        return {"load": offered / truth["tokens_per_s"], "verdict": judged.verdict, "growth": judged.growth}

    return ledger.get("verdict", name, share, repeat, of=step)


# Comparisons


def engine_pairs(ledger: Ledger, second: str, study: int, *, pairs: int = 5) -> Result:
    """Return the metrics of pairs of 60 s at 70 % load, in random order, on two engines that run all the while."""
    rate = 0.7 * truth_of(ledger, "demo")["per_s"]

    def played() -> Result:
        random = np.random.default_rng([4, study])
        settings = SECONDS[second]
        engines = replace(settings, slow=1.0, seed=2 * study), replace(settings, seed=2 * study + 1)
        servers = [server_of(each, shown=False) for each in engines]
        results: list[list[dict[str, float]]] = []
        for at in range(pairs):
            runs: list[dict[str, float]] = [{}, {}]
            for side in random.permutation(2).tolist():
                server = servers[side]
                server.now_ns = max(each.now_ns for each in servers) + 2_000_000_000
                runs[side] = metrics_of(run_step(a_step(rate, 1000 * study + at), server, scrape_s=None, parts="none"))
            results.append(runs)
        return {"pairs": results}

    return ledger.get("power", second, study, of=played)


def metrics_of(data: StepData) -> dict[str, float]:
    log = data.requests
    times = request_metrics(take(log, log.status == "ok"))
    return {
        "ttft_p50": float(np.nanmedian(times.ttft_ms)),
        "ttft_p99": float(np.nanquantile(times.ttft_ms, 0.99)),
        "tpot_p50": float(np.nanmedian(times.tpot_ms)),
        "e2e_p50": float(np.nanmedian(times.e2e_ms)),
    }


# Until an interval is narrow

UNTIL = {"ttft_p50±5%": "p50", "ttft_p50±10%": "p50", "ttft_p99±10%": "p99", "ttft_p99±20%": "p99"}


def until_of_queue(servers: int, load: float, text: str, seed: int) -> Result:
    """Return the interval that a ttft study with `--until` ends with, and its looks: the TTFT is the time in flight.

    The queue serves one request a second and server; each step finds it empty.
    """
    parameters = Parameters(load=load, requests=1000, until=text, capacity=float(servers))
    asked = StudySettings(test="ttft", scale="short", parameters=parameters, seed=seed)
    finished: list[Finished] = []
    data: list[StepData] = []
    while isinstance(step := decide(TTFT, asked, finished), Step):
        data.append(_queued(step, servers))
        came = outcome(step, data[-1])
        finished.append(Finished(number=len(data), run=step.label, step=step, outcome=came))
    findings = TTFT.findings(asked, finished, lambda each: data[each.number - 1])
    return {"ci95": findings.results[f"ttft_{UNTIL[text]}_ms"].ci95, "looks": len(finished)}


def _queued(step: Step, servers: int) -> StepData:
    """Return the tables of a step at a queue that was empty."""
    random = np.random.default_rng([6, servers, step.seed])
    count = step.requests or 0
    arrived_s = random.exponential(1 / step.level, count).cumsum()
    queue = served(arrived_s, took(random, count, 1.0, 1.0), servers=servers)
    submit_ns, end_ns = (np.rint(1e9 * times_s).astype(np.int64) + EPOCH_NS for times_s in (arrived_s, queue.ended_s))
    sent = dict.fromkeys(("scheduled_ns", "dispatch_ns", "connected_ns", "submit_ns"), submit_ns)
    read = ("first_read_ns", "first_output_ns", "first_token_ns", "last_output_ns", "last_token_ns", "end_ns")
    log = log_of(
        count, phase="measure", **sent, **dict.fromkeys(read, end_ns), input_tokens=1, output_tokens=1, status="ok",
        chunk_ns=end_ns, chunk_start=np.arange(count + 1),
    )  # fmt: skip
    return StepData(
        requests=log, parts=break_down(log, unjoined(count), nothing(count, "not estimated")), endpoints=(),
        start_ns=EPOCH_NS, end_ns=int(submit_ns[-1]), closed_loop=False, status="complete", about={},
    )  # fmt: skip
