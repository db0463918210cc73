"""A file of a user's own prompts: JSON lines, a JSON list, or plain text lines (`.txt`).

Field names are ours and those of AIPerf, GuideLLM and vllm bench; docs/reference/workloads.md has the table. The whole
file is read and checked before anything is sent, so that a mistake is named with its line and never cuts a run short.
"""

from __future__ import annotations

import difflib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from sidelight.rundir.printable.errors import CodedError, code_of

MOST_OUTPUT_TOKENS = 2**31 - 1
MOST_LINE_BYTES = 32 * 1024 * 1024
MOST_LIST_BYTES = 256 * 1024 * 1024

_TEXTS = ("prompt", "text", "text_input")
_LENGTHS = ("max_tokens", "output_tokens", "output_length", "output_tokens_count", "max_completion_tokens")
_SESSIONS = ("session", "session_id")
_TOOLS: dict[str, tuple[type, ...]] = {"tools": (list,), "tool_choice": (str, dict)}
_SHARED = (*_LENGTHS, "headers", "delay", "temperature", *_TOOLS)
_FIELDS = (*_TEXTS, "messages", "turns", *_LENGTHS, *_SESSIONS, "headers", "delay", "temperature", *_TOOLS)
# A field that is alike enough to be a slip of the pen is an error; any other that is not known is ignored.
_SLIP = 0.85
_HEADER_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7e\t]*")
_OURS = ("host", "content-length", "transfer-encoding", "connection", "traceparent", "x-request-id")
_SHAREGPT_FIELD = "conversations"
_SHAREGPT = re.compile(rb'\s*\[\s*\{.*"conversations"\s*:', re.DOTALL)
_LOOK_BYTES = 4096
_MOST_IGNORED = 100
_BOM = "\ufeff"
_SHOWN = 60
_DIGITS = 18
_EXAMPLE = '{"prompt": "...", "max_tokens": 128}'

Format = Literal["JSON lines", "JSON list", "text lines", "ShareGPT"]


class PromptsError(CodedError, ValueError):
    """A file of prompts cannot be read; the message names the file, the line, the field, its value and the cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenPrompt:
    """One prompt of the file: a `text`, or `messages` that are sent as they are.

    max_tokens  0 where it is not stated
    delay_s     from the end of the session's turn before; 0 where it is not stated
    headers     the position of its header set in the file's; -1 none
    tools       its `tools` and `tool_choice`, which are sent as they are
    """

    text: str | None
    messages: tuple[Mapping[str, Any], ...]
    max_tokens: int
    temperature: float
    delay_s: float
    headers: int
    tools: Mapping[str, Any]


@dataclass(slots=True, kw_only=True)
class PromptFile:
    """The contents of a prompt file, in its order.

    sessions  the prompts of each session; of a prompt without a session, that one alone
    headers   the different header sets
    ignored   fields that are not known, each with the first place where it stands
    places    the first place of `messages`, of `headers` and of `tools`, which not every protocol has
    """

    sessions: list[list[GivenPrompt]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    ignored: dict[str, str] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class _Reading:
    """The file so far; where in it each session and each header set is."""

    file: PromptFile = field(default_factory=PromptFile)
    sessions: dict[object, list[GivenPrompt]] = field(default_factory=dict)
    headers: dict[tuple[tuple[str, str], ...], int] = field(default_factory=dict)


def format_of(path: Path) -> Format:
    """Return the format of a file, judged by its beginning and its name. Raises OSError."""
    with path.open("rb") as file:
        start = file.read(_LOOK_BYTES).removeprefix(_BOM.encode())
    if _SHAREGPT.match(start):
        return "ShareGPT"
    if _is_text(path):
        return "text lines"
    return "JSON list" if start.lstrip()[:1] == b"[" else "JSON lines"


def read_prompts(path: Path) -> PromptFile:
    """Read a file that is not ShareGPT's. Raises PromptsError, and OSError."""
    reading = _Reading()
    for where, item in _items(path) if format_of(path) == "JSON list" else _lines(path):
        _take(reading, where, item)
    if not reading.file.sessions:
        raise PromptsError("prompt.empty", f"{path}: holds no prompt; write one a line, such as {_EXAMPLE}")
    return reading.file


# Where each prompt stands in the file, and what was read there


def _lines(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the place and content of each line that is not blank. Raises PromptsError."""
    text_lines = _is_text(path)
    with path.open("rb") as file:
        for number in itertools.count(1):
            raw = file.readline(MOST_LINE_BYTES + 1)
            if not raw:
                return
            where = f"{path}, line {number}"
            if len(raw) > MOST_LINE_BYTES:
                _fail("prompt.too-large", where, f"is longer than {MOST_LINE_BYTES >> 20} MiB; write one prompt a line")
            text = _decoded(raw, where).removeprefix(_BOM if number == 1 else "")
            if text.strip():
                yield where, text.rstrip("\r\n") if text_lines else _parsed(text, where)


def _items(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the items of a JSON list, with their places. Raises PromptsError."""
    where = str(path)
    if path.stat().st_size > MOST_LIST_BYTES:
        _fail(
            "prompt.too-large",
            where,
            f"a JSON list of more than {MOST_LIST_BYTES >> 20} MiB; write one prompt a line instead",
        )
    items = _parsed(_decoded(path.read_bytes(), where).removeprefix(_BOM), where)
    if not isinstance(items, list):
        _fail("prompt.not-json", where, "must be a JSON list of prompts, or one JSON object a line")
    for number, item in enumerate(items, 1):
        yield f"{path}, item {number}", item


def _is_text(path: Path) -> bool:
    return path.suffix.lower() == ".txt"


def _decoded(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        _fail("prompt.not-utf8", where, f"byte {error.start + 1} is not UTF-8; give JSON lines or text in UTF-8", error)


def _parsed(text: str, where: str) -> object:
    """Parse a JSON text. Duplicate keys, NaN and values that cannot be sent again are errors."""
    try:
        said = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_int=_whole, parse_float=_finite
        )
        msgspec.json.encode(said)
    except json.JSONDecodeError as error:
        # A line of a file that ends too early is its own second line to the parser.
        inside = error.lineno > 1 and ", line " not in where
        place = f"{where}, line {error.lineno}" if inside else f"{where}, column {error.colno}"
        _fail(
            "prompt.not-json",
            place,
            f"not JSON: {error.msg}; each line must be an object such as {_EXAMPLE}, or name the file *.txt for a "
            "plain prompt a line",
            error,
        )
    except RecursionError as error:
        _fail("prompt.too-large", where, "nested too deeply to be a prompt", error)
    except UnicodeEncodeError as error:
        _fail(
            "prompt.not-utf8",
            where,
            "holds half a surrogate pair (\\ud800 to \\udfff), which cannot be sent as UTF-8",
            error,
        )
    except ValueError as error:
        _fail(code_of(error, "prompt.value"), where, str(error), error)
    return said


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise PromptsError("prompt.duplicate-key", f"{_short(twice)}: is given twice; give it once")
    return fields


def _refuse_constant(name: str) -> NoReturn:
    raise PromptsError("prompt.value", f"{name} is not JSON; give a number, or leave the field out")


def _whole(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise PromptsError("prompt.value", f"{_short(digits)} is too large a number")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise PromptsError("prompt.value", f"{_short(digits)} is too large a number")
    return number


# From what was read to prompts


def _take(reading: _Reading, where: str, item: object) -> None:
    """Add the item at one place of the file. It is a prompt, the next of its session, or a session's turns."""
    fields = _fields(reading, where, item)
    turns, session = fields.get("turns"), _session(fields, where)
    if turns is None:
        _add(reading, session, _prompt(reading, fields, where))
        return
    if not isinstance(turns, list) or not turns:
        _fail("prompt.value", where, f"turns: {_short(turns)} must be a list with at least one prompt")
    for name in (*_TEXTS, "messages"):
        if name in fields:
            _fail("prompt.exclusive", where, f"turns and {name} exclude each other; give one of them")
    for number, turn in enumerate(turns, 1):
        place = f"{where}, turn {number}"
        part = _fields(reading, place, turn)
        for name in ("turns", *_SESSIONS):
            if name in part:
                _fail("prompt.exclusive", place, f"{name}: belongs to the line, not to one of its turns")
        # What stands beside the turns holds for each that has none of its own, by whichever name.
        stated = _LENGTHS if any(name in part for name in _LENGTHS) else ()
        shared = {name: fields[name] for name in _SHARED if name in fields and name not in stated}
        # Turns whose session has no name are one of their own: no other line can continue it.
        _add(reading, session or (where,), _prompt(reading, shared | part, place))


def _add(reading: _Reading, session: object, prompt: GivenPrompt) -> None:
    prompts = reading.sessions.setdefault(session, []) if session else []
    if not prompts:
        reading.file.sessions.append(prompts)
    prompts.append(prompt)


def _prompt(reading: _Reading, fields: Mapping[str, Any], where: str) -> GivenPrompt:
    text, messages = _text(fields, where), fields.get("messages")
    if text is not None and messages is not None:
        _fail("prompt.exclusive", where, "prompt and messages exclude each other; give one of them")
    if text is None and messages is None:
        if _SHAREGPT_FIELD in fields:
            _fail("prompt.not-json", where, f"{_SHAREGPT_FIELD}: ShareGPT is read as one JSON list, not as lines")
        _fail("prompt.missing", where, f"has no prompt; give {_EXAMPLE}, or messages")
    return GivenPrompt(
        text=text,
        messages=() if messages is None else _messages(messages, where),
        max_tokens=_length(fields, where),
        temperature=_number(fields, "temperature", where, most=10.0),
        delay_s=_number(fields, "delay", where, most=1e10) / 1e3,
        headers=_headers(reading, fields.get("headers"), where),
        tools=_tools(fields, where),
    )


def _fields(reading: _Reading, where: str, item: object) -> dict[str, Any]:
    """Return the known fields of a line that are not null; note the others, but refuse a slip of the pen."""
    item = {"prompt": item} if isinstance(item, str) else item
    if not isinstance(item, dict):
        _fail("prompt.value", where, f"{_short(item)} must be an object such as {_EXAMPLE}")
    for name in item:
        ignored, shown = reading.file.ignored, _short(name)
        if name in _FIELDS or shown in ignored or name == _SHAREGPT_FIELD or len(ignored) == _MOST_IGNORED:
            continue
        near = difflib.get_close_matches(name, _FIELDS, n=1, cutoff=_SLIP)
        if near:
            _fail(
                "prompt.unknown-field",
                where,
                f"{shown}: unknown field (did you mean {near[0]!r}?); known: {', '.join(_FIELDS)}",
            )
        ignored[shown] = where.rpartition(", ")[2]
    for name in ("messages", "headers", "tools"):
        if item.get(name):
            reading.file.places.setdefault(name, where)
    return {name: value for name, value in item.items() if value is not None}


def _only(fields: Mapping[str, Any], names: tuple[str, ...], where: str) -> str | None:
    """Return the name that is given, of several for one field, or None. Raises PromptsError where several are."""
    given = [name for name in names if name in fields]
    if len(given) > 1:
        _fail("prompt.exclusive", where, f"{given[0]} and {given[1]} mean the same; give one of them")
    return given[0] if given else None


def _text(fields: Mapping[str, Any], where: str) -> str | None:
    name = _only(fields, _TEXTS, where)
    if name is None:
        return None
    text = fields[name]
    if not isinstance(text, str):
        _fail("prompt.value", where, f"{name}: {_short(text)} must be a text; give a conversation as messages")
    if not text:
        _fail("prompt.missing", where, f"{name}: is empty; give a prompt, or leave the line out")
    return text


def _messages(given: object, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(given, list) or not given:
        _fail("prompt.value", where, f"messages: {_short(given)} must be a list with at least one message")
    for at, message in enumerate(given):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            _fail("prompt.value", where, f"messages[{at}]: {_short(message)} must be "
                  'an object such as {"role": "user", "content": "..."}')  # fmt: skip
        content = message.get("content")
        if not (content is None or isinstance(content, (str, list))):
            _fail("prompt.value", where, f"messages[{at}].content: {_short(content)} must be a text or a list of parts")
    return tuple(given)


def _tools(fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    for name, kinds in _TOOLS.items():
        value = fields.get(name)
        if value is not None and (not isinstance(value, kinds) or not value):
            wanted = "a list of tools" if name == "tools" else "a text or an object"
            _fail("prompt.value", where, f"{name}: {_short(value)} must be {wanted}, as the endpoint has it")
    return {name: fields[name] for name in _TOOLS if name in fields}


def _length(fields: Mapping[str, Any], where: str) -> int:
    name = _only(fields, _LENGTHS, where)
    if name is None:
        return 0
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_OUTPUT_TOKENS:
        _fail("prompt.value", where, f"{name}: {_short(value)} must be a whole number of at least 1")
    return value


def _session(fields: Mapping[str, Any], where: str) -> str:
    name = _only(fields, _SESSIONS, where)
    if name is None:
        return ""
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        _fail("prompt.value", where, f"{name}: {_short(value)} must be a name or a number")
    return str(value)


def _number(fields: Mapping[str, Any], name: str, where: str, *, most: float) -> float:
    value = fields.get(name, 0)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not (math.isfinite(value) and 0 <= value <= most)
    ):
        _fail("prompt.value", where, f"{name}: {_short(value)} must be a number from 0 to {most:g}")
    return float(value)


def _headers(reading: _Reading, given: object, where: str) -> int:
    """Return the position of a header set, -1 without headers. No error shows a value: it may be a secret."""
    if not given:
        return -1
    if not isinstance(given, dict):
        _fail("prompt.header", where, 'headers: must be an object of names and values, such as {"X-Tenant": "a"}')
    for name, value in given.items():
        if not _HEADER_NAME.fullmatch(name):
            _fail("prompt.header", where, f"headers: {_short(name)} is not a header's name")
        if name.lower() in _OURS:
            _fail("prompt.header", where, f"headers.{name}: Sidelight sets this header itself; leave it out")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            _fail("prompt.header", where, f"headers.{name}: must be one line of ASCII text")
    if len({name.lower() for name in given}) < len(given):
        _fail("prompt.header", where, "headers: names that differ in case only are the same; give each once")
    position = reading.headers.setdefault(tuple(given.items()), len(reading.headers))
    if position == len(reading.file.headers):
        reading.file.headers.append(dict(given))
    return position


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _fail(code: str, where: str, problem: str, cause: Exception | None = None) -> NoReturn:
    # A list's whole text has no item yet: its path alone is where.
    raise PromptsError(code, f"{where}: {problem}") from cause
