"""The secrets that this process knows, and texts and bytes without them: whatever is written or printed passes here.

The register is filled from options and the environment; our own child processes get it with their specification. A
value of fewer than LEAST characters is not looked for in texts, since it would be part of words that have nothing to do
with it. Where it stands as an option it is masked all the same.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from sidelight.rundir.printable.escapes import escaped

Bytes = TypeVar("Bytes", bytes, bytearray)

MASK = "***"
LEAST = 8
# Of a header, a field of a query or of a request's body.
SECRET_NAME = re.compile(
    "key(?!word|board)|token(?!iz)|secret|passw|pwd|auth(?!or(?!iz))|credential|cookie|signature|^sig$", re.IGNORECASE
)
# Headers whose values are names of things, which stand in results for their own sake.
_NAMING = re.compile("model|team|tenant|org|region|route|version|trace|request|agent|accept|content|host|project|stage")
_VARIABLE = re.compile(r"(^|_)(KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|HEADERS)(_|$)", re.IGNORECASE)
# Of a command: --api-key VALUE, TOKEN=VALUE, "Authorization: Bearer VALUE", user:password@host. A name is looked for
# where a word begins: from each letter of a word on, a long one took the square of its length.
_IN_COMMAND = re.compile(
    r"((?<![\w-])[\w-]*(?:key|token|secret|password|passwd|pwd|credentials?|authorization)(?:=|:\s*|\s+)[\"']?"
    r"(?:Bearer\s+|Basic\s+)?)([^\s\"']+)",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(?<=://)[^/\s@]+(?=@)")
_SCHEME = re.compile(r"(?:Bearer|Basic|Token)\s+", re.IGNORECASE)
TEMPLATE = "{request}"  # a text with it differs from request to request

# Each form in which a secret is looked for, as text and as bytes; the longest come first.
_KNOWN: dict[str, bytes] = {}


def register(*values: str) -> None:
    """Register secrets, also in base64. The search undoes escapes of JSON, URLs and HTML."""
    forms = {form: form.encode(errors="replace") for value in values for form in _forms(value) if len(form) >= LEAST}
    if forms.keys() - _KNOWN.keys():
        whole = sorted({**_KNOWN, **forms}.items(), key=lambda pair: -len(pair[0]))
        _KNOWN.clear()
        _KNOWN.update(whole)


def registered() -> tuple[str, ...]:
    """Return all forms of all secrets."""
    return tuple(_KNOWN)


def register_likely(*values: str) -> None:
    """Register values that may be secrets or words, if they have letters and digits."""
    register(*(value for value in values if re.search("[A-Za-z]", value) and re.search("[0-9]", value)))


def register_headers(headers: Iterable[tuple[str, str]]) -> None:
    """Register the values of headers, without the scheme that begins an Authorization."""
    for name, value in headers:
        scheme = _SCHEME.match(value)
        credential = value[scheme.end() :] if scheme else value
        if SECRET_NAME.search(name):
            register(credential)
        elif not _NAMING.search(name.lower()):
            register_likely(credential)
        if scheme and scheme[0].lower().startswith("basic"):
            with suppress(binascii.Error, ValueError):
                register_user(base64.b64decode(credential, validate=True).decode())


def register_user(user: str) -> None:
    """Register USER:PASSWORD."""
    name, _, password = user.partition(":")
    register(user, base64.b64encode(user.encode(errors="replace")).decode(), password)
    register_likely(name)


def register_url(url: str) -> None:
    """Register user, password and the query of a URL."""
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.username or parts.password:
            register_user(f"{unquote(parts.username or '')}:{unquote(parts.password or '')}")
        for name, value in parse_qsl(parts.query):
            (register if SECRET_NAME.search(name) else register_likely)(value)


def register_fields(fields: Any) -> None:
    """Register the values of a JSON object's fields that have secret names."""
    secrets: list[str] = []

    def put(_: str, text: str) -> str:
        secrets.append(text)
        return text

    with_secrets(fields, put)
    register_likely(*secrets)


def register_command(command: str) -> None:
    """Register a command's arguments that have secret names."""
    register_likely(*(match[2] for match in _IN_COMMAND.finditer(command)))


def register_environment(variables: Mapping[str, str]) -> None:
    """Register the values of environment variables that hold credentials by their names.

    Of NAME=VALUE,NAME=VALUE in one variable, each value.
    """
    for name in secret_variables(variables):
        if not variables[name].startswith("/"):
            fields = [field.partition("=")[2].strip() for field in variables[name].split(",")]
            register_likely(variables[name], *fields)


def secret_variables(names: Iterable[str]) -> Iterator[str]:
    """Yield the names of variables that hold credentials, ours among them."""
    return (name for name in names if name.startswith("SIDELIGHT_") or _VARIABLE.search(name))


def without_secrets(text: str) -> str:
    """Return a text with `***` in place of each secret."""
    data = text.encode(errors="surrogatepass")
    if spans := escaped(data, _KNOWN.values()):
        for begin, end in reversed(spans):
            data = data[:begin] + MASK.encode() + data[end:]
        text = data.decode(errors="surrogatepass")
    for secret in _KNOWN:
        if secret in text:
            text = text.replace(secret, MASK)
    return text


def without_secrets_all(value: Any) -> Any:
    """Return a JSON value without secrets in its texts; the names of fields stay."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        return {key: without_secrets_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets_all(item) for item in value]
    return value


def blanked(data: Bytes) -> Bytes:
    """Return bytes with asterisks in place of each secret, of the same length."""
    for begin, end in escaped(data, _KNOWN.values()):
        data = data[:begin] + b"*" * (end - begin) + data[end:]
    for secret in _KNOWN.values():
        if secret in data:
            data = data.replace(secret, b"*" * len(secret))
    return data


def with_secrets(fields: Any, put: Callable[[str, str], str], *, name: str = "", inside: bool = False) -> Any:
    """Return a JSON value with texts of secret names replaced by `put(name, text)`.

    Numbers are not: `max_tokens` is a name of this kind. Nor is a text that differs from request to request.
    """
    if isinstance(fields, Mapping):
        return {
            key: with_secrets(item, put, name=f"{name}.{key}", inside=inside or bool(SECRET_NAME.search(str(key))))
            for key, item in fields.items()
        }
    if isinstance(fields, list | tuple):
        return [with_secrets(item, put, name=f"{name}.{at}", inside=inside) for at, item in enumerate(fields)]
    return put(name, fields) if inside and isinstance(fields, str) and fields and TEMPLATE not in fields else fields


def with_stand_ins(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields of a body with stand-ins for secrets, and the secret of each.

    Secret are the values with secret names; a stand-in has the length of its secret. The same field has the same
    stand-in in each run, so that equal requests are equal in a record.
    """
    secrets: dict[str, str] = {}

    def put(name: str, text: str) -> str:
        length = len(text.encode())
        if length < LEAST:
            return text
        digest = blake2b(name.encode()).hexdigest()
        stand_in = f"{MASK}{digest * (length // len(digest) + 1)}"[:length]
        secrets[stand_in] = text
        return stand_in

    return with_secrets(fields, put), secrets


def masked_fields(fields: Any) -> Any:
    """Return a JSON value with `***` for values that have secret names."""
    return with_secrets(fields, lambda *_: MASK)


def masked_body(text: str) -> str:
    """Return a JSON object with `***` for values that have secret names, unchanged without any."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return MASK
    shown = masked_fields(fields)
    return text if shown == fields else json.dumps(shown, ensure_ascii=False)


def unmasked(shown: Any, given: Any) -> Any:
    """Return a JSON value with masked values restored from `given`."""
    if shown == MASK:
        return given
    if isinstance(shown, Mapping) and isinstance(given, Mapping):
        return {key: unmasked(item, given.get(key, item)) for key, item in shown.items()}
    if isinstance(shown, list) and isinstance(given, list) and len(shown) == len(given):
        return [unmasked(*pair) for pair in zip(shown, given, strict=True)]
    return shown


def masked_command(command: str) -> str:
    """Return a shell command with `***` for arguments that have secret names."""
    return _USERINFO.sub(MASK, _IN_COMMAND.sub(lambda match: f"{match[1]}{MASK}", without_secrets(command)))


def _forms(value: str) -> Iterator[str]:
    value = value.strip()
    yield value
    yield value.replace(" ", "+")
    raw = value.encode(errors="replace")
    yield from map(bytes.decode, (base64.b64encode(raw), base64.urlsafe_b64encode(raw)))
    for before in range(3):  # bytes of a longer text: what they share a character of base64 with is left out
        inner = slice(-(-before * 4 // 3), (before + len(raw)) * 8 // 6)
        for encode in (base64.b64encode, base64.urlsafe_b64encode):
            yield encode(bytes(before) + raw)[inner].decode()
