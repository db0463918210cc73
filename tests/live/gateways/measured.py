"""A gateway that runs for real between users and the simulated engine: what a run and a watch say of it, and whether
that is true.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from live.gateways.setups import HERE, KEY, Place, Setup
from live.gateways.users import use
from live.installs import environment
from live.runs import measure
from live.servers import answers, running
from processes import engine, start, until

from sidelight.sidecar.cli.measuring import free_pair

RATE_PER_S = 3.0
REQUESTS, USERS = 100, 50
LEAST_PASSED = 0.9
SLACK_MS, SLACK_RATIO, SLACK_SHARE = 5.0, 0.1, 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one command said of a gateway, and the truth.

    joined        requests whose breakdown is by spans
    passed        those in which spans of the gateway came; sglang-router sends none of one in twenty
    counted       by a watch's `sidelight_requests_total`, of a run its requests with a row
    known_ms      p50 of the gateway's part: all of it, or where its first output is not known, its way in; NaN: neither
    most_ms       p50 of the most that it can be; where all of it is known, that is `known_ms`
    share         of the latter's mean in the mean TTFT; `true_share` is what the client waited outside the engine
    """

    command: str
    requests: int
    joined: int
    passed: int
    counted: int
    known_ms: float
    most_ms: float
    share: float
    true_share: float

    def faults(self, held_ms: float) -> Iterator[str]:
        """Give what is not as it should be, in words."""
        if self.joined < self.requests:
            yield f"{self.requests - self.joined} requests not joined"
        if self.passed < LEAST_PASSED * self.requests:
            yield "too few spans of the gateway"
        if self.counted != self.requests:
            yield f"{self.counted} requests counted"
        slack_ms = max(SLACK_MS, SLACK_RATIO * held_ms)
        if self.known_ms > held_ms + slack_ms or not abs(self.most_ms - held_ms) <= slack_ms:
            yield "part is not what was held"
        if not abs(self.share - self.true_share) <= SLACK_SHARE:
            yield "share is off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stand:
    """A gateway before the simulated engine: their URLs, where spans go, and the engine's truth."""

    gateway: str
    engine: str
    otlp: str
    truth: Path
    folder: Path


@contextmanager
def standing(name: str, setup: Setup, *, held_ms: float, folder: Path) -> Iterator[Stand]:
    """Start a gateway that holds each request for so long, or behind which it is held."""
    programs = environment(name, setup.requirements)
    files = folder / "gateway" / "files"  # LiteLLM looks for modules up to three folders above its current one
    files.mkdir(parents=True)
    otlp, port = free_pair(), int(free_pair().rpartition(":")[2])
    truth = folder / "truth.jsonl"
    with ExitStack() as stack:
        url, _ = stack.enter_context(
            engine("--speed-profile", "demo", "--otlp-endpoint", f"http://{otlp}", "--truth", truth)
        )
        server = url.removeprefix("http://")
        if not setup.holds_itself:
            server = stack.enter_context(delayed(server, held_ms))
        place = Place(programs=programs, folder=files, port=port, server=server, otlp=otlp, hold_ms=held_ms)
        gateway, command = f"http://127.0.0.1:{port}", setup.command(place)
        stack.enter_context(
            running(
                command.arguments,
                log=folder / f"{name}.log",
                is_ready=lambda: answers(gateway + setup.ready),
                environment=command.environment,
                folder=files,
            )
        )
        yield Stand(gateway=gateway, engine=url, otlp=otlp, truth=truth, folder=folder)


@contextmanager
def delayed(server: str, held_ms: float) -> Iterator[str]:
    """Put a proxy that holds back what is sent before a server; yield its HOST:PORT."""
    command = [sys.executable, HERE / "delay.py", server, str(held_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


def by_run(stand: Stand) -> Result:
    """Load the gateway by `sidelight run`."""
    spans = ("--metrics", f"{stand.engine}/metrics", "--otlp-listen", stand.otlp)
    load = ("--rate", str(RATE_PER_S), "--requests", str(REQUESTS), "--warmup", "3")
    tokens = ("--input-tokens", "64", "--output-tokens", "16")
    given = ("--url", stand.gateway, "--model", "sim-llama", "--api-key", KEY, "--quiet")
    run = measure(stand.folder / "run", *given, *spans, *load, *tokens)
    rows = [row for row in run.requests() if row["phase"] == "measure"]
    return _result("run", stand, rows, requests=REQUESTS, counted=len(rows))


def by_watch(stand: Stand) -> Result:
    """Let users ask through the gateway beside a `sidelight watch`."""
    path, page = stand.folder / "watch", free_pair()
    host, _, port = stand.otlp.rpartition(":")
    collector = f"http://{host}:{int(port) + 1}"
    given = ("--metrics", f"{stand.engine}/metrics", "--otlp-listen", stand.otlp, "--listen", page, "--quiet")
    with start("watch", *given, "--out", path) as process:
        try:
            until(lambda: process.poll() is not None or answers(f"http://{page}/readyz"), "the watch")
            asyncio.run(use(stand.gateway, KEY, collector, users=USERS, rate_per_s=RATE_PER_S))
            until(lambda: sum(counts(page, "sidelight_requests_total").values()) >= USERS, "requests to be counted")
            until(lambda: not counts(page, "sidelight_window_size")['{what="pending"}'], "spans that wait")
            counted = sum(counts(page, "sidelight_requests_total").values())
        finally:
            process.terminate()
            process.communicate()
    rows: list[dict[str, Any]] = pq.read_table(path / "requests.parquet").to_pylist()
    return _result("watch", stand, rows, requests=USERS, counted=int(counted))


def counts(page: str, name: str) -> dict[str, float]:
    """Return the samples of a metric of a watch's page, by their labels."""
    with urllib.request.urlopen(f"http://{page}/metrics", timeout=20) as reply:
        lines = reply.read().decode().splitlines()
    samples = (line.removeprefix(name).rpartition(" ") for line in lines if line.startswith(name + "{"))
    return {labels: float(value) for labels, _, value in samples}


def _result(command: str, stand: Stand, rows: Sequence[Mapping[str, Any]], *, requests: int, counted: int) -> Result:
    """Put together what a command derived and what the engine knows of the same requests: the last ones that it had."""
    records = [json.loads(line) for line in stand.truth.read_text(encoding="utf-8").splitlines()]
    records = sorted(records, key=lambda record: int(record["arrival_ns"]))[-requests:]
    engine_ms = np.mean([(record["first_token_ns"] - record["arrival_ns"]) / 1e6 for record in records])
    joined = [row for row in rows if row["breakdown_source"] == "trace"]
    passed = [row for row in joined if row["gateways"]]
    known_ms, bounds_ms, ttft_ms = (
        np.array([row[name] for row in passed], dtype=np.float64)  # NaN for None
        for name in ("gateway_ms", "gateway_at_most_ms", "ttft_ms")
    )
    most_ms = np.where(np.isnan(bounds_ms), known_ms, bounds_ms)
    return Result(
        command=command,
        requests=requests,
        joined=len(joined),
        passed=len(passed),
        counted=counted,
        known_ms=float(np.nanmedian(known_ms)) if np.isfinite(known_ms).any() else np.nan,
        most_ms=float(np.median(most_ms)) if passed else np.nan,
        share=float(most_ms.mean() / ttft_ms.mean()) if passed else np.nan,
        true_share=float(1 - engine_ms / np.mean([row["ttft_ms"] for row in rows])),
    )
