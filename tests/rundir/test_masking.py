"""What of a secret may stand where: nothing."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Iterator
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.protocols.reading.failures import server_message
from sidelight.rundir.printable import masking
from sidelight.rundir.printable.masking import (
    blanked,
    masked_body,
    masked_command,
    register,
    register_command,
    register_environment,
    register_headers,
    register_url,
    register_user,
    unmasked,
    with_stand_ins,
    without_secrets,
    without_secrets_all,
)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Let no other test have these secrets."""
    before = dict(masking._KNOWN)
    yield
    masking._KNOWN.clear()
    masking._KNOWN.update(before)


def test_a_secret_is_masked_in_each_of_its_forms():
    """As it is, in JSON, in a URL; the longest first, so that no end of one stays."""
    register('hush"1/23456', "hush1234", "hush123456")
    text = json.dumps({"a": 'hush"1/23456'}) + " hush%221%2F23456 hush123456 hush1234"
    assert '{"a": "***"} *** *** ***' == without_secrets(text)
    assert {"a hush1234": ["***", 1]} == without_secrets_all({"a hush1234": ["hush1234", 1]})


# As servers, gateways and languages write a text into an error.
ENCODINGS: list[Callable[[str], str]] = [
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1].replace("/", "\\/"),
    lambda text: json.dumps(text)[1:-1].replace("&", "\\u0026").replace("<", "\\u003c"),
    lambda text: "".join(f"\\u{unit:04X}" for unit in memoryview(text.encode("utf-16-le")).cast("H")),
    lambda text: repr(text)[1:-1],
    lambda text: quote(text, safe=""),
    lambda text: "".join(f"%{byte:02x}" for byte in text.encode()),
    quote_plus,
    html.escape,
    lambda text: "".join(f"&#{ord(letter)};" for letter in text),
    lambda text: "".join(f"&#x{ord(letter):X};" for letter in text),
    lambda text: text.replace("/", "&sol;").replace("+", "&plus;"),
]
KEYS = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=8, max_size=40) | st.from_regex(
    r"[A-Za-z0-9+/=&_.-]{8,60}", fullmatch=True
)


@given(KEYS, st.lists(st.sampled_from(ENCODINGS), max_size=3))
def test_a_secret_is_masked_however_its_characters_are_escaped(secret: str, encodings: list[Callable[[str], str]]):
    """By JSON, a language, a URL or HTML, and by several in turn; bytes keep their length."""
    masking._KNOWN.clear()
    register(secret)
    text = secret
    for encode in encodings:
        text = encode(text)
    assert "a *** b" == without_secrets(f"a {text} b")
    assert f'{{"error": "{"*" * len(text.encode())} b"}}'.encode() == blanked(f'{{"error": "{text} b"}}'.encode())


@pytest.mark.parametrize("before", [0, 65_500, 65_536, 131_060, 300_000])
def test_a_secret_is_masked_wherever_it_stands_in_large_data(before: int):
    """Data are looked at in pieces: one that lies across two is whole in one of them."""
    masking._KNOWN.clear()
    register("sk-live/aB3dE&fGh1jKl/mNoP")
    escaped = json.dumps("sk-live/aB3dE&fGh1jKl/mNoP").strip('"').replace("/", "\\/").replace("&", "\\u0026").encode()
    data = b"x" * before + escaped + b"\\n" + b"y" * 70_000 + escaped
    shown = blanked(data)
    assert (len(data), 2 * len(escaped)) == (len(shown), shown.count(b"*"))


@given(
    KEYS, st.binary(max_size=9), st.binary(max_size=9), st.sampled_from([base64.b64encode, base64.urlsafe_b64encode])
)
def test_a_secret_is_masked_within_base64(secret: str, before: bytes, after: bytes, encode: Callable[[bytes], bytes]):
    """Wherever it begins: what stays of it is what shares a character with its neighbours."""
    masking._KNOWN.clear()
    register(secret)
    whole = encode(before + secret.encode() + after).decode()
    shown = without_secrets(whole)
    assert "***" in shown
    assert len(whole) - len(shown) + 3 >= len(secret.encode()) * 8 // 6 - 1


@given(st.integers(0, 320))
def test_no_part_of_a_secret_stays_where_a_message_is_cut(before: int):
    register("hush/1/2/3/4/5/6/7/8")
    said = server_message(json.dumps({"error": "x" * before + " hush/1/2/3/4/5/6/7/8"}).replace("/", "\\/").encode())
    assert "hush" not in said


def test_a_short_value_is_not_looked_for():
    """It would be part of words that have nothing to do with it."""
    register("test", "")
    assert "the latest test" == without_secrets("the latest test")


def test_bytes_keep_their_length():
    """Where reads of a socket ended in them stays true."""
    register("hush12345")
    assert b"a ********* b" == blanked(b"a hush12345 b")
    assert bytearray(b"*********") == blanked(bytearray(b"hush12345"))


@pytest.mark.parametrize(
    ("name", "value", "masks"),
    [
        ("Authorization", "Bearer hushhush", "hushhush"),
        ("Authorization", "Basic " + base64.b64encode(b"ann:hushhush").decode(), "hushhush"),
        ("X-Api-Key", "hushhush", "hushhush"),
        ("X-Tok", "hushhush7", "hushhush7"),
        ("X-Tok", "complete", ""),  # a word
        ("X-Model", "llama3-8b-instruct", ""),  # which stands in results
    ],
)
def test_values_of_headers_are_secrets_but_for_words_and_names(name: str, value: str, masks: str):
    register_headers([(name, value)])
    assert (masks == "") == (without_secrets(value) == value)
    assert masks == "" or "***" == without_secrets(masks)


def test_users_urls_commands_and_variables_are_taken_apart():
    """The password, a user unlike a word, a query's values, what a command and a variable call a key."""
    register_user("scraper7x9:hushhush1")
    register_url("http://annabelle1:hush%2Fhush2@h/m?token=hushhush3&target=engine-1234&word=complete")
    register_command("docker run -e HF_TOKEN=hushhush4 image --api-key 'hushhush5' --tokenizer hushhush6")
    register_environment({"HF_TOKEN": "hushhush7", "PATH": "hushhush8", "SSL_KEY": "/etc/hushhush9"})
    register_environment({"OTEL_EXPORTER_OTLP_HEADERS": "x-team=blue,x-auth=hushhush10"})
    secrets = (
        "scraper7x9",
        "hushhush1",
        "annabelle1",
        "hush/hush2",
        "hushhush3",
        "hushhush4",
        "hushhush5",
        "hushhush7",
        "hushhush10",
    )
    assert ["***"] * len(secrets) == list(map(without_secrets, secrets))
    others = ["complete", "hushhush6", "hushhush8", "/etc/hushhush9"]
    assert others == list(map(without_secrets, others))


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ('{"top_k": 1}', '{"top_k": 1}'),
        ('{"max_tokens": 9, "min_tokens": 1}', '{"max_tokens": 9, "min_tokens": 1}'),
        ('{"prompt_cache_key": "{request}"}', '{"prompt_cache_key": "{request}"}'),
        ('{"api_key": "hush"}', '{"api_key": "***"}'),
        ('{"a": {"auth": [{"user": "hush"}]}}', '{"a": {"auth": [{"user": "***"}]}}'),
        ("{", "***"),
    ],
)
def test_a_body_is_masked_by_the_names_of_its_fields(body: str, shown: str):
    """Texts alone, at any depth; a number is a limit, and what differs from request to request is none."""
    assert shown == masked_body(body)


def test_what_stands_for_a_secret_in_a_plan_is_as_long_and_always_the_same():
    """Plans of equal requests are equal; what was masked can be put back."""
    fields = {"api_token": "hush-hush-12", "top_k": 1}
    with_them, stand_ins = with_stand_ins(fields)
    other, _ = with_stand_ins({"api_token": "other-hush-1", "top_k": 1})
    ((stand_in, secret),) = stand_ins.items()
    assert (with_them, "hush-hush-12") == ({"api_token": stand_in, "top_k": 1}, secret)
    assert (len(secret), with_them) == (len(stand_in), other)
    assert fields == unmasked(json.loads(masked_body(json.dumps(fields))), fields)


def test_a_command_is_recorded_without_what_it_calls_secret():
    """Of URLs in it neither user nor password."""
    command = "TOKEN=hush serve --api-key hush --max-num-batched-tokens 8192 && curl -H 'Authorization: Bearer hush' http://a:hush@h"
    shown = masked_command(command)
    assert "hush" not in shown
    assert "--max-num-batched-tokens 8192 && curl -H 'Authorization: Bearer ***' http://***@h" in shown


def test_a_secret_that_is_no_text_is_masked():
    """A variable of the environment may hold any bytes."""
    register_environment({"HF_TOKEN": "ab1\udcff2345678"})
    assert "a *** b" == without_secrets("a ab1\udcff2345678 b")
