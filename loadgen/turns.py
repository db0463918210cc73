"""The next turn of a session: its body takes up the history and the reply that has just come.

Nothing else in the load loop reads a reply, because that holds up the stamps and submissions of all others; a session
cannot go on without. It is read once a turn, after it has ended and been logged and before the think time is waited
for, and in slices between which the event loop goes on. Measured on one of two shared cores, for a chat reply of 500
tokens (135 KB on the wire): 2.4 ms of CPU time in all (events 1.2, JSON 0.75, dechunking 0.5; carrying the history
0.03), of which the dechunking is the longest slice. With such a reply every 30 ms, what was due every 2 ms was late by
0.26 ms at p90 and 0.8 ms at p99 (median of five runs), against 0.8 and 4.2 ms when replies are read in one go, and 0.1
and 1.0 ms without sessions; threads gained nothing.

A load worker imports this only where there are sessions, because reading replies takes time to load.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

import msgspec

from sidelight.loadgen.protocols.reading.stream import ReplyState, reading
from sidelight.loadgen.protocols.table import Protocol
from sidelight.loadgen.records import PlannedRequest
from sidelight.loadgen.transports.transport import Exchange

_SLICE_EVENTS, _PIECE_BYTES = 24, 256 * 1024


async def next_turn(
    planned: PlannedRequest, exchange: Exchange, *, protocol: Protocol
) -> tuple[PlannedRequest, int] | None:
    """Return the turn after a finished one, and when it is due: its think time after the reply's end, in Unix ns.

    planned   the turn that has ended; the first of its `turns` is the next one, which gets the rest of them
    exchange  what came back, with head, body and read ends kept (`kept_head`, `kept_body`, `kept_ends`)

    None at the session's end: after its last turn, and after one that failed (no complete reply, a status other than
    200, an error event under 200). The turns that were not reached are not sent and appear in no log; that they were
    planned stands in the plan.
    """
    if not planned.turns or exchange.error or exchange.status != 200:
        return None
    text = await reply_text(protocol, exchange.kept_head, exchange.kept_body or b"", exchange.kept_ends)
    if text is None:
        return None
    following = planned.turns[0]
    body = following.body if following.whole else protocol.carry(planned.body, text, following.body)
    due_ns = exchange.end_ns + max(0, following.think_ns)
    return msgspec.structs.replace(following, body=body, turns=planned.turns[1:]), due_ns


async def reply_text(protocol: Protocol, head: bytes, wire: bytes | bytearray, read_ends: Iterable[int]) -> str | None:
    """Return all visible content of choice 0 of a reply, read in slices; None of one that failed or is torn."""
    seen, read = ReplyState(), 0
    for is_piece in reading(seen, protocol.form, 200, head, _pieces(protocol, wire, read_ends)):
        if is_piece or seen.number - read >= _SLICE_EVENTS:
            read = seen.number
            await asyncio.sleep(0)
    return seen.text


def _pieces(
    protocol: Protocol, wire: bytes | bytearray, read_ends: Iterable[int]
) -> Iterator[tuple[bytes, Iterable[int]]]:
    """Yield a body in pieces small enough to remove the framing in one go."""
    if protocol.form.messages:
        yield bytes(wire), read_ends
        return
    for begin in range(0, len(wire), _PIECE_BYTES):
        yield bytes(wire[begin : begin + _PIECE_BYTES]), ()
