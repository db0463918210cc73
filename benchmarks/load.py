"""Our load workers beside a bare client and a peer, in one run, against a server in C whose true times are known.

    python benchmarks/load.py [--bench DIR] [--aiperf PATH] [--repeat N] [--part NAME] [--json FILE]

DIR holds `mockllm.c` (built here with gcc) and `rawclient.py`, the floor: one uvloop process that
stamps and keeps nothing.
Ours are the load workers as a session starts them: log, flushes and compression included, conductor and scraper not.
CPU-seconds come from the kernel's account of the ended process; start-up is taken out by the difference of two run
lengths. Each cost is the least of N measurements: on a machine that does other things as well, the least says most.
Errors of TTFT are those of the run in the middle.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from load_clients import Bench, Load, Outcome, measure
from numpy.typing import NDArray
from scipy import stats

from sidelight.loadgen.transports.lateness import add_counts, quantile_ns

Row = dict[str, float | str]


def cpu_per_1000_chunks(bench: Bench, client: str, short: Load, long: Load) -> float:
    """CPU-seconds a 1000 chunks, start-up taken out by the difference of two run lengths; the least of each length."""
    runs = [[measure(bench, client, load) for load in (short, long)] for _ in range(bench.repeat)]
    ends = [min((pair[end] for pair in runs), key=lambda run: run.cpu_s) for end in (0, 1)]
    return 1000 * (ends[1].cpu_s - ends[0].cpu_s) / (ends[1].chunks - ends[0].chunks)


def requests_per_s(outcome: Outcome) -> float:
    """From the first arrival to the last end, as the mock saw them."""
    truth = outcome.truth
    span_ns = (truth["arr_wall_ns"] + truth["e2e_ns"]).max() - truth["arr_wall_ns"].min()
    return len(truth["ttft_ns"]) / (float(span_ns) / 1e9)


def ttft_errors_ms(outcome: Outcome) -> tuple[float, float]:
    """Reported minus true TTFT: the difference of the means, and of the 99th percentiles."""
    truth_ms = outcome.truth["ttft_ns"] / 1e6
    p99_ms = float(np.quantile(truth_ms, 0.99))
    if outcome.log is not None:
        told_ms = (outcome.log.first_output_ns - outcome.log.submit_ns) / 1e6
        return float(told_ms.mean() - truth_ms.mean()), float(np.quantile(told_ms, 0.99)) - p99_ms
    if "ttft_mean" in outcome.said:
        return outcome.said["ttft_mean"] - truth_ms.mean(), outcome.said["ttft_ms"]["p99"] - p99_ms
    told = outcome.said["time_to_first_token"]
    return told["avg"] - truth_ms.mean(), told["p99"] - p99_ms


def lateness_ms(outcome: Outcome) -> dict[str, float]:
    """Dispatch behind schedule, p50, p99 and the largest."""
    if outcome.log is None:
        return {name: outcome.said["late_ms"][name] for name in ("p50", "p99", "max")}
    late_ms = (outcome.log.dispatch_ns - outcome.log.scheduled_ns) / 1e6
    p50, p99 = np.quantile(late_ms, [0.5, 0.99])
    return {"p50": float(p50), "p99": float(p99), "max": float(late_ms.max())}


def poisson_p_values(submit_ns: NDArray[np.int64], rate_per_s: float) -> tuple[float, float]:
    """Kolmogorov and Smirnov's p-values of a Poisson process: of gaps as exponential, of arrivals as uniform."""
    at_s = np.sort(submit_ns - submit_ns.min()) / 1e9
    gaps = stats.kstest(np.diff(at_s), "expon", args=(0, 1 / rate_per_s))
    # Given how many there are and the last one, the arrivals before it are uniform.
    arrivals = stats.kstest(at_s[1:-1] / at_s[-1], "uniform")
    return float(gaps.pvalue), float(arrivals.pvalue)


def own_lateness(outcome: Outcome) -> str:
    """What the run says of itself: read lateness (user behind kernel) and pauses of the garbage collector."""
    last = {stat.worker: stat for stat in outcome.stats}.values()
    counts = add_counts(stat.read_late_counts for stat in last)
    p50, p99 = (quantile_ns(counts, q) / 1e6 for q in (0.5, 0.99))
    late_max_ms, gc_max_ms = max(s.read_late_max_ns for s in last) / 1e6, max(s.gc_pause_max_ns for s in last) / 1e6
    return f"read lateness p50 {p50:.3f} p99 {p99:.2f} max {late_max_ms:.1f} ms, GC at most {gc_max_ms:.1f} ms"


def run_cpu(bench: Bench, rows: list[Row]) -> None:
    """CPU-seconds a 1000 chunks: paced, and coalesced as far as the mock sends them together."""
    paced = [Load(requests=50 * n, tokens=200, concurrency=50) for n in (2, 6)]
    fast = "--ttft-ms 0 --itl-ms 0 --flush-each 0"
    joined = [Load(requests=n, tokens=200, concurrency=50, mock=fast) for n in (500, 3000)]
    each = [Load(requests=n, tokens=200, concurrency=50, mock="--ttft-ms 0 --itl-ms 0") for n in (500, 2000)]
    for what, (short, long) in (
        ("paced 50 x 200, 10 ms apart", paced), ("unpaced 50 x 200, a write a chunk", each),
        ("unpaced 50 x 200, one write", joined),
    ):  # fmt: skip
        for client in bench.clients:
            _say(rows, f"CPU-s / 1000 chunks, {what}", client, cpu_per_1000_chunks(bench, client, short, long))


def run_ceiling(bench: Bench, rows: list[Row]) -> None:
    """Requests/s at 200 streams x 50 tokens, mock and client on a core each; 2 workers on both."""
    for what, workers, cores in (("2 cores", 1, (0, 1)), ("2 workers, unbound", 2, None)):
        load = Load(
            requests=6000, tokens=50, concurrency=200, workers=workers, mock="--ttft-ms 0 --itl-ms 0", cores=cores
        )
        for client in bench.clients if workers == 1 else ["ours"]:
            runs = [measure(bench, client, load) for _ in range(bench.repeat)]
            cost = min(1e6 * run.cpu_s / load.requests for run in runs)
            note = f"{cost:.0f} us of CPU a request, start-up included"
            _say(rows, f"requests/s, 200 streams x 50, {what}", client, max(map(requests_per_s, runs)), note)


def run_ttft(bench: Bench, rows: list[Row]) -> None:
    """TTFT against the mock's own."""
    for streams in (50, 200):
        load = Load(requests=4 * streams, tokens=200, concurrency=streams)
        for client in bench.clients:
            runs = [measure(bench, client, load) for _ in range(bench.repeat)]
            # The one in the middle: an error may be on either side, and its least says nothing.
            middle = sorted(runs, key=lambda run: ttft_errors_ms(run)[0])[len(runs) // 2]
            mean, p99 = ttft_errors_ms(middle)
            note = own_lateness(middle) if middle.stats else ""
            _say(rows, f"TTFT mean error ms, {streams} x 200", client, mean, note)
            _say(rows, f"TTFT p99 error ms, {streams} x 200", client, p99)
            if middle.log is not None:
                _say(rows, f"log bytes a chunk, {streams} x 200", client, middle.log_bytes / middle.chunks)
                _say(rows, f"peak RSS MB, {streams} x 200", client, middle.rss_mb)


def run_open(bench: Bench, rows: list[Row]) -> None:
    """How late submissions are in an open loop, and whether they still are a Poisson process."""
    for rate_per_s in (500, 2000):
        load = Load(requests=5 * rate_per_s, tokens=5, rate_per_s=rate_per_s, mock="--ttft-ms 20 --itl-ms 5")
        for client in [client for client in bench.clients if client != "aiperf"]:
            runs = [measure(bench, client, load) for _ in range(bench.repeat)]
            best = min(runs, key=lambda run: lateness_ms(run)["p99"])
            for name, value in lateness_ms(best).items():
                _say(rows, f"lateness {name} ms, Poisson {rate_per_s}/s", client, value)
            if best.log is not None:
                gaps, arrivals = poisson_p_values(best.log.submit_ns, rate_per_s)
                _say(rows, f"KS p-value of submitted gaps, Poisson {rate_per_s}/s", client, gaps)
                _say(rows, f"KS p-value of submissions, Poisson {rate_per_s}/s", client, arrivals)


def run_memory(bench: Bench, rows: list[Row]) -> None:
    """Peak memory of a worker must not grow with the run."""
    for requests in (2000, 10_000):
        load = Load(requests=requests, tokens=200, concurrency=200, mock="--ttft-ms 5 --itl-ms 2")
        done = measure(bench, "ours", load)
        _say(rows, f"peak RSS MB, {requests} x 200", "ours", done.rss_mb)
        _say(rows, f"log bytes a chunk, {requests} x 200", "ours", done.log_bytes / done.chunks)


PARTS = {"cpu": run_cpu, "ceiling": run_ceiling, "ttft": run_ttft, "open": run_open, "memory": run_memory}


def main() -> None:
    """Print a line a figure, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, default=Path(__file__).parents[2] / "shared/bench")
    parser.add_argument("--aiperf", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--part", choices=PARTS, action="append")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sidelight-mock-") as name:
        mock = Path(name) / "mockllm"
        subprocess.run(
            [shutil.which("gcc") or "cc", "-O2", "-w", "-o", mock, given.bench / "mockllm.c", "-lm"], check=True
        )
        clients = ["ours", "bare", *(["aiperf"] if given.aiperf else [])]
        bench = Bench(
            mock=mock, sources=given.bench, aiperf=given.aiperf or Path(), clients=clients, repeat=given.repeat
        )
        about = _about(clients)
        print(" ".join(f"{key} {value}" for key, value in about.items()))
        for part in given.part or PARTS:
            PARTS[part](bench, rows)
    if given.json:
        given.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def _about(clients: Sequence[str]) -> dict[str, str]:
    versions = {name: importlib.metadata.version(name) for name in ("uvloop", "msgspec", "numpy")}
    return {
        "Python": platform.python_version(), **versions, "cores": str(os.cpu_count()), "machine": platform.machine(),
        "clients": "+".join(clients), "load": f"{os.getloadavg()[0]:.1f}",
    }  # fmt: skip


def _say(rows: list[Row], what: str, client: str, value: float, note: str = "") -> None:
    rows.append({"what": what, "client": client, "value": value, "note": note})
    print(f"{what:55} {client:7} {value:10.4g}  {note}", flush=True)


if __name__ == "__main__":
    main()
