"""Requests and replies without their texts: what is left of them is their length, their form and a hash.

A reply keeps each byte's place, so that it is read as before: in the texts of its JSON every character is an `x`. Which
fields hold texts of the model is known by their names; what a server says of an error stays.
"""

from __future__ import annotations

import hashlib
import re

import msgspec

from loadgen.records import PlannedRequest

# fmt: off
_NAMES = (
    "content", "text", "reasoning_content", "reasoning", "thinking", "refusal", "arguments", "delta", "response",
    "generated_text", "output_text", "text_output", "token", "tokens", "input", "prompt", "partial_json", "name",
    "summary_text", "decoded_token", "query", "output",
)
# fmt: on
_FRAMING = rb"\r\n[0-9A-Fa-f]+\r\n"  # of chunks, which may begin anywhere
_STRING = rb'"(?:[^"\\\r\n]|\\.|%s)*"?' % _FRAMING
_TEXT = re.compile(rb'("(?:%s)"\s*:\s*)(%s|\[(?:[\s,]*%s)+)' % ("|".join(_NAMES).encode(), _STRING, _STRING), re.DOTALL)
_LIKELY = re.compile(rb'("top_logprobs"\s*:\s*\[?\s*\{)([^{}]*)', re.DOTALL)  # tokens are names of fields here
_STRINGS = re.compile(_STRING, re.DOTALL)
_NUMBERS = re.compile(rb'("(?:bytes|token_ids|prompt_token_ids|tokens|output_ids)"\s*:\s*\[)([\d\s,]*)')
_CHARACTER = re.compile(
    rb"(%s)|\\u[0-9A-Fa-f]{4}|\\.|[\x00-\x7f]|[\xc0-\xdf].|[\xe0-\xef]..|[\xf0-\xf7]...|." % _FRAMING, re.DOTALL
)
_PLAIN_CHARACTER = re.compile(
    rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}|.", re.DOTALL
)
# What stands for a character of so many bytes.
_HIDDEN = {1: b"x", 2: "ñ".encode(), 3: "…".encode(), 4: "🞄".encode(), 6: rb"\u0078"}


def hidden_reply(body: bytes | bytearray) -> bytes:
    """Return the whole body of a reply, as long and with as many characters in each text, which are all the same."""
    without_texts = _TEXT.sub(_without_strings, _LIKELY.sub(_without_strings, bytes(body)))
    return _NUMBERS.sub(lambda match: match[1] + re.sub(rb"\d", b"1", match[2]), without_texts)


def hidden_text(text: bytes) -> bytes:
    """Return a text in UTF-8 that is as long and has as many characters."""
    return _PLAIN_CHARACTER.sub(lambda match: _HIDDEN[len(match[0])], text)


def hidden_request(planned: PlannedRequest) -> PlannedRequest:
    """Return a planned request, and its later turns, with the length and the hash of a body in its place."""
    about = {"sha256": hashlib.sha256(planned.body).hexdigest(), "bytes": len(planned.body)}
    turns = tuple(map(hidden_request, planned.turns))
    return msgspec.structs.replace(planned, body=msgspec.json.encode(about), turns=turns)


def _without_strings(match: re.Match[bytes]) -> bytes:
    return match[1] + _STRINGS.sub(_without_string, match[2])


def _without_string(match: re.Match[bytes]) -> bytes:
    string = match[0]
    end = len(string) - (len(string) > 1 and string.endswith(b'"'))  # none where the reply was cut off
    return string[:1] + _hidden(string[1:end]) + string[end:]


def _hidden(text: bytes) -> bytes:
    if text.isascii() and b"\\" not in text and b"\r" not in text:
        return b"x" * len(text)
    return _CHARACTER.sub(_hidden_character, text)


def _hidden_character(match: re.Match[bytes]) -> bytes:
    character = match[0]
    if match[1] is not None:
        return character
    return rb"\t" if len(character) == 2 and character[:1] == b"\\" else _HIDDEN[len(character)]
