"""Recorded traffic: when requests came and how long they were, from the public traces' own files.

The formats are recognised by their fields, in CSV (its first line) or JSON lines (keys) alike, gzipped or not:

azure     TIMESTAMP (date and time), ContextTokens, GeneratedTokens: Azure's LLM inference traces of 2023, 2024, 2025
burstgpt  Timestamp (seconds), Request tokens, Response tokens: BurstGPT
mooncake  timestamp (milliseconds), input_length, output_length, hash_ids: Mooncake, and what AIPerf reads
weka      requests, block_size: a session of a coding agent a line, as WEKA's kv-cache-tester and AIPerf have it

Other columns are passed over. Nothing here is text: a workload makes prompts of these lengths.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, field

from sidelight.rundir.printable.errors import CodedError
from sidelight.rundir.printable.numbers import agree, count_of

MOONCAKE_BLOCK_TOKENS = 512
LONGEST_THINK_S = 60.0  # of an agent's session: longer pauses of its user are cut, as kv-cache-tester does
_GZIP_MAGIC = b"\x1f\x8b"
_FRACTION = re.compile(r":\d\d[.,](\d+)")
_HASH_IDS = "hash_ids"  # of CSV the only list, which stands there as JSON
_SHOWN_CHARS = 60
_MOST_CHARS = 1 << 26  # of a line: a packed file may unpack to any length
# Bounds that no trace reaches, so that nothing overflows int64.
_Tokens = Annotated[int, Meta(ge=0, le=2**31)]
_Seconds = Annotated[float, Meta(ge=0, le=4e9)]
_Milliseconds = Annotated[float, Meta(ge=0, le=4e12)]

_decode = msgspec.json.Decoder(dict[str, Any]).decode


class TraceError(CodedError, ValueError):
    """A file is not a trace; the message names the file and, where there is one, the line, the field and the value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterRequest:
    """A later request of a session, `think_s` after the reply before; its prompt is whole."""

    input_tokens: int
    output_tokens: int
    hash_ids: Sequence[int]
    think_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArrivalTrace:
    """A trace in the order of its time stamps, the first request at 0.

    name           azure, burstgpt, mooncake or weka
    offsets_ns     int64[n], ascending
    input_tokens   int64[n], at least 1
    output_tokens  int64[n], at least 1
    hash_ids       n tuples: the prompt's blocks from its beginning, equal numbers for equal prefixes; None: not known
    block_tokens   how many tokens a block has; 0 without hash_ids
    later          n tuples: what follows each request in its session; None: each stands alone
    notes          what reading changed: requests left out, or put into order
    """

    name: str
    offsets_ns: npt.NDArray[np.int64]
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    hash_ids: tuple[tuple[int, ...], ...] | None = None
    block_tokens: int = 0
    later: tuple[tuple[LaterRequest, ...], ...] | None = None
    notes: tuple[str, ...] = ()


class _Azure(msgspec.Struct, gc=False):
    at: str = field(name="TIMESTAMP")
    inputs: _Tokens = field(name="ContextTokens")
    outputs: _Tokens = field(name="GeneratedTokens")

    @property
    def at_ns(self) -> int:
        try:
            at = datetime.fromisoformat(self.at)
        except ValueError:
            raise msgspec.ValidationError("no date and time - at `$.TIMESTAMP`") from None
        # Without a zone it is taken as UTC: only differences count. datetime drops what is below a microsecond.
        fraction = _FRACTION.search(self.at)
        whole_s = int(at.replace(microsecond=0, tzinfo=at.tzinfo or UTC).timestamp())
        return whole_s * 10**9 + (int(fraction[1][:9].ljust(9, "0")) if fraction else 0)


class _BurstGpt(msgspec.Struct, gc=False):
    at: _Seconds = field(name="Timestamp")
    inputs: _Tokens = field(name="Request tokens")
    outputs: _Tokens = field(name="Response tokens")

    @property
    def at_ns(self) -> int:
        return round(self.at * 1e9)


class _Mooncake(msgspec.Struct, gc=False):
    at: _Milliseconds = field(name="timestamp")
    inputs: _Tokens = field(name="input_length")
    outputs: _Tokens = field(name="output_length")
    hash_ids: tuple[int, ...] | None = None

    @property
    def at_ns(self) -> int:
        return round(self.at * 1e6)


class _WekaRequest(msgspec.Struct, gc=False):
    """A request of an agent, or a subagent with its own."""

    at: _Seconds = field(name="t", default=0.0)
    input_tokens: _Tokens = field(name="in", default=0)
    output_tokens: _Tokens = field(name="out", default=0)
    hash_ids: tuple[Annotated[int, Meta(ge=0, lt=2**32)], ...] = ()
    api_time: _Seconds = 0.0
    think_time: _Seconds | None = None
    requests: tuple[_WekaRequest, ...] = ()


class _Weka(msgspec.Struct, gc=False):
    requests: tuple[_WekaRequest, ...]
    block_size: Annotated[int, Meta(ge=1, le=2**20)]
    hash_id_scope: Literal["local", "global"] = "local"

    def first(self, session: int) -> _Mooncake:
        """Return the first request as a line of its own; without tokens where there is none."""
        sent = self._sent[0] if self._sent else _WekaRequest()
        return _Mooncake(
            at=0.0,  # each session has a clock of its own
            inputs=sent.input_tokens,
            outputs=sent.output_tokens,
            hash_ids=self._blocks(sent, session),
        )

    @property
    def _sent(self) -> list[_WekaRequest]:
        """Return the requests in order, those of a subagent in its place: what called it waits for it."""
        every = [each for request in self.requests for each in (request, *request.requests)]
        return [request for request in every if request.input_tokens and request.output_tokens]

    def _blocks(self, request: _WekaRequest, session: int) -> tuple[int, ...]:
        """Return the blocks of a request; local numbers become those of the session alone."""
        scope = session << 32 if self.hash_id_scope == "local" else 0
        return tuple(scope + number for number in request.hash_ids)

    def later(self, session: int) -> Iterator[LaterRequest]:
        """Yield the requests behind the first; an unstated pause is what the moments leave of it."""
        for before, request in pairwise(self._sent):
            between_s = max(0.0, request.at - before.at - before.api_time)
            think_s = request.think_time if request.think_time is not None else between_s
            yield LaterRequest(
                input_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                hash_ids=array("q", self._blocks(request, session)),  # thousands of numbers a request
                think_s=min(think_s, LONGEST_THINK_S),
            )


_Line = _Azure | _BurstGpt | _Mooncake | _Weka
_FORMATS: dict[str, type[_Line]] = {"azure": _Azure, "burstgpt": _BurstGpt, "mooncake": _Mooncake, "weka": _Weka}


def read_trace(path: str | Path) -> ArrivalTrace:
    """Read a trace file whole: about 5 us a line.

    Special cases
    a request without input or output tokens (in BurstGPT: one that failed) cannot be sent: left out, with a note
    stamps out of order: the requests are put into order, those of equal stamps as they stand, with a note
    hash_ids in some lines only: the others have none

    Raises TraceError for a file that is none of the formats, has a value that is none, or holds no request to send;
    OSError when it cannot be opened.
    """
    path = Path(path)
    name = ""
    at, inputs, outputs = array("q"), array("q"), array("q")
    hashes: list[tuple[int, ...] | None] = []
    later: list[tuple[LaterRequest, ...]] = []
    block_sizes: set[int] = set()
    try:
        with _opened(path) as text:
            for number, fields in _lines(path, text):
                name = name or _recognised(path, fields)
                try:
                    line = msgspec.convert(fields, _FORMATS[name], strict=False)
                    if isinstance(line, _Weka):
                        block_sizes.add(line.block_size)
                        later.append(tuple(line.later(len(at))))
                        line = line.first(len(at))
                    at.append(line.at_ns)
                    hashes.append(line.hash_ids if isinstance(line, _Mooncake) else None)
                except OverflowError as error:
                    raise TraceError("trace.line", f"{path}, line {number}: a date that is not of our time") from error
                except msgspec.ValidationError as error:
                    raise TraceError("trace.line", f"{path}, line {number}: {_explained(error, fields)}") from error
                inputs.append(line.inputs)
                outputs.append(line.outputs)
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError("trace.unreadable", f"{path}: cannot be read as text: {error}") from error
    if len(block_sizes) > 1:
        raise TraceError("trace.line", f"{path}: block_size: {_shown(str(block_sizes))}; give sessions of one size")
    at_ns, input_tokens, output_tokens = (np.array(column, np.int64) for column in (at, inputs, outputs))
    sendable = np.flatnonzero((input_tokens > 0) & (output_tokens > 0))
    if not len(sendable):
        raise TraceError("trace.empty", f"{path}: no request with input and output tokens in {len(at)} lines")
    order = sendable[np.argsort(at_ns[sendable], kind="stable")]
    hashed = any(ids is not None for ids in hashes)
    return ArrivalTrace(
        name=name,
        offsets_ns=at_ns[order] - at_ns[order[0]],
        input_tokens=input_tokens[order],
        output_tokens=output_tokens[order],
        hash_ids=tuple(hashes[place] or () for place in order.tolist()) if hashed else None,
        block_tokens=next(iter(block_sizes), MOONCAKE_BLOCK_TOKENS) if hashed else 0,
        later=tuple(later[place] for place in order.tolist()) if later else None,
        notes=_notes(len(at), at_ns[sendable]),
    )


def _notes(lines: int, at_ns: npt.NDArray[np.int64]) -> tuple[str, ...]:
    notes = []
    if left_out := lines - len(at_ns):
        have = agree(left_out, "has", "have")
        notes.append(f"{left_out} of {lines} requests {have} no input or no output tokens: left out")
    if backwards := int((np.diff(at_ns) < 0).sum()):
        notes.append(f"time stepped back {count_of(backwards, 'time')} from one line to the next: put into order")
    return tuple(notes)


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOWrapper]:
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        # A spreadsheet's export begins with a byte order mark.
        with io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if packed else raw, encoding="utf-8-sig", newline="") as text:
            yield text


def _bounded(path: Path, text: io.TextIOWrapper) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: text.readline(_MOST_CHARS), ""), 1):
        if len(line) == _MOST_CHARS:
            raise TraceError("trace.line", f"{path}, line {number}: {_MOST_CHARS:,} characters or more; give a trace")
        yield line


def _lines(path: Path, text: io.TextIOWrapper) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield each line's number and its fields by name. Fields of CSV are text, and empty ones are left out."""
    first = next((line for line in _bounded(path, text) if line.strip()), "")
    text.seek(0)
    number, line = 1, ""
    try:
        if first.lstrip()[:1] == "{":
            for number, line in enumerate(_bounded(path, text), 1):
                if line.strip():
                    yield number, _decode(line)
            return
        columns: list[str] = []
        for number, row in enumerate(csv.reader(_bounded(path, text)), 1):
            cells = map(str.strip, row)
            if columns and row:
                yield number, {name: _cell(name, cell) for name, cell in zip(columns, cells, strict=False) if cell}
            elif row:
                columns = list(cells)
                _recognised(path, dict.fromkeys(columns))
    except (msgspec.DecodeError, csv.Error, RecursionError) as error:
        raise TraceError("trace.line", f"{path}, line {number}: {error} {_shown(line.strip())}") from error


def _cell(name: str, text: str) -> Any:
    return msgspec.json.decode(text) if name == _HASH_IDS and text[:1] == "[" else text


def _recognised(path: Path, fields: Mapping[str, Any]) -> str:
    known = {name: [field.encode_name for field in msgspec.structs.fields(form)[:3]] for name, form in _FORMATS.items()}
    for name, (at, inputs, _) in known.items():
        if at in fields and inputs in fields:
            return name
    formats = "; ".join(f"{', '.join(names)} ({name})" for name, names in known.items())
    raise TraceError(
        "trace.fields", f"{path}, line 1: its fields are {_shown(', '.join(fields))}; a trace has {formats}"
    )


def _explained(error: msgspec.ValidationError, fields: Mapping[str, Any]) -> str:
    """Return msgspec's error message, preceded by the field and its value."""
    what, _, place = str(error).partition(" - at `$.")
    name = place.rstrip("`").partition("[")[0]
    return f"{name}: {_shown(repr(fields.get(name)))}: {what}" if name else what


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
