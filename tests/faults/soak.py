"""A watch for as long as is wanted, beside what goes wrong in production: nothing is lost, and nothing grows.

Its engine starts again every half minute and flaps, the next collector is away a third of the time, its configuration
is read again every three seconds, and every tenth export comes twice. Only of the long part of the suite; what was held
is printed when it ends.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from faults.cases import Case, Kind, Setting, Try
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from series import counter, gauge
from test_watch import RESTARTS, TRACE, Watch, request, watching  # that of the tests of `watch`

RATE_PER_S = 20.0
SAMPLE_S = 3.0
LIFE_S = 30.0  # of an engine
LEAST_S = 60.0
# A span waits for the others of its request, and the conductor looks at the logs twice a second.
MOST_LAG_S = 30.0
# Memory from minute 10 to the last tenth; a short soak still fills its windows, which hold six minutes.
MOST_GROWTH, MOST_SHORT_GROWTH, SETTLED_S = 1.01, 1.25, 600.0
MOST_MORE = 8  # descriptors or threads: connections come and go
WAITING = 'sidelight_receiver_forward_queue{what="exports"}'
AWAY = "sidelight_receiver_forward_dropped_total"


@dataclass(slots=True)
class World:
    """What the watch speaks to, and what it was sent."""

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


@dataclass(frozen=True, slots=True)
class Use:
    """What the processes of a watch hold at a moment, so many seconds after it began."""

    at_s: float
    conductor_mib: float
    receiver_mib: float
    descriptors: int
    threads: int
    lag: float  # requests that were sent and are not counted yet


def use(watch: Watch, *, at_s: float, lag: float) -> Use:
    """Return what is held now, all processes together."""
    children = Path(f"/proc/{watch.process.pid}/task/{watch.process.pid}/children").read_text().split()
    pids = [str(watch.process.pid), *children]
    statuses = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    rss_mib = [sum(map(int, re.findall(r"VmRSS:\s+(\d+)", status))) / 1024 for status in statuses]
    threads = sum(map(int, re.findall(r"Threads:\s+(\d+)", "".join(statuses))))
    descriptors = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids)
    conductor_mib, *others_mib = rss_mib
    return Use(
        at_s=at_s,
        conductor_mib=conductor_mib,
        receiver_mib=sum(others_mib),
        descriptors=descriptors,
        threads=threads,
        lag=lag,
    )


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
    print(_figures(world, counts, uses), file=sys.stderr, flush=True)
    if any("Traceback" in line for line in watch.said):
        return "\n".join(watch.said[-5:])
    integrity = json.loads((watch.path / "summary.json").read_text())["integrity"]
    if integrity["state"] != "whole":
        return f"what is left of the logs is {integrity['state']}: {integrity['disagreements']}"
    return _miscounted(world, counts) or grown(uses)


def _miscounted(world: World, counts: Mapping[str, float]) -> str:
    lost = 3 * world.sent - len(world.forwarded)
    if counts[TRACE] != world.sent:
        return f"{world.sent} requests were sent, {counts[TRACE]:g} counted"
    if counts[RESTARTS]:
        return f"the receiver was started again {counts[RESTARTS]:g} times"
    if lost > counts[AWAY] * 3:  # an export has three spans, of one request
        return f"{lost} spans were not forwarded, and {counts[AWAY]:g} exports are counted as dropped"
    return ""


async def _through(watch: Watch, world: World, config: Path, seconds: float) -> Sequence[Use]:
    begun_s = next_s = time.monotonic()
    uses: list[Use] = []
    while (now_s := time.monotonic()) < begun_s + seconds:
        world.sent += 1
        await watch.send(spans := request(world.sent), over=world.rng.choice(("grpc", "http")))
        if world.rng.random() < 0.1:
            await watch.send(spans)
            world.sent_again += 1
        if now_s > begun_s + SAMPLE_S * (len(uses) + 1):
            uses.append(use(watch, at_s=now_s - begun_s, lag=world.sent - (await watch.counts())[TRACE]))
            world.is_away, world.flaps = world.rng.random() < 1 / 3, world.rng.random() < 0.5
            interval_s = world.rng.choice(("0.5", "1", "[["))  # the last is refused, and what was goes on
            configure(config, world, interval_s)
            watch.process.send_signal(signal.SIGHUP)
            world.signals += 1
        next_s += world.rng.expovariate(RATE_PER_S)
        await asyncio.sleep(max(0.0, next_s - time.monotonic()))
    return uses


def held(uses: Sequence[Use]) -> dict[str, tuple[float, float]]:
    """Return what was held in a tenth of the time once all was settled, and in the last tenth: the median of memory in
    MiB, the most of the others.
    """
    end_s = uses[-1].at_s
    settled_s = SETTLED_S if end_s > 2 * SETTLED_S else end_s / 4
    early = [each for each in uses if settled_s <= each.at_s <= settled_s + end_s / 10]
    late = [each for each in uses if each.at_s >= 0.9 * end_s]
    return {
        "memory": _both(early, late, memory_mib),
        "descriptors": _both(early, late, lambda part: max(each.descriptors for each in part)),
        "threads": _both(early, late, lambda part: max(each.threads for each in part)),
    }


def memory_mib(uses: Sequence[Use]) -> float:
    """Return the median of what both processes held."""
    return statistics.median(each.conductor_mib + each.receiver_mib for each in uses)


def _both(early: Sequence[Use], late: Sequence[Use], of: Callable[[Sequence[Use]], float]) -> tuple[float, float]:
    return of(early), of(late)


def grown(uses: Sequence[Use]) -> str:
    """Say what of a watch's use has grown."""
    most = MOST_GROWTH if uses[-1].at_s > 2 * SETTLED_S else MOST_SHORT_GROWTH
    for name, (before, after) in held(uses).items():
        if after > (before * most if name == "memory" else before + MOST_MORE):
            return f"{name} grew from {before:.1f} to {after:.1f}"
    lag_s = max(each.lag for each in uses) / RATE_PER_S
    return f"the conductor was {lag_s:.0f} s behind" if lag_s > MOST_LAG_S else ""


def _figures(world: World, counts: Mapping[str, float], uses: Sequence[Use]) -> str:
    """Say what came, what came of it, and what was held."""
    grew = ", ".join(f"{name} {before:.1f} -> {after:.1f}" for name, (before, after) in held(uses).items())
    tenths = [uses[at * len(uses) // 10 : max(1, (at + 1) * len(uses) // 10)] for at in range(10)]
    process_mib = {
        "conductor": " ".join(f"{statistics.median(each.conductor_mib for each in part):.1f}" for part in tenths),
        "receiver": " ".join(f"{statistics.median(each.receiver_mib for each in part):.1f}" for part in tenths),
    }
    return (
        f"soak of {uses[-1].at_s / 60:.1f} min: {world.sent:,} requests, {world.sent_again:,} sent twice, "
        f"{counts[TRACE]:,.0f} counted; {len(world.forwarded):,} of {3 * world.sent:,} spans forwarded, "
        f"{counts[AWAY]:g} exports dropped; {world.signals:,} SIGHUP; {len(world.lives)} lives of the engine; {grew}; "
        f"lag at most {max(each.lag for each in uses):g} requests\n"
        f"MiB in each tenth: conductor {process_mib['conductor']}, receiver {process_mib['receiver']}"
    )


@contextmanager
def opened(setting: Setting) -> Iterator[Try]:
    def attempt(case: Case) -> str:
        return asyncio.run(soaked(setting.place, max(LEAST_S, setting.seconds), case.random()))

    yield attempt


SOAK = Kind(name="soak", rows={"watch": 0}, opened=opened, repeats=False)
