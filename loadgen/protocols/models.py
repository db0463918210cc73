"""The models that a server lists, and their length limits. A target is asked for them before any load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from sidelight.loadgen.protocols.reading.failures import UNREADABLE
from sidelight.loadgen.protocols.reading.timings import Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The place of a list of models, from the server's root, and its reader.

    `read` gives each model's limit on input and output tokens together by its name, None where it is not said; it
    raises what failures.UNREADABLE lists on anything that is not such a list.
    """

    path: str
    read: Callable[[bytes], dict[str, int | None]]


class _Owned(msgspec.Struct, gc=False):
    owned_by: str | None = None


class _Owners(msgspec.Struct, gc=False):
    data: list[_Owned]


class _Meta(msgspec.Struct, gc=False):
    n_ctx: Count | None = None


class _Served(msgspec.Struct, gc=False):
    id: str
    max_model_len: Count | None = None
    meta: msgspec.Raw = msgspec.Raw(b"null")  # llama.cpp's has n_ctx; others may have anything there

    @property
    def limit(self) -> int | None:
        if self.max_model_len is not None:
            return self.max_model_len
        try:
            return msgspec.json.decode(self.meta, type=_Meta).n_ctx
        except UNREADABLE:
            return None


class _OpenAi(msgspec.Struct, gc=False):
    data: list[_Served]


class _Tag(msgspec.Struct, gc=False):
    name: str


class _Ollama(msgspec.Struct, gc=False):
    models: list[_Tag]


class _Tgi(msgspec.Struct, gc=False):
    model_id: str
    max_total_tokens: Count | None = None


def _openai(body: bytes) -> dict[str, int | None]:
    return {served.id: served.limit for served in msgspec.json.decode(body, type=_OpenAi).data}


def _ollama(body: bytes) -> dict[str, int | None]:
    return dict.fromkeys(tag.name for tag in msgspec.json.decode(body, type=_Ollama).models)


def _tgi(body: bytes) -> dict[str, int | None]:
    info = msgspec.json.decode(body, type=_Tgi)
    return {info.model_id: info.max_total_tokens}


def owner_of(body: bytes) -> str:
    """Return the owner of the models in OpenAI's list, "" if not stated. For most engines it names the engine."""
    try:
        owners = msgspec.json.decode(body, type=_Owners).data
    except UNREADABLE:
        return ""
    return next((owner.owned_by for owner in owners if owner.owned_by), "")


OPENAI = Listing(path="/v1/models", read=_openai)
OLLAMA = Listing(path="/api/tags", read=_ollama)
TGI = Listing(path="/info", read=_tgi)
