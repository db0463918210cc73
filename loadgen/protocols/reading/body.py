"""The body of an HTTP reply without its transfer coding, and which read of the socket brought which byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from loadgen.http1 import Dechunked, Head, ProtocolError, dechunk, is_chunked
from rundir.columns import Ints

NO_BODY = Dechunked(data=b"", data_starts=[0], wire_starts=[0])


def body_of(head: Head, wire: bytes) -> Dechunked:
    """Take the chunk framing off. Raises ProtocolError on framing that is none and on a coding nobody asked for."""
    encoding = head.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ProtocolError(f"content-encoding {encoding!r} was not asked for")
    if not is_chunked(head):
        return Dechunked(data=wire, data_starts=[0], wire_starts=[0])
    plain = dechunk(wire)
    return plain if plain.data else NO_BODY


def stamps_at(ends: Sequence[int], body: Dechunked, reads_ns: Ints, read_ends: Ints) -> Ints:
    """When the byte before each position of a decoded body was read, int64[len(ends)].

    reads_ns, read_ends  int64[k]: when each read returned, and how much was on the wire by then

    -1 where no read reached that far, and for positions that are not behind any byte.
    """
    last = np.asarray(ends, np.int64) - 1
    piece = np.searchsorted(body.data_starts, last, side="right") - 1
    wire = np.take(body.wire_starts, piece) + last - np.take(body.data_starts, piece) + 1
    read = np.searchsorted(read_ends, wire, side="left")
    stamps = np.append(reads_ns, np.int64(-1))[np.minimum(read, len(reads_ns))]
    return np.where(last >= 0, stamps, -1)
