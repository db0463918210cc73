"""Where spans are received and forwarded, and whether that is possible; a module of its own so that options need not
import grpcio.
"""

from __future__ import annotations

import math
import resource
import socket
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Self
from urllib.parse import SplitResult, urlsplit

import msgspec

from rundir.access import Access, Guard, connection_problem, masked

# OpenTelemetry's collector takes no more over gRPC either, so exporters live with it.
LIMIT_BYTES = 4 * 1024 * 1024
# OpenTelemetry's batch processors wait 5 s at most (OTEL_BSP_SCHEDULE_DELAY); what comes later is not awaited.
SETTLE_S = 6.0
MOST_CONNECTIONS, LEAST_CONNECTIONS = 256, 8
_OWN_DESCRIPTORS = 96
MOST_STEPS = 64
GRPC_PORT = 4317
TRACES, LOGS, METRICS = "traces", "logs", "metrics"
# What OTLP carries, by the method of gRPC that takes it; over HTTP its path is /v1/ and its name.
SIGNALS = {
    TRACES: "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    LOGS: "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
    METRICS: "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}


class ForwardKeep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How long exports wait for the next collector: for so many seconds, and of spans so many bytes of the logs.

    clock_steps: when the clock was set, ns by the time before, and by how much, in turn. Of those before the last only
    the ones that matter, MOST_STEPS at most: of a clock that is set each second for months there would be millions.
    """

    seconds: float
    most_bytes: int
    clock_steps: tuple[tuple[int, int], ...] = ()

    def is_over(self, came_ns: int, now_ns: int) -> bool:
        """Tell whether what came then has waited for too long now.

        A clock that is set back shows the same times again: a stamp is taken for the one that is the least ago, or is
        still to come. One that the clock has skipped is of when it was set.
        """
        latest_ns, begun_ns = -math.inf, -math.inf
        to_come_ns = sum(moved_ns for _, moved_ns in self.clock_steps)
        for at_ns, moved_ns in (*self.clock_steps, (math.inf, 0)):
            if begun_ns <= came_ns <= max(at_ns, at_ns + moved_ns):
                latest_ns = max(latest_ns, min(came_ns, at_ns) + to_come_ns)
            begun_ns, to_come_ns = at_ns + moved_ns, to_come_ns - moved_ns
        return now_ns - latest_ns > self.seconds * 1e9

    def after_step(self, at_ns: int, moved_ns: int) -> Self:
        """Return what holds once the clock was set by so much, at a moment by the time before.

        Steps go before which nothing came that still waits. Where there are too many, the two smallest in a row count
        as one, but for one back and then ahead: what came between them waits for longer by one of them.
        """
        steps = list(self.clock_steps)
        while steps and self._is_past(steps, at_ns):
            del steps[0]
        if len(steps) >= MOST_STEPS:
            pairs = [place for place, (a, b) in enumerate(pairwise(steps)) if not a[1] < 0 < b[1]]
            place = min(pairs, key=lambda place: abs(steps[place][1]) + abs(steps[place + 1][1]))
            (first_at_ns, first_ns), (second_at_ns, second_ns) = steps[place : place + 2]
            both_at_ns = second_at_ns - first_ns if first_ns >= 0 else first_at_ns
            steps[place : place + 2] = [(both_at_ns, first_ns + second_ns)]
        return msgspec.structs.replace(self, clock_steps=(*steps, (at_ns, moved_ns)))

    def _is_past(self, steps: Sequence[tuple[int, int]], now_ns: int) -> bool:
        """Tell whether all that came before the first of some steps has waited for too long, with it or without."""
        at_ns, moved_ns = steps[0]
        latest_ns = max(at_ns, at_ns + moved_ns) + sum(by_ns for _, by_ns in steps[1:])
        return now_ns - latest_ns > self.seconds * 1e9


class ReceiverSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where to listen, as HOST:PORT (port 0: any that is free), empty for not; and where to pass spans on to.

    restarts_at_clock_step: when the wall clock is set, another receiver follows that knows the new time. Until then
    exports are turned away whose spans seem to be stamped by another clock.
    memory_bytes: above so much memory of the process, exports are refused until there is room; by default there is no
    limit, for a receiver that shares its process.
    guard: who may send.
    is_awaited: a run waits at its end for the spans of its requests, so that it is noted whose have come.
    forward_keep: what waits at the end is left to the next watch of the folder, and what earlier ones have left is
    passed on too. None: what waits is dropped when the receiver is ended.
    """

    grpc: str = "127.0.0.1:4317"
    http: str = "127.0.0.1:4318"
    clock_offset_ns: int = 0
    forward: str = ""
    forward_keep: ForwardKeep | None = None
    access: Access = Access()
    limit_bytes: int = LIMIT_BYTES
    restarts_at_clock_step: bool = False
    is_awaited: bool = True
    memory_bytes: int = sys.maxsize
    guard: Guard = Guard()


class CannotListen(Exception):
    """An address on which the receiver cannot listen; the text names it."""


def most_connections() -> int:
    """Return how many connections may be open at one port for spans: logs and forwarding need descriptors too."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    share = (soft - _OWN_DESCRIPTORS) // 2
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, share))


def host_and_port(address: str) -> tuple[str, int]:
    """Take HOST:PORT apart, brackets around an IPv6 address aside. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def require_free(address: str) -> None:
    """Raise CannotListen where an address is not free now, ValueError where it is not an address."""
    host, port = host_and_port(address)
    try:
        for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            socket.create_server(place[:2], family=family).close()
    except OSError as error:
        raise CannotListen(f"cannot listen on {address}: {connection_problem(error)}") from error


def forward_parts(url: str) -> SplitResult:
    """Take a URL to forward to apart: grpc(s)://HOST:PORT or http(s)://HOST. Raises ValueError for any other."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("grpc", "grpcs", "http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"{masked(url)} is not a grpc(s) or http(s) URL")
    if parts.scheme in ("grpc", "grpcs") and parts.port is None:
        raise ValueError(f"{masked(url)} names no port")
    return parts
