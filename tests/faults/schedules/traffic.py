"""Requests as clients and engines know them, and the exporters that send their spans: late, twice, in any order.

What was truly so is kept beside it, for the checks.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from faults.schedules.calls import CallFailed
from faults.schedules.calls import call as call_grpc
from faults.schedules.network import Network
from faults.schedules.virtual_time import BOOT_NS, EPOCH_NS, Time
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from sent_spans import MS, NOON, body, call, engine, gateway

from sidelight.scraper.spans.spec import SIGNALS, TRACES

assert EPOCH_NS == NOON
ATTEMPT_S, PATIENCE_S = 10.0, 300.0  # of exporters
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 5.0
GRPC_PORT, HTTP_PORT = 4317, 4318


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request: when it began, ms since NOON, and its true times, ms."""

    number: int
    start_ms: float
    network_ms: float
    gateway_ms: float  # 0: there is none
    frontend_ms: float
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    sides: frozenset[str]  # whose spans are sent at all: client, gateway, engine

    @property
    def trace(self) -> bytes:
        return (self.number + 1).to_bytes(16)

    @property
    def engine_ttft_ms(self) -> float:
        return self.frontend_ms + self.queue_ms + self.prefill_ms

    @property
    def ttft_ms(self) -> float:
        return self.network_ms + self.gateway_ms + self.engine_ttft_ms

    @property
    def end_ms(self) -> float:
        return self.start_ms + self.ttft_ms + self.decode_ms

    def spans(self) -> dict[str, Span]:
        """Return its spans by whose they are."""
        spans = {}
        inner = self.start_ms + self.network_ms / 2
        if "client" in self.sides:
            spans["client"] = call(first_ms=self.ttft_ms, trace=self.trace, start_ms=self.start_ms, end_ms=self.end_ms)
        if "gateway" in self.sides:
            first_ms = self.gateway_ms + self.engine_ttft_ms
            spans["gateway"] = gateway(
                "gate", "client", first_ms=first_ms, trace=self.trace, start_ms=inner, end_ms=self.end_ms
            )
        if "engine" in self.sides:
            e2e_ms = self.engine_ttft_ms + self.decode_ms
            spans["engine"] = engine(
                parent="gate" if "gateway" in self.sides else "client",
                queue_ms=self.queue_ms,
                prefill_ms=self.prefill_ms,
                decode_ms=self.decode_ms,
                ttft_ms=self.engine_ttft_ms,
                e2e_ms=e2e_ms,
                trace=self.trace,
                start_ms=inner + self.gateway_ms / 2,
                end_ms=inner + self.gateway_ms / 2 + e2e_ms,
            )
        return spans


def requests(rng: random.Random, count: int, seconds: float) -> list[Request]:
    """Draw requests that begin within some seconds; all have a client's span, or all an engine's."""
    has_gateway, may_lack = rng.random() < 0.3, rng.choice(("engine", "client", ""))
    drawn = []
    for number in range(count):
        sides = {"client", "engine"} | ({"gateway"} if has_gateway else set())
        if may_lack and rng.random() < 0.2:
            sides -= {may_lack, "gateway"}
        drawn.append(
            Request(
                number=number,
                start_ms=1000 * (2 + rng.uniform(0, seconds)),
                network_ms=rng.uniform(1, 40),
                gateway_ms=rng.uniform(1, 80) if "gateway" in sides else 0.0,
                frontend_ms=rng.uniform(0, 20),
                queue_ms=rng.choice((0.0, rng.uniform(0, 3000))),
                prefill_ms=rng.uniform(5, 500),
                decode_ms=rng.uniform(0, 8000),
                sides=frozenset(sides),
            )
        )
    return drawn


@dataclass(slots=True, kw_only=True, eq=False)
class Export:
    """Spans that are sent together: `parts` are their requests' numbers and whose they are.

    `attempts` have when each began, ms, and how it ended: `taken`, `refused`, or "" for no answer.
    """

    number: int
    due_s: float
    over: str
    data: bytes
    parts: Sequence[tuple[int, str]]  # none of one that is odd
    again_s: Sequence[float]
    signal: str = TRACES
    attempts: list[tuple[float, str]] = field(default_factory=list)

    @property
    def taken(self) -> int:
        return sum(answer == "taken" for _, answer in self.attempts)


def exports(rng: random.Random, drawn: Sequence[Request], *, latest_s: float) -> list[Export]:
    """Put the spans of requests into exports: those of a side that end within a while go together, or not.

    Some are sent again though they were taken, up to `latest_s` later.
    """
    batches: list[Export] = []
    every_s = {side: rng.choice((0.05, 0.5, 5.0)) for side in ("client", "gateway", "engine")}
    over = {side: rng.choice(("grpc", "http")) for side in every_s}
    repeats = rng.choice((0.0, 0.3, 1.0))
    by_batch: dict[tuple[float, str], list[Request]] = {}
    for request in drawn:
        for side in sorted(request.sides):
            due_s = (request.end_ms / 1e3 // every_s[side] + 1) * every_s[side]
            by_batch.setdefault((due_s, side), []).append(request)
    for (due_s, side), together in sorted(by_batch.items()):
        late_s = rng.choice((0.0, 0.0, rng.uniform(0, 3), rng.uniform(0, 30)))
        again_s = [rng.uniform(1, latest_s) for _ in range(rng.randrange(1, 3))] if rng.random() < repeats else []
        data = body([request.spans()[side] for request in together], instance=side, service=side)
        parts = [(request.number, side) for request in together]
        batches.append(
            Export(number=len(batches), due_s=due_s + late_s, over=over[side], data=data, parts=parts, again_s=again_s)
        )
    return batches


def odd_exports(rng: random.Random, count: int, seconds: float) -> list[Export]:
    """Draw exports that are not to be used: bytes that are none, spans without ids, or by another clock."""
    drawn = []
    for number in range(count):
        unusable = call(trace=bytes(16)) if rng.random() < 0.5 else call(clock_ms=-rng.uniform(1, 2) * 1e6)
        unusable.end_time_unix_nano += rng.randrange(10**6)  # no two are the same bytes
        data = b"\xff" + rng.randbytes(rng.randrange(1, 200)) if rng.random() < 0.5 else body([unusable])
        due_s, over = rng.uniform(1, seconds), rng.choice(("grpc", "http"))
        drawn.append(Export(number=-1 - number, due_s=due_s, over=over, data=data, parts=(), again_s=()))
    return drawn


class Exporter:
    """Sends exports as OpenTelemetry's exporters do: again for five minutes where there is no answer, or a busy one."""

    def __init__(self, network: Network, clock: Time, rng: random.Random) -> None:
        self._network, self._clock, self._rng = network, clock, rng

    async def send_all(self, batches: Sequence[Export]) -> None:
        """Send each when it is due, beside the others."""
        async with asyncio.TaskGroup() as group:
            for export in batches:
                group.create_task(self._send(export))

    def _now_s(self) -> float:
        return now_ms(self._clock) / 1e3

    async def _send(self, export: Export) -> None:
        await asyncio.sleep(max(0.0, export.due_s - self._now_s()))
        await self._until_taken(export)
        for late_s in sorted(export.again_s):
            await asyncio.sleep(max(0.0, export.due_s + late_s - self._now_s()))
            await self._until_taken(export)

    async def _until_taken(self, export: Export) -> None:
        until_s, pause_s = self._now_s() + PATIENCE_S, FIRST_PAUSE_S
        while True:
            begun_ms = self._now_s() * 1e3
            try:
                async with asyncio.timeout(ATTEMPT_S):
                    answer = await (self._over_grpc(export) if export.over == "grpc" else self._over_http(export))
            except (TimeoutError, OSError, EOFError, ValueError):
                answer = ""
            export.attempts.append((begun_ms, answer))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S) * self._rng.uniform(0.8, 1.2)
            if answer in ("taken", "refused") or self._now_s() + pause_s > until_s:
                return
            await asyncio.sleep(pause_s)

    async def _over_grpc(self, export: Export) -> str:
        try:
            await call_grpc(self._network, GRPC_PORT, SIGNALS[export.signal], export.data)
        except CallFailed as failed:
            return "refused" if str(failed).startswith("INVALID_ARGUMENT") else _busy(str(failed))
        return "taken"

    async def _over_http(self, export: Export) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", HTTP_PORT)
        try:
            head = (
                f"POST /v1/{export.signal} HTTP/1.1\r\nHost: here\r\nContent-Type: application/x-protobuf\r\n"
                f"Content-Length: {len(export.data)}\r\nConnection: close\r\n\r\n"
            )
            for piece in pieces(self._rng, head.encode() + export.data):
                writer.write(piece)
            status = int((await reader.readline()).split()[1:2][0])
            await reader.readuntil(b"\r\n\r\n")
        except IndexError:
            return ""
        finally:
            writer.close()
        return "taken" if status == 200 else "refused" if status in (400, 413) else f"busy {status}"


def _busy(text: str) -> str:
    return "" if text.startswith(("UNAVAILABLE: connection", "CANCELLED")) else f"busy {text}"


def pieces(rng: random.Random, data: bytes) -> Iterator[bytes]:
    """Take bytes apart somewhere."""
    at = rng.randrange(len(data) + 1) if rng.random() < 0.3 else 0
    yield from filter(None, (data[:at], data[at:]))


def now_ms(clock: Time) -> float:
    """Return the time of day as requests have it: by a clock that is right, whatever ours is set to."""
    return (clock.now_ns - BOOT_NS) / MS
