"""Hostile servers and senders as bytes, each with the sentence that is expected of us.

A reply, or a page, is what a server writes on the connection before it closes it (`faults.servers`).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import dataclass

from faults.servers import AGAIN, HANG, RESET
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from processes import ANSWER

SSE = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n"
STREAM = SSE + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
PIECE = b'{"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}]'
TERMINAL = "\x1b]0;pwned\x07\x1b[31mRED\x1b[2J\u202e=cmd|1"


@dataclass(frozen=True, slots=True)
class Hostile:
    """What comes, in pieces that are each written at once, and the beginning of what is said of it."""

    pieces: tuple[bytes, ...]
    said: str


def chunk(data: bytes) -> bytes:
    """Return data as a chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def events(*payloads: bytes) -> bytes:
    """Return a stream of these events and the last one."""
    return STREAM + b"".join(chunk(b"data: " + payload + b"\n\n") for payload in (*payloads, b"[DONE]")) + LAST


def whole(body: bytes, *, status: bytes = b"200 OK", kind: bytes = b"text/event-stream", head: bytes = b"") -> bytes:
    """Return a reply with its length."""
    length = b"Connection: close\r\nContent-Length: %d\r\n" % len(body)
    return b"HTTP/1.1 " + status + b"\r\nContent-Type: " + kind + b"\r\n" + head + length + b"\r\n" + body


def framed(framing: bytes, *body: bytes) -> tuple[bytes, ...]:
    """Return a reply with these lines in its head."""
    return (SSE + framing + b"\r\n\r\n", *body)


GOOD = chunk(ANSWER) + LAST
INCOMPLETE = "failed incomplete: the reply ended without a finish reason or [DONE]"
IN_HEAD = "failed reset: closed by the peer in the middle of the response head"
EVENT = "failed protocol: event 0 is not a completion chunk: "
DEEP = "malformed page: not JSON: "
LONG_LINE = "malformed page: a line of more than 65536 characters"
NO_EXPORT = "400...it is not an ExportTraceServiceRequest"
# Where more than the table is lost over TLS: the event loop forgets what came right before a reset.
OVER_TLS: Mapping[str, str] = dict.fromkeys(
    ("reply:reset-head", "reply:reset-body"), "failed reset: Connection reset by peer"
)
# What a server answers to a request: the status and error of the request in requests.parquet begin so.
REPLIES: Mapping[str, Hostile] = {
    "honest": Hostile((STREAM + GOOD,), "ok"),
    "endless": Hostile(
        (STREAM, AGAIN, chunk(b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n')),
        "failed timeout: no complete reply",
    ),
    "one-line": Hostile((SSE + b"\r\ndata: ", *(b"x" * (1 << 20),) * 2), INCOMPLETE),
    "no-newline": Hostile((SSE + b"\r\ndata: " + PIECE + b"}",), INCOMPLETE),
    "not-utf8": Hostile(
        (events(b'{"choices":[{"index":0,"delta":{"content":"\xff\xfe\xc3"}}]}'),), EVENT + "'utf-8' codec"
    ),
    "length-short": Hostile(framed(b"Content-Length: 10", ANSWER), INCOMPLETE),
    "length-long": Hostile(
        framed(b"Content-Length: 100000", ANSWER), "ok reset: closed by the peer after 168 body bytes"
    ),
    "length-negative": Hostile(framed(b"Content-Length: -5", ANSWER), "failed protocol: content-length '-5'"),
    "lengths-differ": Hostile(
        framed(b"Content-Length: 5\r\nContent-Length: 6", ANSWER), "failed protocol: content-length '5, 6'"
    ),
    "length-and-chunks": Hostile(framed(b"Content-Length: 5\r\nTransfer-Encoding: chunked", GOOD), "ok"),
    "chunk-size-none": Hostile((STREAM + b"zz\r\nhello\r\n",), "failed protocol: not a chunk size: b'zz"),
    "chunk-size-huge": Hostile(
        (STREAM + b"f" * 400 + b"\r\nhello\r\n",), "failed reset: closed by the peer after 409 body bytes"
    ),
    "chunk-size-negative": Hostile((STREAM + b"-5\r\nhello\r\n",), "failed protocol: not a chunk size: b'-5"),
    "chunk-without-crlf": Hostile(
        (STREAM + b"5\r\nhelloXX" + GOOD,), "failed protocol: a chunk does not end with CRLF"
    ),
    "chunk-extension": Hostile(
        (STREAM + b"5" + b";a=b" * 20_000 + b"\r\nhello\r\n",), "failed protocol: a chunk-size line without end"
    ),
    "chunks-of-a-byte": Hostile((STREAM + b"1\r\n\n\r\n" * 20_000, GOOD), "ok"),
    "http-1.0": Hostile((b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + ANSWER,), "ok"),
    "silent": Hostile((HANG,), "failed timeout: no response within"),
    "silent-head": Hostile((SSE, HANG), "failed timeout: no response within"),
    "silent-body": Hostile((STREAM + chunk(ANSWER), HANG), "ok timeout: no complete reply"),
    "compressed": Hostile(
        (whole(gzip.compress(ANSWER, mtime=0), head=b"Content-Encoding: gzip\r\n"),),
        "failed protocol: content-encoding 'gzip' was not asked for",
    ),
    "redirect": Hostile(
        (whole(b"", status=b"307 T", head=b"Location: file:///etc/passwd\r\n"),), "failed http_307: no message"
    ),
    "continue-50": Hostile((b"HTTP/1.1 100 Continue\r\n\r\n" * 50, STREAM + GOOD), "ok"),
    "continue-endless": Hostile(
        (AGAIN, b"HTTP/1.1 102 Processing\r\n\r\n" * 100), "failed protocol: interim answers (1xx) of more than 64 KiB"
    ),
    "switching": Hostile(
        (b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\n\r\nabc",),
        "failed protocol: 101 Switching Protocols was not asked for",
    ),
    "tls-alert": Hostile((b"\x15\x03\x01\x00\x02\x02\x28",), IN_HEAD),
    "http-2": Hostile((b"\x00\x00\x06\x04\x00\x00\x00\x00\x00\x00\x03\x00\x00\x00\x64",), IN_HEAD),
    "closed": Hostile((), "failed reset: closed by the peer before any response"),
    "reset": Hostile((RESET,), "failed reset: Connection reset by peer before any response"),
    "reset-head": Hostile((SSE, RESET), "failed reset: Connection reset by peer in the middle of the response head"),
    "reset-body": Hostile(
        (STREAM + chunk(ANSWER[:50]) + b"5\r\nda", RESET), "failed reset: Connection reset by peer after"
    ),
    "head-100000-lines": Hostile(
        (SSE, *(b"".join(b"X-%d: y\r\n" % n for n in range(9_000)),) * 11),
        "failed protocol: a response head longer than 64 KiB",
    ),
    "nested-100000": Hostile((events(b'{"a":' * 100_000, PIECE + b"}"),), EVENT),
    "nested-timings": Hostile((events(PIECE + b',"timings":' + b"[" * 400_000 + b"]" * 400_000 + b"}"),), EVENT),
    "count-of-5000-digits": Hostile(
        (events(PIECE + b',"usage":{"completion_tokens":' + b"9" * 5_000 + b"}}"),),
        EVENT + "Integer value out of range",
    ),
    "count-int64": Hostile(
        (events(PIECE + b',"usage":{"completion_tokens":9223372036854775808}}'),),
        "ok",
    ),
    "count-nan": Hostile(
        (events(PIECE + b',"usage":{"prompt_tokens":NaN,"completion_tokens":Infinity}}'),), EVENT + "JSON is malformed"
    ),
    "count-negative": Hostile((events(PIECE + b',"usage":{"prompt_tokens":-5,"completion_tokens":-7}}'),), "ok"),
    "timings-1e308": Hostile(
        (
            events(
                PIECE + b',"timings":{"predicted_n":99999999999999999999,"prompt_ms":1e308,'
                b'"predicted_ms":-1e308,"prompt_n":-3}}'
            ),
        ),
        "ok",
    ),
    "terminal-in-error": Hostile(
        (whole(json.dumps({"error": {"message": TERMINAL}}).encode(), status=b"400 Bad", kind=b"application/json"),),
        "refused http_400: ",
    ),
    "terminal-in-head": Hostile(
        (whole(TERMINAL.encode(), status=b"503 X", head=b"Retry-After: \x1b[31m5\r\n"),), "failed http_503: "
    ),
}

PAGE = b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n"
TEXT = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/plain\r\n"
PLAIN, JSON = b"text/plain; version=0.0.4", b"application/json"


def page(body: bytes, kind: bytes = PLAIN, head: bytes = b"") -> tuple[bytes, ...]:
    """Return a page that is there as a whole."""
    return (whole(body, kind=kind, head=head),)


# What a server answers to a scrape: the error of the scrape begins so; "a page" is none.
PAGES: Mapping[str, Hostile] = {
    "honest": Hostile(page(PAGE), "a page"),
    "json-nested": Hostile(page(b'[{"a":' * 100_000 + b"1" + b"}]" * 100_000, JSON), DEEP),
    "brackets": Hostile(page(b"[" * 100_000, JSON), DEEP),
    "brackets-as-text": Hostile(page(b"[" * 100_000), "speaks something else: JSON"),
    "json-5000-digits": Hostile(
        page(b'[{"iter":' + b"9" * 5_000 + b"}]", JSON), "malformed page: not JSON: Integer value out of range"
    ),
    "json-nan": Hostile(page(b'[{"iter":NaN}]', JSON), "malformed page: not JSON: JSON is malformed"),
    "twice": Hostile(page(PAGE + PAGE), "a page"),
    "not-utf8": Hostile(page(b"\xff\xfe# x\n" + PAGE), "malformed page: not UTF-8 (line 1, byte 0)"),
    "nul": Hostile(page(b"a\0b 1\n" * 10), "speaks something else: binary data"),
    "number-100000-digits": Hostile(page(b"a " + b"9" * 100_000 + b"\n" + PAGE), LONG_LINE),
    "label-1mb": Hostile(page(b'a{x="' + b"y" * (1 << 20) + b'"} 1\n' + PAGE), LONG_LINE),
    "labels-50000": Hostile(page(b"a{" + b",".join(b'l%d="v"' % n for n in range(50_000)) + b"} 1\n"), LONG_LINE),
    "series-60000": Hostile(
        page(b"".join(b'a{i="%d"} 1\n' % n for n in range(60_000))), "malformed page: more than 50000 series"
    ),
    "gzip-bomb": Hostile(
        page(gzip.compress(bytes(40 << 20), 1, mtime=0), head=b"Content-Encoding: gzip\r\n"),
        "too large: more than 4194304 bytes",
    ),
    "gzip-cut": Hostile(
        page(gzip.compress(PAGE, mtime=0)[:-5], head=b"Content-Encoding: gzip\r\n"),
        "cut off: the compressed page is not whole",
    ),
    "gzip-none": Hostile(page(PAGE, head=b"Content-Encoding: gzip\r\n"), "encoding: declared as gzip, but is not"),
    "brotli": Hostile(page(b"xxx", head=b"Content-Encoding: br\r\n"), "encoding: 'br', which was not asked for"),
    "protobuf": Hostile(
        page(b"\xff\xff\xff\xff\x0f", b"application/vnd.google.protobuf"),
        "speaks something else: protobuf, though text was asked for",
    ),
    "redirect-host": Hostile(
        (whole(b"", status=b"302 F", head=b"Location: http://127.0.0.2:1/x\r\n"),),
        "redirect: to another host (127.0.0.2:1)",
    ),
    "redirect-file": Hostile(
        (whole(b"", status=b"302 F", head=b"Location: file:///etc/passwd\r\n"),), "redirect: to another host ()"
    ),
    "redirect-loop": Hostile(
        (whole(b"", status=b"302 F", head=b"Location: /redirect-loop\r\n"),), "redirect: more than 3 in a row"
    ),
    "length-long": Hostile((whole(PAGE)[: -len(PAGE) // 2],), "cut off: the connection ended before the page did"),
    "chunk-size-none": Hostile((TEXT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",), "protocol: 400"),
    "head-20000-lines": Hostile((TEXT, *(b"X-%d: y\r\n" % n for n in range(20_000)), b"\r\n"), "protocol: 400"),
    "no-http": Hostile((b"hello\r\n\r\n",), "protocol: 400"),
    "closed": Hostile((), "protocol: Server disconnected"),
    "reset": Hostile((RESET,), "protocol: [Errno 104] Connection reset by peer"),
    "silent": Hostile((HANG,), "timeout: "),
    "endless": Hostile((TEXT + b"\r\n", AGAIN, b"a 1\n" * 100_000), "too large: more than 4194304 bytes"),
}


def varint(number: int) -> bytes:
    """Return a number as protobuf has it."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, body: bytes) -> bytes:
    """Return a field with a length."""
    return bytes([number << 3 | 2]) + varint(len(body)) + body


def nested(levels: int) -> bytes:
    """Return an export whose one attribute is a list in a list, so many levels deep."""
    value = b"\x08\x01"
    for _ in range(levels):
        value = field(5, field(1, value))
    return field(1, field(2, field(2, field(9, field(1, b"k") + field(2, value)))))


def empty_spans(count: int) -> bytes:
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for _ in range(count):
        spans.add()
    return request.SerializeToString()


@dataclass(frozen=True, slots=True)
class Attack:
    """A body that is sent to the receiver of spans with these headers, and how the answer begins: its status, and words
    of the reason."""

    body: bytes
    said: str
    headers: tuple[tuple[str, str], ...] = ()


GZIP = (("Content-Encoding", "gzip"),)
EXPORTS: Mapping[str, Attack] = {
    "nothing": Attack(b"", "200"),
    "random": Attack(bytes(range(256)) * 4, NO_EXPORT),
    "cut": Attack(nested(3)[:-2], NO_EXPORT),
    "gzip-bomb": Attack(gzip.compress(bytes(64 << 20), 1, mtime=0), "413...more than 4194304 bytes", GZIP),
    "gzip-none": Attack(b"no gzip", "400...declared as gzip, but is not", GZIP),
    "gzip-cut": Attack(gzip.compress(nested(3), mtime=0)[:-4], "400...cut off: its gzip has no end", GZIP),
    "brotli": Attack(b"x", "415...encoded as 'br'", (("Content-Encoding", "br"),)),
    "json": Attack(
        b"{}", "415...it is application/json, not application/x-protobuf", (("Content-Type", "application/json"),)
    ),
    "nested-2000": Attack(nested(2_000), NO_EXPORT),
    "too-large": Attack(bytes(5 << 20), "413...more than 4194304 bytes"),
    "spans-20001": Attack(empty_spans(20_001), "413...more than 20000 spans at once"),
    "spans-20000": Attack(empty_spans(20_000), "200...no valid trace id"),
    "resources-1000000": Attack(b"\x0a\x00" * 1_000_000, "413...more than 20000 spans at once"),
    "attributes-1000000": Attack(
        field(1, field(2, field(2, b"\x4a\x00" * 1_000_000))), "413...more than 200000 attributes"
    ),
}
