"""One export as it came off a wire: unpacked and parsed within bounds, or refused with a reason."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

MAX_SPANS = 20_000  # or logs, or metrics
_MESSAGES = {
    "spans": "ExportTraceServiceRequest",
    "logs": "ExportLogsServiceRequest",
    "metrics": "ExportMetricsServiceRequest",
}
_GZIP = 16 + zlib.MAX_WBITS
_LENGTH_DELIMITED = 2


class Refusal(Exception):
    """An export that is refused: under which of the receiver's counts, and the text and status of the reply."""

    def __init__(self, count: str, text: str, http_status: int, grpc_code: grpc.StatusCode) -> None:
        super().__init__(text)
        self.count, self.text, self.http_status, self.grpc_code = count, text, http_status, grpc_code

    def status(self) -> bytes:
        """Return the google.rpc.Status that OTLP wants in a reply over HTTP: field 2, a text of less than 128 bytes."""
        text = self.text.encode()[:120]
        return b"\x12" + bytes([len(text)]) + text


def malformed(text: str, http_status: int = 400) -> Refusal:
    """Return the refusal of a body that is not an export; sending it again does not help."""
    return Refusal("malformed", text, http_status, grpc.StatusCode.INVALID_ARGUMENT)


def too_large(limit_bytes: int) -> Refusal:
    """Return the refusal of a body beyond the limit."""
    return Refusal("too_large", f"more than {limit_bytes} bytes", 413, grpc.StatusCode.RESOURCE_EXHAUSTED)


def turned_away(text: str) -> Refusal:
    """Return the refusal of an export that may be sent again."""
    return Refusal("turned_away", text, 503, grpc.StatusCode.UNAVAILABLE)


def unpacked(body: bytes, limit_bytes: int) -> bytes:
    """Inflate gzip up to the limit: never more of it is in memory. Raises Refusal."""
    inflate = zlib.decompressobj(_GZIP)
    try:
        plain = inflate.decompress(body, limit_bytes + 1)
    except zlib.error:
        raise malformed("declared as gzip, but is not") from None
    if len(plain) > limit_bytes:
        raise too_large(limit_bytes)
    if not inflate.eof:
        raise malformed("cut off: its gzip has no end")
    return plain


def parsed(body: bytes) -> ExportTraceServiceRequest:
    """Parse an export of MAX_SPANS spans at most. Raises Refusal.

    The spans are counted first: parsed, an empty one of two bytes takes two hundred.
    """
    check(body, "spans")
    try:
        return ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        raise _no_export("spans") from None


def check(body: bytes, of: str) -> None:
    """Look through an export of spans, logs or metrics without unpacking one. Raises Refusal as `parsed` does."""
    try:
        if sum(1 for _, record in zip(range(MAX_SPANS + 1), _records(body), strict=False)) > MAX_SPANS:
            raise Refusal("too_large", f"more than {MAX_SPANS} {of} at once", 413, grpc.StatusCode.INVALID_ARGUMENT)
    except IndexError:
        raise _no_export(of) from None


def _no_export(of: str) -> Refusal:
    return malformed(f"it is not an {_MESSAGES[of]}")


def _records(body: bytes) -> Iterator[tuple[int, int]]:
    """Give where the spans, logs or metrics of an export are: field 2 of field 2 of its field 1, in all three.

    Raises IndexError if it is cut off.
    """
    for resource in _fields(body, 0, len(body), 1):
        for scope in _fields(body, *resource, 2):
            yield from _fields(body, *scope, 2)


def _fields(body: bytes, at: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    """Give the begin and end of each length-delimited field of a number; others are passed over.

    Raises IndexError for what cannot be a message, or is cut off.
    """
    while at < end:
        tag, at = _varint(body, at)
        kind = tag & 7
        if kind == _LENGTH_DELIMITED:
            size, at = _varint(body, at)
            if at + size > end:
                raise IndexError
            if tag >> 3 == number:
                yield at, at + size
            at += size
        elif kind == 0:
            _, at = _varint(body, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
        elif kind not in (3, 4):
            raise IndexError
        # The begin and the end of a group are tags alone: what is between them counts as if it stood here.
    if at > end:
        raise IndexError


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise IndexError
