"""How often the methodology's statistics are right, in virtual time: intervals, verdicts, comparisons, limits.

`python benchmarks/methodology.py [--size N] [SECTION ...]` prints the tables of benchmarks/RESULTS.md, which have size
1; without a size a section takes about a minute, and a larger one has so many times the simulations. Sections:
intervals verdict false power limit. Behind a share stands its standard error over simulations; seeds are fixed.

Queues are M/G/k with log-normal service times of variation 1; engines are the simulator's, with a page.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

# Without this folder, where the package of the same name would be this file.
sys.path.pop(0)
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from queues import served, took
from virtual_runs import VirtualLoad, workload_of
from virtual_study import play, run_step

from loadgen.requests.metrics import request_metrics
from methodology.compare import Comparison, of_family, paired
from methodology.intervals import quantiles
from methodology.procedures.throughput import THROUGHPUT
from methodology.stability import Stability
from methodology.study.model import Asked, Parameters, Step, StepData
from methodology.study.outcome import outcome
from rundir.columns import take
from simulator.settings import EngineSettings, SimulatorSettings
from simulator.virtual import Load, VirtualServer

Floats = npt.NDArray[np.float64]

QUANTILES = (0.5, 0.9, 0.95, 0.99)
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
SERVERS = (1, 8, 16)
LEAST_CELL = 20  # intervals that a cell's share is worth something of
# Engines that differ in what binds them and in how long requests take.
ENGINES = (
    EngineSettings(),
    EngineSettings(max_num_seqs=4),
    EngineSettings(max_num_seqs=32),
    EngineSettings(max_num_seqs=64, kv_blocks=512),
    EngineSettings(max_num_seqs=64, kv_blocks=1024),
    EngineSettings(max_num_batched_tokens=256),
    EngineSettings(slow=2.0),
    EngineSettings(slow=0.5, max_num_seqs=8),
)
VERDICTS = ("stable", "undecided", "growing")
EDGES = (0.0, 0.9, 0.97, 1.03, 1.1)


def share(hits: int, count: int) -> str:
    """Return a share in per cent with its standard error, as of two more hits and misses: 3 of 3 are not certain."""
    if not count:
        return "-"
    ratio = (hits + 2) / (count + 4)
    return f"{100 * hits / count:.1f} ± {100 * math.sqrt(ratio * (1 - ratio) / (count + 4)):.1f}"


def least(size: int, *values: int) -> int:
    """Return the value for a size, the last for all larger ones."""
    return values[min(size, len(values) - 1)]


def row(*cells: object) -> None:
    print("|", " | ".join(str(cell) for cell in cells), "|", flush=True)


def head(*cells: object) -> None:
    print()
    row(*cells)
    print("|", "|".join("---" for _ in cells), "|", sep="")


# Intervals


def times_in_flight(servers: int, load: float, *, runs: int, size: int) -> Floats:
    """Return how long requests were in flight [runs, size] in steady queues, all runs beside each other."""
    random = np.random.default_rng([1, servers, int(100 * load)])
    skipped = int(min(60_000, 20 / (1 - load) ** 2 + 20 * servers))
    spread = math.log(2)
    times_s, free_s = np.empty((runs, size), np.float32), np.zeros((runs, servers))
    moment_s, rows = np.zeros(runs), np.arange(runs)
    for at in range(-skipped, size):
        moment_s += random.exponential(1 / (load * servers), runs)
        first = free_s.argmin(axis=1)
        ended_s = np.maximum(moment_s, free_s[rows, first]) + random.lognormal(-spread / 2, math.sqrt(spread), runs)
        free_s[rows, first] = ended_s
        if at >= 0:
            times_s[:, at] = ended_s - moment_s
    return times_s.astype(np.float64)


def intervals(*, size: int) -> None:
    """Print how often 95 % intervals hold the truth, by load: of those that are given, and of all runs how many err."""
    usual = {1000: 120, 3000: 120, 10_000: 100, 30_000: 50, 100_000: 30}
    counts = {count: size * runs for count, runs in usual.items()} if size else {1000: 40, 3000: 40, 10_000: 20}
    cells: dict[tuple[int, float, int, float], list[bool | None]] = {}
    for servers, load in product(SERVERS, LOADS):
        times_s = times_in_flight(servers, load, runs=200 * max(1, size), size=100_000 if size else 10_000)
        truths = np.quantile(times_s, QUANTILES)
        for count, series in counts.items():
            for values in times_s[:series, :count]:
                for q, truth, each in zip(QUANTILES, truths, quantiles(values, QUANTILES), strict=True):
                    held = (each.low or 0) <= truth <= (each.high or 0) if each.is_known else None
                    cells.setdefault((servers, load, count, q), []).append(held)
    head("load", "given, %", "of these hold, %", "of all err, %")
    for shown in (*LOADS, None):
        of_load = [held for key, cell in cells.items() if shown in (None, key[1]) for held in cell]
        known = [held for held in of_load if held is not None]
        wrong = share(known.count(False), len(of_load))
        row(shown or "all", share(len(known), len(of_load)), share(known.count(True), len(known)), wrong)
    head("cells", "number", "below 90 %", "the lowest")
    for name, least in (("given in half of the runs", 0.5), ("given in some", 0.0)):
        shares = {}
        for key, cell in cells.items():
            known = [held for held in cell if held is not None]
            if len(known) >= max(LEAST_CELL, least * len(cell)):
                shares[key] = known.count(True) / len(known)
        low = min(shares, key=lambda key: shares[key])
        where = f"M/G/{low[0]}, {100 * low[1]:.0f} %, n {low[2]:,}, p{100 * low[3]:g}"
        row(name, len(shares), sum(ratio < 0.9 for ratio in shares.values()), f"{100 * shares[low]:.0f} % ({where})")


# Engines


def server_of(settings: EngineSettings, *, shown: bool = True) -> VirtualServer:
    return VirtualServer(SimulatorSettings(engine_settings=settings), network_s=0.002, shown=shown)


@cache
def truth_of(settings: EngineSettings, *, requests: int) -> tuple[float, float]:
    """Return requests and tokens a second of a saturated run, without its ramp and its drain."""
    load = VirtualLoad(workload=workload_of({}, seed=99), max_model_len=settings.max_model_len)
    concurrency = 4 * settings.max_num_seqs
    sent = Load(requests=load.requests(requests), concurrency=concurrency)
    played = server_of(settings, shown=False).play(sent)
    ends = np.sort([each.end_ns for each in played.exchanges])
    tokens = np.concatenate([np.array(each.token_ns) for each in played.exchanges])
    first, last = int(ends[concurrency]), int(ends[-concurrency])
    seconds = (last - first) / 1e9
    inside = int(((tokens > first) & (tokens <= last)).sum())
    return (len(ends) - 2 * concurrency) / seconds, inside / seconds


def a_step(rate: float, seed: int, *, seconds: float = 60.0) -> Step:
    return Step(kind="level", label="open", load="open", level=rate, duration=seconds, seed=seed)


def offered_tokens_per_s(data: StepData, seconds: float) -> float:
    """Return the output tokens a second that were asked for."""
    return float(data.requests.max_tokens.sum()) / seconds


def verdict(*, size: int) -> None:
    """Print the verdicts of single steps of 60 s, by the load in tokens that they really were."""
    rates = (0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0, 1.03, 1.06, 1.1, 1.15, 1.3)
    counters: dict[tuple[float, bool], list[Counter[str | None]]] = {}
    for engine, settings in enumerate(ENGINES[: least(size, 2, 4, 8)]):
        requests_per_s, tokens_per_s = truth_of(settings, requests=least(size, 4000, 8000, 20_000))
        for (at, rate), repeat in product(enumerate(rates), range(max(1, 3 * size))):
            step = a_step(rate * requests_per_s, 10_000 * engine + 100 * at + repeat)
            data = run_step(step, server_of(settings), scrape_s=1.0, parts="none")
            place = int(np.searchsorted(EDGES, offered_tokens_per_s(data, 60.0) / tokens_per_s, side="right")) - 1
            judged = outcome(step, data).stability or Stability(verdict=None, reason="not judged")
            counters.setdefault((60.0, True), [Counter() for _ in EDGES])[place][judged.verdict] += 1
    head("step", *(f"{low:g} - {high:g}" for low, high in zip(EDGES, (*EDGES[1:], 1.5), strict=True)))
    for (seconds, _), row_of in counters.items():
        texts = (" / ".join(f"{100 * cell[name] / max(1, cell.total()):.0f}" for name in VERDICTS) for cell in row_of)
        row(f"{seconds:g} s", *(f"{text} (n {cell.total()})" for text, cell in zip(texts, row_of, strict=True)))


# Comparisons


def false(*, size: int) -> None:
    """Print how often systems that are the same are called different, by pairs, load and metric; without a margin."""
    studies = 800 * size or 100
    head("load", "pairs", *METRICS, "any of them, after Holm")
    for load, pairs in product((0.5, 0.6, 0.7, 0.8, 0.9) if size else (0.5, 0.7, 0.9), (3, 5, 10)):
        differ: Counter[str] = Counter()
        for study in range(studies):
            random = np.random.default_rng([3, int(100 * load), pairs, study])
            family = compared([twins(random, load) for _ in range(pairs)], margin=0.0)
            differ.update(name for name, each in family.items() if each.verdict in {"better", "worse"})
            differ["any"] += any(each.verdict in {"better", "worse"} for each in of_family(family).values())
        row(load, pairs, *(share(differ[name], studies) for name in (*METRICS, "any")))


METRICS = ("ttft_p50", "ttft_p99", "tpot_p50", "e2e_p50")
Pair = tuple[dict[str, float], dict[str, float]]


def twins(random: np.random.Generator, load: float, *, seconds: float = 60.0, servers: int = 16) -> Pair:
    """Return the metrics of two runs of one system with the same requests: each of its times varies by 5 %."""
    per_s = 6.0
    arrived_s = np.sort(random.uniform(0, seconds, random.poisson(load * per_s * seconds)))
    tokens = np.maximum(1, np.rint(took(random, len(arrived_s), 160, 0.4)))
    runs = []
    for _ in range(2):
        token_s = servers / per_s / 160 * random.lognormal(0, 0.05, len(arrived_s))
        prefill_s = 0.05 * random.lognormal(0, 0.05, len(arrived_s))
        queue = served(arrived_s, prefill_s + tokens * token_s, servers=servers)
        ttft_s = queue.begun_s - arrived_s + prefill_s
        runs.append(
            {
                "ttft_p50": float(np.median(ttft_s)),
                "ttft_p99": float(np.quantile(ttft_s, 0.99)),
                "tpot_p50": float(np.median(token_s)),
                "e2e_p50": float(np.median(queue.ended_s - arrived_s)),
            }
        )
    return runs[0], runs[1]


def compared(pairs: Sequence[Pair], *, margin: float = 0.05) -> dict[str, Comparison]:
    return {name: paired([a[name] for a, _ in pairs], [b[name] for _, b in pairs], margin) for name in METRICS}


def engine_pairs(first: EngineSettings, second: EngineSettings, rate: float, *, seed: int, pairs: int) -> list[Pair]:
    """Return the metrics of pairs of 60 s, in random order, on two engines that run all the while."""
    random = np.random.default_rng([4, seed])
    servers = [server_of(each, shown=False) for each in (first, second)]
    results: list[Pair] = []
    for at in range(pairs):
        runs: dict[int, dict[str, float]] = {}
        for side in random.permutation(2).tolist():
            server = servers[side]
            server.now_ns = max(each.now_ns for each in servers) + 2_000_000_000
            runs[side] = metrics_of(run_step(a_step(rate, 1000 * seed + at), server, scrape_s=None, parts="none"))
        results.append((runs[0], runs[1]))
    return results


def metrics_of(data: StepData) -> dict[str, float]:
    log = data.requests
    times = request_metrics(take(log, log.status == "ok"))
    return {
        "ttft_p50": float(np.nanmedian(times.ttft_ms)),
        "ttft_p99": float(np.nanquantile(times.ttft_ms, 0.99)),
        "tpot_p50": float(np.nanmedian(times.tpot_ms)),
        "e2e_p50": float(np.nanmedian(times.e2e_ms)),
    }


def power(*, size: int) -> None:
    """Print what five pairs of 60 s at 70 % load say of engines that differ, and of equals."""
    studies = 12 * size or 6
    rate = 0.7 * truth_of(EngineSettings(), requests=least(size, 4000, 8000, 20_000))[0]
    cases = {
        "5 % slower": EngineSettings(seed=7, slow=1.05),
        "10 % slower": EngineSettings(seed=7, slow=1.1),
        "equal": EngineSettings(seed=7),
        "equal, both drift 5 %/h": EngineSettings(seed=7, drift_per_h=0.05),
    }
    head("B", "verdict", *METRICS)
    for name, second in cases.items():
        first = EngineSettings(seed=0, drift_per_h=second.drift_per_h)
        verdicts: dict[str, Counter[str | None]] = {metric: Counter() for metric in METRICS}
        for study in range(studies):
            for metric, each in compared(engine_pairs(first, second, rate, seed=study, pairs=5)).items():
                verdicts[metric][each.verdict] += 1
        for kind in ("worse", "better", "equivalent", "inconclusive"):
            row(name, kind, *(share(verdicts[metric][kind], studies) for metric in METRICS))


# The limit


def limit(*, size: int) -> None:
    """Print how far the limit and the highest level of a throughput study are from the truth, by engine."""
    head(
        "engine",
        "studies",
        "limit within 3 %",
        "within 5 %",
        "interval holds",
        "bias, sd, %",
        "steps, most",
        "time, min",
    )
    totals: list[tuple[float, bool, int, float]] = []
    for settings in ENGINES if size else ENGINES[:2]:
        _, tokens_per_s = truth_of(settings, requests=least(size, 4000, 8000, 20_000))
        studies = [_study(settings, seed, tokens_per_s) for seed in range(3 * size or 2)]
        totals += studies
        _limit_row(_name(settings), studies)
    _limit_row("all", totals)


def _study(settings: EngineSettings, seed: int, truth: float) -> tuple[float, bool, int, float]:
    """Return the limit over the truth, whether its interval holds it, the steps, and the minutes that they took."""
    asked = Asked(
        test="throughput",
        scale="short",
        parameters=Parameters(duration=60.0, min=0.01, max=10_000.0, increment=0.01),
        seed=seed,
    )
    steps, findings = play(THROUGHPUT, asked, settings, scrape_s=1.0, parts="none")
    result = findings.results["limit_output_tokens_per_s"]
    low, high = result.ci95 or (None, None)
    held = low is not None and high is not None and low <= truth <= high
    minutes = sum(each.step.duration or 0 for each in steps) / 60
    return (result.value or math.nan) / truth, held, len(steps), minutes


def _limit_row(name: str, studies: Sequence[tuple[float, bool, int, float]]) -> None:
    off, count = np.array([study[0] for study in studies]) - 1, len(studies)
    row(
        name,
        count,
        *(share(int((np.abs(off) <= within).sum()), count) for within in (0.03, 0.05)),
        share(sum(study[1] for study in studies), count),
        f"{100 * off.mean():+.1f}, {100 * off.std():.1f}",
        max(study[2] for study in studies),
        f"{np.mean([study[3] for study in studies]):.0f}",
    )


def _name(settings: EngineSettings) -> str:
    usual, fields = EngineSettings(), ("max_num_seqs", "kv_blocks", "max_num_batched_tokens", "slow")
    values = ((name, getattr(settings, name)) for name in fields)
    differs = (f"{name} {value:g}" for name, value in values if value != getattr(usual, name))
    return ", ".join(differs) or "demo"


SECTIONS: dict[str, Callable[..., None]] = {
    "intervals": intervals,
    "verdict": verdict,
    "false": false,
    "power": power,
    "limit": limit,
}


def main() -> None:
    """Print the sections that are asked for, all without names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all by default")
    parser.add_argument("--size", type=int, default=0, help="how many simulations: 1 as quoted, 0 (default) a few")
    options = parser.parse_args()
    for name in options.sections or SECTIONS:
        print(f"\n{name}")
        SECTIONS[name](size=options.size)


if __name__ == "__main__":
    main()
