"""The next turn of a session: its body takes up the history and the reply that has just come.

Nothing else in the load loop reads a reply, because that holds up the stamps and submissions of all others; a session
cannot go on without. It is read once a turn, after it has ended and been logged and before the think time is waited
for, and in slices between which the event loop goes on. Measured on one of two shared cores, for a chat reply of 500
tokens (135 KB on the wire): 2.4 ms of CPU time in all (events 1.2, JSON 0.75, dechunking 0.5; carrying the history
0.03), of which the dechunking is the longest slice. With such a reply every 30 ms, what was due every 2 ms was late by
0.26 ms at p90 and 0.8 ms at p99 (median of five runs), against 0.8 and 4.2 ms when replies are read in one go, and 0.1
and 1.0 ms without sessions; threads gained nothing.

A load worker imports this only where there are sessions: reading replies takes numpy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial

import msgspec
import numpy as np

from loadgen.http1 import ProtocolError, parse_head
from loadgen.protocols import PROTOCOLS, Protocol
from loadgen.protocols.body import body_of
from loadgen.protocols.stream import Seen, reading
from loadgen.records import PlannedRequest
from loadgen.transport import Exchange

_SLICE_EVENTS = 32
_NONE = np.empty(0, np.int64)


def follower(
    protocol_name: str,
) -> Callable[[PlannedRequest, Exchange], Coroutine[None, None, tuple[PlannedRequest, int] | None]]:
    """`next_turn` of one protocol. Raises ValueError where there is none, or none that carries sessions."""
    protocol = PROTOCOLS.get(protocol_name)
    if protocol is None or protocol.carry is None:
        names = ", ".join(name for name, one in PROTOCOLS.items() if one.carry is not None)
        raise ValueError(f"protocol {protocol_name!r} carries no sessions; these do: {names}")
    return partial(next_turn, protocol=protocol)


async def next_turn(
    planned: PlannedRequest, exchange: Exchange, *, protocol: Protocol
) -> tuple[PlannedRequest, int] | None:
    """The turn after a finished one, and when it is due: its think time after the reply's end, in Unix ns.

    planned   the turn that has ended; the first of its `turns` is the next one, which gets the rest of them
    exchange  what came back, with head and body kept (`kept_head`, `kept`)

    None at the session's end: after its last turn, after one that failed (no complete reply, a status other than 200,
    an error event under 200), and where the protocol carries no sessions. The turns that were not reached are not
    sent and appear in no log; that they were planned stands in the plan.
    """
    if not planned.turns or protocol.carry is None or exchange.error or exchange.status != 200:
        return None
    text = await _text(protocol, exchange.kept_head, bytes(exchange.kept or b""))
    if text is None:
        return None
    following = planned.turns[0]
    body = protocol.carry(planned.body, text, following.body)
    due_ns = exchange.end_ns + max(0, following.think_ns)
    return msgspec.structs.replace(following, body=body, turns=planned.turns[1:]), due_ns


async def _text(protocol: Protocol, head: bytes, wire: bytes) -> str | None:
    """What Protocol.reply_text gives, but a stream is read in slices."""
    form, seen = protocol.form, Seen()
    try:
        parsed = parse_head(head)
        if parsed.headers.get("content-type", "").partition(";")[0].strip().lower() not in form.kinds:
            return protocol.reply_text(200, head, wire)
        data = body_of(parsed, wire, _NONE, _NONE).data
    except ProtocolError:
        return None
    await asyncio.sleep(0)
    for _ in reading(seen, form, data):
        if seen.number % _SLICE_EVENTS == 0:
            await asyncio.sleep(0)
    return "".join(seen.texts) if seen.complete(streamed=True) else None
