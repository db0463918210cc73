from __future__ import annotations

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen import records
from sidelight.loadgen.protocols.reading.reply import unpack
from sidelight.loadgen.transports import packing

PART = records.RequestPart(index=3)

pieces = st.lists(st.tuples(st.integers(-(2**62), 2**62), st.binary(max_size=50)))


def _packed(reads_ns: list[int], read_ends: list[int], body: bytes) -> records.RequestPart:
    packed = packing.pack(array("q", reads_ns), array("q", read_ends), bytearray(body))
    return msgspec.structs.replace(
        PART, reads_ns=packed.reads_ns, read_ends=packed.read_ends, body=packed.body, packing=packed.packing
    )


def _ends(parts: list[bytes]) -> list[int]:
    return [sum(map(len, parts[: k + 1])) for k in range(len(parts))]


@given(pieces)
def test_unpacking_gives_what_was_packed(reads: list[tuple[int, bytes]]):
    """Any stamps, in any order and as far apart as may be, with any lengths; none at all as well."""
    stamps, parts = [stamp for stamp, _ in reads], [part for _, part in reads]
    got = unpack(_packed(stamps, _ends(parts), b"".join(parts)))
    assert (stamps, _ends(parts), b"".join(parts)) == (list(got.stamps_ns), list(got.ends), got.body)


def test_a_paced_stream_takes_few_bytes():
    """Sixty events of 200 bytes, 10 ms apart: below 12 bytes an event, stamps and lengths included."""
    event = b"c8\r\n" + b'data: {"id":"x","choices":[{"delta":{"content":" the"}}]}'.ljust(198) + b"\n\n\r\n"
    stamps = [10**18 + k * 10_000_000 + 7919 * k % 100_000 for k in range(60)]
    part = _packed(stamps, _ends([event] * 60), event * 60)
    assert len(part.reads_ns + part.read_ends + part.body) < 12 * 60


def test_a_log_of_before_is_still_read():
    """Where nothing is said of packing, stamps and ends are plain int64."""
    part = msgspec.structs.replace(PART, reads_ns=array("q", [5, 6]).tobytes(), read_ends=array("q", [0, 0]).tobytes())
    got = unpack(part)
    assert ([5, 6], [0, 0], b"") == (list(got.stamps_ns), list(got.ends), got.body)


def test_a_packing_of_the_future_is_refused():
    """Rather than misread."""
    with pytest.raises(ValueError, match="packed in way 7"):
        unpack(msgspec.structs.replace(PART, packing=7))
