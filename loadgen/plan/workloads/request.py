"""What every workload produces."""

from __future__ import annotations

from dataclasses import dataclass


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
    """A later turn of a session: what the user adds, and how long after the previous reply's end."""

    token_ids: tuple[int, ...] = ()
    text: str | None = None
    input_tokens: int = -1
    max_tokens: int
    think_s: float = 0.0


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
    turns: tuple[Turn, ...] = ()
