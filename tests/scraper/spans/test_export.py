"""An export as it came off a wire: whatever the bytes, it is parsed as Google's parser has it, or refused."""

from __future__ import annotations

import gzip
import random
import zlib
from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from scraper.spans.export import MAX_MESSAGES, MAX_SPANS, Refusal, checked, malformed, parsed, unpacked


def export(shape: list[list[int]]) -> bytes:
    """Resources of scopes of so many spans, with fields around them that are to be passed over."""
    request = ExportTraceServiceRequest()
    for scopes in shape:
        resource = request.resource_spans.add(schema_url="x")
        resource.resource.attributes.add(key="k").value.int_value = 1
        for spans in scopes:
            scope = resource.scope_spans.add(schema_url="y")
            scope.scope.name = "scope"
            for number in range(spans):
                scope.spans.add(name="n", flags=number, start_time_unix_nano=number)
    return request.SerializeToString()


def taken(body: bytes) -> ExportTraceServiceRequest:
    """What is parsed of an export that passes the check."""
    for _ in checked(body, "spans"):
        pass
    return parsed(body)


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=4))
def test_what_is_an_export_is_parsed(shape: list[list[int]]):
    """Whatever its shape, and however short of the limit."""
    assert export(shape) == taken(export(shape)).SerializeToString()


@given(st.binary(max_size=200) | st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=3).map(export), st.data())
def test_invalid_bytes_are_refused_and_raise_nothing_else(body: bytes, data: st.DataObject):
    """Noise, and exports with bytes cut off or turned over: Google's parser decides, and no other error comes out."""
    cut = data.draw(st.integers(0, len(body)))
    broken = bytearray(body[:cut])
    if broken:
        broken[data.draw(st.integers(0, len(broken) - 1))] ^= data.draw(st.integers(0, 255))
    try:
        expected = ExportTraceServiceRequest.FromString(bytes(broken))
    except DecodeError:
        with pytest.raises(Refusal, match="it is not an ExportTraceServiceRequest"):
            taken(bytes(broken))
    else:
        assert expected == taken(bytes(broken))


def test_a_field_of_tomorrow_is_passed_over():
    """Of whatever type, groups too: Google's parser keeps it, and so do we."""
    for unknown in (b"\x1b\x08\x01\x1c", b"\x19" + bytes(8), b"\x1d" + bytes(4), b"\x18\x01", b"\x1a\x01x"):
        assert export([[1]]) + unknown == taken(export([[1]]) + unknown).SerializeToString()


def test_what_is_in_a_group_is_no_part_of_an_export():
    """Google's parser keeps a group as it is: what looks like a span in it is none, and need be no message at all."""
    group = b"\xa3\x06\x0a\x03\xff\xff\xff\x12\x01\xff\xa4\x06"
    resource = group + export([[1]])[2:]
    body = group + b"\x0a" + bytes([len(resource)]) + resource
    assert ExportTraceServiceRequest.FromString(body) == taken(body)
    with pytest.raises(Refusal, match="it is not an ExportTraceServiceRequest"):
        taken(group[:-2])


@pytest.mark.parametrize("two_bytes", [b"\x18\x01", b"\x1a\x00", b"\x0a\x00"], ids=["number", "text", "resource"])
def test_what_is_passed_over_takes_steps_too(two_bytes: bytes):
    """Two million such fields fit into one export: the receiver would do nothing else for a second."""
    assert 100_000 // 64 <= len(list(checked(two_bytes * 100_000, "logs")))


def test_the_limit_of_spans_is_exact():
    """As many as allowed pass, over all scopes together; one more does not."""
    half = MAX_SPANS // 2
    assert 2 == len(parsed(export([[half], [half]])).resource_spans)
    with pytest.raises(Refusal, match=f"more than {MAX_SPANS} spans at once"):
        taken(export([[half], [half + 1]]))


def field(number: int, content: bytes) -> bytes:
    """A field of a number below 16 that has a length, which takes three bytes at least."""
    size = len(content)
    return bytes([number << 3 | 2, size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + content


@pytest.mark.parametrize(
    "parts",
    [
        pytest.param(lambda count: field(1, field(2, field(2, b"\x4a\x00" * count))), id="attributes of a span"),
        pytest.param(lambda count: field(1, field(1, b"\x0a\x00" * count)), id="attributes of a resource"),
        pytest.param(lambda count: field(1, field(2, field(2, b"\x5a\x00" * count))), id="events"),
        pytest.param(
            lambda count: field(1, field(2, field(2, field(9, field(2, field(5, b"\x0a\x00" * count)))))), id="an array"
        ),
        pytest.param(lambda count: b"\x0a\x00" * count, id="resources"),
    ],
)
def test_parts_of_spans_are_counted_before_they_are_parsed(parts: Callable[[int], bytes]):
    """Two bytes of an empty one take a hundred when parsed: some 200,000 pass, whatever they are, and twice as many do
    not, of which no more than those are looked at, beside a look that counts the spans.
    """
    assert taken(parts(MAX_MESSAGES - 100)).ByteSize()
    steps: list[None] = []
    with pytest.raises(Refusal, match=f"more than {MAX_MESSAGES} attributes and other parts at once"):
        steps.extend(checked(parts(2 * MAX_MESSAGES), "spans"))
    of_spans = len(list(checked(parts(2 * MAX_MESSAGES), "logs")))
    assert MAX_MESSAGES // 100 < len(steps) < MAX_MESSAGES // 50 + of_spans


def test_long_texts_are_no_parts():
    """An export is looked through only as far as what is left of it could hold too many."""
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for _ in range(100):
        spans.add(name="n").attributes.add(key="prompt").value.string_value = "x" * 10_000
    body = request.SerializeToString()
    assert len(body) > 2 * MAX_MESSAGES
    assert request == taken(body)


def test_usual_spans_and_their_parts_are_not_counted():
    """Up to 2 MB of an engine's spans have too few bytes with which a span or a part of one may begin."""
    number = random.Random(1)
    request = ExportTraceServiceRequest()
    spans = request.resource_spans.add().scope_spans.add().spans
    for _ in range(2000):
        span = spans.add(name="llm_request", trace_id=number.randbytes(16), span_id=number.randbytes(8), kind=2)
        for key in ("time_in_queue", "time_in_model_prefill", "time_in_model_decode", "time_to_first_token", "e2e"):
            span.attributes.add(key=f"gen_ai.latency.{key}").value.double_value = number.random()
        span.attributes.add(key="gen_ai.request.id").value.string_value = f"chatcmpl-{number.randbytes(16).hex()}"
    body = request.SerializeToString()
    assert len(body) > 2 * MAX_MESSAGES
    assert not list(checked(body, "spans"))


@given(st.binary(max_size=500))
def test_gzip_is_unpacked_up_to_the_limit(body: bytes):
    """At the limit it is whole; beyond it, cut off or not gzip it is refused."""
    whole = gzip.compress(body)
    assert body == unpacked(whole, len(body))
    if body:
        with pytest.raises(Refusal, match=f"more than {len(body) - 1} bytes"):
            unpacked(whole, len(body) - 1)
    with pytest.raises(Refusal, match="cut off: its gzip has no end"):
        unpacked(whole[:-1], len(body))
    with pytest.raises(Refusal, match="declared as gzip, but is not"):
        unpacked(zlib.compress(body), len(body))


def test_a_reason_of_any_length_is_a_status_of_one_byte_length():
    """Cut, where it is too long for it."""
    assert b"\x12\x78" + b"x" * 120 == malformed("x" * 500).status()
