"""Sending exports to an OTLP collector within bounds: each is tried again for a while, then the rest is given up.

What is given up is stated and lost to the collector only: the run directory can be sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from rundir.access import Access
from scraper.spans.forward import Rejected, Unavailable, Wire

PATIENCE_S = 10.0  # how long one export is tried
REPORT_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What came of it, in spans: how many the collector took, and rejected of those it was given; why it ended early.

    `reason` is "" where all were given, and may then still say why some were rejected.
    """

    taken: int
    rejected: int
    given_up: bool
    reason: str


async def send(
    exports: Iterable[ExportTraceServiceRequest],
    url: str,
    access: Access,
    *,
    report: Callable[[str], None],
) -> Sent:
    """Send exports in turn, gzipped; `report` is called every few seconds with how many spans were taken.

    - a collector that is away, or asks for later (429, 502, 503, 504), is tried again for PATIENCE_S with growing
      pauses, or after the Retry-After that it states; one longer than that is not waited for
    - one that refuses is not asked again, and is given nothing more

    Raises what `scraper.spans.forward.Wire` does of a URL or a certificate that cannot be used.
    """
    taken = rejected = 0
    why = ""
    loop = asyncio.get_running_loop()
    reported_s = loop.time()
    async with Wire(url, access, zipped=True) as wire:
        for export in exports:
            count = sum(len(scope.spans) for resource in export.resource_spans for scope in resource.scope_spans)
            try:
                reply = await wire.deliver(export.SerializeToString(), patience_s=PATIENCE_S)
            except (Unavailable, Rejected) as error:
                return Sent(taken=taken, rejected=rejected, given_up=True, reason=str(error))
            bad, reason = _rejected(reply)
            taken, rejected, why = taken + count - bad, rejected + bad, why or reason
            if loop.time() - reported_s >= REPORT_EVERY_S:
                reported_s = loop.time()
                report(f"{taken:,} spans sent")
    return Sent(taken=taken, rejected=rejected, given_up=False, reason=why)


def _rejected(reply: bytes) -> tuple[int, str]:
    """Return how many spans of an export the collector rejected, and why; a reply that cannot be read rejects none."""
    try:
        partial = ExportTraceServiceResponse.FromString(reply).partial_success
    except DecodeError:
        return 0, ""
    return partial.rejected_spans, " ".join(partial.error_message.split())
