"""The requests and turns that every workload produces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Messages = tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A piece that several requests begin with, the same bytes in all of them.

    name       tells it from the others of its workload
    token_ids  as token ids of cl100k_base; empty where `text` is given
    tokens     how long it is meant to be, in tokens of whichever tokenizer is declared
    """

    name: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A later turn of a session: what the user adds, and how long after the previous reply's end.

    With `messages` it adds nothing: they are the whole conversation, which is sent as it is; so is its text where it is
    `whole`. `body` goes before the
    request's own further fields.
    """

    token_ids: tuple[int, ...] = ()
    text: str | None = None
    input_tokens: int = -1
    max_tokens: int
    think_s: float = 0.0
    messages: Messages = ()
    headers: int = -1
    body: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadRequest:
    """One request before it is fitted to a tokenizer and a server.

    token_ids     the part of the input that is the request's own, as token ids of cl100k_base; empty where `text` is
    input_tokens  the whole input in tokens, as drawn: system prompt, prefix, own part and suffix; of a `text` -1,
                  since it is counted where the tokenizer is
    text          the own part where it is a file's and goes out as it is
    system        a shared system prompt, sent as a message of its own where the protocol has roles
    prefix        a shared piece that the user's message begins with
    suffix        what the user's message ends with, as the question after a document
    messages      a whole conversation that goes out as it is, in place of all of these
    headers       which of the workload's header sets is sent with it; -1 none
    body          further fields of its body and of its later turns', as those that are sent with every request
    model         the model that it and its later turns ask; "" leaves it to the target
    turns         the later turns of the session that this request begins
    """

    workload_class: str
    token_ids: tuple[int, ...] = ()
    input_tokens: int = -1
    max_tokens: int
    temperature: float = 0.0
    text: str | None = None
    system: Shared | None = None
    prefix: Shared | None = None
    suffix: str = ""
    messages: Messages = ()
    headers: int = -1
    body: Mapping[str, Any] = field(default_factory=dict)
    model: str = ""
    turns: tuple[Turn, ...] = ()
