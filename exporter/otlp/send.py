"""Sending exports to an OTLP collector within bounds: each is tried again for a while, then the rest is given up.

What is given up is stated and lost to the collector only: the run directory can be sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from rundir.access import Access
from scraper.spans.forward import Rejected, Unavailable, Wire
from scraper.spans.spec import METRICS, TRACES

PATIENCE_S = 10.0  # how long one export is tried
REPORT_EVERY_S = 5.0

Export = ExportTraceServiceRequest | ExportMetricsServiceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Outcome of sending: the number of spans, or metric points, that the collector took, and rejected of those that it
    was given; why it ended early, and whether it was because the collector was away.

    `reason` is "" where all were given, and may then still say why some were rejected.
    """

    taken: int
    rejected: int
    given_up: bool
    reason: str
    is_away: bool = False


async def send(exports: Iterable[Export], url: str, access: Access, *, report: Callable[[str], None]) -> Sent:
    """Send exports in turn, gzipped; `report` is called every few seconds with how much was taken.

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
            of_spans = isinstance(export, ExportTraceServiceRequest)
            signal = TRACES if of_spans else METRICS
            try:
                reply = await wire.deliver(export.SerializeToString(), signal, patience_s=PATIENCE_S)
            except (Unavailable, Rejected) as error:
                is_away = isinstance(error, Unavailable)
                return Sent(taken=taken, rejected=rejected, given_up=True, reason=str(error), is_away=is_away)
            bad, reason = _rejected(reply, of_spans=of_spans)
            taken, rejected, why = taken + _size(export) - bad, rejected + bad, why or reason
            if loop.time() - reported_s >= REPORT_EVERY_S:
                reported_s = loop.time()
                report(f"{taken:,} {'spans' if of_spans else 'metric points'} sent")
    return Sent(taken=taken, rejected=rejected, given_up=False, reason=why)


def _size(export: Export) -> int:
    """Return the number of spans, or metric points, of an export."""
    if isinstance(export, ExportTraceServiceRequest):
        return sum(len(scope.spans) for resource in export.resource_spans for scope in resource.scope_spans)
    metrics = (
        metric for resource in export.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics
    )
    return sum(len(getattr(metric, str(metric.WhichOneof("data"))).data_points) for metric in metrics)


def _rejected(reply: bytes, *, of_spans: bool) -> tuple[int, str]:
    """Return the number of spans or points that the collector rejected, and its reason. A reply that cannot be read
    rejects nothing.
    """
    try:
        if of_spans:
            spans = ExportTraceServiceResponse.FromString(reply).partial_success
            return spans.rejected_spans, " ".join(spans.error_message.split())
        points = ExportMetricsServiceResponse.FromString(reply).partial_success
        return points.rejected_data_points, " ".join(points.error_message.split())
    except DecodeError:
        return 0, ""
