"""Pages that break off, that are too large, or that are nothing: refused whole, or read for what they are."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.scraper.exposition import (
    MAX_LINE_CHARACTERS,
    MAX_LINES,
    MAX_SERIES,
    MalformedPage,
    Page,
    PageReader,
    parse,
)
from sidelight.scraper.targets.scrape import Scrape


def test_every_cut_of_a_real_page_is_refused_or_a_prefix(vllm_scrapes: list[Scrape]):
    """Cut at any byte, a page of vLLM gives no wrong value: inside a line it is refused, after one it is a prefix.

    Inside a line the page begins with the line's family: those before it are whole.
    """
    body = vllm_scrapes[-1].body
    whole = parse(body)
    expected = list(zip(whole.series, whole.values.tolist(), strict=True))
    reader = PageReader()
    reader.read(body)
    accepted = family = 0
    for at in range(1, len(body)):
        if body[at - 1] != ord("\n"):
            with pytest.raises(MalformedPage):
                parse(body[family:at])
            continue
        if body.startswith(b"# HELP", at):
            family = at
        try:
            cut = parse(body[:at])
        except MalformedPage:
            continue
        assert expected[: len(cut.series)] == list(zip(cut.series, cut.values.tolist(), strict=True))
        assert cut.series == reader.read(body[:at]).series
        accepted += 1
    assert 0 < accepted < body.count(b"\n")


def test_histogram_that_a_cut_left_incomplete_is_refused_at_every_line(vllm_scrapes: list[Scrape]):
    """Inside a histogram no line end is a page's end."""
    lines = vllm_scrapes[-1].body.splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if line.startswith(b"vllm:time_to_first_token_seconds_bucket"))
    size = next(i for i, line in enumerate(lines[first:]) if not line.startswith(b"vllm:time_to_first_token_seconds"))
    for upto in range(first + 1, first + size):
        with pytest.raises(MalformedPage, match="at its end lacks"):
            parse(b"".join(lines[:upto]))
    parse(b"".join(lines[: first + size]))


@pytest.mark.parametrize(
    ("page", "reason"),
    [
        ("".join(f'x{{id="{n}"}} 1\n' for n in range(100_000)), f"more than {MAX_SERIES} series"),
        ("\n" * 100_000, f"more than {MAX_SERIES} series"),
        ("# TYPE x gauge\n" * (MAX_LINES + 1), f"more than {MAX_LINES} lines"),
        ('x{a="' + "y" * 1_000_000 + '"} 1\n', f"a line of more than {MAX_LINE_CHARACTERS}"),
        ("x " + "9" * 1_000_000 + "\n", f"a line of more than {MAX_LINE_CHARACTERS}"),
        ('x{a="' + '\\"' * 30_000 + " 1\n", "labels that cannot be read"),
        ("x{" + 'a="",' * 13_000 + "} 1\n", "label a twice"),
        ("x" + "{" * 60_000 + " 1\n", "labels that cannot be read"),
        ("x" + " " * 60_000 + "y 1\n", "no readable value"),
        ("x 1" + " 1" * 30_000 + "\n", "no readable value"),
        ("x{" + '""' * 30_000 + "} 1\n", "labels that cannot be read"),
    ],
)
def test_what_only_an_attack_sends_is_refused(page: str, reason: str):
    """A page that is too large or too odd is refused, with the reason, by both ways of reading."""
    with pytest.raises(MalformedPage, match=reason):
        parse(page)
    with pytest.raises(MalformedPage, match=reason):
        PageReader().read(page.encode())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("[" * 100_000, "not JSON: "),
        ("[" + '{"a":' * 400 + "1" + "}" * 400 + "]", "more than 16 levels"),
        ('[{"a":' + "9" * 5000 + "}]", "not JSON: Integer value out of range"),
    ],
)
def test_json_that_only_an_attack_sends_is_refused(body: str, reason: str):
    """TensorRT-LLM's iterations are read by this: brackets without end, and integers longer than any counter."""
    with pytest.raises(MalformedPage, match=reason):
        PageReader().read(body.encode(), "application/json")


def test_an_integer_beyond_float64_is_infinite():
    """As the same digits in text are."""
    page = PageReader().read(b'[{"iter": %s, "x": -%s}]' % (b"9" * 400, b"9" * 400), "application/json")
    assert [math.inf, -math.inf] == page.values.tolist()


def test_as_many_series_as_are_allowed_are_read():
    """The limit itself is allowed."""
    page = parse("".join(f'x{{id="{n}"}} {n}\n' for n in range(MAX_SERIES)))
    assert list(range(MAX_SERIES)) == page.values.tolist()


def outcome(read: Callable[[bytes], Page], body: bytes) -> object:
    """What was read, NaN by its name, or the refusal."""
    try:
        page = read(body)
    except MalformedPage as refused:
        return refused.reason, refused.line, refused.byte
    return page.series, list(map(repr, page.values.tolist()))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(body: bytes):
    """Nothing but a page or `MalformedPage` leaves a reader, whatever comes in any format."""
    for content_type in ("", "application/openmetrics-text", "application/json"):
        outcome(partial(PageReader().read, content_type=content_type), body)


@given(st.text(st.sampled_from('x{}="a,1. \t\r\n\\#+-eé_'), max_size=30).filter(lambda line: line.lstrip()[:1] != '"'))
def test_nonsense_in_the_letters_of_the_format_is_read_or_refused(line: str):
    """Lines made of the format's own letters are read or refused; both ways of reading agree."""
    body = f"{line}\n".encode()
    assert outcome(parse, body) == outcome(PageReader().read, body)


def test_web_page_and_archive_are_refused_at_their_first_line(shared: Path):
    """What is not an exposition at all is refused where it starts."""
    packed = gzip.compress((shared / "fixtures/llamacpp/metrics.prom").read_bytes())
    for body in (b"<!DOCTYPE html>\n<html></html>\n", packed + b"\n"):
        with pytest.raises(MalformedPage) as refused:
            parse(body)
        assert (1, 0) == (refused.value.line, refused.value.byte)


def test_letter_cut_in_two_is_a_cut_page():
    """A page that ends inside a letter of several bytes is cut off; a broken one further up is not UTF-8."""
    for page, expected in ((b'x 1\nx{a="\xc3', ("cut off", 2, 10)), (b'x 1\nx{a="\xc3"} 1\n', ("not UTF-8", 2, 4))):
        with pytest.raises(MalformedPage, match=expected[0]) as refused:
            parse(page)
        assert expected[1:] == (refused.value.line, refused.value.byte)


def test_windows_line_ends_are_read():
    """Lines may end in `\\r\\n`, comments and the end of OpenMetrics too."""
    page = parse('# HELP x Why.\r\n# TYPE x counter\r\nx{a="b"} 1\r\n\r\nx 2 \r\n# EOF\r\n', openmetrics=True)
    assert [("counter", "Why."), ("counter", "Why.")] == [(series.type, series.help) for series in page.series]
    assert [1.0, 2.0] == page.values.tolist()


def test_labels_are_not_taken_from_another_kind_of_line():
    """Labels that hold the metric's name, or that stand before a tab, are never those of another line."""
    page = parse('{"n",a="b"} 1\nx{a="c d",e="f"}\t2\nx{a="c g",e="h"}\t3\n')
    assert [("n", "b"), ("x", "c d"), ("x", "c g")] == [(series.name, series.labels[0][1]) for series in page.series]
    with pytest.raises(MalformedPage, match="a label without a name"):
        parse('{"n",a="b"} 1\nx{"n",a="b"} 1\n')
    with pytest.raises(MalformedPage, match="readable le"):
        parse('# TYPE h histogram\nh_bucket{a="b c",le="1"}\t1\nh_bucket{a="b d",xx="1"}\t1\nx 1\n')
