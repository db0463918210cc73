"""The body of an HTTP reply without its transfer coding, and which read of the socket brought which byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loadgen.http1 import Head, ProtocolError, dechunk, is_chunked

Int64s = npt.NDArray[np.int64]


class Stamps:
    """Maps a position in the decoded body to the stamp of the read that brought the byte before it."""

    def __init__(
        self, reads_ns: Int64s, read_ends: Int64s, data_starts: Sequence[int] = (0,), wire_starts: Sequence[int] = (0,)
    ) -> None:
        self._reads_ns, self._read_ends = reads_ns, read_ends
        self._data_starts = np.asarray(data_starts, np.int64)
        self._wire_starts = np.asarray(wire_starts, np.int64)

    def at(self, ends: Sequence[int]) -> Int64s:
        """int64 stamps of decoded positions `ends`; -1 where no read reached that far."""
        last = np.asarray(ends, np.int64) - 1
        piece = np.searchsorted(self._data_starts, last, side="right") - 1
        wire = self._wire_starts[piece] + last - self._data_starts[piece] + 1
        read = np.searchsorted(self._read_ends, wire, side="left")
        stamps = np.append(self._reads_ns, np.int64(-1))
        return stamps[np.minimum(read, len(self._reads_ns))]

    def one(self, end: int) -> int:
        """The stamp of one position; -1 for a position that is -1."""
        return int(self.at([end])[0]) if end >= 0 else -1


@dataclass(frozen=True, slots=True)
class Body:
    """A decoded body and its stamps."""

    data: bytes
    stamps: Stamps


def body_of(head: Head, wire: bytes, reads_ns: Int64s, read_ends: Int64s) -> Body:
    """Take the chunk framing off. Raises ProtocolError on framing that is none and on a coding nobody asked for."""
    encoding = head.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ProtocolError(f"content-encoding {encoding!r} was not asked for")
    if not is_chunked(head):
        return Body(wire, Stamps(reads_ns, read_ends))
    plain = dechunk(wire)
    return Body(plain.data, Stamps(reads_ns, read_ends, plain.data_starts or [0], plain.wire_starts or [0]))
