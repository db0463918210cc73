"""Addresses for receiving and forwarding spans, and checks of them.

It is a module of its own so that options need not import grpcio.
"""

from __future__ import annotations

import resource
import socket
import sys
from urllib.parse import SplitResult, urlsplit

import msgspec

from sidelight.rundir.access import Access, Guard, connection_problem, masked

# OpenTelemetry's collector takes no more over gRPC either, so exporters live with it.
LIMIT_BYTES = 4 * 1024 * 1024
# OpenTelemetry's batch processors wait 5 s at most (OTEL_BSP_SCHEDULE_DELAY); what comes later is not awaited.
SETTLE_S = 6.0
# So long a decode engine's span is awaited after its prefill engine's: it is sent when all has been generated.
DECODE_S = 300.0
MOST_CONNECTIONS, LEAST_CONNECTIONS = 256, 8
_OWN_DESCRIPTORS = 96
GRPC_PORT = 4317
PROTOBUF = "application/x-protobuf"
TRACES, LOGS, METRICS = "traces", "logs", "metrics"
# What OTLP carries, by the method of gRPC that takes it; over HTTP its path is /v1/ and its name.
SIGNALS = {
    TRACES: "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    LOGS: "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
    METRICS: "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}


class ReceiverSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses of a receiver: those to listen at, and the collector to forward spans to.

    Those to listen at are HOST:PORT (port 0: any that is free), empty for not.

    restarts_at_clock_step: when the wall clock is set, another receiver follows that knows the new time. Until then
    exports are turned away whose spans seem to be stamped by another clock.
    memory_bytes: above this memory of the process, exports are refused until there is room; the default is none, for a
    receiver that shares its process.
    guard: who may send.
    is_awaited: a run waits at its end for the spans of its requests, so that it is noted whose have come.
    clock_step_ns: by how much the wall clock was set last before the receiver began, 0 where it was not.
    """

    grpc: str = "127.0.0.1:4317"
    http: str = "127.0.0.1:4318"
    clock_offset_ns: int = 0
    forward: str = ""
    clock_step_ns: int = 0
    access: Access = Access()
    limit_bytes: int = LIMIT_BYTES
    restarts_at_clock_step: bool = False
    is_awaited: bool = True
    memory_bytes: int = sys.maxsize
    guard: Guard = Guard()


class CannotListen(Exception):
    """An address on which the receiver cannot listen; the text names it."""


def most_connections() -> int:
    """Return the maximum number of open connections at one port for spans.

    Logs and forwarding need descriptors too.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    share = (soft - _OWN_DESCRIPTORS) // 2
    return max(LEAST_CONNECTIONS, min(MOST_CONNECTIONS, share))


def host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT, without brackets around an IPv6 address. Raises ValueError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def require_free(address: str) -> None:
    """Raise CannotListen for an address that is in use, ValueError for an invalid one."""
    host, port = host_and_port(address)
    try:
        for family, _, _, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
            socket.create_server(place[:2], family=family).close()
    except OSError as error:
        raise CannotListen(f"cannot listen on {address}: {connection_problem(error)}") from error


def forward_parts(url: str) -> SplitResult:
    """Split a forwarding URL: grpc(s)://HOST:PORT or http(s)://HOST. Raises ValueError for any other."""
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
