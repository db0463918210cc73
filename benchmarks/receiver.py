"""Send a resident sidecar more spans than it needs, and print how late its scrapes were meanwhile and what it counted.

    python benchmarks/receiver.py --rate 50000 --seconds 20

First nothing is sent, then 40 exports of 20,000 empty spans at once, then as many spans a second as are wanted, in
exports of 500. What was sent must be what was taken and what was refused. How late a scrape is, its log says.
At last exports of 10 spans are sent at 20 a second, alone and then beside 400 connections, each of which sends a body
of 4 MB at 1.5 kB/s, and comes again where it is closed; how long they took is from when they were due.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sidelight.scraper.series.log import ScrapeRow, read_log

INTERVAL_S = 0.25
EMPTY_EXPORTS, EMPTY_SPANS = 40, 20_000
SPANS = 500  # in an export of the flood
SENDERS = 12
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
OF_SPANS = ("bad_spans", "off_clock")  # kinds that count spans, not exports
HONEST_SPANS, HONEST_PER_S, HONEST_S = 10, 20.0, 20.0
SLOW_BODIES = 400
# In a process of their own: what they take of a loop is not how long an export takes.
SLOW = """
import asyncio, sys
HEAD = b"POST /v1/traces HTTP/1.1\\r\\nHost: x\\r\\nContent-Type: application/x-protobuf\\r\\n"
HEAD += b"Content-Length: 4000000\\r\\n\\r\\n"
async def send(host, port):
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            await asyncio.sleep(1)
            continue
        closed = asyncio.ensure_future(reader.read())
        writer.write(HEAD)
        while not closed.done():
            writer.write(bytes(1500))
            await asyncio.wait([closed], timeout=1)
        closed.exception()
        writer.close()
        await asyncio.sleep(1)
async def main():
    host, _, port = sys.argv[1].rpartition(":")
    await asyncio.gather(*(send(host, port) for _ in range(int(sys.argv[2]))))
asyncio.run(main())
"""
HEADERS = {"Content-Type": "application/x-protobuf"}


@dataclass(slots=True)
class Phase:
    """What was sent in a stretch of time: spans by the status of the reply; `lag_s` is how far the watch was behind."""

    name: str
    begin_ns: int
    end_ns: int = 0
    spans: Counter[int] = field(default_factory=Counter)
    exports: Counter[int] = field(default_factory=Counter)
    lag_s: float = 0.0
    most_mb: dict[int, float] = field(default_factory=dict)
    took_ms: list[float] = field(default_factory=list)  # each of the exports that are sent at a rate of their own


@dataclass(slots=True)
class Sender:
    """Sends exports to a watch."""

    session: aiohttp.ClientSession
    url: str
    phase: Phase

    async def send(self, body: bytes, spans: int) -> None:
        async with self.session.post(self.url, data=body, headers=HEADERS) as reply:
            await reply.read()
            self.phase.spans[reply.status] += spans
            self.phase.exports[reply.status] += 1


def export(spans: int, *, empty: bool) -> bytes:
    """Return an export of vLLM's spans, or of spans of which nothing is known."""
    request = ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    now_ns = time.time_ns()
    for _ in range(spans):
        if empty:
            scope.spans.add()
            continue
        span = scope.spans.add(name="llm_request", trace_id=random.randbytes(16), span_id=random.randbytes(8), kind=2)
        span.start_time_unix_nano, span.end_time_unix_nano = now_ns - 10**9, now_ns
        span.attributes.add(key="gen_ai.latency.time_in_queue").value.double_value = 0.1
    return request.SerializeToString()


async def flood(sender: Sender, rate_per_s: float, seconds: float) -> None:
    """Send spans at a rate, from several senders at once, for so long."""
    bodies = [export(SPANS, empty=False) for _ in range(20)]
    begin_s, sent = time.monotonic(), 0

    async def send_on() -> None:
        nonlocal sent
        while (due_s := begin_s + sent * SPANS / rate_per_s) < begin_s + seconds:
            sent += 1
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            await sender.send(random.choice(bodies), SPANS)

    await asyncio.gather(*(send_on() for _ in range(SENDERS)))


async def measured(options: argparse.Namespace) -> list[str]:
    """Start a watch, send to it, and return what to print."""
    with tempfile.TemporaryDirectory() as scratch:
        runner = await page_served()
        page = f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"
        arguments = ["--otlp-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--json", "--metrics", page]
        arguments += ["--scrape-interval", str(INTERVAL_S), "--out", f"{scratch}/watch"]
        watch = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sidelight", "watch", *arguments),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        live, target = await addresses_of(watch)
        phases = await driven(options, watch.pid, live, f"http://{target}/v1/traces")
        await until_read(live)
        counts = await asyncio.to_thread(counters, live)
        beside = await beside_slow_bodies(watch.pid, live, target)
        watch.send_signal(signal.SIGTERM)
        await watch.wait()
        await runner.cleanup()
        return list(report(phases, beside, Path(scratch) / "watch/raw", counts))


async def driven(options: argparse.Namespace, pid: int, live: str, url: str) -> list[Phase]:
    """Send what the phases have."""
    phases = []
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        for name in ("quiet", "empty spans", f"{options.rate:,.0f} spans/s"):
            phase = Phase(name=name, begin_ns=time.time_ns())
            sender = Sender(session=session, url=url, phase=phase)
            looking = asyncio.ensure_future(look_on(phase, pid))
            if name == "quiet":
                await asyncio.sleep(options.seconds)
            elif name == "empty spans":
                body = export(EMPTY_SPANS, empty=True)
                await asyncio.gather(*(sender.send(body, EMPTY_SPANS) for _ in range(EMPTY_EXPORTS)))
                await asyncio.sleep(2 * INTERVAL_S)
            else:
                await flood(sender, options.rate, options.seconds)
            phase.end_ns = time.time_ns()
            looking.cancel()
            phase.lag_s = (await asyncio.to_thread(counters, live))["sidelight_watch_lag_seconds"]
            phases.append(phase)
    return phases


async def beside_slow_bodies(pid: int, live: str, target: str) -> list[Phase]:
    """Send exports at a rate, alone and beside slow bodies."""
    phases = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        for slow in (0, SLOW_BODIES):
            name = f"{HONEST_PER_S:g} exports of {HONEST_SPANS} spans a second beside {slow} slow bodies"
            phase = Phase(name=name, begin_ns=time.time_ns())
            sender = Sender(session=session, url=f"http://{target}/v1/traces", phase=phase)
            looking = asyncio.ensure_future(look_on(phase, pid))
            senders = await asyncio.create_subprocess_exec(sys.executable, "-c", SLOW, target, str(slow))
            await send_honestly(sender)
            phase.end_ns = time.time_ns()
            looking.cancel()
            with suppress(ProcessLookupError):  # where there are none, it has ended
                senders.kill()
            await senders.wait()
            phase.lag_s = (await asyncio.to_thread(counters, live))["sidelight_watch_lag_seconds"]
            phases.append(phase)
    return phases


async def send_honestly(sender: Sender) -> None:
    """Send exports at a rate, however long each takes."""
    body = export(HONEST_SPANS, empty=False)
    begin_s = time.monotonic()

    async def send(due_s: float) -> None:
        await sender.send(body, HONEST_SPANS)
        sender.phase.took_ms.append(1e3 * (time.monotonic() - due_s))

    async with asyncio.TaskGroup() as group:
        for index in range(round(HONEST_S * HONEST_PER_S)):
            due_s = begin_s + index / HONEST_PER_S
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            group.create_task(send(due_s))


async def look_on(phase: Phase, pid: int) -> None:
    """Note the most memory that the processes of a watch hold."""
    while True:
        for each, mb in resident_mb(pid).items():
            phase.most_mb[each] = max(phase.most_mb.get(each, 0.0), mb)
        await asyncio.sleep(0.3)


def resident_mb(pid: int) -> dict[int, float]:
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return {each: int(Path(f"/proc/{each}/statm").read_text().split()[1]) * PAGE_BYTES / 1e6 for each in pids}


def report(phases: list[Phase], beside: list[Phase], raw: Path, counts: dict[str, float]) -> Iterator[str]:
    """Yield a line for each phase, and whether the counts agree of those before slow bodies."""
    rows = [row for log in sorted(raw.glob("scrapes-*.log")) for row in read_log(log) if isinstance(row, ScrapeRow)]
    request_ns, tick_ns = (np.array([getattr(row, name) for row in rows]) for name in ("request_ns", "tick_ns"))
    for phase in (*phases, *beside):
        during = (request_ns >= phase.begin_ns) & (request_ns < phase.end_ns)
        late_ms, gaps_s = (request_ns - tick_ns)[during] / 1e6, np.diff(request_ns[during]) / 1e9
        p50, p99 = np.quantile(late_ms, (0.5, 0.99))
        yield (
            f"{phase.name}: {during.sum()} scrapes, late by {p50:.1f} ms (p50), {p99:.1f} (p99), {late_ms.max():.1f} "
            f"at most; gap {gaps_s.max():.3f} s at most; spans sent by status {dict(phase.spans)}; "
            f"{phase.lag_s:.1f} s behind; MB {[round(mb) for mb in phase.most_mb.values()]}"
        )
        if phase.took_ms:
            p50, p99 = np.quantile(phase.took_ms, (0.5, 0.99))
            yield f"  an export took {p50:.1f} ms (p50), {p99:.1f} (p99), {max(phase.took_ms):.1f} at most"
    exports = sum((phase.exports for phase in phases), Counter[int]())
    refused = sum(value for name, value in counts.items() if name.startswith("sidelight_receiver_refused_total"))
    refused -= sum(counts.get(f'sidelight_receiver_refused_total{{kind="{kind}"}}', 0) for kind in OF_SPANS)
    taken = counts["sidelight_receiver_exports_total"]
    yield (
        f"exports: {exports.total()} sent, {exports[200]} answered 200; "
        f"on the page {taken:.0f} taken, {refused:.0f} refused"
    )


async def page_served() -> web.AppRunner:
    async def page(_: web.Request) -> web.Response:
        return web.Response(text="# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n")

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner


async def addresses_of(watch: asyncio.subprocess.Process) -> tuple[str, str]:
    """Return where a watch serves its page, and where it receives spans over HTTP; read on what it says."""
    stream = watch.stderr
    if stream is None:
        raise AssertionError("it is a pipe")
    live = target = ""
    while not (live and target):
        said = json.loads(await stream.readline()).get("stage", "")
        live = live or "".join(re.findall(r"http://\S+/metrics", said))
        target = target or "".join(re.findall(r"HTTP/protobuf at (\S+:\d+)", said))
    _reading.append(asyncio.ensure_future(stream.read()))
    return live, target


_reading: list[asyncio.Future[bytes]] = []


async def until_read(live: str) -> None:
    """Wait until the watch has counted what its receiver logged; refusals are up to 2 s old."""
    await asyncio.sleep(3)
    for _ in range(600):
        if (await asyncio.to_thread(counters, live))["sidelight_watch_lag_seconds"] < 1:
            return
        await asyncio.sleep(0.5)


def counters(live: str) -> dict[str, float]:
    with urllib.request.urlopen(live, timeout=60) as response:  # noqa: S310  our own page
        lines = response.read().decode().splitlines()
    return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=50_000.0, help="spans a second")
    parser.add_argument("--seconds", type=float, default=20.0, help="for how long nothing, and spans, are sent")
    for line in asyncio.run(measured(parser.parse_args())):
        print(line)


if __name__ == "__main__":
    main()
