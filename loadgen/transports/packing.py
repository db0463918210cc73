"""The format of a request's part on disk: a few bytes a read.

Read back by `reply.unpack`; a worker does without numpy.

packing 0  stamps and read ends as int64 little-endian, the body through zlib
packing 1  the first stamp as int64, then uint32 differences; no read ends: read lengths (uint32) stand before the body,
           and both go through zlib together, where equal lengths cost nothing to speak of
"""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass
from itertools import islice
from operator import sub

PLAIN, COMPACT = 0, 1
# Level 1 in a 16 KiB window and 48 KiB of state. zlib's default state of 256 KiB is fetched from the kernel and given
# back with each call, which cost nine times as much as compressing forty events does.
_LEVEL, _WINDOW_BITS, _MEMORY_LEVEL = 1, 14, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """The three fields of a RequestPart that hold its reads, and their packing."""

    reads_ns: bytes
    read_ends: bytes
    body: bytes
    packing: int


NOTHING = Packed(reads_ns=b"", read_ends=b"", body=b"", packing=COMPACT)


def pack(reads_ns: array[int], read_ends: array[int], body: bytes | bytearray) -> Packed:
    """Pack the reads of a part.

    The packing is compact unless a stamp lies before its predecessor or more than 4 s behind it.
    """
    if not reads_ns:
        return NOTHING
    try:
        steps = array("I", map(sub, islice(reads_ns, 1, None), reads_ns))
        lengths = array("I", map(sub, islice(read_ends, 1, None), read_ends))
        lengths.insert(0, read_ends[0])
    except OverflowError:
        return Packed(reads_ns=reads_ns.tobytes(), read_ends=read_ends.tobytes(), body=_squeeze(body), packing=PLAIN)
    return Packed(
        reads_ns=reads_ns[:1].tobytes() + steps.tobytes(),
        read_ends=b"",
        body=_squeeze(lengths.tobytes(), body),
        packing=COMPACT,
    )


def _squeeze(*pieces: bytes | bytearray) -> bytes:
    squeezer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS, _MEMORY_LEVEL)
    return b"".join([*map(squeezer.compress, pieces), squeezer.flush()])
