"""How one request is written and how its reply is read, a module a protocol, and the table of them all."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from loadgen.protocols import carry, exo, kserve, models, ollama, openai, responses, sglang, tgi, websocket
from loadgen.protocols.body import Int64s
from loadgen.protocols.prompt import Prompt, Target
from loadgen.protocols.reply import Reply
from loadgen.protocols.stream import Form, read_reply, reply_text

Transport = Literal["http", "websocket", "grpc"]


class Encode(typing.Protocol):
    """Writes one request: its path, from the server's root, and its body; equal arguments give equal bytes."""

    def __call__(
        self,
        target: Target,
        prompt: Prompt,
        max_tokens: int,
        temperature: float,
        *,
        ignore_eos: bool = True,
    ) -> tuple[str, bytes]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One way to ask and to be answered.

    encode   writes a request
    form     how replies look, for `read_reply` and `reply_text`
    carry    the next turn's whole body from (previous body, the reply's text, the body of what the turn adds); None
             where sessions cannot be carried
    models   where the server lists its models, and how that is read; None where it cannot be asked over HTTP
    streams  whether replies come in pieces, so that the client sees a first token
    """

    name: str
    transport: Transport = "http"
    encode: Encode
    form: Form
    carry: Callable[[bytes, str, bytes], bytes] | None
    models: models.Listing | None = models.OPENAI
    streams: bool = True

    def read_reply(self, http_status: int, head: bytes, body: bytes, reads_ns: Int64s, read_ends: Int64s) -> Reply:
        """What a reply said and when; see stream.read_reply."""
        return read_reply(self.form, http_status, head, body, reads_ns, read_ends)

    def reply_text(self, http_status: int, head: bytes, body: bytes) -> str | None:
        """All visible content of choice 0, None of a reply that failed; see stream.reply_text."""
        return reply_text(self.form, http_status, head, body)


_messages = partial(carry.messages, "messages")

PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol(name="chat", encode=openai.encode_request, form=openai.FORM, carry=_messages),
        Protocol(
            name="completions",
            encode=openai.encode_request,
            form=openai.FORM,
            carry=partial(carry.text, "prompt"),
        ),
        Protocol(name="responses", encode=responses.encode_request, form=responses.FORM, carry=carry.responses),
        Protocol(name="sglang", encode=sglang.encode_request, form=sglang.FORM, carry=partial(carry.text, "text")),
        Protocol(
            name="tgi",
            encode=tgi.encode_request,
            form=tgi.FORM,
            carry=partial(carry.text, "inputs"),
            models=models.TGI,
        ),
        Protocol(name="ollama", encode=ollama.encode_request, form=ollama.FORM, carry=_messages, models=models.OLLAMA),
        Protocol(
            name="websocket",
            transport="websocket",
            encode=websocket.encode_request,
            form=websocket.FORM,
            carry=_messages,
        ),
        Protocol(
            name="grpc",
            transport="grpc",
            encode=kserve.encode_request,
            form=kserve.FORM,
            carry=kserve.carry,
            models=None,
        ),
        Protocol(name="exo", encode=exo.encode_request, form=openai.FORM, carry=_messages, streams=False),
    )
}
