"""A watch for as long as is wanted, beside what goes wrong in production: nothing is lost, and nothing grows.

Its target flaps, the next collector is away a third of the time, its configuration is read again every few seconds, and
every tenth export comes twice. Only of the long part of the suite.
"""

from __future__ import annotations

import asyncio
import random
import re
import signal
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from faults.cases import Case, Kind, Setting, Try
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from processes import METRICS
from test_watch import TRACE, Watch, request, watching  # that of the tests of `watch`

RATE_PER_S = 20.0
SAMPLE_S = 5.0
LEAST_S = 60.0
# A span waits for the others of its request, and the conductor looks at the logs twice a second.
MOST_LAG_S = 30.0
# From the second quarter to the last: of an hour 1 %; a short soak still fills its windows, which hold a minute.
MOST_GROWTH, MOST_SHORT_GROWTH, SHORT_S = 1.01, 1.25, 1200.0
WAITING = 'sidelight_receiver_forward_queue{what="exports"}'
AWAY = "sidelight_receiver_forward_dropped_total"


@dataclass(slots=True)
class World:
    """What the watch speaks to, and what it was sent."""

    rng: random.Random
    page_url: str = ""
    collector_url: str = ""
    is_away: bool = False
    flaps: bool = False
    forwarded: set[bytes] = field(default_factory=set)
    repeated: int = 0
    sent: int = 0
    again: int = 0

    async def take(self, received: web.Request) -> web.Response:
        """Be the next collector."""
        body = await received.read()
        if self.is_away and received.transport is not None:
            received.transport.abort()
        else:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        key = span.trace_id + span.span_id
                        self.repeated += key in self.forwarded
                        self.forwarded.add(key)
        return web.Response(content_type="application/x-protobuf")

    async def page(self, received: web.Request) -> web.Response:
        """Be the target."""
        if self.flaps and received.transport is not None:
            received.transport.abort()
        return web.Response(body=METRICS, headers={"Content-Type": "text/plain; version=0.0.4"})


@dataclass(frozen=True, slots=True)
class Use:
    """What the processes of a watch hold at a moment."""

    rss_kib: int
    descriptors: int
    threads: int
    lag: float  # requests that were sent and are not counted yet


def use(watch: Watch, lag: float) -> Use:
    """Return what is held now, all processes together."""
    children = Path(f"/proc/{watch.process.pid}/task/{watch.process.pid}/children").read_text().split()
    pids = [str(watch.process.pid), *children]
    status = "".join(Path(f"/proc/{pid}/status").read_text() for pid in pids)
    sums = {key: sum(map(int, re.findall(rf"{key}:\s+(\d+)", status))) for key in ("VmRSS", "Threads")}
    descriptors = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
    return Use(rss_kib=sums["VmRSS"], descriptors=descriptors, threads=sums["Threads"], lag=lag)


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


def configure(path: Path, world: World, interval_s: str) -> None:
    """Write the configuration of a watch."""
    path.write_text(f"metrics: [{world.page_url}]\nscrape-interval: {interval_s}\n")


async def soaked(place: Path, seconds: float, rng: random.Random) -> str:
    """Let a watch go on for so long; return what is wrong."""
    config = place / "watch.yaml"
    async with standing(rng) as world:
        configure(config, world, "0.5")
        options = ("--config", str(config), "--otlp-forward", world.collector_url, "--keep", "2m")
        async with watching(place / "watch", *options) as watch:
            uses = await _through(watch, world, config, seconds)
            world.is_away = world.flaps = False
            counts = await watch.until(lambda page: page[TRACE] >= world.sent and not page.get(WAITING))
            await watch.end()
        if any("Traceback" in line for line in watch.said):
            return "\n".join(watch.said[-5:])
        counted = counts[TRACE]
        lost = 3 * world.sent - len(world.forwarded)
        if counted != world.sent:
            return f"{world.sent} requests were sent, {counted:g} counted"
        if lost > counts[AWAY] * 3:  # an export has three spans, of one request
            return f"{lost} spans were not forwarded, and {counts[AWAY]:g} exports are counted as dropped"
        return grown(uses, seconds)


async def _through(watch: Watch, world: World, config: Path, seconds: float) -> Sequence[Use]:
    begun_s = next_s = time.monotonic()
    uses: list[Use] = []
    while (now_s := time.monotonic()) < begun_s + seconds:
        world.sent += 1
        await watch.send(spans := request(world.sent), over=world.rng.choice(("grpc", "http")))
        if world.rng.random() < 0.1:
            await watch.send(spans)
        if now_s > begun_s + SAMPLE_S * (len(uses) + 1):
            uses.append(use(watch, world.sent - (await watch.counts())[TRACE]))
            world.is_away, world.flaps = world.rng.random() < 1 / 3, world.rng.random() < 0.5
            interval_s = world.rng.choice(("0.5", "1", "[["))  # the last is refused, and what was goes on
            configure(config, world, interval_s)
            watch.process.send_signal(signal.SIGHUP)
        next_s += world.rng.expovariate(RATE_PER_S)
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
    return uses


def grown(uses: Sequence[Use], seconds: float) -> str:
    """Say what of a watch's use has grown from its second quarter to its last."""
    quarter = max(1, len(uses) // 4)
    early, late = uses[quarter : 2 * quarter], uses[-quarter:]
    before, after = (statistics.median(each.rss_kib for each in part) for part in (early, late))
    if after > before * (MOST_GROWTH if seconds >= SHORT_S else MOST_SHORT_GROWTH):
        return f"memory grew from {before / 1024:.1f} to {after / 1024:.1f} MiB"
    for name in ("descriptors", "threads"):
        most = [max(getattr(each, name) for each in part) for part in (early, late)]
        if most[1] > most[0] + 8:
            return f"{name} grew from {most[0]} to {most[1]}"
    lag_s = max(each.lag for each in uses) / RATE_PER_S
    return f"the conductor was {lag_s:.0f} s behind" if lag_s > MOST_LAG_S else ""


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    def attempt(case: Case) -> str:
        return asyncio.run(soaked(setting.place, max(LEAST_S, setting.seconds), case.random()))

    yield attempt


SOAK = Kind(name="soak", rows={"watch": 0}, opened=opened, repeats=False)
