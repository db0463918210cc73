"""Sending to an OTLP collector by OpenTelemetry's exporters, which try again within OTEL_EXPORTER_OTLP_TIMEOUT, 10 s.

They say only whether a batch was taken; what the collector said of it is read here. What is given up is stated and lost
to the collector only: the run directory can be sent again.
"""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urlsplit

# Read on import; else each failed connection is written to standard error.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc
import requests
import urllib3
from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.grpc.exporter import InvalidCompressionValueException
from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.trace import ReadableSpan

from sidelight.rundir.access import Access, bare, connection_problem, headers_for, tls_context
from sidelight.scraper.spans.forward import GRPC_AGAIN, HTTP2_SETTINGS, HTTP_AGAIN, http_url, refusal, speaks_grpc
from sidelight.scraper.spans.spec import TRACES

REPORT_EVERY_S = 5.0
_REPLY_BYTES = 64 * 1024

Batch = Sequence[ReadableSpan] | MetricsData

logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)  # what they log is said once, in the outcome


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


@dataclass(slots=True)
class _Reply:
    """The collector's last reply, as far as the exporters do not pass it on."""

    rejected: int = 0
    reason: str = ""
    is_away: bool = False

    def failed(self, reason: str, *, is_away: bool) -> None:
        self.rejected, self.reason, self.is_away = 0, reason, is_away

    def took(self, body: bytes) -> None:
        """Read the part of a batch that it rejected. A reply that cannot be read rejects nothing."""
        self.rejected, self.reason, self.is_away = 0, "", False
        try:  # in the reply to metrics these are the same fields
            partial = ExportTraceServiceResponse.FromString(body).partial_success
        except DecodeError:
            return
        self.rejected, self.reason = partial.rejected_spans, " ".join(partial.error_message.split())


def send(batches: Iterable[Batch], signal: str, url: str, access: Access, *, report: Callable[[str], None]) -> Sent:
    """Send batches of a signal in turn, gzipped; `report` is called every few seconds with how much was taken.

    The first batch that is given up is the last.
    """
    taken = rejected = 0
    why, reply = "", _Reply()
    try:
        exporter = _exporter(signal, url, access, reply)
    except (ValueError, InvalidCompressionValueException) as error:
        return Sent(taken=0, rejected=0, given_up=True, reason=str(error))
    reported_s = monotonic()
    try:
        for batch in batches:
            reply.failed("it cannot be encoded", is_away=False)
            if exporter.export(batch).name != "SUCCESS":
                return Sent(taken=taken, rejected=rejected, given_up=True, reason=reply.reason, is_away=reply.is_away)
            taken, rejected = taken + _size(batch) - reply.rejected, rejected + reply.rejected
            why = why or reply.reason
            if monotonic() - reported_s >= REPORT_EVERY_S:
                reported_s = monotonic()
                report(f"{taken:,} {'spans' if signal == TRACES else 'metric points'} sent")
    finally:
        exporter.shutdown()
    return Sent(taken=taken, rejected=rejected, given_up=False, reason=why)


def _exporter(signal: str, url: str, access: Access, reply: _Reply) -> Any:
    """Return the exporter of a signal. Raises ValueError, or InvalidCompressionValueException, where the URL, a
    certificate or a variable of the environment cannot be used.
    """
    if access.ca:
        tls_context(access)  # says in our words what is wrong with the file
    headers, plain, kind = headers_for(access, url), bare(url), signal == TRACES
    zips = not _variable(signal, "COMPRESSION")
    if speaks_grpc(plain):
        parts = urlsplit(plain)
        is_open = parts.scheme in ("grpc", "http")
        return (_GrpcSpans if kind else _GrpcMetrics)(
            reply,
            endpoint=f"{'http' if is_open else 'https'}://{parts.netloc}",
            insecure=is_open,
            credentials=grpc.ssl_channel_credentials(Path(access.ca).read_bytes()) if access.ca else None,
            headers={name.lower(): value for name, value in headers.items()} or None,
            compression=grpc.Compression.Gzip if zips else None,
            channel_options=(("grpc.enable_http_proxy", 0),),  # as over HTTP: headers may be secrets
        )
    if not (endpoint := http_url(plain, signal)):
        raise ValueError(f"the path of its URL is for spans alone; end it in /v1/traces, or in /v1/{signal}")
    system = ssl.get_default_verify_paths()
    return (HttpSpans if kind else HttpMetrics)(
        endpoint=endpoint,
        # requests has authorities of its own
        certificate_file=access.ca or _variable(signal, "CERTIFICATE") or system.cafile or system.capath,
        headers=headers,
        compression=Compression.Gzip if zips else None,
        session=_Session(reply),
    )


def _variable(signal: str, name: str) -> str:
    """Return a variable of OpenTelemetry's exporters, "" where it is not set."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_{name}") or os.environ.get(
        f"OTEL_EXPORTER_OTLP_{name}", ""
    )


class _Session(requests.Session):
    """Requests to a collector: by no proxy, to no other host, and with what it replied."""

    def __init__(self, reply: _Reply) -> None:
        super().__init__()
        self.trust_env = False
        self._reply = reply

    def request(self, method: str, url: str, **options: Any) -> Any:  # type: ignore[override]
        """Send a request. Raises ValueError for what the exporter would try again, or take for taken, and is not."""
        try:
            response = super().request(method, url, **options, stream=True)
            with response:
                body: bytes = response.raw.read(_REPLY_BYTES, decode_content=True)
        except (OSError, urllib3.exceptions.HTTPError, ValueError) as error:
            cause = _cause(error)
            if HTTP2_SETTINGS in repr(cause):
                self._reply.failed(f"this is a gRPC port: write grpc://{urlsplit(url).netloc}", is_away=False)
                raise ValueError(self._reply.reason) from error
            problem = connection_problem(cause)
            reason = f"connect: {problem}"
            if problem.kind == "other":
                reason = str(problem) if isinstance(cause, OSError) else f"reply: {problem}"
            is_late = isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError)
            self._reply.failed("no answer in time" if is_late else reason, is_away=True)
            raise
        status, kind = response.status_code, response.headers.get("Content-Type", "").partition(";")[0]
        if 200 <= status < 300:
            self._reply.took(body)
        else:
            is_away = status in HTTP_AGAIN
            self._reply.failed(f"HTTP {status}{'' if is_away else refusal(kind, body)}", is_away=is_away)
        if 300 <= status < 400:
            raise ValueError(self._reply.reason)
        return response


def _cause(error: BaseException) -> BaseException:
    """Return the first cause of an exception of requests."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    return error


class _Stub:
    """Stub of a service that keeps its replies, which the exporters over gRPC drop."""

    def __init__(self, stub: Any, reply: _Reply) -> None:
        self._stub, self._reply = stub, reply

    def Export(self, **call: Any) -> Any:  # noqa: N802  the service's name
        try:
            answer = self._stub.Export(**call)
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {' '.join((error.details() or '').split())[:200]}"
            self._reply.failed(reason, is_away=error.code() in GRPC_AGAIN)
            raise
        self._reply.took(answer.SerializeToString())
        return answer


class _Heard:
    """Mixin of an exporter over gRPC: its stub keeps the replies."""

    _client: Any

    def __init__(self, reply: _Reply, **options: Any) -> None:
        self._reply = reply
        super().__init__(**options)

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[misc]
        self._client = _Stub(self._client, self._reply)


class _GrpcSpans(_Heard, GrpcSpans):
    """Exporter of spans over gRPC."""


class _GrpcMetrics(_Heard, GrpcMetrics):
    """Exporter of metrics over gRPC."""


def _size(batch: Batch) -> int:
    """Return the number of spans, or metric points, of a batch."""
    if not isinstance(batch, MetricsData):
        return len(batch)
    metrics = (
        metric for resource in batch.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics
    )
    return sum(len(metric.data.data_points) for metric in metrics)
