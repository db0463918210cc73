"""The records in the load generator's raw logs. They are planned requests, parts of replies, a worker's own state.

Every stamp is int64 nanoseconds since the Unix epoch, -1 where the moment has not come. Nothing here needs numpy, so
that a load worker starts fast.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b, sha256

import msgspec

from sidelight.rundir.frames import FrameLog, read_frames

PLAN_END = -1
MOST_REPLY_BYTES = 64_000_000  # on the wire
MOST_MESSAGE_BYTES = 16 * 1024 * 1024  # of one event of a stream, one message, or a reply in one piece


class PlannedRequest(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One request as the conductor wants it sent, and the later turns of its session.

    index       unique in the run; warm-up and measurement share one numbering; PLAN_END closes a plan
    input_tokens in the declared tokenizer; -1 unknown; max_tokens: the output tokens that its body asks for, -1 unknown
    offset_ns   from the phase's start; -1 in a closed loop
    url         which of the worker's URLs, by position
    session     the session it is a turn of; -1 none
    turn        0 for the first turn; the others stand in the first one's `turns`, and hold only what they add
    think_ns    how long after the previous turn's end it is sent; -1 for a first turn
    headers     which of the worker's header sets goes with it, by position; -1 none. A plan holds no header: it may be
                a secret
    whole       of a later turn: its body is the whole conversation, and is sent as it is
    model       the model that its body asks; "" unknown
    leave_ns    how long after its dispatch the client closes the connection if the reply has not ended; -1 never
    """

    index: int
    phase: str = ""
    workload_class: str = ""
    path: str = ""
    body: bytes = b""
    input_tokens: int = -1
    max_tokens: int = -1
    offset_ns: int = -1
    url: int = 0
    session: int = -1
    turn: int = 0
    think_ns: int = -1
    turns: tuple[PlannedRequest, ...] = ()
    headers: int = -1
    whole: bool = False
    leave_ns: int = -1
    model: str = ""


class RequestPart(msgspec.Struct, array_like=True, frozen=True, tag="part", gc=False):
    """The new data of one request since its previous part.

    The parts of a request are numbered by seq and end with `last`.

    url         where it was sent, path included
    status      HTTP status, or what WebSocket and gRPC said in HTTP's terms; 0 until there is one
    head        the raw response head of HTTP, in the first part written after it arrived, else empty
    reads_ns    stamps, one a read of the socket, or a message of WebSocket and gRPC; read_ends: length of this part's
                body after each; body: its bytes as they came, chunk framing included; all three as `packing` says, see
                reply.unpack. A message of no bytes is the end of a gRPC call with status OK
    end_ns      -1 unless last
    held_ns     for how long the cap on requests in flight held it back, which is part of dispatch_ns - scheduled_ns
    retried     it was sent twice: the kept connection of the first time ended before any byte of a reply; connected_ns
                and submit_ns are of the second time
    error       "" or "kind: message", kind one of connect, reset, timeout, cancelled, left, protocol, too_large and
                server (gRPC)
    sha256, reply  of the whole body, and its contents and times as `reply.encoded` writes them; both in the last part,
                where its bytes are left out of the log (--redact-bodies), else empty
    """

    index: int
    seq: int = 0
    last: bool = False
    worker: int = 0
    url: str = ""
    scheduled_ns: int = -1
    dispatch_ns: int = -1
    connected_ns: int = -1
    submit_ns: int = -1
    reused: bool = False
    status: int = 0
    head: bytes = b""
    reads_ns: bytes = b""
    read_ends: bytes = b""
    body: bytes = b""
    end_ns: int = -1
    error: str = ""
    packing: int = 0
    held_ns: int = 0
    retried: bool = False
    reserved: int = 1  # the place of a field that is no more: the form of the X-Request-Id
    sha256: str = ""
    reply: bytes = b""


class WorkerStat(msgspec.Struct, array_like=True, frozen=True, tag="stat", gc=False):
    """A worker's own state, a few times a second.

    cpu_ns            CPU time of the process so far
    loop_delay_ns     how late the worker's timer fired: what a stamp without the kernel's may be late by
    read_late_counts  histogram (lateness.bucket_bounds) of how late reads came behind the kernel's receive stamp, since
                      the start; empty where the kernel gives none. read_late_max_ns: the latest
    gc_pause_max_ns   longest pause of the garbage collector since the start; gc_pause_total_ns: all together
    rss_bytes         resident memory; -1 unknown
    kernel_stamps     whether reads bear the kernel's stamps, so that their lateness is not in the results
    """

    worker: int
    at_ns: int
    cpu_ns: int
    loop_delay_ns: int = 0
    in_flight: int = 0
    started: int = 0
    read_late_counts: tuple[int, ...] = ()
    read_late_max_ns: int = -1
    gc_pause_max_ns: int = -1
    gc_pause_total_ns: int = -1
    rss_bytes: int = -1
    kernel_stamps: bool = False


LogRecord = RequestPart | WorkerStat

_encode = msgspec.msgpack.Encoder().encode
# One record of a plan, one of a worker's log; they raise msgspec.DecodeError on anything else.
decode_planned = msgspec.msgpack.Decoder(PlannedRequest).decode
decode_log: Callable[[bytes], LogRecord] = msgspec.msgpack.Decoder(LogRecord).decode


def append_record(log: FrameLog, record: PlannedRequest | LogRecord) -> None:
    """Append one record of the load generator. Raises OSError as FrameLog.append does."""
    log.append(_encode(record))


def read_plan(path: str | os.PathLike[str]) -> Iterator[PlannedRequest]:
    """Yield the requests of a plan, without its end record. There are fewer than planned if the plan was torn."""
    for payload in read_frames(path):
        planned = decode_planned(payload)
        if planned.index == PLAN_END:
            return
        yield planned


def read_log(path: str | os.PathLike[str]) -> Iterator[LogRecord]:
    """Yield the records of a worker's log up to its end or its tear."""
    yield from map(decode_log, read_frames(path))


def hidden_request(planned: PlannedRequest) -> PlannedRequest:
    """Return a planned request with its body replaced by length and hash. Its later turns are treated alike."""
    about = {"sha256": sha256(planned.body).hexdigest(), "bytes": len(planned.body)}
    turns = tuple(map(hidden_request, planned.turns))
    return msgspec.structs.replace(planned, body=msgspec.json.encode(about), turns=turns)


def with_secrets(planned: PlannedRequest, stand_ins: Mapping[bytes, bytes]) -> PlannedRequest:
    """Return a request and its later turns with secrets in place of their stand-ins.

    A plan holds the stand-ins only.
    """
    body = planned.body
    for stand_in, secret in stand_ins.items():
        body = body.replace(stand_in, secret)
    turns = tuple(with_secrets(turn, stand_ins) for turn in planned.turns)
    return msgspec.structs.replace(planned, body=body, turns=turns)


def as_sent(stand_ins: Mapping[str, str], *, is_json: bool) -> dict[bytes, bytes]:
    """Return the secrets by their stand-ins, encoded as they are in bodies."""
    return {
        stand_in.encode(): msgspec.json.encode(secret)[1:-1] if is_json else secret.encode()
        for stand_in, secret in stand_ins.items()
    }


def plan_end(phase: str) -> PlannedRequest:
    """Return the record that marks a plan as complete."""
    return PlannedRequest(index=PLAN_END, phase=phase)


def request_id(run_id: str, index: int) -> str:
    """Return the X-Request-Id of a request: a UUID that ends in the decimal digits of its index, so that people can
    read it in a server's log.

    Envoy samples traces by a UUID's first eight digits, and writes its decision into the thirteenth.
    """
    digest = blake2b(f"{run_id}/{index}".encode(), digest_size=9, person=b"request").hexdigest()
    return f"{digest[:8]}-{digest[8:12]}-4{digest[12:15]}-8{digest[15:]}-{index:012d}"


def trace_id(run_id: str, index: int) -> str:
    """Return the W3C trace id (32 hex digits) of a request. It is the same whenever it is derived again."""
    return blake2b(f"{run_id}/{index}".encode(), digest_size=16, person=b"trace").hexdigest()


def span_id(run_id: str, index: int) -> str:
    """Return the W3C span id (16 hex digits) of a request's client span. This span is the parent of the server's."""
    return blake2b(f"{run_id}/{index}".encode(), digest_size=8, person=b"span").hexdigest()


def traceparent(run_id: str, index: int) -> str:
    """Return the W3C traceparent header of a request; its flags 01 ask the server to record the span."""
    return f"00-{trace_id(run_id, index)}-{span_id(run_id, index)}-01"
