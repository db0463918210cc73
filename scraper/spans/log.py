"""The log of spans: every export that an engine or a gateway sent, as it came, and what the receiver had to refuse.

Raw bytes rather than rows: how spans are read will change, and what was not kept cannot be read again.
zlib takes an export of vLLM to about a fifth, less than rows of all its attributes would be.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sidelight.rundir.frames import FrameLog, Rotation, read_frames
from sidelight.rundir.framing import inflate
from sidelight.rundir.printable.masking import blanked
from sidelight.scraper.spans.received import ReceivedSpan, received_spans

_COMPRESSION_LEVEL = 1
BODY_BYTES = 64 * 1024 * 1024  # a receiver takes 4 MiB


class ReceiverCounts(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Counts of a receiver since its start.

    exports, spans  taken in and logged; `bad_spans` of them break OTLP's rules, the end of `off_clock` lies so far from
                    when they came that another clock has stamped them (`received.fault`): neither are used
    malformed       exports that are no OTLP, or not compressed as they say; too_large: beyond the limit, also unpacked
    turned_away     exports that had to come again: not whole in time, too many at once, or the log could not be
                    written; `unwritten`: those of the latter
    forwarded       exports that the next collector took; forward_dropped: those it did not take, or not in time
    forward_unknown exports of all signals that waited for it, or had come since the last count, as a receiver died
    no_memory       exports that had to come again because the receiver was at its limit of memory
    unauthorized    exports without the token that is asked for
    incomplete      exports that did not come whole, or whose sender left before they were taken, or had to make room;
                    over gRPC also those that its library refuses: far beyond the limit, or packed as it does not know
    cut_connections connections that had to make room for others
    logs, metrics   exports of other signals, which are passed on and then not kept; of them `_dropped`, those that were
                    not passed on, for want of a next collector too
    """

    exports: int = 0
    spans: int = 0
    bad_spans: int = 0
    malformed: int = 0
    too_large: int = 0
    turned_away: int = 0
    forwarded: int = 0
    forward_dropped: int = 0
    off_clock: int = 0
    logs: int = 0
    logs_dropped: int = 0
    metrics: int = 0
    metrics_dropped: int = 0
    no_memory: int = 0
    unauthorized: int = 0
    cut_connections: int = 0
    incomplete: int = 0
    unwritten: int = 0
    forward_unknown: int = 0


class ForwardQueue(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Queue for the next collector: exports, their bytes, and the limit of bytes (0: no forwarding)."""

    exports: int = 0
    size_bytes: int = 0
    limit_bytes: int = 0


class ExportRecord(msgspec.Struct, tag="export", array_like=True, frozen=True, kw_only=True):
    """One export: received_ns is int64 ns Unix, `via` grpc or http, `packed` the ExportTraceServiceRequest in zlib."""

    received_ns: int
    via: str
    packed: bytes

    def body(self) -> bytes:
        """Return the bytes of the ExportTraceServiceRequest."""
        return inflate(self.packed, BODY_BYTES)

    def spans(self) -> Iterator[ReceivedSpan]:
        """Inflate and parse the export, and give each of its spans.

        Raises ValueError for bytes that no receiver has written.
        """
        try:
            request = ExportTraceServiceRequest.FromString(self.body())
        except (DecodeError, ValueError) as error:
            raise ValueError(f"not an export: {error}") from error
        return received_spans(request, self.received_ns)


class StateRecord(msgspec.Struct, tag="receiver", array_like=True, frozen=True, kw_only=True):
    """A receiver began, counted on, settled or ended: `started`, `counted`, `settled`, `ended`; `continued` is what was
    so when another file began. One that started again without an end died. `queue` is that of its forwarder.
    """

    at_ns: int
    state: str
    counts: ReceiverCounts
    queue: ForwardQueue = ForwardQueue()


SpanLogRecord = ExportRecord | StateRecord
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[SpanLogRecord] = msgspec.msgpack.Decoder(SpanLogRecord)


class SpanLog:
    """Writer of an append-only log of exports and the receiver's states.

    Owns its file, or several: each begins with the last state.
    """

    def __init__(self, path: str | os.PathLike[str], rotation: Rotation | None = None) -> None:
        self.path = Path(path)  # of the first
        self._frames = FrameLog(path, rotation)
        self._state: StateRecord | None = None

    def append(self, record: SpanLogRecord) -> None:
        """Write one record. Raises OSError when it cannot be written whole, as on a full disk."""
        if self._frames.rotate() and self._state is not None:
            self._frames.append(_encode(msgspec.structs.replace(self._state, state="continued")))
        if isinstance(record, StateRecord):
            self._state = record
        self._frames.append(_encode(record))

    def close(self) -> None:
        """Close the file."""
        self._frames.close()


def packed(received_ns: int, via: str, body: bytes) -> ExportRecord:
    """Return the record of an export's bytes."""
    return ExportRecord(received_ns=received_ns, via=via, packed=compressed(body))


def compressed(body: bytes) -> bytes:
    """Return an export's bytes as they are kept: without secrets, in zlib."""
    return zlib.compress(blanked(body), _COMPRESSION_LEVEL)


def decode(payload: bytes) -> SpanLogRecord:
    """Return the record of one payload of the log. Raises msgspec.DecodeError on what `SpanLog` has not written."""
    return _decoder.decode(payload)


def read_log(path: str | os.PathLike[str]) -> Iterator[SpanLogRecord]:
    """Yield the records of a log up to its end or its tear. Raises msgspec.DecodeError as `decode` does."""
    yield from map(decode, read_frames(path))


@dataclass(slots=True)
class ReceiverLife:
    """The last state that a receiver logged, and the number of exports logged since."""

    state: StateRecord
    exports: int = 0

    def counts(self) -> ReceiverCounts:
        """Return the receiver's counts, with all exports that are logged.

        Of a receiver that died, the number of exports that may have been forwarded is among them.
        """
        stated = self.state.counts
        exports = stated.exports + self.exports
        if self.state.state == "ended" or not self.state.queue.limit_bytes:
            return msgspec.structs.replace(stated, exports=exports)
        unknown = self.state.queue.exports + self.exports
        return msgspec.structs.replace(stated, exports=exports, forward_unknown=unknown)


def follow(lives: list[ReceiverLife], record: SpanLogRecord) -> None:
    """Continue the last receiver of a log by its next record, or begin another."""
    if not isinstance(record, StateRecord):
        for life in lives[-1:]:
            life.exports += 1
    # A log whose first files were deleted begins in the midst of a receiver.
    elif record.state == "started" or not lives:
        for life in lives[-1:]:
            life.exports -= record.counts.exports  # the next one had taken these before it said that it was there
        lives.append(ReceiverLife(record))
    else:
        lives[-1] = ReceiverLife(record)


def added_up(lives: Sequence[ReceiverLife]) -> tuple[ReceiverCounts | None, int]:
    """Return the counts of all receivers of a log added up, None without one; and how many died without an `ended`."""
    if not lives:
        return None, 0
    return summed([life.counts() for life in lives]), sum(life.state.state != "ended" for life in lives)


def summed(counts: Sequence[ReceiverCounts]) -> ReceiverCounts:
    """Return the sum of counts."""
    return ReceiverCounts(
        **{name: sum(getattr(each, name) for each in counts) for name in ReceiverCounts.__struct_fields__}
    )
