"""The pages of one target: what is known is not parsed again, and never shows another page's numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidelight.scraper.exposition import MalformedPage, Page, PageReader, parse

TEXT = "text/plain; version=0.0.4"


def comparable(page: Page) -> tuple[object, list[str]]:
    return page.series, list(map(repr, page.values.tolist()))


def read_twice(reader: PageReader, body: bytes) -> tuple[object, object]:
    """Read by a reader that has a past and by the pure parser; a refusal is its text."""
    readings = []
    for read in (reader.read, parse):
        try:
            readings.append(comparable(read(body)))
        except MalformedPage as refused:
            readings.append(str(refused))
    return readings[0], readings[1]


lines = st.lists(
    st.sampled_from(
        (
            "x 1",
            "x 2",
            "x -0",
            "x NaN",
            "x +Inf",
            "x 1e400",
            "x 5 1700000000000",
            'x 6 1700000000001 # {a="b"} 1',
            "x 1_0",
            "x \u0661",
            "x  7",
            "x 7 ",
            "x 7\r",
            "x 1,2",
            "x [1]",
            "x ",
            "x1 2",
            "x{} 1",
            'x{a="b 1"} 1',
            'x{a="b 1"} 2',
            'x{a="b 1"}3',
            'x{a="b 2"} 2',
            'x{a="b"} 1',
            ' x{a="b"} 1',
            ' x{a="b"} 2',
            "# TYPE x gauge",
            "# TYPE x counter",
            " # y",
            "",
            " ",
            "1",
            "{",
            "# EOF",
        )
    ),
    max_size=5,
)


@given(st.lists(lines, min_size=1, max_size=8))
def test_what_was_read_before_changes_nothing(pages: list[list[str]]):
    """Whatever pages came before, a page is read or refused as the pure parser does."""
    reader = PageReader()
    for page in pages:
        body = "".join(f"{line}\n" for line in page).encode()
        read, expected = read_twice(reader, body)
        assert expected == read


@given(st.lists(st.floats(), min_size=1, max_size=20), st.lists(st.floats(), min_size=1, max_size=20))
def test_numbers_of_a_known_layout_are_exact(first: list[float], second: list[float]):
    """Every float comes back to the last bit, on a page of a new layout and of a known one."""
    reader = PageReader()
    for numbers in (first, second[: len(first)] + first[len(second) :]):
        page = reader.read("".join(f"x{n} {number!r}\n" for n, number in enumerate(numbers)).encode())
        assert list(map(repr, numbers)) == list(map(repr, page.values.tolist()))


def test_known_layout_keeps_its_series():
    """Pages that differ in numbers alone share one tuple of series, time stamps and exemplars or not."""
    reader = PageReader()
    first = reader.read(b'x{a="b"} 1\ny 1 1700000000000\nz_total 1 # {t="1"} 1 2.5\n')
    second = reader.read(b'x{a="b"} 2\ny 3 1700000000001\nz_total 4 # {t="2"} 1\n')
    assert first.series is second.series
    assert [2.0, 3.0, 4.0] == second.values.tolist()


def test_layout_that_returns_keeps_its_series():
    """A layout that was left for another is recognised when it returns."""
    reader = PageReader()
    first = reader.read(b"x 1\n")
    assert first.series is not reader.read(b"x 1\ny 1\n").series
    again = reader.read(b"x 2\n")
    assert first.series is again.series
    assert [2.0] == again.values.tolist()


@pytest.mark.parametrize(
    "other", ["# TYPE x counter\nx 1\n", "# TYPE x gauge\ny 1\n", "# HELP x Why.\nx 1\n", "x 1\n# TYPE x gauge\n"]
)
def test_other_comments_or_series_are_another_layout(other: str):
    """The same number of lines is not the same layout, nor are the same samples under other declarations."""
    reader = PageReader()
    before = reader.read(b"# TYPE x gauge\nx 1\n")
    assert comparable(parse(other)) == comparable(reader.read(other.encode()))
    assert before.series is not reader.read(other.encode()).series


def test_formats_do_not_share_layouts():
    """What was read as text is refused as OpenMetrics all the same."""
    reader = PageReader()
    reader.read(b"x 1\n", TEXT)
    with pytest.raises(MalformedPage, match="without # EOF"):
        reader.read(b"x 1\n", "application/openmetrics-text; version=1.0.0")


def test_values_belong_to_the_caller():
    """Writing into a page's values changes no later page."""
    reader = PageReader()
    for body in (b"x 1\ny 2\n", b"x 1\ny 2\n", b"x 1\ny 3\n", b"x 1\ny 3\n"):
        page = reader.read(body)
        assert 1.0 == page.values[0]
        page.values[:] = np.nan


def test_broken_value_on_a_known_layout_is_refused_where_it_stands():
    """An invalid number refuses the page by line and byte; the layout stays known."""
    reader = PageReader()
    first = reader.read(b"x 1\ny 2\n")
    with pytest.raises(MalformedPage) as refused:
        reader.read(b"x 1\ny 2_0\n")
    assert (2, 4) == (refused.value.line, refused.value.byte)
    after = reader.read(b"x 3\ny 2\n")
    assert first.series is after.series
    assert [3.0, 2.0] == after.values.tolist()


def test_page_in_json_quotes_is_unquoted():
    """Some builds of llama.cpp send the page as one JSON string (issue 17384); it is read as its text."""
    text = '# TYPE llamacpp:n_total counter\nllamacpp:n_total 1\nx{a="b\\n☃"} 2\n'
    reader = PageReader()
    for content_type in (TEXT, "application/json"):
        assert comparable(parse(text)) == comparable(reader.read(json.dumps(text).encode(), content_type))


@pytest.mark.parametrize("body", [b'"x 1\\n', b'"', b'"x 1\\n" 2', b'"\\ud800 1\\n"'])
def test_broken_json_quotes_are_refused(body: bytes):
    """A quoted page that is cut off is refused."""
    with pytest.raises(MalformedPage, match="not a JSON string"):
        PageReader().read(body)


def test_what_a_reader_keeps_is_bounded():
    """A target that invents a layout on each scrape is forgotten layout by layout."""
    reader = PageReader()
    first = reader.read(b"first 1\n")
    for number in range(10):
        reader.read(f"x{number} 1\n".encode())
    assert first.series is not reader.read(b"first 1\n").series
    assert first.series == reader.read(b"first 1\n").series
    large = ["".join(f'x{{id="{n}",p="{p}{"y" * 900}"}} 1\n' for n in range(3000)).encode() for p in "abc"]
    read = [reader.read(body) for body in large]
    assert read[0].series is not reader.read(large[0]).series
