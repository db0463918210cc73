"""Which transport carries a worker's requests."""

from __future__ import annotations

from loadgen.transports.http import HttpLink
from loadgen.transports.lateness import ReceiveStamps
from loadgen.transports.link import Link, WorkerSpec
from rundir.clock import Clock


def link_of(spec: WorkerSpec, clock: Clock, stamps: ReceiveStamps | None = None) -> Link:
    """The transport that was asked for; the others stay unloaded, since gRPC alone takes a tenth of a second.

    Raises ValueError or OSError on an unusable specification.
    """
    if spec.transport == "websocket":
        from loadgen.transports.websocket import WebSocketLink  # noqa: PLC0415

        return WebSocketLink(spec, clock)
    if spec.transport == "grpc":
        from loadgen.transports.grpc import GrpcLink  # noqa: PLC0415

        return GrpcLink(spec, clock)
    return HttpLink(spec, clock, stamps=stamps or ReceiveStamps(clock))
