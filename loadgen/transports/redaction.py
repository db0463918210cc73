"""Requests and replies without their texts: what is left of them is their length, their form and a hash.

A reply keeps each byte's place, so that it is read as before: in the texts of its JSON every character is an `x`. Which
fields hold texts of the model is known by their names; what a server says of an error stays.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from operator import sub

import msgspec

from loadgen.http1 import BodyEnd, ProtocolError, dechunk, is_chunked, parse_head
from loadgen.records import PlannedRequest

# fmt: off
_NAMES = (
    "content", "text", "reasoning_content", "reasoning", "thinking", "refusal", "arguments", "delta", "response",
    "generated_text", "output_text", "text_output", "token", "tokens", "input", "prompt", "partial_json", "name",
    "summary_text", "decoded_token", "query", "output",
)
# fmt: on
# Nothing is given back once it matched: a text of 1 MB would take 280 MB to remember how, and blanks in a row the
# square of their number in time.
_STRING = rb'"(?:[^"\\\r\n]++|\\.)*+"?'
_TEXT = re.compile(
    rb'("(?:%s)"\s*+:\s*+)(%s|\[(?:[\s,]*+%s)++)' % ("|".join(_NAMES).encode(), _STRING, _STRING), re.DOTALL
)
_LIKELY = re.compile(rb'("top_logprobs"\s*+:\s*+(?:\[\s*+)?\{)([^{}]*+)', re.DOTALL)  # tokens are names of fields here
_STRINGS = re.compile(_STRING, re.DOTALL)
_NUMBERS = re.compile(rb'("(?:bytes|token_ids|prompt_token_ids|tokens|output_ids)"\s*+:\s*+\[)([\d\s,]*+)')
_DIGIT = re.compile(rb"\d")
# Characters of one kind in a row; at the end what JSON does not allow, which stays unreadable.
_CHARACTERS = re.compile(
    rb"(?P<ascii>[\x20-\x5b\x5d-\x7f]++)|(?P<two>(?:[\xc2-\xdf][\x80-\xbf])++)"
    rb"|(?P<three>(?:\xe0[\xa0-\xbf][\x80-\xbf]|\xed[\x80-\x9f][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2})++)"
    rb"|(?P<four>(?:\xf0[\x90-\xbf][\x80-\xbf]{2}|\xf4[\x80-\x8f][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3})++)"
    rb'|(?P<escape>(?:\\["\\/bfnrt])++)|(?P<number>(?:\\u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]|[dD][0-7])[0-9a-fA-F]{2})++)'
    rb"|(?P<pair>(?:\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})++)"
    rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|(?P<no_escape>\\.)|(?P<no_character>[\x80-\xff])|(?P<control>.)",
    re.DOTALL,
)
_PLAIN_CHARACTER = re.compile(
    rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}|.", re.DOTALL
)
# What stands for a character of so many bytes.
_HIDDEN = {1: b"x", 2: "ñ".encode(), 3: "…".encode(), 4: "🞄".encode()}
_HIDDEN_KINDS = {
    **{kind: _HIDDEN[size] for size, kind in enumerate(("ascii", "two", "three", "four"), 1)},
    "escape": rb"\t", "number": rb"\u0078", "pair": rb"\ud83d\udf84",
    "half": rb"\udc00", "no_escape": rb"\q", "no_character": b"\xff", "control": b"\1",
}  # fmt: skip


def hidden_reply(head: bytes, body: bytes | bytearray) -> bytes:
    """Return a reply's body with every character of its texts replaced.

    It is as long and has as many characters in each text, which are all the same.

    head  the raw response head: it says whether there is the framing of chunks, which may begin anywhere in a text
    """
    data, begins, sizes = _without_framing(head, bytes(body))
    data = _hidden_json(data)
    hidden, at, end = bytearray(body), 0, 0
    for begin, size in zip(begins, sizes, strict=True):
        end = begin + size
        hidden[begin:end] = data[at : at + size]
        at += size
    hidden[end:] = _hidden_json(bytes(body[end:]))  # behind broken framing
    return bytes(hidden)


def _without_framing(head: bytes, body: bytes) -> tuple[bytes, list[int], list[int]]:
    """Return the data of a body, its pieces' positions in the body and their sizes.

    They go as far as the framing is sound.
    """
    try:
        read = parse_head(head)
        if not is_chunked(read):
            return body, [0], [len(body)]
        try:
            BodyEnd(read).feed(body, 0)
        except ProtocolError as error:
            body = body[: error.at]
        pieces = dechunk(body)
    except ProtocolError:
        return body, [0], [len(body)]
    stops = [*pieces.data_starts[1:], len(pieces.data)] if pieces.data_starts else []
    return pieces.data, pieces.wire_starts, list(map(sub, stops, pieces.data_starts))


def _hidden_json(data: bytes) -> bytes:
    without_texts = _substituted(_TEXT, _without_strings, _substituted(_LIKELY, _without_strings, data))
    return _substituted(_NUMBERS, lambda match: match[1] + _DIGIT.sub(b"1", match[2]), without_texts)


def _substituted(pattern: re.Pattern[bytes], new: Callable[[re.Match[bytes]], bytes], data: bytes) -> bytes:
    """Substitute matches like `pattern.sub`, with less memory. `pattern.sub` takes some 100 bytes for each match."""
    changed, at = bytearray(), 0
    for match in pattern.finditer(data):
        changed += data[at : match.start()]
        changed += new(match)
        at = match.end()
    changed += data[at:]
    return bytes(changed)


def hidden_text(text: bytes) -> bytes:
    """Return a text of equal length in UTF-8 and equal number of characters."""
    return _PLAIN_CHARACTER.sub(lambda match: _HIDDEN[len(match[0])], text)


def hidden_request(planned: PlannedRequest) -> PlannedRequest:
    """Return a planned request with its body replaced by length and hash. Its later turns are treated alike."""
    about = {"sha256": hashlib.sha256(planned.body).hexdigest(), "bytes": len(planned.body)}
    turns = tuple(map(hidden_request, planned.turns))
    return msgspec.structs.replace(planned, body=msgspec.json.encode(about), turns=turns)


def _without_strings(match: re.Match[bytes]) -> bytes:
    return match[1] + _substituted(_STRINGS, _without_string, match[2])


def _without_string(match: re.Match[bytes]) -> bytes:
    string = match[0]
    end = len(string) - (len(string) > 1 and string.endswith(b'"'))  # none where the reply was cut off
    return string[:1] + _substituted(_CHARACTERS, _hidden_characters, string[1:end]) + string[end:]


def _hidden_characters(match: re.Match[bytes]) -> bytes:
    hidden = _HIDDEN_KINDS[match.lastgroup or "control"]
    return hidden * (len(match[0]) // len(hidden))
