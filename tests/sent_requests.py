"""Requests as they stand in a plan, and as load workers log them."""

from __future__ import annotations

import json
import zlib
from array import array

from sidelight.loadgen.records import PlannedRequest, RequestPart

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def planned(index: int, tokens: int) -> PlannedRequest:
    """Return a request of the measured phase."""
    return PlannedRequest(
        index=index,
        phase="measure",
        workload_class="synthetic-uniform",
        path="/v1/chat/completions",
        body=b"{}",
        input_tokens=17,
        max_tokens=tokens,
        offset_ns=index,
    )


def parts(index: int, tokens: int) -> list[RequestPart]:
    """Return a finished request whose every event was logged in a part of its own, a microsecond apart."""
    replies = [
        {"choices": [{"index": 0, "delta": {"content": f" w{n}"}, "finish_reason": None}]} for n in range(tokens)
    ]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 17, "completion_tokens": tokens}}
    pieces = [*(f"data: {json.dumps(reply)}\n\n" for reply in (*replies, end, usage)), "data: [DONE]\n\n"]
    began_ns = 1_000_000_000 * (index + 1)
    return [
        RequestPart(
            index=index,
            seq=seq,
            last=seq == len(pieces) - 1,
            worker=0,
            url="http://h/v1/chat/completions",
            scheduled_ns=began_ns,
            dispatch_ns=began_ns + 1,
            connected_ns=began_ns + 2,
            submit_ns=began_ns + 3,
            reused=False,
            status=200,
            head=b"" if seq else HEAD,
            reads_ns=array("q", [began_ns + 1000 * (seq + 1)]).tobytes(),
            read_ends=array("q", [len(piece)]).tobytes(),
            body=zlib.compress(piece.encode(), 1),
            end_ns=began_ns + 1000 * len(pieces) if seq == len(pieces) - 1 else -1,
            error="",
        )
        for seq, piece in enumerate(pieces)
    ]
