"""An export as it came off a wire: whatever the bytes, it is parsed, or refused with a reason."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sidelight.scraper.spans.intake.export import MAX_ATTRIBUTES, MAX_SPANS, ExportRefusal, malformed, parsed, unpacked


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
        with pytest.raises(ExportRefusal, match="it is not an ExportTraceServiceRequest"):
            parsed(bytes(broken))
    else:
        assert expected == parsed(bytes(broken))


def test_the_limit_of_spans_is_exact():
    """As many as allowed pass, over all scopes together; one more does not."""
    half = MAX_SPANS // 2
    assert 2 == len(parsed(export([[half], [half]])).resource_spans)
    with pytest.raises(ExportRefusal, match=f"more than {MAX_SPANS} spans at once"):
        parsed(export([[half], [half + 1]]))


def field(number: int, content: bytes) -> bytes:
    """A field of a number below 16 that has a length, which takes three bytes at least."""
    size = len(content)
    return bytes([number << 3 | 2, size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + content


@pytest.mark.parametrize(
    ("parts", "name", "most"),
    [
        pytest.param(lambda count: b"\x0a\x00" * count, "spans", MAX_SPANS, id="senders"),
        pytest.param(lambda count: field(1, b"\x12\x00" * count), "spans", MAX_SPANS, id="scopes"),
        pytest.param(
            lambda count: field(1, field(1, b"\x0a\x00" * count)), "attributes", MAX_ATTRIBUTES, id="of a sender"
        ),
        pytest.param(
            lambda count: field(1, field(2, field(2, b"\x4a\x00" * count))),
            "attributes",
            MAX_ATTRIBUTES,
            id="of a span",
        ),
    ],
)
def test_parts_that_are_looked_at_have_a_limit(parts: Callable[[int], bytes], name: str, most: int):
    """Each takes some microseconds, during which no other export is read."""
    assert parsed(parts(most)).ByteSize()
    with pytest.raises(ExportRefusal, match=f"more than {most} {name} at once"):
        parsed(parts(most + 1))


@given(st.binary(max_size=500))
def test_gzip_is_unpacked_up_to_the_limit(body: bytes):
    """At the limit it is whole; beyond it, cut off or not gzip it is refused."""
    whole = gzip.compress(body)
    assert body == unpacked(whole, len(body))
    if body:
        with pytest.raises(ExportRefusal, match=f"more than {len(body) - 1} bytes"):
            unpacked(whole, len(body) - 1)
    with pytest.raises(ExportRefusal, match="cut off: its gzip has no end"):
        unpacked(whole[:-1], len(body))
    with pytest.raises(ExportRefusal, match="declared as gzip, but is not"):
        unpacked(zlib.compress(body), len(body))


def test_a_reason_of_any_length_is_a_status_of_one_byte_length():
    """Cut, where it is too long for it."""
    assert b"\x12\x78" + b"x" * 120 == malformed("x" * 500).status()
