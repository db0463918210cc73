"""The exact request sequence as a file: written once, sent again by anyone, compared by its SHA-256.

JSON lines, UTF-8. The first line says what the file is; each other is one request or, with its `turns`, one session:

index      from 0, whatever stood before it in the run
class      its workload class
path       from the server's root
body       the body's text exactly as it is sent; `body_base64` where it is not UTF-8
tokens     [input, max output]: as declared in the original run's tokenizer; input -1 where it is not known
offset_ns  from the phase's start; left out in a closed loop
url        which of the run's URLs, by position; left out for the first
think_ns   of a later turn: how long after the previous turn's end
whole      of a later turn: true where its body is the whole conversation and nothing is carried into it
turns      the later turns, each an object like this one

What is equal in two runs (phase, numbering) is not in it, so equal workloads give equal files; nor are headers.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncGenerator, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from loadgen.plan.fitting import Planned, PlanOrder, numbered
from loadgen.protocols.reading.failures import UNREADABLE
from loadgen.records import PlannedRequest

FORMAT = "sidelight requests 1"
# -1: not known.
_Known = Annotated[int, Meta(ge=-1, lt=2**62)]


class SavedRequestsError(ValueError):
    """A file of saved requests cannot be read or written; the message names file, line, field and cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a file of saved requests says of itself: how many records, its SHA-256, and the workload they are of."""

    count: int
    sha256: str
    workload: dict[str, Any]


class _Head(msgspec.Struct, frozen=True):
    format: str
    workload: dict[str, Any]


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    index: int
    workload_class: str = msgspec.field(name="class")
    path: Annotated[str, Meta(pattern="^/")]
    tokens: tuple[_Known, _Known]
    body: str = ""
    body_base64: bytes = b""
    offset_ns: _Known = -1
    url: Annotated[int, Meta(ge=0)] = 0
    think_ns: _Known = -1
    whole: bool = False
    turns: tuple[_Line, ...] = ()


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(_Line).decode


def save(path: Path, requests: Iterable[PlannedRequest], *, workload: dict[str, Any]) -> Saved:
    """Write requests, as read from a plan, to a file that is not there yet. `workload` is what is stated of them.

    Raises SavedRequestsError.
    """
    digest = hashlib.sha256()
    count = 0
    try:
        # Its owner's alone: what goes into bodies may be secret.
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            for line in _lines(requests, workload):
                file.write(line)
                digest.update(line)
                count += 1
    except FileExistsError as error:
        raise SavedRequestsError(f"{path}: already exists; choose another file for --save-requests") from error
    except OSError as error:
        raise SavedRequestsError(f"{path}: {error.strerror}; name a file that can be written") from error
    return Saved(count=count - 1, sha256=digest.hexdigest(), workload=workload)


def _lines(requests: Iterable[PlannedRequest], workload: dict[str, Any]) -> Iterator[bytes]:
    yield _encode(_Head(FORMAT, workload)) + b"\n"
    first: int | None = None
    for request in requests:
        first = request.index if first is None else first
        yield _encode(_to_line(request, first)) + b"\n"


def _to_line(request: PlannedRequest, first: int) -> _Line:
    try:
        body, encoded = request.body.decode(), b""
    except UnicodeDecodeError:
        body, encoded = "", request.body
    return _Line(
        index=request.index - first,
        workload_class=request.workload_class,
        path=request.path,
        body=body,
        body_base64=encoded,
        tokens=(request.input_tokens, request.max_tokens),
        offset_ns=request.offset_ns,
        url=request.url,
        think_ns=request.think_ns,
        whole=request.whole,
        turns=tuple(_to_line(turn, first) for turn in request.turns),
    )


def look(path: Path) -> Saved:
    """Read a file's first line and hash it whole. Raises SavedRequestsError."""
    try:
        with path.open("rb") as file:
            head = _head(path, file.readline())
            count = sum(1 for line in file if line.strip())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(path, error) from error
    if count == 0:
        raise SavedRequestsError(f"{path}, line 2: there is no request; save some with --save-requests")
    return Saved(count=count, sha256=digest, workload=head.workload)


def read(path: Path, *, model: str | None = None, without: Collection[str] = ()) -> Iterator[PlannedRequest]:
    """Read the requests of a file, in order, as a plan's records, of no phase and numbered from 0.

    model    asked for instead of the original run's, in bodies that are JSON with a model
    without  fields that are left out of such bodies

    Raises SavedRequestsError at the first line that is not as it must be.
    """
    index = 0
    try:
        with path.open("rb") as file:
            _head(path, file.readline())
            for number, raw in enumerate(file, 2):
                if not raw.strip():
                    continue
                try:
                    line = _decode(raw)
                except UNREADABLE as error:
                    raise SavedRequestsError(f"{path}, line {number}: {error}; save the requests again") from error
                if line.index != index:
                    raise SavedRequestsError(
                        f"{path}, line {number}: index: {line.index} must be {index}; a line was lost"
                    )
                index += 1 + len(line.turns)
                yield _planned(line, model, without)
    except OSError as error:
        raise _unreadable(path, error) from error


async def replay(
    path: Path, *, order: PlanOrder, model: str | None = None, without: Collection[str] = ()
) -> AsyncGenerator[Planned, None]:
    """Give saved requests in place of a workload's plan: the same bodies at the same offsets.

    Of the order: `offsets_ns`, where given, replaces the saved ones; `count` sends fewer; `urls` spreads them anew;
    without `sessions` later turns are left out; `exact`, `max_model_len` and `ignore_eos` change nothing.

    Raises SavedRequestsError.
    """
    offsets = None if order.offsets_ns is None else order.offsets_ns.tolist()
    index = order.first_index
    for ordinal, saved in enumerate(read(path, model=model, without=without)):
        if ordinal == order.count or (offsets is not None and ordinal == len(offsets)):
            return
        offset_ns = saved.offset_ns if offsets is None else offsets[ordinal]
        replayed = saved if order.sessions else msgspec.structs.replace(saved, turns=())
        request = numbered(replayed, order, index=index, offset_ns=offset_ns, ordinal=ordinal)
        index += 1 + len(request.turns)
        yield Planned(request=request)


def _head(path: Path, raw: bytes) -> _Head:
    try:
        head = msgspec.json.decode(raw, type=_Head)
    except UNREADABLE as error:
        raise SavedRequestsError(
            f"{path}, line 1: {error}; the file must begin with the line that --save-requests writes"
        ) from error
    if head.format != FORMAT:
        raise SavedRequestsError(f"{path}, line 1: format: {head.format!r} must be {FORMAT!r}; save the requests again")
    return head


def _planned(line: _Line, model: str | None, without: Collection[str]) -> PlannedRequest:
    body = line.body_base64 or line.body.encode()
    turns = tuple(
        msgspec.structs.replace(_planned(turn, model, without), session=line.index, turn=number)
        for number, turn in enumerate(line.turns, 1)
    )
    return PlannedRequest(
        index=line.index,
        workload_class=line.workload_class,
        path=line.path,
        body=body if model is None else with_model(body, model, without),
        input_tokens=line.tokens[0],
        max_tokens=line.tokens[1],
        offset_ns=line.offset_ns,
        url=line.url,
        session=line.index if turns else -1,
        think_ns=line.think_ns,
        whole=line.whole,
        turns=turns,
    )


def with_model(body: bytes, model: str, without: Collection[str] = ()) -> bytes:
    """Return a JSON body for another model, without some fields; any other body, and one without a model, as it is."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except UNREADABLE:
        return body
    if "model" not in fields:
        return body
    remaining = {name: value for name, value in fields.items() if name not in without}
    return msgspec.json.encode({**remaining, "model": model})


def _unreadable(path: Path, error: OSError) -> SavedRequestsError:
    return SavedRequestsError(f"{path}: {error.strerror}; give a file that --save-requests wrote")
