"""The exposition parser: equal to prometheus-client's sample for sample, and stricter about what is broken."""

from __future__ import annotations

import functools
import gzip
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from exposed import pages
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from sidelight.scraper.exposition import MalformedPage, Page, PageReader, parse
from sidelight.scraper.targets.scrape import Scrape

Sample = tuple[str, tuple[tuple[str, str], ...], str, str]


def by_oracle(text: str) -> list[Sample]:
    """Return the oracle's samples of a page, a family at a time: from scrape to scrape most families stay."""
    return [sample for family in re.split(r"^(?=# HELP )", text, flags=re.MULTILINE) for sample in of_family(family)]


@functools.lru_cache(maxsize=4096)
def of_family(text: str) -> list[Sample]:
    return [
        (sample.name, tuple(sorted(sample.labels.items())), repr(float(sample.value)), family.type)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]


def as_oracle(page: Page) -> list[Sample]:
    """Our samples as the oracle names them: it gives every counter a `_total`."""
    return [
        (
            series.name + ("_total" if series.type == "counter" and not series.name.endswith("_total") else ""),
            series.labels,
            repr(value),
            series.type,
        )
        for series, value in zip(page.series, page.values.tolist(), strict=True)
    ]


def test_every_fixture_page_equals_the_oracle(shared: Path):
    """Every fixture page of every engine reads as prometheus-client reads it, but for the one that is cut off."""
    read = 0
    for path in sorted(shared.glob("fixtures/**/*.prom*")):
        text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
        if path.name == "v0_truncated_histogram.prom":
            continue
        assert by_oracle(text) == as_oracle(parse(text)), path.name
        read += 1
    assert read >= 15


@pytest.mark.parametrize("name", ["main", "edges", "engine_death", "multi_api_server"])
def test_every_recorded_scrape_equals_the_oracle(recording: Callable[[str], list[Scrape]], name: str):
    """Every page of every recording equals the oracle, read alone and read after those before it; and there are as
    many tuples of series as there are layouts."""
    reader = PageReader()
    before = b""
    objects, layouts = {}, set()
    for scrape in recording(name):
        if scrape.error or scrape.body == before:
            continue
        before = scrape.body
        expected, alone = by_oracle(scrape.body.decode()), parse(scrape.body)
        page = reader.read(scrape.body, scrape.content_type)
        assert expected == as_oracle(alone) == as_oracle(page)
        objects[id(page.series)] = page.series
        layouts.add(alone.series)
    assert len(layouts) == len(objects)


def test_recorded_vllm_pages_equal_the_oracle(vllm_scrapes: list[Scrape]):
    """Pages of one server that is under load equal the oracle."""
    for scrape in vllm_scrapes[:3] + vllm_scrapes[-2:]:
        assert by_oracle(scrape.body.decode()) == as_oracle(parse(scrape.body))


def test_histogram_cut_off_in_the_middle_is_refused(shared: Path):
    """A page that ends inside a histogram is refused, with the last line and the page's length."""
    text = (shared / "fixtures/vllm/v0_truncated_histogram.prom").read_bytes()
    with pytest.raises(MalformedPage, match=r"lacks a \+Inf bucket and a _count") as refused:
        parse(text)
    assert (18, len(text)) == (refused.value.line, refused.value.byte)


@given(pages())
def test_hostile_labels_equal_the_oracle(text: str):
    """Quotes, backslashes, newlines, braces and commas in labels read as the oracle reads them."""
    assert by_oracle(text) == as_oracle(parse(text))


@given(pages(), st.floats(0, 1, exclude_max=True))
def test_cut_page_is_refused_unless_it_ends_between_metrics(text: str, share: float):
    """A cut inside a line is always refused; what a cut leaves unnoticed is a prefix of the page's samples."""
    part = text.encode()[: int(share * len(text.encode()))]  # a share: the page's length varies with its stamps
    if part and not part.endswith(b"\n"):
        with pytest.raises(MalformedPage) as refused:
            parse(part)
        assert len(part) == refused.value.byte
    else:
        try:
            cut = parse(part)
        except MalformedPage:
            return
        whole = parse(text)
        assert whole.series[: len(cut.series)] == cut.series


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x 1", ("x", (), 1.0)),
        ("x{} 1", ("x", (), 1.0)),
        ("x  \t 1", ("x", (), 1.0)),
        ('x{a="b",} 2', ("x", (("a", "b"),), 2.0)),
        ('x { a = "b" , c="d" } 2', ("x", (("a", "b"), ("c", "d")), 2.0)),
        ('x{z="1",a="2"} 3', ("x", (("a", "2"), ("z", "1")), 3.0)),
        ('x{a="}",b=",",c="="} 4', ("x", (("a", "}"), ("b", ","), ("c", "=")), 4.0)),
        (r'x{a="q\"q\\n\n"} 5', ("x", (("a", 'q"q\\n\n'),), 5.0)),
        (r'x{a="\d"} 5', ("x", (("a", r"\d"),), 5.0)),
        ("x +Inf", ("x", (), math.inf)),
        ("x -Inf", ("x", (), -math.inf)),
        ("x 1e-3 1700000000000", ("x", (), 0.001)),
        ('x{a="b"} 7 1700000000000', ("x", (("a", "b"),), 7.0)),
        ('x_bucket{le="1.0"} 7 # {trace_id="a b"} 0.5 1700000000.5', ("x_bucket", (("le", "1.0"),), 7.0)),
        ('{"a.b",c="d"} 8', ("a.b", (("c", "d"),), 8.0)),
        ('{"a.b","c d"="e"} 8', ("a.b", (("c d", "e"),), 8.0)),
        ("x 1\r", ("x", (), 1.0)),
        ("  x 1", ("x", (), 1.0)),
    ],
)
def test_sample_lines(line: str, expected: tuple[str, tuple[tuple[str, str], ...], float]):
    """What a sample line may look like, in text 0.0.4, text 1.0.0 and OpenMetrics."""
    page = parse(line + "\n")
    assert expected == (page.series[0].name, page.series[0].labels, float(page.values[0]))


@pytest.mark.parametrize(
    "line",
    [
        "x",
        "x one",
        "x 1_000",
        "x 0x10",
        "x1.0",
        "1x 2",
        'x{a="b" 1',
        'x{a="b} 1',
        "x{a=b} 1",
        'x{a="b",a="c"} 1',
        'x{"a"} 1',
        'x{a="b"} 1 2 3',
        "{} 1",
        "<html>",
        "# TYPE x",
        "# TYPE 5 counter",
        '# TYPE h histogram\nh_bucket{a="b"} 1',
        '# TYPE h histogram\nh_bucket{le="wide"} 1',
    ],
)
def test_broken_line_is_refused_where_it_stands(line: str):
    """A line that is not a sample refuses the page, and names the line and the byte at which it starts."""
    before = "# HELP y Why.\ny 1\n"
    with pytest.raises(MalformedPage) as refused:
        parse(before + line + "\ny 2\n")
    assert line.count("\n") + 3 == refused.value.line
    assert len(before) + line.rfind("\n") + 1 == refused.value.byte


@pytest.mark.parametrize(
    ("text", "openmetrics", "reason"),
    [
        ("x 12", False, "last line has no end"),
        ("x 1\n", True, "without # EOF"),
        ("x 1\n# EOF\nx 2\n", False, "after # EOF"),
        ('# TYPE h histogram\nh_bucket{le="+Inf"} 1\nh_sum 1\n', False, "lacks a _count$"),
        ('# TYPE h histogram\nh_bucket{le="+Inf"} 1\nh_count 1\n', False, "lacks a _sum$"),
    ],
)
def test_page_that_only_a_cut_leaves_is_refused(text: str, openmetrics: bool, reason: str):
    """What no exporter ends a page with is a cut."""
    with pytest.raises(MalformedPage) as refused:
        parse(text, openmetrics=openmetrics)
    assert re.search(reason, refused.value.reason)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "# just a remark\n",
        "# TYPE a gauge\n",
        "a 1\n# EOF",
        "a 1\n# EOF\n",
        '# TYPE h histogram\nh_bucket{le="1"} 1\nh_sum 1\n# TYPE a gauge\na 1\n',
        '# TYPE h histogram\nh_bucket{le="-1"} 1\nh_bucket{le="+Inf"} 1\nh_count 1\n',
    ],
)
def test_page_that_looks_whole_is_accepted(text: str):
    """Families without samples, an exporter's odd histogram inside the page, and an empty page are no cuts."""
    assert len(parse(text).values) == text.count("\na ") + text.startswith("a ") + text.count("\nh_")


def test_interleaved_families_are_whole():
    """A declaration counts for every sample of its family, wherever on the page."""
    page = parse('a{x="1"} 1\n# TYPE b gauge\nb 2\n# TYPE a counter\na 3\nb{c="d"} 4\n')
    assert ["counter", "gauge", "counter", "gauge"] == [series.type for series in page.series]


def test_family_type_and_help():
    """Histograms lose their suffix, counters keep `_total`, and a histogram may itself be called `_total`."""
    page = parse(
        "# HELP t_total Tokens\\nper step.\n# TYPE t_total histogram\n"
        't_total_bucket{le="+Inf"} 1\nt_total_sum 1\nt_total_count 1\n'
        "# TYPE t_total_created gauge\nt_total_created 5\n"
        "# TYPE r_total counter\nr_total 1\n# TYPE s summary\ns_sum 1\ns_count 1\nu_sum 1\n"
    )
    assert [
        ("t_total", "histogram", "Tokens\nper step."),
        ("t_total", "histogram", "Tokens\nper step."),
        ("t_total", "histogram", "Tokens\nper step."),
        ("t_total_created", "gauge", ""),
        ("r_total", "counter", ""),
        ("s", "summary", ""),
        ("s", "summary", ""),
        ("u_sum", "unknown", ""),
    ] == [(series.family, series.type, series.help) for series in page.series]


def test_duplicates_stay_on_the_page():
    """Two samples of one series are two samples; which one counts is decided where pages are laid together."""
    assert [1.0, 2.0] == parse("x 1\nx 2\n").values.tolist()
