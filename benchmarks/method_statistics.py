"""How often the methodology's statistics are right, in virtual time: intervals, verdicts, comparisons, limits.

`python benchmarks/method_statistics.py [--size N] [--results FILE] [SECTION ...]` prints the tables of
benchmarks/RESULTS.md, which have size 25; with 1, the default, a section takes some minutes, and with more so many
times the simulations.
A file keeps the results of single studies: what was stopped goes on from there. Sections: intervals false limit binding
verdict power until slo. Behind a share stands its Wilson interval at 95 %; seeds are fixed.

Queues are M/G/k with log-normal service times of variation 1; engines are the simulator's, with a page.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

# This folder last: the package of the same name comes before this file.
sys.path.append(sys.path.pop(0))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import method_studies as studies
from method_studies import ENGINES, Ledger, Result
from queues import served, took
from scipy.stats import binomtest

from sidelight.correlator.statistics.intervals import quantiles
from sidelight.methodology.compare import Comparison, of_family, paired
from sidelight.methodology.measures.looks import LOOKS

Floats = npt.NDArray[np.float64]

QUANTILES = (0.5, 0.9, 0.95, 0.99)
LOADS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95)
SERVERS = (1, 8, 16)
QUOTED = 25  # the size of the tables
LEAST_CELL = 20  # intervals that a cell's share is worth something of
VERDICTS = ("stable", "undecided", "growing")
RATES = (0.6, 0.7, 0.8, 0.85, 0.88, 0.93, 1.0, 1.03, 1.05, 1.07, 1.15, 1.25)
EDGES = (0.0, 0.9, 0.97, 1.03, 1.1)


def share(hits: int, count: int) -> str:
    """Return a share in per cent with its Wilson interval at 95 %."""
    if not count:
        return "-"
    interval = binomtest(hits, count).proportion_ci(method="wilson")
    return f"{100 * hits / count:.1f} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


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


def intervals(_: Ledger, size: int) -> None:
    """Print how often 95 % intervals hold the truth, by load: of those that are given, and of all runs how many err."""
    usual = {1000: 120, 3000: 120, 10_000: 100, 30_000: 50, 100_000: 30}
    counts = {count: math.ceil(runs * size / QUOTED) for count, runs in usual.items()}
    cells: dict[tuple[int, float, int, float], list[bool | None]] = {}
    for servers, load in product(SERVERS, LOADS):
        times_s = times_in_flight(servers, load, runs=max(20, 8 * size), size=100_000)
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


# Comparisons of queues


def false(_: Ledger, size: int) -> None:
    """Print how often systems that are the same are called different, by pairs, load and metric; without a margin."""
    count = 80 * size
    head("load", "pairs", *METRICS, "any of them, after Holm")
    for load, pairs in product((0.5, 0.6, 0.7, 0.8, 0.9), (3, 5, 10)):
        differ: Counter[str] = Counter()
        for study in range(count):
            random = np.random.default_rng([3, int(100 * load), pairs, study])
            family = compared([twins(random, load) for _ in range(pairs)], margin=0.0)
            differ.update(name for name, each in family.items() if each.verdict in {"better", "worse"})
            differ["any"] += any(each.verdict in {"better", "worse"} for each in of_family(family).values())
        row(load, pairs, *(share(differ[name], count) for name in (*METRICS, "any")))


METRICS = ("ttft_p50", "ttft_p99", "tpot_p50", "e2e_p50")
Pair = tuple[dict[str, float], dict[str, float]]


def twins(
    random: np.random.Generator, load: float, *, seconds: float = 60.0, servers: int = 16, slow: float = 1.0
) -> Pair:
    """Return the metrics of two runs with the same requests, whose times vary by 5 %; the second may be slower."""
    per_s = 6.0
    arrived_s = np.sort(random.uniform(0, seconds, random.poisson(load * per_s * seconds)))
    tokens = np.maximum(1, np.rint(took(random, len(arrived_s), 160, 0.4)))
    runs = []
    for times in (1.0, slow):
        token_s = times * servers / per_s / 160 * random.lognormal(0, 0.05, len(arrived_s))
        prefill_s = times * 0.05 * random.lognormal(0, 0.05, len(arrived_s))
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


def compared(pairs: Iterable[Sequence[dict[str, float]]], *, margin: float = 0.05) -> dict[str, Comparison]:
    first, second = zip(*pairs, strict=True)
    return {name: paired([a[name] for a in first], [b[name] for b in second], margin) for name in METRICS}


def power(ledger: Ledger, size: int) -> None:
    """Print what five pairs of 60 s at 70 % load say of systems that differ, and of equals."""
    head("of 60 s at 70 %", "B", "studies", "verdict", *METRICS)
    for name, slow in {"5 % slower": 1.05, "10 % slower": 1.1, "equal": 1.0}.items():
        random = np.random.default_rng([7, round(100 * slow)])
        _power_rows("queues", name, [[twins(random, 0.7, slow=slow) for _ in range(5)] for _ in range(80 * size)])
    for name in studies.SECONDS:
        _power_rows("engines", name, [studies.engine_pairs(ledger, name, at)["pairs"] for at in range(4 * size)])


def _power_rows(system: str, name: str, known: Sequence[Iterable[Sequence[dict[str, float]]]]) -> None:
    for margin, kinds in ((0.05, ("worse", "better", "equivalent", "inconclusive")), (0.0, ("worse", "better"))):
        verdicts = [compared(each, margin=margin) for each in known]
        for kind in kinds:
            hits = [sum(each[metric].verdict == kind for each in verdicts) for metric in METRICS]
            if any(hits):
                said = kind if margin else f"{kind}, without a margin"
                row(system, name, len(known), said, *(share(each, len(known)) for each in hits))


# Studies of engines


def limit(ledger: Ledger, size: int) -> None:
    """Print how far the limit of a throughput study is from the truth, by engine."""
    titles = ("limit within 3 %", "within 5 %", "interval holds", "bias, sd, %", "steps, most", "load, min")
    head("engine", "studies", *titles)
    everything: list[tuple[float, Result]] = []
    for name in (*ENGINES, "all"):
        truth = 0.0 if name == "all" else studies.truth_of(ledger, name)["tokens_per_s"]
        known = [(truth, studies.limit(ledger, name, number)) for number in range(size)] if truth else everything
        everything += known if truth else []
        errors = np.array([each["value"] / truth for truth, each in known]) - 1
        row(
            name,
            len(known),
            *(share(int((np.abs(errors) <= within).sum()), len(known)) for within in (0.03, 0.05)),
            share(sum(_holds(each["ci95"], truth) for truth, each in known), len(known)),
            f"{100 * errors.mean():+.1f}, {100 * errors.std():.1f}",
            max(each["steps"] for _, each in known),
            f"{np.mean([each['minutes'] for _, each in known]):.0f}",
        )


def _holds(ci95: Sequence[float | None] | None, truth: float) -> bool:
    low, high = ci95 or (None, None)
    return low is not None and high is not None and low <= truth <= high


def binding(ledger: Ledger, size: int) -> None:
    """Print what throughput studies of drawn settings name as what binds, by the truth."""
    known = [studies.binding(ledger, number) for number in range(4 * size)]
    said = sorted({str(each["said"]) for each in known})
    head("truth", "settings", "right, %", *said)
    for kind in (*sorted({each["truth"] for each in known}), "all"):
        of_kind = [each for each in known if kind in (each["truth"], "all")]
        counts = Counter(str(each["said"]) for each in of_kind)
        right = sum(each["said"] == each["truth"] for each in of_kind)
        row(kind, len(of_kind), share(right, len(of_kind)), *(counts[name] for name in said))


def verdict(ledger: Ledger, size: int) -> None:
    """Print the verdicts of single steps of 60 s, by the load in tokens that they really were."""
    counters = [Counter[str]() for _ in EDGES]
    for name, rate, repeat in product(ENGINES, RATES, range(math.ceil(size / 2))):
        result = studies.verdict(ledger, name, rate, repeat)
        counters[int(np.searchsorted(EDGES, result["load"], side="right")) - 1][str(result["verdict"])] += 1
    head("load", "steps", *VERDICTS)
    for low, high, counter in zip(EDGES, (*EDGES[1:], 1.5), counters, strict=True):
        row(f"{low:g} - {high:g}", counter.total(), *(share(counter[name], counter.total()) for name in VERDICTS))


def until(_: Ledger, size: int) -> None:
    """Print how often the interval holds the truth after `--until` ended, at whatever look and at an early one."""
    head("until", "studies", "have an interval, %", "of these hold, %", "of them ended early", "of these hold, %")
    everything: list[tuple[int, bool | None]] = []
    for text in studies.UNTIL:
        known = [_until(*case, text, seed) for case in product(SERVERS, LOADS[:3]) for seed in range(4 * size)]
        _until_row(text, known)
        everything += known
    _until_row("all", everything)


def _until(servers: int, load: float, text: str, seed: int) -> tuple[int, bool | None]:
    """Return the looks of a study, and whether its interval holds the truth; None where it has none."""
    result = studies.until_of_queue(servers, load, text, seed)
    if None in (result["ci95"] or (None,)):
        return result["looks"], None
    return result["looks"], _holds(result["ci95"], true_percentile(servers, load, studies.UNTIL[text]))


def _until_row(text: str, known: Sequence[tuple[int, bool | None]]) -> None:
    held_at = [(looks, held) for looks, held in known if held is not None]
    early = [held for looks, held in held_at if looks < LOOKS]
    shares = share(len(held_at), len(known)), share(sum(held for _, held in held_at), len(held_at))
    row(text, len(known), *shares, len(early), share(sum(early), len(early)))


@cache
def true_percentile(servers: int, load: float, name: str) -> float:
    """Return a percentile of the time in flight, ms, of 200 steady runs of 20,000 requests."""
    times_s = times_in_flight(servers, load, runs=200, size=20_000)
    return 1e3 * float(np.quantile(times_s, int(name[1:]) / 100))


def slo(ledger: Ledger, size: int) -> None:
    """Print how far the load at P99 < 500 ms is from the truth, of studies of the demo engine, by the steps' length."""
    truth = studies.load_at_objective(ledger, "demo")["per_s"]
    head("steps", "studies", "within 8 %", "interval holds", "bias, sd, %", "steps, most", "of them at it, most")
    for seconds in (300.0, 60.0):
        known = [studies.at_objective(ledger, "demo", seconds, seed) for seed in range(math.ceil(size / 2))]
        errors = np.array([(each["value"] or math.nan) / truth for each in known]) - 1
        row(
            f"{seconds:g} s",
            len(known),
            share(int((np.abs(errors) <= 0.08).sum()), len(known)),
            share(sum(_holds(each["ci95"], truth) for each in known), len(known)),
            f"{100 * np.nanmean(errors):+.1f}, {100 * np.nanstd(errors):.1f}",
            max(each["steps"] for each in known),
            max(each["slo_steps"] for each in known),
        )


SECTIONS: dict[str, Callable[[Ledger, int], None]] = {
    "intervals": intervals,
    "false": false,
    "limit": limit,
    "binding": binding,
    "verdict": verdict,
    "power": power,
    "until": until,
    "slo": slo,
}


def main() -> None:
    """Print the sections that are asked for, all without names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all by default")
    parser.add_argument(
        "--size", type=int, default=1, help=f"how many simulations: {QUOTED} as quoted, 1 a few (default)"
    )
    parser.add_argument("--results", type=Path, help="file that keeps the results of studies, as lines of JSON")
    options = parser.parse_args()
    ledger = Ledger(path=options.results)
    for name in options.sections or SECTIONS:
        print(f"\n{name}")
        SECTIONS[name](ledger, options.size)


if __name__ == "__main__":
    main()
