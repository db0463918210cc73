"""The table of the protocols, each a module that writes requests and reads replies.

A new protocol is one module here and one row in PROTOCOLS: the command line, the load and the report read the table.
The table itself needs no numpy, so that `--help` stays fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from sidelight.loadgen.protocols import kserve, messages, models, ollama, openai, responses, sglang, tgi, websocket
from sidelight.loadgen.protocols.reading.stream import Form
from sidelight.loadgen.protocols.request import Prompt, RequestContent, RequestTarget, carry_messages, carry_text

if TYPE_CHECKING:
    from sidelight.loadgen.protocols.reading.reply import Reads, Reply
    from sidelight.rundir.columns import Ints

Transport = Literal["http", "websocket", "grpc"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """One way to ask and to be answered.

    path       where requests go, from the server's root
    body       writes a request; equal arguments give equal bytes
    form       how replies look
    carry      the next turn's whole body from (previous body, the reply's text, the body of what the turn adds)
    models     where the server lists its models, and how that is read; None where it cannot be asked over HTTP
    streams    whether replies come in pieces, so that the client sees a first token
    templated  whether the server puts prompts under the model's chat template
    has_ignore_eos  whether a request can ask to ignore the end of a sequence; elsewhere lengths are the model's
    provider   gen_ai.provider.name of its spans, where no engine was recognised
    """

    name: str
    transport: Transport = "http"
    path: str
    body: Callable[[RequestContent], bytes]
    form: Form
    carry: Callable[[bytes, str, bytes], bytes]
    models: models.Listing | None = models.OPENAI
    streams: bool = True
    templated: bool = True
    has_ignore_eos: bool = True
    provider: str = "openai"

    def encode(
        self, target: RequestTarget, prompt: Prompt, max_tokens: int, temperature: float, *, ignore_eos: bool = True
    ) -> tuple[str, bytes]:
        """Return one request: its path, from the server's root, and its body."""
        return self.path, self.body(
            RequestContent(
                target=target, prompt=prompt, max_tokens=max_tokens, temperature=temperature, ignore_eos=ignore_eos
            )
        )

    def read_reply(self, http_status: int, head: bytes, body: bytes, reads_ns: Ints, read_ends: Ints) -> Reply:
        """Read the contents and times of a reply; see reply.read_reply."""
        from sidelight.loadgen.protocols.reading.reply import read_reply  # noqa: PLC0415  the one thing here that needs numpy

        return read_reply(self.form, http_status, head, body, reads_ns, read_ends)

    def read_parts(self, http_status: int, head: bytes, parts: Iterable[Reads]) -> Reply:
        """Read the contents and times of a reply, part by part; see reply.read_parts."""
        from sidelight.loadgen.protocols.reading.reply import read_parts  # noqa: PLC0415  as above

        return read_parts(self.form, http_status, head, parts)

    def first_token_ns(self, http_status: int, head: bytes, beginning: Reads) -> int:
        """Return the time of an unfinished reply's first token; see reply.first_token_ns."""
        from sidelight.loadgen.protocols.reading.reply import first_token_ns  # noqa: PLC0415  as above

        return first_token_ns(self.form, http_status, head, beginning)


_messages = partial(carry_messages, "messages")

PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            name="chat", path="/v1/chat/completions", body=openai.chat_body, form=openai.FORM, carry=_messages
        ),
        Protocol(
            name="completions", path="/v1/completions", body=openai.completions_body, form=openai.FORM,
            carry=partial(carry_text, "prompt"), templated=False,
        ),
        Protocol(
            name="responses", path="/v1/responses", body=responses.body, form=responses.FORM,
            carry=partial(carry_messages, "input", constant="instructions"),
        ),
        Protocol(
            name="messages", path="/v1/messages", body=messages.body, form=messages.FORM,
            carry=partial(carry_messages, "messages", constant="system"), has_ignore_eos=False, provider="anthropic",
        ),
        Protocol(
            name="websocket", transport="websocket", path="/v1/stream", body=websocket.body, form=websocket.FORM,
            carry=_messages,
        ),
        Protocol(
            name="grpc", transport="grpc", path=kserve.METHOD, body=kserve.body, form=kserve.FORM,
            carry=kserve.carry, models=None, templated=False,
        ),
        Protocol(
            name="sglang", path="/generate", body=sglang.body, form=sglang.FORM, carry=partial(carry_text, "text"),
            templated=False, provider="sglang",
        ),
        Protocol(
            name="tgi", path="/generate_stream", body=tgi.body, form=tgi.FORM, carry=partial(carry_text, "inputs"),
            models=models.TGI, templated=False, has_ignore_eos=False, provider="tgi",
        ),
        Protocol(
            name="ollama", path="/api/chat", body=ollama.body, form=ollama.FORM, carry=_messages,
            models=models.OLLAMA, has_ignore_eos=False, provider="ollama",
        ),
        Protocol(
            name="exo", path="/bench/chat/completions", body=openai.exo_body, form=openai.FORM, carry=_messages,
            streams=False, provider="exo",
        ),
    )
}  # fmt: skip


def split_endpoint(url: str) -> tuple[str, tuple[str, ...]]:
    """Return a URL without its endpoint's path at the end. The path of the list of models is removed too.

    With it come the names of the protocols that have this path.
    """
    base = url.rstrip("/")
    if base.endswith(models.OPENAI.path):
        return base.removesuffix(models.OPENAI.path), ()
    paths = {protocol.path for protocol in PROTOCOLS.values() if base.endswith(protocol.path)}
    if not paths:
        return url, ()
    path = max(paths, key=len)
    return base.removesuffix(path), tuple(name for name, protocol in PROTOCOLS.items() if protocol.path == path)


# A name in PROTOCOLS: what a type checker cannot see, the command line can.
if TYPE_CHECKING:
    Endpoint = str
else:
    Endpoint = Literal[tuple(PROTOCOLS)]
