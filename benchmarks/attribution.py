"""What `correlator.estimate` reaches on recorded and simulated runs, beside the naive ways and the design note.

Usage: PYTHONPATH=tests python benchmarks/attribution.py [directory of the recordings]. The recordings of a real vLLM
have its spans as truth; without them only the simulated runs are shown. About a minute.
"""

from __future__ import annotations

import itertools
import platform
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from quantiles import linear
from recordings import SHARED, Case, case_of
from simulated_cases import CHUNKED, Load, simulated

from sidelight.correlator.attribute import attribute
from sidelight.correlator.estimate.intervals import Observed, observe
from sidelight.correlator.estimate.table import Attribution
from sidelight.correlator.statistics.server_times import ServerPercentiles, server_percentiles
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.catalogue import catalogue
from sidelight.scraper.exposition import histograms
from sidelight.scraper.series.table import EndpointSeries

Floats = npt.NDArray[np.float64]

PARTS: tuple[Literal["queue", "prefill"], ...] = ("queue", "prefill")
CANCELLED_SEEDS = range(1, 9)
CHUNKED_SEEDS = range(301, 325)
QS = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the table: a case, how often it is scraped, and what the design note reached on its like."""

    case: Case
    scrape_s: float
    note: str


def main() -> None:
    """Print the tables."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else SHARED / "fixtures/vllm/recorded"
    print(f"Python {platform.python_version()}, numpy {version('numpy')}, scipy {version('scipy')}")
    print("\nper request; median / 95th percentile of the error in ms, and sum of errors over sum of truth")
    print("| case (mean queue / prefill, ms) | scrape, s | queue | WAPE | prefill | WAPE | exact, wrong |", end="")
    print(" 90 % covers | design note: queue, WAPE; prefill, WAPE | interval's mean | wait - mean prefill |", end="")
    print(" at first token | median of buckets |")
    sliced, read = [], []
    for row in (*recorded_rows(folder), *simulated_rows()):
        table = attribute(row.case.requests, row.case.scrapes)
        print(per_request(row, table))
        if row.scrape_s in {0.5, 1.0} and "%" not in row.case.name:
            read.append((row, table))
        if row.scrape_s <= 0.5:
            sliced.append((row, table))
    print_chunked(folder)
    print_cancelled(folder)
    print_slices(sliced)
    print_percentiles(read)
    print_cost()


def recorded_rows(folder: Path) -> Iterator[Row]:
    """Give the recordings of the real engine."""
    if not (folder / "main").is_dir():
        print(f"(no recordings at {folder})")
        return
    whole = case_of(folder / "main", "vLLM main")
    notes = {1: "0 / 13, 0.2 %; 0.9 / 10, 3 %", 5: "0 / 29, 0.5 %; 3.9 / 19, 7 %", 25: "0.2 / 33, 0.6 %; 6.5 / 24, 9 %"}
    for every, note in notes.items():
        yield Row(case=whole.every(every), scrape_s=0.2 * every, note=note)
    for seed in (1, 2, 3):
        hidden = replace(whole.every(5).withheld(0.3, seed), name="vLLM main, 30 % hidden")
        yield Row(case=hidden, scrape_s=1.0, note="0.1 / 50, 0.7 %; 9 / 39, 14 %")
    for name in ("multi_api_server", "edges"):
        yield Row(case=case_of(folder / name, f"vLLM {name}"), scrape_s=0.2, note="")


def simulated_rows() -> Iterator[Row]:
    """Give runs of the simulated engine like those of the design note, which had a simulator of its own."""
    light = simulated("sim 0.95", Load(utilisation=0.95, seconds=60, scrape_s=0.1))
    yield Row(case=light, scrape_s=0.1, note="(0.8) 0 / 1, 17 %; 1.9 / 16, 10 %")
    yield Row(case=light.every(10), scrape_s=1.0, note="(0.8) 0 / 30, 59 %; 2.5 / 34, 16 %")
    heavy = simulated("sim 1.2", Load(utilisation=1.2, seconds=60, scrape_s=0.1))
    for every, note in (
        (1, "5 / 29, 0.2 %; 2.1 / 16, 11 %"),
        (10, "8 / 46, 0.2 %; 3.5 / 30, 18 %"),
        (50, "10 / 55, 0.3 %; 3.3 / 40, 20 %"),
    ):
        yield Row(case=heavy.every(every), scrape_s=0.1 * every, note=note)
    shared = simulated("sim 1.1, 30 % foreign", Load(utilisation=1.1, seconds=60, scrape_s=0.25)).withheld(0.3, 1)
    yield Row(case=shared, scrape_s=0.25, note="9 / 44, 0.5 %; 3.8 / 29, 17 %")
    chunked = simulated("sim chunked prefill", Load(utilisation=0.47, seconds=60, scrape_s=0.25, budget_tokens=64))
    yield Row(case=chunked, scrape_s=0.25, note="0 / 80, 12 %; 7 / 79, 10 %")
    pair = simulated("sim 2 replicas", Load(utilisation=0.96, seconds=60, scrape_s=0.1, engines=2))
    yield Row(case=pair, scrape_s=0.1, note="0 / 33, 8 %; 3.2 / 32, 17 %")
    yield Row(case=pair.every(10), scrape_s=1.0, note="0 / 54, 16 %; 5.3 / 55, 29 %")
    cached = simulated("sim prefix cache", Load(utilisation=1.0, seconds=60, scrape_s=0.5, prefix_tokens=512))
    yield Row(case=cached, scrape_s=0.5, note="(second) 12 / 123, 2 %; 16 / 59, 17 %")
    far = simulated("sim 20 ms away", Load(utilisation=1.0, seconds=60, scrape_s=0.1, network_s=0.02, spikes=0.05))
    yield Row(case=far, scrape_s=0.1, note="prefill WAPE 19 to 32 %")


def per_request(row: Row, table: Attribution) -> str:
    """Return one row of table 1."""
    case = row.case
    found = [(getattr(case, f"{part}_s"), getattr(table, f"{part}_s")) for part in PARTS]
    exact = table.quality == "exact"
    wrong = int(sum((np.abs(truth - value)[exact] > 2e-3).sum() for truth, value in found))
    means = " / ".join(f"{1e3 * np.nanmean(truth):.0f}" for truth, _ in found)
    ours = [f"{_error(*pair)} | {_wape(*pair)}" for pair in found]
    covers = " / ".join(
        _covered(truth, value, getattr(table, f"{part}_sd_s"))
        for part, (truth, value) in zip(PARTS, found, strict=True)
    )
    naive = [" / ".join(_wape(pair[0], value) for pair, value in zip(found, way, strict=True)) for way in naives(case)]
    return (
        f"| {case.name} ({means}) | {row.scrape_s:g} | {' | '.join(ours)} | {100 * exact.mean():.0f} %, {wrong} "
        f"| {covers} | {row.note} | {' | '.join(naive)} |"
    )


def _error(truth: Floats, value: Floats) -> str:
    error = 1e3 * np.abs(truth - value)
    return f"{np.nanmedian(error):.1f} / {np.nanpercentile(error, 95):.1f}"


def _wape(truth: Floats, value: Floats) -> str:
    known = np.isfinite(truth) & np.isfinite(value)
    total = float(np.abs(truth[known]).sum())
    return f"{100 * np.abs(truth - value)[known].sum() / total:.1f} %" if total else "-"


def _covered(truth: Floats, value: Floats, sd: Floats) -> str:
    known = np.isfinite(truth) & np.isfinite(value)
    return f"{100 * (np.abs(truth - value)[known] <= 1.645 * sd[known] + 1e-6).mean():.0f} %"


def naives(case: Case) -> Iterator[tuple[Floats, Floats]]:
    """Give queue and prefill [n] by the naive ways.

    The mean of the scrape interval in which a request ended; its wait less the run's mean prefill; the mean of the
    interval of its first token; and the median that linear interpolation in the buckets gives.
    """
    engines = [one for one in map(observe, case.scrapes) if isinstance(one, Observed)]
    intervals = engines[0].ends
    busy = np.flatnonzero(intervals.count > 0)
    means = [intervals.sums[part][busy] / intervals.count[busy] for part in PARTS]
    requests = case.requests
    wait_s = np.where(requests.first_output_ns < 0, np.nan, (requests.first_output_ns - requests.submit_ns) / 1e9)

    def at(stamps_ns: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        place = np.minimum(np.searchsorted(intervals.end_ns[busy], stamps_ns), len(busy) - 1)
        return means[0][place], means[1][place]

    overall = float(intervals.sums["prefill"].sum() / intervals.count.sum())
    medians = [linear(one.bounds, one.counts, [0.5])[0] for one in (intervals.buckets[part] for part in PARTS)]
    size = len(wait_s)
    yield at(requests.end_ns)
    yield np.maximum(wait_s - overall, 0.0), np.full(size, overall)
    yield at(requests.first_output_ns)
    yield np.full(size, medians[0]), np.full(size, medians[1])


def cancelled(case: Case, share: float, seed: int, *, counted: bool) -> Case:
    """Let the client cancel a share of the requests between their first token and their end.

    The engine then observes nothing at their end: it is taken out of the pages. `counted`: usage came with every chunk,
    so that their prompts' tokens are known; else it would have come at the end.
    """
    random = np.random.default_rng(np.random.SeedSequence(seed))
    requests, size = case.requests, len(case.queue_s)
    chosen = random.random(size) < share
    served_ns = requests.end_ns - requests.first_output_ns
    end_ns = np.where(chosen, requests.first_output_ns + served_ns * random.random(size), requests.end_ns)
    seen = requests.chunk_ns <= np.repeat(end_ns, np.diff(requests.chunk_start))
    unknown = chosen & (not counted)
    changed = {
        "status": np.where(chosen, "cancelled", requests.status),
        "end_ns": end_ns.astype(np.int64),
        "input_tokens": np.where(unknown, -1, requests.input_tokens),
        "cached_tokens": np.where(unknown, -1, requests.cached_tokens),
        "output_tokens": np.where(chosen, -1, requests.output_tokens),
        "chunk_ns": requests.chunk_ns[seen],
        "chunk_chars": requests.chunk_chars[seen],
        "chunk_start": np.concatenate([[0], np.cumsum(seen)])[requests.chunk_start],
    }
    scrapes = (_without(case, chosen),)
    return replace(case, requests=replace(requests, **changed), scrapes=scrapes)


def _without(case: Case, chosen: npt.NDArray[np.bool_]) -> EndpointSeries:
    """Take what the engine observed of the chosen requests out of its pages, from the first one on that shows it."""
    (endpoint,) = case.scrapes
    observed = observe(endpoint)
    if isinstance(observed, Missing):
        raise TypeError(observed.reason)
    interval = attribute(case.requests, case.scrapes).interval[chosen]
    shown = (endpoint.at_ns[:, None] >= observed.ends.end_ns[interval]).astype(np.float64)
    families = catalogue("vllm").end_tokens
    held = {
        "vllm:request_queue_time_seconds": case.queue_s,
        "vllm:request_prefill_time_seconds": case.prefill_s,
        families["prompt_tokens"]: case.requests.input_tokens,
        families["computed_tokens"]: case.requests.input_tokens,  # nothing is cached in this recording
        families["output_tokens"]: case.requests.output_tokens,
    }
    values = endpoint.values.copy()
    for one in histograms(endpoint.series):
        if one.family in held:
            gone = np.asarray(held[one.family][chosen], dtype=np.float64)
            values[:, one.count] -= shown.sum(axis=1)
            values[:, one.sum] -= shown @ gone
            values[:, one.buckets] -= shown @ (gone[:, None] <= np.array(one.bounds))
    return replace(endpoint, values=values)


def print_cancelled(folder: Path) -> None:
    """Print how well the times of cancelled requests are known, which no histogram holds."""
    if not (folder / "main").is_dir():
        return
    whole = case_of(folder / "main")
    print("\nvLLM main, cancelled in mid-stream, 8 draws; WAPE and what 90 % intervals cover, queue / prefill")
    print("| scrape, s | share | prompt tokens | requests | WAPE | covers | of the others, covers |")
    for every, share, counted in itertools.product((1, 5, 25), (0.2, 0.5), (False, True)):
        drawn = [cancelled(whole, share, seed, counted=counted).every(every) for seed in CANCELLED_SEEDS]
        tables = [attribute(one.requests, one.scrapes) for one in drawn]
        missed = np.concatenate([table.quality == "prior" for table in tables])
        of, rest = [], []
        for part in PARTS:
            truth = np.concatenate([getattr(one, f"{part}_s") for one in drawn])
            value, sd = (np.concatenate([getattr(one, f"{part}{end}") for one in tables]) for end in ("_s", "_sd_s"))
            of.append((_wape(truth[missed], value[missed]), _covered(truth[missed], value[missed], sd[missed])))
            rest.append(_covered(truth[~missed], value[~missed], sd[~missed]))
        shown = " | ".join(" / ".join(one) for one in (*zip(*of, strict=True), rest))
        known = "known" if counted else "unknown"
        print(f"| {0.2 * every:g} | {100 * share:.0f} % | {known} | {missed.sum()} | {shown} |")


def print_chunked(folder: Path) -> None:
    """Print the share of truths that 90 % intervals hold where prefills are chunked, by how often pages are scraped."""
    drawn = {
        name: [simulated(name, replace(load, seed=seed)) for seed in CHUNKED_SEEDS] for name, load in CHUNKED.items()
    }
    if (folder / "main").is_dir():
        drawn |= {f"vLLM {name}": [case_of(folder / name)] for name in ("main", "multi_api_server")}
    print(f"\nwhat 90 % intervals of queue / prefill hold, {len(CHUNKED_SEEDS)} draws each of the simulated")
    print("| case | requests | 0.2 s | 0.6 s | 1 s | 2 s |")
    for name, cases in drawn.items():
        shown = []
        for every in (1, 3, 5, 10):
            thinned = [case.every(every) for case in cases]
            tables = [attribute(case.requests, case.scrapes) for case in thinned]
            shown.append(
                " / ".join(
                    _covered(
                        *(
                            np.concatenate(columns)
                            for columns in (
                                [getattr(case, f"{part}_s") for case in thinned],
                                [getattr(table, f"{part}_s") for table in tables],
                                [getattr(table, f"{part}_sd_s") for table in tables],
                            )
                        )
                    )
                    for part in PARTS
                )
            )
        print(f"| {name} | {len(cases[0].queue_s)} | {' | '.join(shown)} |")


def print_slices(rows: list[tuple[Row, Attribution]]) -> None:
    """Print the error of the means of 5 s slices, and the queue's share of the variance of the wait."""
    print("\n5 s slices by submission: mean error of the slice's mean, ms; queue's share of var(wait)")
    print("| case | scrape, s | queue | prefill | share, estimate / truth |")
    for row, table in rows:
        case = row.case
        known = np.isfinite(table.queue_s) & np.isfinite(case.queue_s)
        submit_ns = case.requests.submit_ns[known]
        place = (submit_ns - submit_ns.min()) // (5 * 10**9)
        errors = []
        for part in PARTS:
            off_s = (getattr(table, f"{part}_s") - getattr(case, f"{part}_s"))[known]
            errors.append(1e3 * float(np.mean([abs(off_s[place == one].mean()) for one in np.unique(place)])))
        wait_s = (case.requests.first_output_ns[known] - submit_ns) / 1e9
        shares = [np.cov(one[known], wait_s)[0, 1] / np.var(wait_s, ddof=1) for one in (table.queue_s, case.queue_s)]
        means, both = " | ".join(f"{one:.2f}" for one in errors), " / ".join(f"{one:.3f}" for one in shares)
        print(f"| {case.name} | {row.scrape_s:g} | {means} | {both} |")


def print_percentiles(rows: list[tuple[Row, Attribution]]) -> None:
    """Print percentiles of what the server did."""
    print("\np50 / p90 / p99, ms")
    print("| case | scrape, s | part | truth | linear in buckets | ours | from |")
    for row, table in rows:
        for part in PARTS:
            truth = getattr(row.case, f"{part}_s")
            found = server_percentiles(table, [observe(endpoint) for endpoint in row.case.scrapes], part, QS)
            engines = [one for one in map(observe, row.case.scrapes) if isinstance(one, Observed)]
            if not isinstance(found, ServerPercentiles) or not engines:
                continue
            held = engines[0].ends.buckets[part]
            three = (np.nanquantile(truth, QS), linear(held.bounds, held.counts, QS), found.values_s)
            shown = " | ".join(" / ".join(f"{1e3 * value:.0f}" for value in one) for one in three)
            print(f"| {row.case.name} | {row.scrape_s:g} | {part} | {shown} | {found.source} |")


def print_cost() -> None:
    """Print what 2,500, 5,000 and 10,000 requests cost, scraped six times a second."""
    print("\ncost: requests, scrapes, CPU s (least of 3)")
    for seconds in (100, 200, 400):
        case = simulated("cost", Load(utilisation=0.98, seconds=seconds, scrape_s=1 / 6))
        times = []
        for _ in range(3):
            began = time.process_time()
            attribute(case.requests, case.scrapes)
            times.append(time.process_time() - began)
        print(f"{len(case.queue_s)}, {len(case.scrapes[0].at_ns)}, {min(times):.2f}")
    print(f"largest resident size of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
