"""Send the spans of one traffic to several shards of a watch, as Collectors that route do, and compare with the truth.

    python benchmarks/fleet.py [--shards 4] [--rate 1000] [--seconds 30] [--routing trace|round-robin]
                               [--kill-after S] [--grow-after S] [--as-one]

The spans are those of `watch.py`, made before the first is sent. A sender hashes trace ids (rendezvous: where a shard
is added, 1 of N traces moves), and sends each service's spans once a second to each shard, the engine's first, the
client's two seconds later, again until they are taken. --kill-after kills the receiver of shard 1 once, --grow-after
begins to route to one shard more. CPU time of the sender and of the watches is stated apart.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from watch import SCOPES, Traffic, page_of, receiver, use

from sidelight.rundir.access import Access
from sidelight.scraper.spans.forward import CollectorConnection, Unavailable

PARTS = ("network", "gateway", "queue", "prefill", "other")
DELAY_S = {"engine": 0.0, "gateway": 1.0, "client": 2.0}  # of the batches of a service
MAKING_S = 400e-6  # a request, with room
Route = Callable[[bytes, int], int]  # of a trace at a second


@dataclass(slots=True, kw_only=True)
class Shard:
    """A watch, the URL of its page, and where it takes spans."""

    process: asyncio.subprocess.Process
    page: str
    target: str
    path: Path


def by_trace(shards: int, grow_after_s: float | None) -> Route:
    """Route by the highest of the hashes of a trace with each shard; with one shard more from a second on."""

    def route(trace: bytes, second: int) -> int:
        of = shards + (grow_after_s is not None and second >= grow_after_s)
        return max(range(of), key=lambda shard: hashlib.blake2b(trace, digest_size=8, key=bytes([shard])).digest())

    return route


def round_robin(shards: int, _: float | None) -> Route:
    """Route each span to the next shard."""
    turn = count()
    return lambda _trace, _second: next(turn) % shards


ROUTES = {"trace": by_trace, "round-robin": round_robin}


def exports(
    traffic: Traffic, options: argparse.Namespace, begin_ns: int, route: Route
) -> dict[tuple[str, int, int], bytes]:
    """Make the exports of all traffic, by service, second and shard."""
    spans: dict[tuple[str, int, int], list[Span]] = defaultdict(list)
    at_s = 0.0
    while at_s < options.seconds:
        traffic.request(begin_ns + round(at_s * 1e9))
        for name in SCOPES:
            (span,), traffic.pending[name] = traffic.pending[name], []
            second = int(at_s + DELAY_S[name])
            spans[name, second, route(span.trace_id, second)].append(span)
        at_s += traffic.rng.expovariate(options.rate)
    made = {}
    for key, sent in spans.items():
        request = ExportTraceServiceRequest()
        scope = request.resource_spans.add().scope_spans.add()
        scope.scope.name = SCOPES[key[0]]
        scope.spans.extend(sent)
        made[key] = request.SerializeToString()
    return made


async def started(number: int, total: int, scratch: str) -> Shard:
    """Start a watch, and wait until it receives."""
    path = Path(scratch) / f"shard-{number}"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidelight", "watch", "--shard", f"{number}/{total}", "--json", "--out", str(path)),
        *("--otlp-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    page = target = ""
    while not (page and target):
        assert process.stderr is not None
        said = str(json.loads(await process.stderr.readline()).get("stage", ""))
        page = page or "".join(re.findall(r"http://\S+/metrics", said))
        target = target or "".join(re.findall(r"gRPC at (\S+:\d+)", said))
    return Shard(process=process, page=page, target=target, path=path)


async def read_on(shard: Shard, warned: list[tuple[float, str]], begun_s: float) -> None:
    """Keep the warnings of a shard, by the seconds since the begin."""
    assert shard.process.stderr is not None
    while line := await shard.process.stderr.readline():
        said = json.loads(line)
        if "warning" in said.get("event", "") or said.get("level") == "warning" or "text" in said:
            warned.append((round(time.monotonic() - begun_s, 1), str(said.get("text"))))


async def send_on(
    made: dict[tuple[str, int, int], bytes], name: str, number: int, shard: Shard, begin_s: float
) -> tuple[int, float]:
    """Send a service's exports to a shard when due; return how often again, and how late the latest was taken."""
    again, late_s = 0, 0.0
    async with CollectorConnection(f"grpc://{shard.target}", Access()) as wire:
        for second in sorted(key[1] for key in made if (key[0], key[2]) == (name, number)):
            await asyncio.sleep(max(0.0, begin_s + second + 1 - time.monotonic()))
            pause_s = 0.5
            while True:
                try:
                    await wire.send(made[name, second, number])
                except Unavailable:
                    again += 1
                    await asyncio.sleep(pause_s)
                    pause_s = min(2 * pause_s, 4.0)
                else:
                    break
            late_s = max(late_s, time.monotonic() - begin_s - second - 1)
    return again, late_s


async def measure(options: argparse.Namespace) -> dict[str, object]:
    """Start the shards, send, wait until all is counted, and compare."""
    total = options.shards + (options.grow_after is not None)
    with tempfile.TemporaryDirectory(prefix="sidelight-fleet-") as scratch:
        shards = [await started(number, total, scratch) for number in range(total)]
        traffic = Traffic(rng=random.Random(1), engine_spans=True)
        ahead_s = 1.0 + options.rate * options.seconds * MAKING_S
        begin_ns, begin_s = time.time_ns() + round(ahead_s * 1e9), time.monotonic() + ahead_s
        made = exports(traffic, options, begin_ns, ROUTES[options.routing](options.shards, options.grow_after))
        if time.monotonic() > begin_s:
            raise SystemExit("making the spans took longer than thought")
        warned: list[tuple[float, str]] = []
        reading = [asyncio.ensure_future(read_on(shard, warned, begin_s)) for shard in shards]
        await asyncio.sleep(begin_s - time.monotonic())
        cpu_s, before = resource.getrusage(resource.RUSAGE_SELF), [use(shard.process.pid) for shard in shards]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(send_on(made, name, number, shard, begin_s))
                     for name in SCOPES for number, shard in enumerate(shards)]  # fmt: skip
            if options.kill_after is not None:
                await asyncio.sleep(options.kill_after)
                os.kill(receiver(shards[1].process.pid), signal.SIGKILL)
        sent_s = time.monotonic() - begin_s
        spent = resource.getrusage(resource.RUSAGE_SELF)
        loads = os.getloadavg()
        pages = await counted(shards, traffic.requests)
        counted_s = time.monotonic() - begin_s
        figures = {
            "load_average": loads,
            "spans_sent": traffic.spans,
            "spans_per_s": round(traffic.spans / options.seconds),
            "sent_in_s": round(sent_s, 1),
            "counted_in_s": round(counted_s, 1),
            "sent_again": sum(task.result()[0] for task in tasks),
            "latest_taken_s": round(max(task.result()[1] for task in tasks), 2),
            "cores_of_sender": round((spent.ru_utime + spent.ru_stime - cpu_s.ru_utime - cpu_s.ru_stime) / sent_s, 2),
            "cores_of_watches": [cores(shard, first) for shard, first in zip(shards, before, strict=True)],
            **compared(traffic, pages),
            "warned": warned,
        }
        for shard in shards:
            shard.process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(shard.process.wait() for shard in shards), *reading)
        return figures | (as_one(shards, scratch) if options.as_one else {})


def cores(shard: Shard, before: object) -> float:
    """Return the CPU time of a watch since a look at it, in cores."""
    now = use(shard.process.pid)
    spent_s = sum(now.cpu_s.values()) - sum(before.cpu_s.values())  # type: ignore[attr-defined]
    return float(round(spent_s / (now.at_s - before.at_s), 3))  # type: ignore[attr-defined]


async def counted(shards: list[Shard], requests: int) -> list[dict[str, float]]:
    """Return the pages once nothing is pending, or after two minutes."""
    for _ in range(240):
        pages = [await asyncio.to_thread(page_of, shard.page) for shard in shards]
        pending = sum(page.get(key, 0.0) for page in pages for key in page if "breakdown_pending" in key)
        if not pending and summed(pages, "sidelight_requests_total") >= requests:
            break
        await asyncio.sleep(0.5)
    return pages


def summed(pages: list[dict[str, float]], name: str, *labels: str) -> float:
    """Return the sum of a metric over shards."""
    return sum(
        value for page in pages for key, value in page.items()
        if key.partition("{")[0] == name and all(label in key for label in labels)
    )  # fmt: skip


def compared(traffic: Traffic, pages: list[dict[str, float]]) -> dict[str, object]:
    """Return what the shards counted in all, beside the truth."""
    missing: Counter[str] = Counter()
    for page in pages:
        for key, value in page.items():
            if key.startswith("sidelight_breakdown_missing_total") and value:
                missing["".join(re.findall(r'reason="(\w+)"', key))] += int(value)
    sums = {part: summed(pages, "sidelight_ttft_part_seconds_sum", f'part="{part}"') for part in PARTS}
    return {
        "requests_sent": traffic.requests,
        "requests_by_trace": summed(pages, "sidelight_requests_total", 'source="trace"'),
        "by_shard": [summed([page], "sidelight_requests_total") for page in pages],
        "missing": dict(missing),
        "spans_counted": summed(pages, "sidelight_receiver_spans_total"),
        "spans_repeated": summed(pages, "sidelight_window_repeated_spans_total"),
        "spans_evicted": summed(pages, "sidelight_window_evicted_spans_total"),
        "receiver_restarts": summed(pages, "sidelight_receiver_restarts_total"),
        "apart_ms": {part: round(1e3 * sums[part] - traffic.truth_ms[part], 3) for part in PARTS},
    }


def as_one(shards: list[Shard], scratch: str) -> dict[str, object]:
    """Report the shards as one, and return what it took and counted."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ran = subprocess.run(
        [sys.executable, "-m", "sidelight", "report", *(str(shard.path) for shard in shards), "--as-one", "--json",
         "--output", f"{scratch}/as-one"], stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    told = json.loads(ran.stdout)
    return {
        "as_one": {
            "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
            "peak_mb": round(after.ru_maxrss / 1e3),
            "requests": told["client"]["requests"]["sent"],
            "by_trace": told["correlation"]["breakdown"]["queue_ms"].get("count"),
            "missing": told["watch"]["missing"],
            "split_traces": told["watch"].get("split_traces"),
            "warnings": told["warnings"],
        }
    }


def main() -> None:
    """Send, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--routing", choices=ROUTES, default="trace")
    parser.add_argument("--kill-after", type=float, default=None)
    parser.add_argument("--grow-after", type=float, default=None)
    parser.add_argument("--as-one", action="store_true")
    print(json.dumps(asyncio.run(measure(parser.parse_args())), indent=2))


if __name__ == "__main__":
    main()
