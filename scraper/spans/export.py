"""One export as it came off a wire: unpacked and parsed within bounds, or refused with a reason."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

MAX_SPANS = 20_000  # or logs, or metrics
_RECORD_BYTES = 2  # a tag and a length
MAX_MESSAGES = 200_000  # attributes, events and their like: parsed, an empty one of two bytes takes a hundred
AGAIN_S = 1  # after which an export that is refused for want of room may be sent again
_MESSAGES = {
    "spans": "ExportTraceServiceRequest",
    "logs": "ExportLogsServiceRequest",
    "metrics": "ExportMetricsServiceRequest",
}
GZIP, DEFLATE = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS  # as zlib calls them
# How a body begins that is packed so; no export does: its fields of today are of number 1, and a byte of 0x1f is none.
_BEGINNINGS = {b"\x1f\x8b": GZIP, **{b"\x78" + level: DEFLATE for level in (b"\x01", b"\x5e", b"\x9c", b"\xda")}}
_LOOKS = 64  # fields between two steps
_DEPTH = 200  # of messages; the parser takes 100
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
# The fields of an ExportTraceServiceRequest that hold messages, and theirs: a message is a mapping of its fields.
_Fields = dict[int, "_Fields"]
_VALUE: _Fields = {}
_ATTRIBUTE: _Fields = {2: _VALUE}
_VALUE |= {5: {1: _VALUE}, 6: {1: _ATTRIBUTE}}
_SPAN: _Fields = {9: _ATTRIBUTE, 11: {3: _ATTRIBUTE}, 13: {4: _ATTRIBUTE}, 15: {}}
_EXPORT: _Fields = {1: {1: {1: _ATTRIBUTE, 3: {}}, 2: {1: {3: _ATTRIBUTE}, 2: _SPAN}}}
_LENGTH_DELIMITED = 2
_GROUP, _GROUP_END = -2, -3
# How the tags of those fields begin, also where one is written longer than it need be; and those of values' lists.
_TAGS = bytes(
    number << 3 | _LENGTH_DELIMITED | more for number in (1, 2, 3, 4, 5, 6, 9, 11, 13, 15) for more in (0, 128)
)
_LIST = re.compile(rb"[\x2a\x32\xaa\xb2]")


class Refusal(Exception):
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


def malformed(text: str, http_status: int = 400) -> Refusal:
    """Return the refusal of a body that is not an export; sending it again does not help."""
    return Refusal("malformed", text, http_status, grpc.StatusCode.INVALID_ARGUMENT)


def too_large(limit_bytes: int) -> Refusal:
    """Return the refusal of a body beyond the limit."""
    return Refusal("too_large", f"more than {limit_bytes} bytes", 413, grpc.StatusCode.RESOURCE_EXHAUSTED)


def turned_away(text: str) -> Refusal:
    """Return the refusal of an export that may be sent again."""
    return Refusal("turned_away", text, 503, grpc.StatusCode.UNAVAILABLE)


def incomplete() -> Refusal:
    """Return the refusal of an export that did not come whole; its sender may be gone."""
    return Refusal("incomplete", "no whole export came", 400, grpc.StatusCode.INVALID_ARGUMENT)


def unauthorized() -> Refusal:
    """Return the refusal of an export without the token that is asked for."""
    text = "a bearer token is asked for here (Authorization: Bearer ...)"
    return Refusal("unauthorized", text, 401, grpc.StatusCode.UNAUTHENTICATED)


def no_memory(most_bytes: int) -> Refusal:
    """Return the refusal of an export for lack of memory. It may be sent again once there is memory for it."""
    text = f"more than {most_bytes / 1e6:.0f} MB of memory are in use"
    return Refusal("no_memory", text, 503, grpc.StatusCode.RESOURCE_EXHAUSTED)


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
    """Parse an export that `checked` has found small enough. Raises Refusal."""
    try:
        return ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        raise _no_export("spans") from None


def checked(body: bytes, of: str) -> Iterator[None]:
    """Look through an export of spans, logs or metrics in small steps without unpacking it: at most MAX_SPANS of them,
    and MAX_MESSAGES messages in those of spans, which are parsed. Raises Refusal.
    """
    try:
        count = 0
        for record in () if of == "spans" and _most_records(body) <= MAX_SPANS else _records(body):
            if record is None:
                yield
                continue
            count += 1
            if count > MAX_SPANS:
                raise Refusal("too_large", f"more than {MAX_SPANS} {of} at once", 413, grpc.StatusCode.INVALID_ARGUMENT)
        if of == "spans" and len(body) > MAX_MESSAGES:  # a message takes a byte at least
            yield from _few_messages(body)
    except IndexError:
        raise _no_export(of) from None


def _most_records(body: bytes) -> int:
    """Return an upper bound of an export's number of spans, logs or metrics.

    It is as many as fit into it, or the bytes with which a field 2 may begin, also where its tag is written longer than
    it need be.

    Of usual exports that is enough, and costs a hundredth of counting them. That they are well-formed is the parser's.
    """
    if len(body) <= _RECORD_BYTES * MAX_SPANS:
        return len(body) // _RECORD_BYTES
    return body.count(b"\x12") + body.count(b"\x92")


def _few_messages(body: bytes) -> Iterator[None]:
    """Count messages until there are too few bytes left with which others may begin: of usual exports of up to 2 MB,
    none need be counted. Raises Refusal, IndexError.

    An attribute counts once with its value, but each part of a value that is a list.
    """
    unseen = _beginnings(body)
    count = looks = seen = at = groups = 0
    end, messages = len(body), _EXPORT
    above: list[tuple[int, int, _Fields]] = []
    while count + unseen > MAX_MESSAGES:
        if at >= end:
            if groups:
                raise IndexError
            if not above:
                return
            at, end, messages = above.pop()
            continue
        tag = body[at]
        if tag & 0x87 == _LENGTH_DELIMITED and body[at + 1] < 128:  # tag and length of one byte each, as most have
            number, at, size = tag >> 3, at + 2, body[at + 1]
        else:
            number, at, size = _field(body, at)
        behind = at + max(size, 0)
        if behind > end or len(above) > _DEPTH:
            raise IndexError
        if size < 0:
            groups += (size == _GROUP) - (size == _GROUP_END)
        inner = messages.get(number) if size >= 0 and not groups else None
        count += inner is not None and messages is not _ATTRIBUTE
        looks += 1
        if inner is None or (inner is _ATTRIBUTE and not _LIST.search(body, at, behind)):
            at = behind
        else:
            above.append((behind, end, messages))
            end, messages = behind, inner
        if looks % _LOOKS == 0:
            unseen -= _beginnings(body[seen:at])
            seen = at
            yield
            if count > MAX_MESSAGES:
                text = f"more than {MAX_MESSAGES} attributes and other parts at once"
                raise Refusal("too_large", text, 413, grpc.StatusCode.INVALID_ARGUMENT)


def _beginnings(body: bytes) -> int:
    """Return the number of bytes with which messages may begin."""
    return len(body) - len(body.translate(None, _TAGS))


def _field(body: bytes, at: int) -> tuple[int, int, int]:
    """Return a field's number, the offset of its content or end, and its length.

    The offset is that of its content if it has a length, else of its end. The length is below zero without one: _GROUP
    where a group begins, _GROUP_END where it ends. Raises IndexError.
    """
    tag, at = _varint(body, at)
    kind = tag & 7
    if kind == _LENGTH_DELIMITED:
        size, at = _varint(body, at)
        return tag >> 3, at, size
    if kind == 0:
        _, at = _varint(body, at)
    elif kind in (1, 5):
        at += 8 if kind == 1 else 4
    elif kind == 3:
        return tag >> 3, at, _GROUP
    elif kind == 4:
        return tag >> 3, at, _GROUP_END
    else:
        raise IndexError
    return tag >> 3, at, -1


def _no_export(of: str) -> Refusal:
    return malformed(f"it is not an {_MESSAGES[of]}")


def _records(body: bytes) -> Iterator[tuple[int, int] | None]:
    """Yield the places of an export's spans, logs or metrics, and None between two steps.

    They are field 2 of field 2 of its field 1 in all three.

    Raises IndexError if it is cut off.
    """
    for resource in _fields(body, 0, len(body), 1):
        if resource is None:
            yield None
            continue
        for scope in _fields(body, *resource, 2):
            if scope is None:
                yield None
            else:
                yield from _fields(body, *scope, 2)


def _fields(body: bytes, at: int, end: int, number: int) -> Iterator[tuple[int, int] | None]:
    """Yield the begin and end of each length-delimited field of a number.

    None comes whenever `_LOOKS` fields were looked at. Others are passed over, and so are groups with all that is in
    them.

    Raises IndexError for what cannot be a message, or is cut off.
    """
    looks = groups = 0
    while at < end:
        field, at, size = _field(body, at)
        looks += 1
        if not looks % _LOOKS:
            yield None
        if size < 0:
            groups += (size == _GROUP) - (size == _GROUP_END)
            continue
        if at + size > end:
            raise IndexError
        if field == number and not groups:
            yield at, at + size
        at += size
    if at > end or groups:
        raise IndexError


def _varint(body: bytes, at: int) -> tuple[int, int]:
    if body[at] < 128:
        return body[at], at + 1
    value = shift = 0
    while shift < 70:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise IndexError
