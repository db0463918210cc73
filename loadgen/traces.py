"""Recorded traffic: when requests came and how long they were, from the public traces' own files.

The formats are told apart by their fields, in CSV (its first line) or JSON lines (keys) alike, gzipped or not:

azure     TIMESTAMP (date and time), ContextTokens, GeneratedTokens: Azure's LLM inference traces of 2023, 2024, 2025
burstgpt  Timestamp (seconds), Request tokens, Response tokens: BurstGPT
mooncake  timestamp (milliseconds), input_length, output_length, hash_ids: Mooncake, and what AIPerf reads

Other columns are passed over. Nothing here is text: a workload makes prompts of these lengths.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

_T = TypeVar("_T")

MOONCAKE_BLOCK_TOKENS = 512
_HASHES = "hash_ids"
_GZIP_MAGIC = b"\x1f\x8b"
_FRACTION = re.compile(r":\d\d[.,](\d+)")
_VALUE_CHARS = 60
# Bounds that no trace reaches, so that nothing overflows int64.
_MOST_S = 4e9
_MOST_TOKENS = 2**31

_decode = msgspec.json.Decoder(dict[str, object]).decode


class TraceError(ValueError):
    """A file is no trace; the message names the file and, where there is one, the line, the field and the value."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """A trace in the order of its time stamps, the first request at 0.

    name           azure, burstgpt or mooncake
    offsets_ns     int64[n], ascending
    input_tokens   int64[n], at least 1
    output_tokens  int64[n], at least 1
    hash_ids       n tuples: the prompt's blocks from its beginning, equal numbers for equal prefixes; None: not known
    block_tokens   how many tokens a block has; 0 without hash_ids
    notes          what reading changed: requests left out, or put into order
    """

    name: str
    offsets_ns: npt.NDArray[np.int64]
    input_tokens: npt.NDArray[np.int64]
    output_tokens: npt.NDArray[np.int64]
    hash_ids: tuple[tuple[int, ...], ...] | None = None
    block_tokens: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    name: str
    time: str
    inputs: str
    outputs: str
    to_ns: Callable[[object], int]


def read_trace(path: str | Path) -> Trace:
    """Read a trace file whole: about 5 us a line.

    Special cases
    a request without input or output tokens (in BurstGPT: one that failed) cannot be sent: left out, with a note
    stamps out of order: the requests are put into order, those of equal stamps as they stand, with a note
    hash_ids in some lines only: the others have none

    Raises TraceError for a file that is none of the formats, has a value that is none, or holds no request to send;
    OSError when it cannot be opened.
    """
    path = Path(path)
    form: _Format | None = None
    at, inputs, outputs = array("q"), array("q"), array("q")
    hashes: list[tuple[int, ...] | None] = []
    try:
        with _opened(path) as text:
            for number, fields in _lines(path, text):
                form = form or _recognised(path, fields)
                at.append(_value(path, number, fields, form.time, form.to_ns))
                inputs.append(_value(path, number, fields, form.inputs, _tokens))
                outputs.append(_value(path, number, fields, form.outputs, _tokens))
                hashes.append(_value(path, number, fields, _HASHES, _hashes) if _HASHES in fields else None)
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read as text: {error}") from error
    at_ns, input_tokens, output_tokens = (np.array(column, np.int64) for column in (at, inputs, outputs))
    sendable = np.flatnonzero((input_tokens > 0) & (output_tokens > 0))
    if form is None or not len(sendable):
        raise TraceError(f"{path}: no request with input and output tokens in {len(at)} lines")
    order = sendable[np.argsort(at_ns[sendable], kind="stable")]
    hashed = any(one is not None for one in hashes)
    return Trace(
        name=form.name,
        offsets_ns=at_ns[order] - at_ns[order[0]],
        input_tokens=input_tokens[order],
        output_tokens=output_tokens[order],
        hash_ids=tuple(hashes[place] or () for place in order.tolist()) if hashed else None,
        block_tokens=MOONCAKE_BLOCK_TOKENS if hashed else 0,
        notes=_notes(len(at), at_ns[sendable]),
    )


def _notes(lines: int, at_ns: npt.NDArray[np.int64]) -> tuple[str, ...]:
    notes = []
    if left_out := lines - len(at_ns):
        notes.append(f"{left_out} of {lines} requests have no input or no output tokens: left out")
    if backwards := int((np.diff(at_ns) < 0).sum()):
        notes.append(f"time stepped back {backwards} times from one line to the next: put into order")
    return tuple(notes)


@contextmanager
def _opened(path: Path) -> Iterator[io.TextIOWrapper]:
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP_MAGIC
        raw.seek(0)
        # A spreadsheet's export begins with a byte order mark.
        with io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if packed else raw, encoding="utf-8-sig", newline="") as text:
            yield text


def _lines(path: Path, text: io.TextIOWrapper) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Each line's number and its fields by name."""
    first = next((line for line in text if line.strip()), "")
    text.seek(0)
    if first.lstrip()[:1] == "{":
        for number, line in enumerate(text, 1):
            if line.strip():
                try:
                    yield number, _decode(line)
                except msgspec.DecodeError as error:
                    raise TraceError(f"{path}, line {number}: {error}: {_shown(line.strip())}") from error
        return
    rows = csv.reader(text)
    columns: list[str] = []
    try:
        for row in rows:
            if columns and row:
                yield rows.line_num, dict(zip(columns, row, strict=False))
            elif row:
                columns = [column.strip() for column in row]
                _recognised(path, dict.fromkeys(columns))
    except csv.Error as error:
        raise TraceError(f"{path}, line {rows.line_num}: {error}") from error


def _recognised(path: Path, fields: Mapping[str, object]) -> _Format:
    for form in _FORMATS:
        if form.time in fields and form.inputs in fields:
            return form
    known = "; ".join(f"{form.time}, {form.inputs}, {form.outputs} ({form.name})" for form in _FORMATS)
    raise TraceError(f"{path}, line 1: its fields are {_shown(', '.join(fields))}; a trace has {known}")


def _value(path: Path, number: int, fields: Mapping[str, object], field: str, read: Callable[[object], _T]) -> _T:
    if field not in fields:
        raise TraceError(f"{path}, line {number}: no {field}")
    try:
        return read(fields[field])
    except (ValueError, TypeError, OverflowError) as error:
        raise TraceError(f"{path}, line {number}: {field}: {_shown(repr(fields[field]))} {error}") from error


def _date_ns(value: object) -> int:
    text = str(value).strip()
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("is no date and time") from None
    # Without a zone it is taken as UTC: only differences count. datetime drops what is below a microsecond.
    fraction = _FRACTION.search(text)
    whole_s = int(at.replace(microsecond=0, tzinfo=at.tzinfo or UTC).timestamp())
    return whole_s * 10**9 + (int(fraction[1][:9].ljust(9, "0")) if fraction else 0)


def _seconds_ns(value: object) -> int:
    return round(_moment(value, 1.0) * 1e9)


def _milliseconds_ns(value: object) -> int:
    return round(_moment(value, 1e3) * 1e6)


def _moment(value: object, a_second: float) -> float:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise TypeError("is no number")
    try:
        number = float(value)
    except ValueError:
        raise ValueError("is no number") from None
    if not 0 <= number <= _MOST_S * a_second:
        raise ValueError("is no moment of a trace")
    return number


def _tokens(value: object) -> int:
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise TypeError("is no whole number")
    try:
        count = int(value)
    except ValueError:
        raise ValueError("is no whole number") from None
    if not 0 <= count <= _MOST_TOKENS:
        raise ValueError("is no number of tokens")
    return count


def _hashes(value: object) -> tuple[int, ...]:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value or "[]")
        except msgspec.DecodeError:
            raise ValueError("is no list of whole numbers") from None
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        raise TypeError("is no list of whole numbers")
    return tuple(value)


def _shown(text: str) -> str:
    return text if len(text) <= _VALUE_CHARS else f"{text[:_VALUE_CHARS]}..."


_FORMATS = (
    _Format(name="azure", time="TIMESTAMP", inputs="ContextTokens", outputs="GeneratedTokens", to_ns=_date_ns),
    _Format(name="burstgpt", time="Timestamp", inputs="Request tokens", outputs="Response tokens", to_ns=_seconds_ns),
    _Format(name="mooncake", time="timestamp", inputs="input_length", outputs="output_length", to_ns=_milliseconds_ns),
)
