"""What soaked processes speak to, and what they hold while they go on."""

from __future__ import annotations

import random
import re
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from series import counter, gauge

SAMPLE_S = 3.0
LIFE_S = 30.0  # of an engine
# Memory from minute 10 to the last tenth; a short soak still fills its windows, which hold six minutes.
MOST_GROWTH, MOST_SHORT_GROWTH, SETTLED_S = 1.01, 1.25, 600.0
MOST_MORE = 8  # descriptors or threads: connections come and go


@dataclass(slots=True)
class World:
    """What a command speaks to, and what it was sent."""

    rng: random.Random
    page_url: str = ""
    collector_url: str = ""
    begun_s: float = field(default_factory=time.monotonic)
    is_away: bool = False
    flaps: bool = False
    forwarded: set[bytes] = field(default_factory=set)
    sent: int = 0
    sent_again: int = 0
    signals: int = 0
    lives: set[int] = field(default_factory=set)  # of the engine, that were scraped

    async def take(self, received: web.Request) -> web.Response:
        """Be the next collector."""
        body = await received.read()
        if self.is_away and received.transport is not None:
            received.transport.abort()
        else:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        self.forwarded.add(span.trace_id + span.span_id)
        return web.Response(content_type="application/x-protobuf")

    async def page(self, received: web.Request) -> web.Response:
        """Be an engine, whose counters begin anew with each of its lives."""
        life, age_s = divmod(time.monotonic() - self.begun_s, LIFE_S)
        if self.flaps and received.transport is not None:
            received.transport.abort()
        else:
            self.lives.add(int(life))
        text = counter("vllm:prompt_tokens_total", int(1000 * age_s)) + gauge("vllm:num_requests_running", 3)
        text += gauge("process_start_time_seconds", LIFE_S * life)
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4"})


@asynccontextmanager
async def standing(rng: random.Random) -> AsyncIterator[World]:
    """Run the target and the next collector."""
    world, app = World(rng=rng), web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/traces", world.take)
    app.router.add_get("/metrics", world.page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    world.collector_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    world.page_url = f"{world.collector_url}/metrics"
    try:
        yield world
    finally:
        await runner.cleanup()


@dataclass(frozen=True, slots=True)
class Use:
    """What the processes of a command hold at a moment, so many seconds after it began."""

    at_s: float
    conductor_mib: float
    children_mib: float
    descriptors: int
    threads: int
    lag: float = 0.0  # requests that were sent and are not counted yet

    @property
    def memory_mib(self) -> float:
        """Return what all processes hold."""
        return self.conductor_mib + self.children_mib


def use(conductor: int, *, at_s: float, lag: float = 0.0) -> Use:
    """Return what a process and its children hold now."""
    children = Path(f"/proc/{conductor}/task/{conductor}/children").read_text().split()
    pids = [str(conductor), *children]
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    rss_mib = [sum(map(int, re.findall(r"VmRSS:\s+(\d+)", status))) / 1024 for status in statuses]
    conductor_mib, *others_mib = rss_mib
    return Use(
        at_s=at_s,
        conductor_mib=conductor_mib,
        children_mib=sum(others_mib),
        descriptors=sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
        threads=sum(map(int, re.findall(r"Threads:\s+(\d+)", "".join(statuses)))),
        lag=lag,
    )


def is_long(uses: Sequence[Use]) -> bool:
    """Tell whether all windows were full before half of the time was over."""
    return uses[-1].at_s > 2 * SETTLED_S


def both(uses: Sequence[Use], of: Callable[[Sequence[Use]], float]) -> tuple[float, float]:
    """Return what was held in a tenth of the time once all was settled, and in the last tenth."""
    end_s = uses[-1].at_s
    settled_s = SETTLED_S if is_long(uses) else end_s / 4
    early = [each for each in uses if settled_s <= each.at_s <= settled_s + end_s / 10]
    late = [each for each in uses if each.at_s >= 0.9 * end_s]
    return of(early), of(late)


def median(of: Callable[[Use], float]) -> Callable[[Sequence[Use]], float]:
    """Return what says the median of something that was held."""
    return lambda uses: statistics.median(map(of, uses))


def held(uses: Sequence[Use], memory: Callable[[Use], float]) -> dict[str, tuple[float, float]]:
    """Return what was held early and late: the median of memory in MiB, the most of the others."""
    return {
        "memory": both(uses, median(memory)),
        "descriptors": both(uses, lambda part: max(each.descriptors for each in part)),
        "threads": both(uses, lambda part: max(each.threads for each in part)),
    }


def grown(uses: Sequence[Use], memory: Callable[[Use], float] = lambda each: each.memory_mib) -> str:
    """Say what of a command's use has grown."""
    most = MOST_GROWTH if is_long(uses) else MOST_SHORT_GROWTH
    for name, (before, after) in held(uses, memory).items():
        if after > (before * most if name == "memory" else before + MOST_MORE):
            return f"{name} grew from {before:.1f} to {after:.1f}"
    return ""


def figures(uses: Sequence[Use]) -> str:
    """Say what was held."""
    of_all = held(uses, lambda each: each.memory_mib)
    tenths = [uses[at * len(uses) // 10 : max(1, (at + 1) * len(uses) // 10)] for at in range(10)]
    conductor = " ".join(f"{statistics.median(each.conductor_mib for each in part):.1f}" for part in tenths)
    others = " ".join(f"{statistics.median(each.children_mib for each in part):.1f}" for part in tenths)
    return (
        ", ".join(f"{name} {before:.1f} -> {after:.1f}" for name, (before, after) in of_all.items())
        + f"\nMiB in each tenth: conductor {conductor}, its children {others}"
    )
