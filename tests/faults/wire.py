"""Exports of spans in any form that Protobuf has: what is stated of a request is what is read of it.

Every message is made from the descriptors of opentelemetry-proto: fields in any order and more than once, tags and
lengths longer than they need be, fields of tomorrow, groups, and fields of another type than they should have.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from faults.cases import Case, Kind, Setting, Try
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span

from sidelight.scraper.spans.intake.export import ExportRefusal, parsed
from sidelight.scraper.spans.log import packed
from sidelight.scraper.spans.requests import engine_spans

SECOND_NS = 10**9
NOON_NS = 1_700_000_000 * SECOND_NS
DEEPEST = 9  # of messages; Google's parser takes 100
ODD = 'ab.-\\"\n{}=é€\u2028\U0001f600\x00\x7f'
TEXTS = ("service.name", "llm_request", "gen_ai.request.id", "k")
VARINTS = {
    FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_ENUM, FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_INT64,
    FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64, FieldDescriptor.TYPE_SINT32, FieldDescriptor.TYPE_SINT64,
}  # fmt: skip
BYTES_OF = {
    FieldDescriptor.TYPE_DOUBLE: 8, FieldDescriptor.TYPE_FIXED64: 8, FieldDescriptor.TYPE_SFIXED64: 8,
    FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_FIXED32: 4, FieldDescriptor.TYPE_SFIXED32: 4,
}  # fmt: skip
# The times of vLLM's spans in the order of their columns, and its counts of tokens.
TIMES = {
    "queue_s": "gen_ai.latency.time_in_queue",
    "prefill_s": "gen_ai.latency.time_in_model_prefill",
    "decode_s": "gen_ai.latency.time_in_model_decode",
    "ttft_s": "gen_ai.latency.time_to_first_token",
    "e2e_s": "gen_ai.latency.e2e",
}
INPUT_TOKENS = "gen_ai.usage.prompt_tokens"


def message(descriptor: Descriptor, rng: random.Random, depth: int = 0) -> bytes:
    """Return a message of up to five of its fields, and of some that it does not have."""
    parts = [field(each, rng, depth) for each in rng.choices(descriptor.fields, k=rng.randrange(6))]
    if rng.random() < 0.15:
        parts.append(unknown(rng.randrange(500, 2000), rng))
    rng.shuffle(parts)
    return b"".join(parts)


def field(of: FieldDescriptor, rng: random.Random, depth: int) -> bytes:
    """Return a field; one in 30 is of another type than it should be, which makes it one of those passed over."""
    if rng.random() < 1 / 30:
        # Not of a length: so lists of numbers come, too.
        return unknown(of.number, rng, [kind for kind in (0, 1, 3, 5) if kind != wire_type(of)])
    if of.type == FieldDescriptor.TYPE_MESSAGE:
        if depth >= DEEPEST or of.message_type is None:
            return b""
        return delimited(of.number, message(of.message_type, rng, depth + 1), rng)
    if of.type == FieldDescriptor.TYPE_STRING:
        return delimited(of.number, text(rng).encode(), rng)
    if of.type == FieldDescriptor.TYPE_BYTES:
        return delimited(of.number, rng.randbytes(rng.choice((16, 8, 0, rng.randrange(40)))), rng)
    values = [number(of, rng) for _ in range(rng.randrange(4))]
    if rng.random() < 0.3:  # as lists of numbers are usually sent
        return delimited(of.number, b"".join(values), rng)
    return b"".join(tag(of.number, wire_type(of), rng) + value for value in values)


def number(of: FieldDescriptor, rng: random.Random) -> bytes:
    if of.type in BYTES_OF:
        return rng.randbytes(BYTES_OF[of.type])
    return varint(rng.choice((0, 1, rng.randrange(2**7), rng.randrange(2**31), rng.randrange(2**64))))


def wire_type(of: FieldDescriptor) -> int:
    if of.type in VARINTS:
        return 0
    return {8: 1, 4: 5}.get(BYTES_OF.get(of.type, 0), 2)


def unknown(at: int, rng: random.Random, kinds: Sequence[int] = (0, 1, 2, 3, 5)) -> bytes:
    """Return a field that no message has so: of any type, what has a length and a group filled with anything."""
    kind = rng.choice(kinds)
    if kind == 0:
        return tag(at, 0, rng) + varint(rng.randrange(2**64))
    if kind == 2:
        return delimited(at, rng.randbytes(rng.randrange(20)), rng)
    if kind == 3:
        inner = b"".join(unknown(rng.choice((1, 2, 9, 700)), rng) for _ in range(rng.randrange(3)))
        return tag(at, 3, rng) + inner + tag(at, 4, rng)
    return tag(at, kind, rng) + rng.randbytes(8 if kind == 1 else 4)


def delimited(at: int, content: bytes, rng: random.Random) -> bytes:
    return tag(at, 2, rng) + varint(len(content), longer=rng.choice((0, 0, 0, 1))) + content


def tag(at: int, kind: int, rng: random.Random) -> bytes:
    return varint(at << 3 | kind, longer=rng.choice((0, 0, 0, 0, 1, 2)))


def varint(value: int, longer: int = 0) -> bytes:
    """Return a number in base 128, by so many bytes longer than it need be."""
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes((*digits, value)) if not longer else bytes((*digits, value | 128, *(128,) * (longer - 1), 0))


def text(rng: random.Random) -> str:
    return rng.choice(TEXTS) if rng.random() < 0.3 else "".join(rng.choices(ODD, k=rng.randrange(9)))


def vllm(rng: random.Random) -> bytes:
    """Return an export of a request's span of vLLM, whatever else stands before its fields: the last one counts."""
    end_ns = NOON_NS - rng.randrange(300 * SECOND_NS)
    sound = Span(
        trace_id=rng.randbytes(15) + b"t", span_id=rng.randbytes(7) + b"s", parent_span_id=rng.randbytes(8),
        name="llm_request", start_time_unix_nano=end_ns - rng.randrange(SECOND_NS), end_time_unix_nano=end_ns,
    )  # fmt: skip
    for name in (*TIMES.values(), INPUT_TOKENS):
        match rng.randrange(3):
            case 0:
                sound.attributes.add(key=name).value.int_value = rng.randrange(2**40)
            case 1:
                sound.attributes.add(key=name).value.double_value = rng.expovariate(1.0)
    span = message(Span.DESCRIPTOR, rng, DEEPEST - 3) + sound.SerializeToString()
    name = InstrumentationScope(name="vllm.tracing.otel").SerializeToString()
    scope = [delimited(1, message(InstrumentationScope.DESCRIPTOR, rng, DEEPEST - 3), rng), delimited(1, name, rng)]
    scope.insert(rng.randrange(3), delimited(2, span, rng))
    spans = message(ScopeSpans.DESCRIPTOR, rng, DEEPEST) + b"".join(scope)
    return delimited(1, message(ResourceSpans.DESCRIPTOR, rng, DEEPEST - 2) + delimited(2, spans, rng), rng)


def difference(body: bytes) -> str:
    """Say where we and Google's parser differ about an export."""
    try:
        expected = ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        return "" if is_refused(body) else "taken, which Google's parser refuses"
    return "refused, which Google's parser takes" if is_refused(body) else spans_differ(body, expected)


def is_refused(body: bytes) -> bool:
    try:
        parsed(body)
    except ExportRefusal:
        return True
    return False


def spans_differ(body: bytes, expected: ExportTraceServiceRequest) -> str:
    """Say what is read otherwise of an export of spans."""
    record = packed(NOON_NS, "grpc", body)
    ours = [(as_bytes(each.span), as_bytes(each.resource)) for each in record.spans()]
    theirs = [
        (as_bytes(span), as_bytes(sender.resource))
        for sender in expected.resource_spans
        for scope in sender.scope_spans
        for span in scope.spans
    ]
    if ours != theirs:
        return f"{len(ours)} spans are read, not these {len(theirs)}, or not so"
    return ""


def times_differ(body: bytes) -> str:
    """Say which times of vLLM's spans are read otherwise than they are stated."""
    table = engine_spans([packed(NOON_NS, "grpc", body)])
    columns: list[Any] = [table.trace_id, table.span_id, table.arrival_ns, table.end_ns, table.input_tokens]
    columns += [getattr(table, name) for name in TIMES]
    read = list(zip(*(column.tolist() for column in columns), strict=True))
    stated = list(vllm_rows(ExportTraceServiceRequest.FromString(body)))
    return f"as times are read {read}, and stated {stated}" if repr(read) != repr(stated) else ""


def vllm_rows(sent: ExportTraceServiceRequest) -> Iterator[tuple[object, ...]]:
    """Yield what the spans of vLLM state, as its documentation says it."""
    for sender in sent.resource_spans:
        for scope in sender.scope_spans:
            for span in scope.spans:
                if scope.scope.name != "vllm.tracing.otel" or span.name != "llm_request":
                    continue
                values = {each.key: each.value for each in span.attributes}
                numbers = {key: float(value.int_value or value.double_value) for key, value in values.items()}
                tokens = int(numbers.get(INPUT_TOKENS, -1))
                times = (numbers.get(name, float("nan")) for name in TIMES.values())
                begin_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
                yield span.trace_id.hex(), span.span_id.hex(), begin_ns, end_ns, tokens, *times


def as_bytes(sent: Message) -> bytes:
    """Return a message in one form: one that holds NaN equals nothing."""
    return sent.SerializeToString(deterministic=True)


def torn(body: bytes, rng: random.Random) -> bytes:
    """Cut an export off, or change, insert and leave out up to three bytes of it."""
    new = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(new) + 1)
        match rng.randrange(4):
            case 0:
                del new[at:]
            case 1:
                new[at:at] = rng.randbytes(1)
            case 2:
                del new[at : at + 1]
            case _:
                new[at : at + 1] = rng.randbytes(1)
    return bytes(new)


@contextmanager
def opened(_: Setting) -> Iterator[Try]:
    def attempt(case: Case) -> str:
        rng = case.random()
        body = message(ExportTraceServiceRequest.DESCRIPTOR, rng)
        if rng.random() < 0.5:
            body += vllm(rng)
        if case.row == "spans-torn":
            body = torn(body, rng)
        else:
            ExportTraceServiceRequest.FromString(body)  # what it refuses should be none
        wrong = difference(body) or (times_differ(body) if case.row == "spans" else "")
        return f"{wrong}: {body.hex()}" if wrong else ""

    yield attempt


WIRE = Kind(
    name="wire",
    rows={"spans": 300, "spans-torn": 300},
    opened=opened,
)
