"""The exact requests of a recorded run, sent again: they are read from the log of its plan.

What secrets its bodies had is not in it: stand-ins are, which are the same wherever the same field is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sidelight.loadgen.plan.fitting import Planned, PlanOrder, numbered
from sidelight.loadgen.protocols.reading.failures import UNREADABLE
from sidelight.loadgen.records import PLAN_END, PlannedRequest, decode_planned
from sidelight.rundir.frames import read_frames
from sidelight.rundir.framing import GAP
from sidelight.rundir.printable.errors import CodedError


class SavedRequestsError(CodedError, ValueError):
    """The requests of a plan cannot be sent again; the message names the file and the cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Requests of a plan: how many, the SHA-256 of all bodies in order, and whether the first has a time."""

    count: int
    sha256: str
    is_timed: bool


def look(path: Path) -> Saved:
    """Read a plan whole. Raises SavedRequestsError."""
    digest, count, is_timed = hashlib.sha256(), 0, False
    for count, request in enumerate(read(path), 1):
        is_timed = is_timed or (count == 1 and request.offset_ns >= 0)
        for turn in (request, *request.turns):
            digest.update(turn.body)
    if count == 0:
        raise SavedRequestsError("replay.empty", f"{path}: there is no request; give another run")
    return Saved(count=count, sha256=digest.hexdigest(), is_timed=is_timed)


def read(path: Path) -> Iterator[PlannedRequest]:
    """Yield the requests of a plan, in order. Their phase and their own headers are not in it.

    Raises SavedRequestsError where one cannot be sent, or the plan has no end.
    """
    try:
        for payload in read_frames(path, gaps=True):
            if payload is GAP:
                break
            request = decode_planned(payload)
            if request.index == PLAN_END:
                return
            yield _checked(path, request)
    except OSError as error:
        raise SavedRequestsError(
            "replay.unreadable", f"{path}: {error.strerror}; give the directory of a run"
        ) from error
    except UNREADABLE as error:
        raise SavedRequestsError(
            "replay.unreadable", f"{path}: {error}; give the directory of a run of this version"
        ) from error
    raise SavedRequestsError(
        "replay.damaged", f"{path}: it is damaged or has no end, as of a run that was killed; give another run"
    )


def _checked(path: Path, request: PlannedRequest) -> PlannedRequest:
    for turn in (request, *request.turns):
        at = f"{path}, request {turn.index}"
        if not turn.path.startswith("/"):
            raise SavedRequestsError(
                "replay.damaged", f"{at}: path: {turn.path[:60]!r} must begin with /; give another run"
            )
        numbers = (turn.input_tokens, turn.max_tokens, turn.offset_ns, turn.think_ns)
        if not -1 <= min(numbers) <= max(numbers) < 2**62:
            raise SavedRequestsError("replay.damaged", f"{at}: its numbers cannot be used; give another run")
    turns = tuple(msgspec.structs.replace(turn, headers=-1, turns=()) for turn in request.turns)
    return msgspec.structs.replace(request, headers=-1, turns=turns)


async def replay(
    path: Path, *, order: PlanOrder, model: str | None = None, extra: Mapping[str, object] | None = None
) -> AsyncGenerator[Planned, None]:
    """Yield the requests of a plan in place of a workload's. They have the same bodies at the same offsets.

    `model` and `extra` are as in `with_model`. Of the order: `offsets_ns`, where given, replaces the recorded ones;
    `count` sends fewer; `urls` spreads them anew; without `sessions` later turns are left out; `exact`,
    `max_model_len` and `ignore_eos` change nothing.

    Raises SavedRequestsError.
    """
    offsets = None if order.offsets_ns is None else order.offsets_ns.tolist()
    index = order.first_index
    for ordinal, saved in enumerate(read(path)):
        if ordinal == order.count or (offsets is not None and ordinal == len(offsets)):
            return
        offset_ns = saved.offset_ns if offsets is None else offsets[ordinal]
        replayed = _for_model(saved if order.sessions else msgspec.structs.replace(saved, turns=()), model, extra or {})
        request = numbered(replayed, order, index=index, offset_ns=offset_ns, ordinal=ordinal)
        index += 1 + len(request.turns)
        yield Planned(request=request)


def _for_model(request: PlannedRequest, model: str | None, extra: Mapping[str, object]) -> PlannedRequest:
    if model is None:
        return request
    turns = tuple(_for_model(turn, model, extra) for turn in request.turns)
    return msgspec.structs.replace(request, body=with_model(request.body, model, extra), model=model, turns=turns)


def with_model(body: bytes, model: str, extra: Mapping[str, object]) -> bytes:
    """Return a JSON body with another model and other fields.

    Fields that are None are removed. Any other body, and one without a model, is returned as it is.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return body
    if "model" not in fields:
        return body
    remaining = {name: value for name, value in fields.items() if name not in extra or extra[name] is not None}
    return msgspec.json.encode({**remaining, **{n: v for n, v in extra.items() if v is not None}, "model": model})
