"""Reported latencies beside a server's own, with a load worker at about 20, 50 and 80 % of a core.

    python benchmarks/truth.py --bench DIR

DIR holds `mockllm.c`, as for load.py. It is built with kernel_arrival.h: a request arrives when the kernel says so, not
when the mock reads it, which on a busy core is later and is the server's wait; and a token is sent when it is handed to
the kernel. The true TTFT lies between the two. Of inter-token latency the mock logs each request's mean.
Requests come evenly, so that the n-th that was submitted is the n-th to arrive.
`stamp` is the error of the first token's stamp alone. `within` is the share of requests whose error is at most what the
worker's self-check states of itself.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from load_clients import Bench, Load, Outcome, measure

from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.self_check.check import SelfCheck, self_check

TOKENS = 200
RATES_PER_S = (60.0, 200.0, 320.0)
SECONDS = 12


def compared(outcome: Outcome, stamps_ns: np.ndarray) -> tuple[SelfCheck, dict[str, np.ndarray]]:
    """The self-check, and the errors of each request in ms: stamp, ttft, itl.

    stamps_ns  int64[n, 2], wall clock: when each request came to its socket, and its first token was sent
    """
    log, truth = outcome.log, outcome.truth
    if log is None:
        raise SystemExit("only our own workers have a log")
    check = self_check(log, outcome.stats, open_loop=True)
    ours, theirs = np.argsort(log.submit_ns), np.argsort(truth["arr_wall_ns"])
    told = request_metrics(log)
    true_itl_ms = (truth["e2e_ns"] - truth["ttft_ns"]) / 1e6 / (TOKENS - 1)
    arrived_ns, sent_ns = stamps_ns[np.argsort(stamps_ns[:, 0])].T
    return check, {
        "stamp": (log.first_token_ns[ours] - sent_ns) / 1e6,
        "ttft": told.ttft_ms[ours] - (sent_ns - arrived_ns) / 1e6,
        "itl": told.tpot_ms[ours] - true_itl_ms[theirs],
    }


def row(rate: float, outcome: Outcome, stamps_ns: np.ndarray) -> str:
    """One line of the table."""
    check, errors = compared(outcome, stamps_ns)
    stated = {name: getattr(check.error_ms, name).p99 for name in ("ttft", "itl")}
    cpu_ratio = check.cpu_ratio.max or 0.0
    cells = [f"{rate:g}", f"{100 * cpu_ratio:.0f} %", f"{stated['ttft']:.2f}, {stated['itl']:.2f}"]
    for name, error in errors.items():
        bound = stated["itl" if name == "itl" else "ttft"]
        p99, within = np.quantile(np.abs(error), 0.99), 100 * (np.abs(error) <= bound).mean()
        cells.append(f"{error.mean():+.3f}, {p99:.3f}, {within:.1f} %")
    return f"| {' | '.join((*cells, check.verdict))} |"


def main() -> None:
    """Print a row a load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, required=True, help="directory of mockllm.c and rawclient.py")
    given = parser.parse_args()
    print("| requests/s | CPU | stated TTFT, ITL, ms | error of stamp: mean, p99, within | TTFT | ITL | verdict |")
    with tempfile.TemporaryDirectory(prefix="sidelight-truth-") as name:
        mock, stamps = Path(name) / "mockllm", Path(name) / "stamps"
        os.environ["KERNEL_ARRIVAL"] = str(stamps)
        header = str(Path(__file__).with_name("kernel_arrival.h"))
        build = [shutil.which("gcc") or "cc", "-O2", "-w", "-include", header]
        subprocess.run([*build, "-o", mock, given.bench / "mockllm.c", "-lm"], check=True)
        bench = Bench(mock=mock, sources=given.bench, aiperf=Path(), clients=["ours"], repeat=1)
        for rate in RATES_PER_S:
            load = Load(requests=int(rate * SECONDS), tokens=TOKENS, rate_per_s=rate, arrival="uniform", cores=(0, 1))
            outcome = measure(bench, "ours", load)
            print(row(rate, outcome, np.loadtxt(stamps, np.int64)), flush=True)


if __name__ == "__main__":
    main()
