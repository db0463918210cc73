"""The clients that load.py compares, and the server in C that they are compared against."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal, Self

import numpy as np

from sidelight.loadgen.plan.arrivals import Arrival, schedule
from sidelight.loadgen.records import (
    PlannedRequest,
    RequestPart,
    WorkerStat,
    append_record,
    plan_end,
    read_log,
    read_plan,
)
from sidelight.loadgen.requests.table.fold import assemble
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.frames import FrameLog

PORT = 38_471
URL = f"http://127.0.0.1:{PORT}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One load on the mock: a closed loop of `concurrency`, or an open loop of `rate_per_s`."""

    requests: int
    tokens: int
    concurrency: int = 0
    rate_per_s: float = 0.0
    arrival: Literal["poisson", "uniform"] = "poisson"
    workers: int = 1
    mock: str = "--ttft-ms 20 --itl-ms 10"
    cores: tuple[int, int] | None = None  # the mock's, and the clients' where they are bound to one


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one run of one client cost and said. `chunks` as the mock counted them."""

    cpu_s: float
    chunks: int
    log: RequestLog | None = None
    stats: tuple[WorkerStat, ...] = ()
    said: dict[str, Any] = field(default_factory=dict)
    truth: dict[str, np.ndarray] = field(default_factory=dict)
    log_bytes: int = 0
    rss_mb: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What every measurement takes."""

    mock: Path
    sources: Path
    aiperf: Path
    clients: list[str]
    repeat: int


class Mock:
    """The server in C; owns the process."""

    def __init__(self, binary: Path, options: str, out: Path, *, core: int | None) -> None:
        self.log = out / "server.csv"
        pinned = ["taskset", "-c", str(core)] if core is not None else []
        self._process = subprocess.Popen([*pinned, binary, "--port", str(PORT), "--log", self.log, *options.split()])

    def __enter__(self) -> Self:
        for _ in range(200):
            try:
                self.stats()
            except OSError:
                time.sleep(0.02)
            else:
                return self
        raise SystemExit("the mock did not start")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(10)

    def stats(self) -> dict[str, int]:
        """Requests and chunks so far."""
        with urllib.request.urlopen(URL + "/stats", timeout=5) as reply:  # noqa: S310  # our own mock
            return dict(json.load(reply))

    def truth(self) -> dict[str, np.ndarray]:
        """Arrival and TTFT of each request; only whole once the mock has ended."""
        with self.log.open(encoding="ascii") as file:
            rows = list(csv.DictReader(file))
        return {name: np.array([int(row[name]) for row in rows]) for name in ("arr_wall_ns", "ttft_ns", "e2e_ns")}


def _reap(process: subprocess.Popen[Any]) -> float:
    """CPU seconds of a child that ended, its own children included."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{process.args!r} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def _write_plan(path: Path, load: Load) -> None:
    body = json.dumps(
        {
            "model": "mock-model",
            "stream": True,
            "max_completion_tokens": load.tokens,
            "messages": [{"role": "user", "content": "the " * 50}],
        }
    ).encode()
    due_ns = (
        schedule(Arrival(kind=load.arrival, rate_per_s=load.rate_per_s), seed=1, count=load.requests).tolist()
        if load.rate_per_s
        else [-1] * load.requests
    )
    log = FrameLog(path)
    for index, offset_ns in enumerate(due_ns):
        append_record(
            log,
            PlannedRequest(
                index=index, phase="measure", workload_class="bench", path="/v1/chat/completions", body=body,
                input_tokens=50, max_tokens=load.tokens, offset_ns=offset_ns,
            ),
        )  # fmt: skip
    append_record(log, plan_end("measure"))
    log.close()


def _hear(pipe: IO[bytes] | None, event: str) -> dict[str, Any]:
    line = json.loads((pipe.readline() if pipe is not None else b"") or b"{}")
    if line.get("event") != event:
        raise SystemExit(f"a load worker said {line} instead of {event!r}")
    return dict(line)


def _start_worker(number: int, load: Load, out: Path, offset_ns: int) -> subprocess.Popen[bytes]:
    spec = {
        "worker": number, "workers": load.workers, "run_id": "bench", "clock_offset_ns": offset_ns, "headers": {},
        "urls": [URL], "out": str(out / f"requests-{number}.log"), "request_timeout_s": 120.0,
    }  # fmt: skip
    pinned = ["taskset", "-c", str(load.cores[1])] if load.cores is not None and load.workers == 1 else []
    child = subprocess.Popen(
        [*pinned, sys.executable, "-m", "sidelight.loadgen.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    _tell(child, spec)
    return child


def _tell(child: subprocess.Popen[bytes], line: dict[str, Any]) -> None:
    if child.stdin is None:
        raise RuntimeError("a worker is started with a pipe")
    child.stdin.write(json.dumps(line).encode() + b"\n")
    child.stdin.flush()


def ours(mock: Mock, load: Load, out: Path) -> Outcome:
    """Run our load workers as a session does."""
    _write_plan(out / "plan", load)
    offset_ns = time.time_ns() - time.monotonic_ns()
    before = mock.stats()["chunks"]
    children = [_start_worker(number, load, out, offset_ns) for number in range(load.workers)]
    for child in children:
        _hear(child.stdout, "ready")
    run = {"cmd": "run", "plan": str(out / "plan"), "start_ns": time.monotonic_ns() + offset_ns + 100_000_000}
    if not load.rate_per_s:
        run["concurrency"] = load.concurrency
    for child in children:
        _tell(child, run)
    for child in children:
        _hear(child.stdout, "drained")
    chunks = mock.stats()["chunks"] - before
    for child in children:
        _tell(child, {"cmd": "exit"})
    cpu_s = sum(_reap(child) for child in children)
    logged = [record for path in sorted(out.glob("requests-*.log")) for record in read_log(path)]
    parts = [record for record in logged if isinstance(record, RequestPart)]
    stats = tuple(record for record in logged if isinstance(record, WorkerStat))
    return Outcome(
        cpu_s=cpu_s,
        chunks=chunks,
        log=assemble(read_plan(out / "plan"), parts, run_id="bench"),
        stats=stats,
        log_bytes=sum(path.stat().st_size for path in out.glob("requests-*.log")),
        rss_mb=max(stat.rss_bytes for stat in stats) / 1e6,
    )


def bare(mock: Mock, load: Load, raw: Path) -> Outcome:
    """Run the floor."""
    numbers = [load.concurrency or 64, load.requests, load.tokens, *([load.rate_per_s] if load.rate_per_s else [])]
    return _run([sys.executable, str(raw), URL, *map(str, numbers)], mock, load)


def aiperf(mock: Mock, load: Load, program: Path, out: Path, tokenizer: Path) -> Outcome:
    """Run the peer, with everything off that is not load."""
    flags = {
        "-m": "mock-model", "-u": URL, "--endpoint-type": "chat", "--tokenizer": tokenizer,
        "--request-count": load.requests, "--isl": 50, "--osl": load.tokens, "--extra-inputs": "ignore_eos:true",
        "--artifact-dir": out / "art", "--ui": "none",
        **({"--request-rate": load.rate_per_s} if load.rate_per_s else {"--concurrency": load.concurrency}),
    }  # fmt: skip
    options = [str(piece) for flag in flags.items() for piece in flag]
    switches = ["--streaming", "--use-server-token-count", "--no-gpu-telemetry", "--no-server-metrics"]
    done = _run([str(program), "profile", *options, *switches], mock, load)
    told = json.loads(next((out / "art").rglob("profile_export_aiperf.json")).read_text(encoding="utf-8"))
    return replace(done, said=told)


def _run(command: list[str], mock: Mock, load: Load) -> Outcome:
    pinned = ["taskset", "-c", str(load.cores[1])] if load.cores is not None else []
    before = mock.stats()["chunks"]
    with tempfile.TemporaryFile() as said:
        cpu_s = _reap(subprocess.Popen([*pinned, *command], stdout=said, stderr=subprocess.DEVNULL))
        said.seek(0)
        lines = said.read().splitlines()
    told = json.loads(lines[-1]) if lines and lines[-1].startswith(b"{") else {}
    return Outcome(cpu_s=cpu_s, chunks=mock.stats()["chunks"] - before, said=told)


def measure(bench: Bench, client: str, load: Load) -> Outcome:
    """Run a client against a mock of its own; what the mock says is the truth."""
    with tempfile.TemporaryDirectory(prefix="sidelight-bench-") as name:
        out = Path(name)
        with Mock(bench.mock, load.mock, out, core=load.cores[0] if load.cores is not None else None) as mock:
            if client == "ours":
                done = ours(mock, load, out)
            elif client == "bare":
                done = bare(mock, load, bench.sources / "rawclient.py")
            else:
                done = aiperf(mock, load, bench.aiperf, out, bench.sources / "tokenizer")
        return replace(done, truth=mock.truth())
