"""Send a resident sidecar the spans of production traffic whose times are known, and print what it cost and told.

    python benchmarks/watch.py [--seconds 600] [--rate 20] [--kill-after S] [--no-engine-spans | --pair] [--out FILE]

A client, a gateway and an engine send their spans over gRPC, each in its own batches once a second, the engine by a
clock that is five minutes off. A simulated engine's page is scraped meanwhile. Memory and CPU time are of all processes
of the watch, from /proc. With --pair a prefill engine computes the prompt and another one decodes: a span more a
request. --kill-after kills the receiver once (SIGKILL); senders try again, as exporters do.
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
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from sidelight.rundir.access import Access
from sidelight.scraper.spans.forward import CollectorConnection, Unavailable

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
BATCH_S = 1.0
SAMPLE_S = 5.0
ENGINE_CLOCK_NS = -300_000_000_000
ENGINE_SCOPE = "vllm.tracing.otel"
SCOPES = {"client": "benchmark", "gateway": "dynamo-frontend", "engine": ENGINE_SCOPE, "prefill": ENGINE_SCOPE}
MEANS_MS = {"network": 3.0, "gateway": 2.0, "other": 6.0, "queue": 40.0, "prefill": 80.0, "decode": 400.0}
PAIR_MS = {"router": 1.0, "decode_queue": 8.0, "first_step": 10.0}


@dataclass(slots=True)
class Traffic:
    """What was sent: spans, and the truth in ms by part, added up over requests."""

    rng: random.Random
    engine_spans: bool
    pair: bool = False
    pending: dict[str, list[Span]] = field(default_factory=lambda: {name: [] for name in SCOPES})
    spans: int = 0
    requests: int = 0
    tries: int = 0
    truth_ms: Counter[str] = field(default_factory=Counter)

    def request(self, now_ns: int) -> None:
        """Let one request end now."""
        means_ms = MEANS_MS | (PAIR_MS if self.pair else {})
        ms = {part: self.rng.expovariate(1 / mean) for part, mean in means_ms.items()}
        between_ms = sum(ms.get(part, 0.0) for part in PAIR_MS)
        self.truth_ms.update(ms)
        self.requests += 1
        trace = self.rng.randbytes(16)
        ids = {name: self.rng.randbytes(8) for name in SCOPES}
        engine_ttft = ms["other"] + ms["queue"] + ms["prefill"]
        whole = {"prefill": engine_ttft, "engine": between_ms - ms.get("router", 0.0) + ms["decode"]}
        if not self.pair:
            whole["engine"] += engine_ttft
        whole["gateway"] = engine_ttft + between_ms + ms["decode"] + ms["gateway"]
        whole["client"] = whole["gateway"] + ms["network"]
        ttft = {name: one - ms["decode"] for name, one in whole.items()}
        parents = {"client": b"", "gateway": ids["client"], "engine": ids["gateway"], "prefill": ids["gateway"]}
        names = ("client", "gateway", "engine") if self.engine_spans else ("client", "gateway")
        for name in SCOPES if self.pair else names:
            end_ns = now_ns + (ENGINE_CLOCK_NS if name in ("engine", "prefill") else 0)
            end_ns -= int((whole["engine"] + ms["router"]) * 1e6) if name == "prefill" else 0
            span = Span(trace_id=trace, span_id=ids[name], parent_span_id=parents[name])
            span.start_time_unix_nano, span.end_time_unix_nano = end_ns - int(whole[name] * 1e6), end_ns
            times = ms
            if name == "prefill":
                ttft[name], times = whole[name], ms | {"decode": 0.0}
                span.attributes.add(key="gen_ai.request.max_tokens").value.int_value = 1
                span.attributes.add(key="gen_ai.usage.completion_tokens").value.int_value = 1
            elif name == "engine" and self.pair:
                times = ms | {"queue": ms["decode_queue"], "prefill": ms["first_step"]}
            self._describe(name, span, times, ttft[name] / 1e3, whole[name] / 1e3)
            self.pending[name].append(span)
            self.spans += 1

    def _describe(self, name: str, span: Span, ms: dict[str, float], ttft_s: float, whole_s: float) -> None:
        kinds = {"client": Span.SPAN_KIND_CLIENT, "gateway": Span.SPAN_KIND_INTERNAL}
        span.kind = kinds.get(name, Span.SPAN_KIND_SERVER)
        span.name = {"client": "chat model", "gateway": "http-request"}.get(name, "llm_request")
        texts: dict[str, str] = {}
        numbers = {"gen_ai.response.time_to_first_chunk": ttft_s}
        if name == "client":
            texts["gen_ai.operation.name"] = "chat"
        elif name == "gateway":
            # Of Dynamo's frontend, as it was recorded.
            texts |= {"method": "POST", "uri": "/v1/chat/completions", "x_request_id": span.trace_id.hex()}
            texts["ttft_ms"], numbers = f"{1e3 * ttft_s:.2f}", {}
        else:
            times = {"time_in_queue": ms["queue"], "time_in_model_prefill": ms["prefill"]}
            times["time_in_model_decode"] = ms["decode"]
            numbers = {f"gen_ai.latency.{key}": one / 1e3 for key, one in times.items()}
            numbers |= {"gen_ai.latency.time_to_first_token": ttft_s, "gen_ai.latency.e2e": whole_s}
            texts["gen_ai.request.id"] = f"chatcmpl-{span.trace_id.hex()}"
        for key, text in texts.items():
            span.attributes.add(key=key).value.string_value = text
        for key, number in numbers.items():
            span.attributes.add(key=key).value.double_value = number

    async def send_on(self, name: str, wire: CollectorConnection, stop: asyncio.Event) -> None:
        """Send one service's spans in batches, each until it is taken."""
        while not (stop.is_set() and not self.pending[name]):
            spans, self.pending[name] = self.pending[name], []
            if spans:
                await self._send(name, spans, wire)
            if not stop.is_set():
                await asyncio.sleep(BATCH_S)

    async def _send(self, name: str, spans: list[Span], wire: CollectorConnection) -> None:
        request = ExportTraceServiceRequest()
        resource = request.resource_spans.add()
        for key, text in {"service.instance.id": name, "host.name": "benchmark"}.items():
            resource.resource.attributes.add(key=key).value.string_value = text
        scope = resource.scope_spans.add()
        scope.scope.name = SCOPES[name]
        scope.spans.extend(spans)
        pause_s = 0.5
        while True:
            try:
                await wire.send(request.SerializeToString())
            except Unavailable:
                self.tries += 1
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 8.0)
            else:
                return


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Memory and CPU time of processes: resident MB by process, and CPU seconds of all since their start."""

    at_s: float
    mb: dict[int, float]
    cpu_s: dict[int, float]

    @property
    def whole_mb(self) -> float:
        return sum(self.mb.values())


def use(root: int) -> Use:
    """Read what a process and its children use."""
    pids = [root, *map(int, Path(f"/proc/{root}/task/{root}/children").read_text().split())]
    mb, cpu_s = {}, {}
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            mb[pid] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / 1e6
            cpu_s[pid] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
        except (OSError, IndexError):
            continue
    return Use(at_s=time.monotonic(), mb=mb, cpu_s=cpu_s)


def receiver(root: int) -> int:
    """Return the child of a watch that receives spans."""
    return next(
        pid for pid in use(root).mb if b"sidelight.scraper.worker.spans" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )


async def _measure(options: argparse.Namespace) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        simulator = await _started("sidelight.simulator", "--port", "0", "--exit-on-eof", stdin=asyncio.subprocess.PIPE)
        page = json.loads(await _line(simulator.stdout))["url"] + "/metrics"
        arguments = ["--otlp-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0", "--json", "--metrics", page]
        watch = await _started("sidelight", "watch", *arguments, "--out", f"{scratch}/watch", "--keep", options.keep)
        url, target = "", ""
        while not (url and target):
            told = json.loads(await _line(watch.stderr)).get("stage", "")
            url = url or "".join(re.findall(r"http://\S+/metrics", told))
            target = target or "".join(re.findall(r"gRPC at (\S+:\d+)", told))
        reading = asyncio.ensure_future(_read_on(watch.stderr))
        traffic = Traffic(rng=random.Random(1), engine_spans=not options.no_engine_spans, pair=options.pair)
        uses = await _drive(traffic, options, watch.pid, f"grpc://{target}")
        await _until_counted(url, traffic.requests)
        counts = page_of(url)
        kept = sum(one.stat().st_size for one in os.scandir(f"{scratch}/watch/raw"))
        watch.send_signal(signal.SIGTERM)
        summary = (await _line(watch.stdout)).decode().strip()
        code = await watch.wait()
        reading.cancel()
        if simulator.stdin is not None:
            simulator.stdin.close()
        await simulator.wait()
        return {"exit": code, "summary": summary, "kept_mb": kept / 1e6, **_report(traffic, uses, counts, options)}


async def _drive(traffic: Traffic, options: argparse.Namespace, pid: int, target: str) -> list[Use]:
    """Let requests end at the rate, look at the watch every few seconds, and kill its receiver where that was asked."""
    uses, stop = [use(pid)], asyncio.Event()
    begin_s, next_s, kill_s = time.monotonic(), time.monotonic(), options.kill_after
    async with asyncio.TaskGroup() as group:
        for name in SCOPES:
            wire = await asyncio.wait_for(CollectorConnection(target, Access()).__aenter__(), 10)
            group.create_task(traffic.send_on(name, wire, stop))
        while time.monotonic() < begin_s + options.seconds:
            traffic.request(time.time_ns())
            next_s += traffic.rng.expovariate(options.rate)
            if kill_s is not None and time.monotonic() > begin_s + kill_s:
                os.kill(receiver(pid), signal.SIGKILL)
                kill_s = None
            if time.monotonic() > uses[-1].at_s + SAMPLE_S:
                uses.append(use(pid))
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        stop.set()
    return [*uses, use(pid)]


def _report(
    traffic: Traffic, uses: list[Use], counts: dict[str, float], options: argparse.Namespace
) -> dict[str, object]:
    begin_s = uses[0].at_s
    late = [one for one in uses if one.at_s > begin_s + min(120.0, options.seconds / 2)] or uses[-1:]
    steady = [one.whole_mb for one in late]
    # Of a process that died, up to when it was seen last; of one that began, all of it.
    last = {pid: cpu_s for one in late for pid, cpu_s in one.cpu_s.items()}
    cpu_s = sum(spent_s - late[0].cpu_s.get(pid, 0.0) for pid, spent_s in last.items())
    sums = {}
    for part in ("network", "gateway", "queue", "prefill", "other", *PAIR_MS):
        found = [
            value for key, value in counts.items() if key.startswith(f'sidelight_ttft_part_seconds_sum{{part="{part}"')
        ]
        sums[part] = (round(sum(found), 3), round(traffic.truth_ms[part] / 1e3, 3))
    return {
        "requests": traffic.requests,
        "spans_sent": traffic.spans,
        "spans_counted": counts["sidelight_receiver_spans_total"],
        "sent_again": traffic.tries,
        "restarts": counts["sidelight_receiver_restarts_total"],
        "cpu_s_from_first_request": round(sum(last.values()) - sum(uses[0].cpu_s.values()), 2),
        "rss_mb_after_2_min": round(steady[0], 1),
        "rss_mb_least_most": (round(min(steady), 1), round(max(steady), 1)),
        "rss_mb_at_end": round(steady[-1], 1),
        "rss_mb_by_process": [round(one, 1) for one in uses[-1].mb.values()],
        "cpu_percent_of_a_core": round(100 * cpu_s / max(late[-1].at_s - late[0].at_s, 1e-9), 2),
        "ttft_part_s_told_and_true": sums,
        **{
            key: value
            for key, value in counts.items()
            if key.startswith(("sidelight_requests_total", "sidelight_breakdown_missing_total")) and value
        },
    }


def page_of(url: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=20) as response:  # noqa: S310  our own page
        lines = response.read().decode().splitlines()
    return {key: float(value) for key, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


async def _until_counted(url: str, requests: int) -> None:
    for _ in range(120):
        counts = await asyncio.to_thread(page_of, url)
        done = sum(value for key, value in counts.items() if key.startswith("sidelight_requests_total"))
        if done >= requests:
            return
        await asyncio.sleep(0.5)


async def _started(module: str, *arguments: str, stdin: int | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", module, *arguments),
        stdin=stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE if module == "sidelight" else None,
    )


async def _line(stream: asyncio.StreamReader | None) -> bytes:
    assert stream is not None
    line = await asyncio.wait_for(stream.readline(), 60)
    assert line, "it ended"
    return line


async def _read_on(stream: asyncio.StreamReader | None) -> None:
    while stream is not None and (line := await stream.readline()):
        print(line.decode().rstrip(), file=sys.stderr)


def main() -> None:
    """Send, measure, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--kill-after", type=float, default=None)
    parser.add_argument("--no-engine-spans", action="store_true")
    parser.add_argument("--pair", action="store_true")
    parser.add_argument("--keep", default="1h")
    parser.add_argument("--out", type=Path, default=None, help="write the figures there as JSON too")
    options = parser.parse_args()
    figures = asyncio.run(_measure(options))
    print(json.dumps(figures, indent=2))
    if options.out:
        options.out.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
