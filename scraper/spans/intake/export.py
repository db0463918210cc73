"""One export as it came off a wire: unpacked and parsed within bounds, or refused with a reason."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

MAX_SPANS, MAX_ATTRIBUTES = 20_000, 200_000  # of an export: each is looked at
AGAIN_S = 1  # after which an export that is refused for want of room may be sent again
GZIP, DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS  # as zlib calls them
# How a body begins that is packed so; no export does: its fields of today are of number 1, and a byte of 0x1f is none.
_BEGINNINGS = {b"\x1f\x8b": GZIP, **{b"\x78" + level: DEFLATE for level in (b"\x01", b"\x5e", b"\x9c", b"\xda")}}
_NO_ROOM = "alloc failed"  # in what protobuf says where it gets no memory
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"


class ExportRefusal(Exception):
    """An export that is refused: under which of the receiver's counts, and the text and status of the reply."""

    def __init__(self, count: str, text: str, http_status: int, grpc_code: grpc.StatusCode) -> None:
        super().__init__(text)
        self.count, self.text, self.http_status, self.grpc_code = count, text, http_status, grpc_code

    def status(self) -> bytes:
        """Return the google.rpc.Status that OTLP wants in a reply over HTTP: field 2, a text of less than 128 bytes."""
        text = self.text.encode()[:120]
        return b"\x12" + bytes([len(text)]) + text

    def details(self) -> bytes:
        """Return the google.rpc.Status that asks a sender over gRPC to come again, with its RetryInfo."""
        delay = Duration(seconds=AGAIN_S).SerializeToString()
        info = Any(type_url=_RETRY_INFO, value=b"\x0a" + bytes([len(delay)]) + delay).SerializeToString()
        return b"\x08" + bytes([self.grpc_code.value[0]]) + self.status() + b"\x1a" + bytes([len(info)]) + info


def malformed(text: str, http_status: int = 400) -> ExportRefusal:
    """Return the refusal of a body that is not an export; sending it again does not help."""
    return ExportRefusal("malformed", text, http_status, grpc.StatusCode.INVALID_ARGUMENT)


def too_large(limit_bytes: int) -> ExportRefusal:
    """Return the refusal of a body beyond the limit."""
    return ExportRefusal("too_large", f"more than {limit_bytes} bytes", 413, grpc.StatusCode.RESOURCE_EXHAUSTED)


def turned_away(text: str) -> ExportRefusal:
    """Return the refusal of an export that may be sent again."""
    return ExportRefusal("turned_away", text, 503, grpc.StatusCode.UNAVAILABLE)


def incomplete() -> ExportRefusal:
    """Return the refusal of an export that did not come whole; its sender may be gone."""
    return ExportRefusal("incomplete", "no whole export came", 400, grpc.StatusCode.INVALID_ARGUMENT)


def unauthorized() -> ExportRefusal:
    """Return the refusal of an export without the token that is asked for."""
    text = "a bearer token is asked for here (Authorization: Bearer ...)"
    return ExportRefusal("unauthorized", text, 401, grpc.StatusCode.UNAUTHENTICATED)


def no_memory(most_bytes: int) -> ExportRefusal:
    """Return the refusal of an export for lack of memory. It may be sent again once there is memory for it."""
    text = f"more than {most_bytes / 1e6:.0f} MB of memory are in use"
    return ExportRefusal("no_memory", text, 503, grpc.StatusCode.RESOURCE_EXHAUSTED)


def packing(body: bytes) -> int | None:
    """Return the compression of a gRPC message, None if plain. grpcio does not say which encoding it has."""
    return _BEGINNINGS.get(body[:2])


def unpacked(body: bytes, limit_bytes: int, packed: int = GZIP) -> bytes:
    """Inflate gzip, or deflate, up to the limit: never more of it is in memory. Raises Refusal."""
    inflate = zlib.decompressobj(packed)
    name = "gzip" if packed == GZIP else "deflate"
    try:
        plain = inflate.decompress(body, limit_bytes + 1)
    except zlib.error:
        raise malformed(f"declared as {name}, but is not") from None
    if len(plain) > limit_bytes:
        raise too_large(limit_bytes)
    if not inflate.eof:
        raise malformed(f"cut off: its {name} has no end")
    return plain


def parsed(body: bytes) -> ExportTraceServiceRequest:
    """Parse an export of spans. Raises Refusal, MemoryError."""
    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError as error:
        if _NO_ROOM in str(error):
            raise MemoryError from error
        raise malformed("it is not an ExportTraceServiceRequest") from None
    for name, count, most in _sizes(request):
        if count > most:
            raise ExportRefusal("too_large", f"more than {most} {name} at once", 413, grpc.StatusCode.INVALID_ARGUMENT)
    return request


def _sizes(request: ExportTraceServiceRequest) -> Iterator[tuple[str, int, int]]:
    """Yield name, number and maximum of an export's parts, the outer ones first."""
    senders = request.resource_spans
    yield "spans", len(senders), MAX_SPANS
    yield "spans", sum(len(sender.scope_spans) for sender in senders), MAX_SPANS
    scopes = [scope for sender in senders for scope in sender.scope_spans]
    yield "spans", sum(len(scope.spans) for scope in scopes), MAX_SPANS
    attributes = sum(len(sender.resource.attributes) for sender in senders)
    attributes += sum(len(span.attributes) for scope in scopes for span in scope.spans)
    yield "attributes", attributes, MAX_ATTRIBUTES
