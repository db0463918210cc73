"""exo's /bench/chat/completions: a whole JSON reply with generation_stats.

The endpoint empties the prefix cache, bans the end of a sequence and does not stream, so there are no token times of
the client's: the server's are all there is. Its streaming chat is the protocol `chat`, which reads the same statistics.
"""

from __future__ import annotations

import msgspec

from loadgen.protocols.prompt import Prompt, Target, messages_of, with_extra


def encode_request(
    target: Target,
    prompt: Prompt,
    max_tokens: int,
    temperature: float,
    *,
    ignore_eos: bool = True,  # noqa: ARG001  # the endpoint always does
) -> tuple[str, bytes]:
    """Path and JSON body."""
    body = {
        "model": target.model,
        "messages": messages_of(prompt),
        "max_tokens": max_tokens,
        "temperature": temperature,
    }
    return "/bench/chat/completions", msgspec.json.encode(with_extra({**body, "stream": False}, target))
