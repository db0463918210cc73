"""Rows of the table of requests: a request read from its parts, and rows laid out as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from itertools import accumulate, chain, islice
from operator import attrgetter
from sys import intern
from typing import Any

import msgspec
import numpy as np

from sidelight.loadgen.protocols.reading.batch import WholeReply, may_join
from sidelight.loadgen.protocols.reading.reply import Reads, Reply, head_of, in_order, joined, logged, unpack
from sidelight.loadgen.protocols.reading.stream import EMPTY
from sidelight.loadgen.protocols.reading.timings import ServerTimings
from sidelight.loadgen.protocols.reading.usage import Contradictions, contradictions, output_tokens
from sidelight.loadgen.protocols.table import Protocol
from sidelight.loadgen.records import PlannedRequest, RequestPart, request_id, trace_id
from sidelight.loadgen.requests.table.log import DTYPES, RequestLog

END_BYTES = 5  # of a body in chunks that holds nothing
_UNREAD, _UNTIMED = Reply(), ServerTimings(source="")


class RequestRow(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """One request; `whole` is its reply as long as that is still to be read."""

    planned: PlannedRequest
    last: RequestPart
    status_code: int
    first_read_ns: int
    received_bytes: int
    sent_bytes: int
    reply: Reply
    whole: WholeReply | None = None


def row_of(
    parts: Sequence[RequestPart], planned: PlannedRequest, sent_bytes: int, protocol: Protocol, *, may_wait: bool
) -> RequestRow | None:
    """Read one request from its parts; None without its first. The last part repeats the stamps of those before.

    Its reply may be left to be read together with others where it `may_wait`.
    """
    known = in_order(parts)
    if not known:
        return None
    last = msgspec.structs.replace(known[-1], head=b"", reads_ns=b"", read_ends=b"", body=b"", reply=b"")
    status, head = max(part.status for part in known), head_of(known)
    row = partial(RequestRow, planned=planned, last=last, status_code=status, sent_bytes=sent_bytes)
    if known[-1].reply:
        reads = unpack(known[-1])
        received_bytes, reply = int(reads.ends[-1]) if len(reads.ends) else 0, logged(known[-1].reply, reads.stamps_ns)
        return row(first_read_ns=int(next(iter(reads.stamps_ns), -1)), received_bytes=received_bytes, reply=reply)
    pieces = joined(known)
    beginning = list(islice(pieces, 2))
    whole = WholeReply(http_status=status, head=head, reads=beginning[0])
    if may_wait and len(beginning) == 1 and may_join(protocol.form, whole):
        first_ns, received_bytes = int(whole.reads.stamps_ns[0]), len(whole.reads.body)
        return row(first_read_ns=first_ns, received_bytes=received_bytes, reply=_UNREAD, whole=whole)
    sizes, firsts_ns = [], []

    def parts_read() -> Iterator[Reads]:
        for reads in chain(beginning, pieces):
            sizes.append(len(reads.body))
            firsts_ns.extend(reads.stamps_ns[:1].tolist())
            yield reads

    bodies = parts_read()
    reply = protocol.read_parts(status, head, bodies)
    for _ in bodies:
        pass  # what came behind the reply's end counts as received
    return row(first_read_ns=firsts_ns[0] if firsts_ns else -1, received_bytes=sum(sizes), reply=reply)


def _status(row: RequestRow) -> tuple[str, str]:
    """Return status and error of a request; the draft counts success or failure, a refusal is kept apart."""
    part, reply = row.last, row.reply
    error = part.error or reply.error
    if not part.last:
        return "in_flight", error
    # [DONE] means that the reply is whole: a connection that then hangs or breaks takes nothing away.
    if row.status_code == 200 and reply.complete and (reply.done or not part.error):
        return ("refused" if reply.finish_reason == "content_filter" else "ok"), error
    if 400 <= row.status_code < 500:
        return "refused", reply.error or error
    if part.error.startswith("left"):
        return "left", ""
    if part.error.startswith("cancelled"):
        return "cancelled", error
    if row.status_code == 200 and row.received_bytes <= END_BYTES:
        error = error or f"empty: {EMPTY}"
    return "failed", error or "incomplete: the reply ended without a finish reason or [DONE]"


def _counts_reasoning(reply: Reply) -> bool:
    """Return False for a count of 0 beside reasoning; vLLM states it if the chat template opens the thought."""
    return reply.reasoning_tokens > 0 or reply.first_kind != "reasoning"


def _end_ns(row: RequestRow) -> int:
    """Return the time of a request's end. A reply that was cut off behind its [DONE] ended with that."""
    part, reply = row.last, row.reply
    return reply.done_ns if part.last and part.error and reply.done_ns >= 0 else part.end_ns


# The columns that are a field of a request's last part, its plan, its reply or its server's timings, by that name.
_OF_PART = (
    "index", "scheduled_ns", "dispatch_ns", "held_ns", "connected_ns", "submit_ns", "worker", "reused", "retried",
)  # fmt: skip
_OF_PLAN = ("phase", "workload_class", "model", "max_tokens", "session", "turn")
_OF_REPLY = (
    "first_output_ns", "last_output_ns", "first_token_ns", "first_visible_ns", "last_token_ns", "choices",
    "output_span_ns", "unseen_tokens", "finish_reason", "first_kind", "role_only_first", "blank_before_first",
    "response_id",
)  # fmt: skip
_OF_USAGE = ("input_tokens", "output_tokens", "cached_tokens")
_OF_CHUNKS = ("chunk_ns", "chunk_chars", "chunk_choice")
_OF_TIMINGS = (
    "queue_ms", "prefill_ms", "decode_ms", "ttft_ms", "e2e_ms", "scheduler_intake_ms", "load_ms", "prompt_tps",
    "generation_tps",
)  # fmt: skip
_OF_DRAFTS = ("drafts", "draft_tokens", "draft_tokens_accepted")


def columns(rows: Sequence[RequestRow], run_id: str) -> RequestLog:
    last = [row.last for row in rows]
    planned = [row.planned for row in rows]
    replies = [row.reply for row in rows]
    timings = [reply.timings or _UNTIMED for reply in replies]
    # A server that states drafts of each of several choices: these are of the last alone.
    drafted = [_UNTIMED if reply.choices > 1 else reply.timings or _UNTIMED for reply in replies]
    outcomes = [_status(row) for row in rows]
    doubts = [
        contradictions(row.reply, row.planned, sent_bytes=row.sent_bytes, received_bytes=row.received_bytes)
        if status == "ok"
        else Contradictions()
        for row, (status, _) in zip(rows, outcomes, strict=True)
    ]
    tokens = [
        output_tokens(reply, status, doubt.output)
        for reply, (status, _), doubt in zip(replies, outcomes, doubts, strict=True)
    ]
    values: dict[str, Iterable[Any]] = {
        **{name: map(attrgetter(name), last) for name in _OF_PART},
        **{name: map(attrgetter(name), planned) for name in _OF_PLAN},
        **{name: map(attrgetter(name), replies) for name in _OF_REPLY},
        **{f"usage_{name}": map(attrgetter(name), replies) for name in _OF_USAGE},
        **{f"server_{name}": map(attrgetter(name), timings) for name in _OF_TIMINGS},
        "endpoint_url": (part.url for part in last),
        "request_id": (request_id(run_id, part.index) for part in last),
        "trace_id": (trace_id(run_id, part.index) for part in last),
        "first_read_ns": (row.first_read_ns for row in rows),
        "end_ns": (_end_ns(row) for row in rows),
        "declared_input_tokens": (request.input_tokens for request in planned),
        "usage_contradiction": ("; ".join(filter(None, doubt)) for doubt in doubts),
        "input_tokens": (
            -1 if doubt.input else reply.input_tokens for reply, doubt in zip(replies, doubts, strict=True)
        ),
        "reasoning_tokens": (
            -1 if doubt.output or not _counts_reasoning(reply) else reply.reasoning_tokens
            for reply, doubt in zip(replies, doubts, strict=True)
        ),
        "cached_tokens": (
            -1 if doubt.cached else reply.cached_tokens for reply, doubt in zip(replies, doubts, strict=True)
        ),
        "output_tokens": (count for count, _ in tokens),
        "output_tokens_source": (source for _, source in tokens),
        "status": (status for status, _ in outcomes),
        "http_status": (row.status_code for row in rows),
        "error": (error for _, error in outcomes),
        "received_bytes": (row.received_bytes for row in rows),
        "timings_source": (timing.source for timing in timings),
        "peak_memory_bytes": (timing.peak_memory_bytes for timing in timings),
        **{name: map(attrgetter(name), drafted) for name in _OF_DRAFTS},
        "chunk_start": accumulate((len(reply.chunk_ns) for reply in replies), initial=0),
        "choice_start": accumulate((len(reply.chunk_choice) for reply in replies), initial=0),
    }
    dtypes = {column.name: DTYPES[str(column.type)] for column in fields(RequestLog)}
    chunks = {name: np.concatenate([np.empty(0, np.int64), *map(attrgetter(name), replies)]) for name in _OF_CHUNKS}
    few = (name for name, dtype in dtypes.items() if dtype is np.object_ and name not in ("request_id", "trace_id"))
    values |= {name: map(intern, values[name]) for name in few}
    return RequestLog(**{name: np.fromiter(each, dtypes[name]) for name, each in values.items()}, **chunks)
