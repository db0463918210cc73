"""Selection of the transport for a worker's requests."""

from __future__ import annotations

from sidelight.loadgen.transports.http import HttpTransport
from sidelight.loadgen.transports.lateness import ReceiveStamps
from sidelight.loadgen.transports.transport import Transport, WorkerSpec
from sidelight.rundir.clock import AnchoredClock


def open_transport(spec: WorkerSpec, clock: AnchoredClock, stamps: ReceiveStamps | None = None) -> Transport:
    """Return the transport that a specification names; the others stay unloaded: gRPC alone takes a tenth of a second.

    Raises ValueError or OSError on an unusable specification.
    """
    if spec.transport == "websocket":
        from sidelight.loadgen.transports.websocket import WebSocketTransport  # noqa: PLC0415

        return WebSocketTransport(spec, clock)
    if spec.transport == "grpc":
        from sidelight.loadgen.transports.grpc import GrpcTransport  # noqa: PLC0415

        return GrpcTransport(spec, clock)
    return HttpTransport(spec, clock, stamps=stamps or ReceiveStamps(clock))
