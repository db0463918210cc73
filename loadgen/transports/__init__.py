"""Selection of the transport for a worker's requests."""

from __future__ import annotations

from loadgen.transports.http import HttpTransport
from loadgen.transports.lateness import ReceiveStamps
from loadgen.transports.transport import Transport, WorkerSpec
from rundir.clock import AnchoredClock


def open_transport(spec: WorkerSpec, clock: AnchoredClock, stamps: ReceiveStamps | None = None) -> Transport:
    """Return the transport that a specification names; the others stay unloaded: gRPC alone takes a tenth of a second.

    Raises ValueError or OSError on an unusable specification.
    """
    if spec.transport == "websocket":
        from loadgen.transports.websocket import WebSocketTransport  # noqa: PLC0415

        return WebSocketTransport(spec, clock)
    if spec.transport == "grpc":
        from loadgen.transports.grpc import GrpcTransport  # noqa: PLC0415

        return GrpcTransport(spec, clock)
    return HttpTransport(spec, clock, stamps=stamps or ReceiveStamps(clock))
