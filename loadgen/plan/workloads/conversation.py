"""The draft's Conversation workload from a ShareGPT file.

The file is a JSON list of {"id", "conversations": [{"from": "human" | "gpt" | ..., "value": text}, ...]}. A request is
a conversation's first user message, and the length of the reply that follows it in the file is its output length. As
sessions, the later user messages with a reply are the later turns.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from sidelight.loadgen.plan.tokenizers.reference import reference
from sidelight.loadgen.plan.workloads.distributions import Distribution
from sidelight.loadgen.plan.workloads.fields import WorkloadError, about_file, file_state, unreadable
from sidelight.loadgen.plan.workloads.mix import choose, endless_order, share, stream_rng
from sidelight.loadgen.plan.workloads.reference import SYSTEM_PROMPT
from sidelight.loadgen.plan.workloads.request import Turn, WorkloadRequest
from sidelight.rundir.printable.numbers import agree

NAME = "conversation"

_USERS = ("human", "user")
_ASSISTANTS = ("gpt", "assistant", "chatgpt", "bing", "bard")
_SURROGATES = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
_ESCAPE_BYTES = 6
_CONTENT_STREAM, _ORDER_STREAM, _SHARE_STREAM, _THINK_STREAM = 101, 102, 103, 104


class _FileMessage(msgspec.Struct, gc=False):
    speaker: str | None = msgspec.field(name="from", default=None)
    value: str | None = None


class _Conversation(msgspec.Struct, gc=False):
    conversations: list[_FileMessage] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MessageAndReply:
    """A user's message, and its reply in the file."""

    user: str
    assistant: str


def read(path: Path) -> tuple[list[tuple[MessageAndReply, ...]], dict[str, Any]]:
    """Return the conversations that have an exchange, and the report's description of the file.

    Conversations are in the file's order.

    The newest file is kept in memory, since a warm-up draws from it too.

    Raises WorkloadError naming the file, the place in it and the cure.
    """
    return _read(path, file_state(path))


@lru_cache(maxsize=1)
def _read(path: Path, _state: tuple[int, int]) -> tuple[list[tuple[MessageAndReply, ...]], dict[str, Any]]:
    about = about_file(path)
    try:
        data = _decoded(path.read_bytes())
    except OSError as error:
        raise unreadable(path, error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WorkloadError(
            "dataset.unreadable",
            f"{path}: no ShareGPT JSON: {error}; it must be a list of "
            '{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}',
        ) from error
    conversations = [exchanges for entry in data if (exchanges := _exchanges(entry.conversations))]
    if not conversations:
        raise WorkloadError(
            "dataset.empty", f"{path}: none of {len(data)} conversations has a human message with a gpt reply after it"
        )
    later = sum(len(exchanges) - 1 for exchanges in conversations)
    return conversations, {
        **about,
        "dataset": "ShareGPT",
        "conversations_in_file": len(data),
        "without_reply": len(data) - len(conversations),
        "later_turns": later,
        "subset": f"the {len(conversations)} conversations with at least one reply to a user's message",
        "order": "a seeded permutation; a new one when all were sent",
        "preprocessing": "blank messages dropped; of a user's messages without a reply between them the last counts; "
        "halves of surrogate pairs become U+FFFD; "
        "texts are sent as they are; output lengths are the replies' in tokens of cl100k_base",
    }


def notes(about: Mapping[str, Any], *, sessions: bool) -> tuple[str, ...]:
    """Return notes about the messages that are not sent, with the reason. `about` is the description from `read`."""
    texts = []
    if without := about["without_reply"]:
        whole = about["conversations_in_file"]
        sent = f"{without} of {whole} conversations {agree(without, 'is', 'are')} not sent"
        texts.append(f"{sent}: no user's message with a reply is in {agree(without, 'it', 'them')}")
    if (later := about["later_turns"]) and not sessions:
        texts.append(
            f"later turns ({later}) of {about['conversations_in_file'] - without} conversations not sent, only the "
            "first of each: --sessions sends them"
        )
    return tuple(texts)


def requests(
    conversations: list[tuple[MessageAndReply, ...]], *, seed: int, think_s: Distribution | None = None
) -> Iterator[WorkloadRequest]:
    """Yield requests without end. With `think_s`, the pause before a later turn, a conversation is a session."""
    rng, think = stream_rng(seed, _SHARE_STREAM), stream_rng(seed, _THINK_STREAM)
    systems = share(SYSTEM_PROMPT, "system", "words", stream_rng(seed, _CONTENT_STREAM))
    order = endless_order(len(conversations), seed=seed, stream=_ORDER_STREAM)
    while True:
        for system in choose(SYSTEM_PROMPT, systems, rng):
            exchanges = conversations[next(order)]
            pauses_s = [] if think_s is None else think_s.draw(think, len(exchanges) - 1).tolist()
            yield replace(request_of(exchanges, pauses_s), system=system)


def in_order(
    conversations: Sequence[tuple[MessageAndReply, ...]], *, think_s: float | None
) -> Iterator[WorkloadRequest]:
    """Yield requests in the file's order without end.

    No system prompt stands before them; with `think_s` they are sessions.
    """
    for exchanges in itertools.cycle(conversations):
        yield request_of(exchanges, [] if think_s is None else itertools.repeat(think_s))


def request_of(exchanges: Sequence[MessageAndReply], pauses_s: Iterable[float]) -> WorkloadRequest:
    """Return a conversation's first message as a request, with later messages as turns.

    There are as many turns as pauses.
    """
    first, *later = exchanges
    return WorkloadRequest(
        workload_class=NAME,
        text=first.user,
        max_tokens=_reply_tokens(first),
        turns=tuple(
            Turn(text=exchange.user, max_tokens=_reply_tokens(exchange), think_s=max(0.0, pause_s))
            for exchange, pause_s in zip(later, pauses_s, strict=False)
        ),
    )


def _reply_tokens(exchange: MessageAndReply) -> int:
    return max(1, reference().count(exchange.assistant))


def _decoded(raw: bytes) -> list[_Conversation]:
    """Decode conversations; half a surrogate pair, which no UTF-8 can hold, becomes U+FFFD. Raises as msgspec does."""
    try:
        return msgspec.json.decode(raw, type=list[_Conversation])
    except msgspec.DecodeError as error:
        if "surrogate" not in str(error):
            raise
    return msgspec.json.decode(_SURROGATES.sub(_paired, raw), type=list[_Conversation])


def _paired(match: re.Match[bytes]) -> bytes:
    """Return an escaped backslash or a whole pair as it is; half a pair as U+FFFD."""
    return match[0] if len(match[0]) != _ESCAPE_BYTES else rb"\ufffd"


def _exchanges(messages: list[_FileMessage]) -> tuple[MessageAndReply, ...]:
    exchanges: list[MessageAndReply] = []
    asked: str | None = None
    for message in messages:
        text = message.value or ""
        if message.speaker in _USERS and text.strip():
            asked = text
        elif message.speaker in _ASSISTANTS and text.strip() and asked is not None:
            exchanges.append(MessageAndReply(asked, text))
            asked = None
    return tuple(exchanges)
