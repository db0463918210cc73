"""Protobuf pages: the series and values that the same metrics give as text, and native histograms expanded."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from scraper.exposition import MAX_SERIES, MalformedPage, Page, PageReader, parse
from scraper.exposition.native_histogram import upper_bound
from scraper.exposition.protobuf import message_class
from scraper.targets.fetch import Scrape

PROTOBUF = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
Family = message_class("MetricFamily")
TYPES = {"counter": 0, "gauge": 1, "summary": 2, "unknown": 3, "histogram": 4}
FIELDS = {"unknown": "untyped"}


def delimited(families: Iterable[Any]) -> bytes:
    body = b""
    for family in families:
        message = family.SerializeToString()
        size = len(message)
        while size >= 0x80:
            body += bytes((size & 0x7F | 0x80,))
            size >>= 7
        body += bytes((size,)) + message
    return body


def read(*families: Any) -> Page:
    return PageReader().read(delimited(families), PROTOBUF)


def samples(page: Page) -> list[tuple[str, tuple[tuple[str, str], ...], str, str, str, str]]:
    return sorted(
        (one.name, one.labels, one.family, one.type, one.help, repr(value))
        for one, value in zip(page.series, page.values.tolist(), strict=True)
    )


def encoded(text: str) -> list[Any]:
    """A text page as protobuf, after the oracle's reading of it."""
    families = []
    for metric in text_string_to_metric_families(text):
        total = "_total" if metric.type == "counter" and f"# TYPE {metric.name}_total " in text else ""
        family = Family(name=metric.name + total, help=metric.documentation, type=TYPES[metric.type])
        by_labels: dict[tuple[tuple[str, str], ...], Any] = {}
        for sample in metric.samples:
            labels = tuple((k, v) for k, v in sample.labels.items() if k not in ("le", "quantile"))
            if labels not in by_labels:
                by_labels[labels] = family.metric.add(label=[{"name": k, "value": v} for k, v in labels])
            _put(getattr(by_labels[labels], FIELDS.get(metric.type, metric.type)), sample)
        families.append(family)
    return families


def _put(one: Any, sample: Any) -> None:
    end = sample.name.rpartition("_")[2]
    if "le" in sample.labels:
        if sample.labels["le"] != "+Inf":  # optional in protobuf
            one.bucket.add(upper_bound=float(sample.labels["le"]), cumulative_count=int(sample.value))
    elif "quantile" in sample.labels:
        one.quantile.add(quantile=float(sample.labels["quantile"]), value=sample.value)
    elif end == "sum" and hasattr(one, "sample_sum"):
        one.sample_sum = sample.value
    elif end == "count" and hasattr(one, "sample_count"):
        one.sample_count = int(sample.value)
    else:
        one.value = sample.value
        one.SetInParent()


def test_recorded_page_reads_as_its_text(vllm_scrapes: list[Scrape]):
    """A page of vLLM as protobuf gives what it gives as text; its families stay in the order of the page."""
    text = vllm_scrapes[-1].body.decode()
    page = read(*encoded(text))
    assert samples(parse(text)) == samples(page)
    assert list(dict.fromkeys(s.family for s in parse(text).series)) == list(
        dict.fromkeys(s.family for s in page.series)
    )


def test_every_kind_reads_as_its_text():
    """Counters, gauges, untyped metrics, summaries and histograms, with labels in any order and odd numbers."""
    text = (
        '# HELP c_total Why.\n# TYPE c_total counter\nc_total{z="1",a="é\\"\\n"} 3.0\n'
        "# TYPE g gauge\ng NaN\n# TYPE u unknown\nu -Inf\n"
        '# TYPE s summary\ns{quantile="0.5",l="m"} 1.0\ns{quantile="0.99",l="m"} 2.0\ns_sum{l="m"} 3.5\n'
        's_count{l="m"} 2.0\n# TYPE h histogram\nh_bucket{z="1",le="-1.0"} 1.0\nh_bucket{z="1",le="1e+06"} 2.0\n'
        'h_bucket{z="1",le="+Inf"} 4.0\nh_sum{z="1"} -5.0\nh_count{z="1"} 4.0\n'
    )
    page = read(*encoded(text))
    assert samples(parse(text)) == samples(page)
    assert {None} == {one.native for one in page.series}


def test_bytes_on_the_wire_are_those_of_the_specification():
    """A message put together by hand from metrics.proto, with a time stamp, an exemplar and fields of tomorrow."""
    label = b"\x0a\x01a\x12\x01b"
    exemplar = b"\x0a" + bytes((len(label),)) + label + b"\x11" + struct.pack("<d", 9.0) + b"\x1a\x02\x08\x07"
    counter = b"\x09" + struct.pack("<d", -42.0) + b"\x12" + bytes((len(exemplar),)) + exemplar
    metric = b"\x0a" + bytes((len(label),)) + label + b"\x1a" + bytes((len(counter),)) + counter + b"\x30\x07"
    bucket = b"\x08\x03\x11" + struct.pack("<d", 0.5)
    histogram = b"\x08\x04\x11" + struct.pack("<d", 1.5) + b"\x1a" + bytes((len(bucket),)) + bucket
    first = b"\x0a\x01n\x12\x02hi\x18\x00\x22" + bytes((len(metric),)) + metric + b"\xfa\x3e\x01x"
    second = b"\x0a\x01h\x18\x04\x22" + bytes((len(histogram) + 2,)) + b"\x3a" + bytes((len(histogram),)) + histogram
    page = PageReader().read(b"".join(bytes((len(one),)) + one for one in (first, second)), PROTOBUF)
    expected = parse(
        '# HELP n hi\n# TYPE n counter\nn{a="b"} -42\n'
        '# TYPE h histogram\nh_bucket{le="0.5"} 3\nh_bucket{le="+Inf"} 4\nh_sum 1.5\nh_count 4\n'
    )
    assert (expected.series, expected.values.tolist()) == (page.series, page.values.tolist())


def native(**fields: Any) -> Any:
    return Family(name="h", type=4, metric=[{"label": [{"name": "a", "value": "b"}], "histogram": fields}])


def buckets(page: Page) -> list[tuple[str, float]]:
    return [
        (dict(one.labels)["le"], value)
        for one, value in zip(page.series, page.values.tolist(), strict=True)
        if one.name == "h_bucket"
    ]


SPANS = {
    "positive_span": [{"offset": 0, "length": 2}, {"offset": 1, "length": 1}],
    "negative_span": [{"offset": 1, "length": 2}],
    "zero_threshold": 0.25,
    "schema": 0,
    "sample_sum": 7.5,
}
EXPANDED = [("-2.0", 4.0), ("-1.0", 5.0), ("0.25", 7.0), ("1.0", 10.0), ("2.0", 11.0), ("8.0", 13.0), ("+Inf", 14.0)]


@pytest.mark.parametrize(
    "counts",
    [
        {"positive_delta": [3, -2, 1], "negative_delta": [1, 3], "zero_count": 2, "sample_count": 14},
        {
            "positive_count": [3.0, 1.0, 2.0],
            "negative_count": [1.0, 4.0],
            "zero_count_float": 2.0,
            "sample_count_float": 14.0,
        },
    ],
)
def test_native_histogram_is_expanded(counts: dict[str, Any]):
    """Integer deltas and float counts give cumulative buckets: negative ones, the zero bucket, positive ones, +Inf."""
    page = read(native(**SPANS, **counts))
    assert EXPANDED == buckets(page)
    assert [("h_sum", 7.5, None), ("h_count", 14.0, None)] == [
        (one.name, value, one.native) for one, value in zip(page.series[-2:], page.values[-2:].tolist(), strict=True)
    ]
    assert {(("a", "b"), 0, "histogram", "h")} == {
        (one.labels[0], one.native, one.type, one.family) for one in page.series[:-2]
    }


@pytest.mark.parametrize(
    ("index", "schema", "expected"),
    [
        (0, 0, 1.0),
        (1, 0, 2.0),
        (-1, 0, 0.5),
        (1, -4, 65536.0),
        (-1, -1, 0.25),
        (1, 1, math.sqrt(2)),
        (-3, 2, 2**-0.75),
        (256, 8, 2.0),
        (1024, 0, 1.7976931348623157e308),
        (1025, 0, math.inf),
        (2**31, -4, math.inf),
        (-(2**31), -4, 0.0),
    ],
)
def test_bucket_bounds(index: int, schema: int, expected: float):
    """Bounds are powers of 2 ** 2 ** -schema; the last finite one is the largest float."""
    assert expected == pytest.approx(upper_bound(index, schema), rel=1e-15)


counted = st.lists(st.integers(0, 5), min_size=1, max_size=20)


@given(counted, st.integers(-4, 8), st.integers(-50, 50))
def test_absent_bucket_has_the_count_of_the_next_lower_bound(counts: list[int], schema: int, offset: int):
    """What the expansion leaves out loses nothing: at its bound the count is that of the next lower bucket.

    The bucket beyond the largest float, where infinite observations are, is +Inf.
    """
    page = read(
        native(
            schema=schema,
            positive_span=[{"offset": offset, "length": len(counts)}],
            positive_count=list(map(float, counts)),
            sample_count_float=float(sum(counts)),
        )
    )
    there = [(float(le), value) for le, value in buckets(page)]
    assert there == sorted(there)
    finite = [n > 0 and upper_bound(offset + place, schema) < math.inf for place, n in enumerate(counts)]
    assert sum(finite) + 1 == len(there)
    for place in range(len(counts)):
        edge = upper_bound(offset + place, schema)
        below = max((value for bound, value in there if bound <= edge), default=0)
        assert sum(counts[: place + 1]) == below


def test_native_histogram_without_observations():
    """An empty span tells a native histogram that has seen nothing from a classic one."""
    page = read(native(positive_span=[{"offset": 0, "length": 0}], schema=3))
    assert [("+Inf", 0.0)] == buckets(page)
    assert [3, None, None] == [one.native for one in page.series]


def test_native_histogram_counts_before_a_classic_one():
    """Of a histogram that is both, the native one is read; the classic one where the schema is unknown."""
    both = {"bucket": [{"upper_bound": 1.0, "cumulative_count": 1}], "sample_count": 1}
    span = {"positive_span": [{"offset": 3, "length": 1}], "positive_delta": [1]}
    assert [("8.0", 1.0), ("+Inf", 1.0)] == buckets(read(native(**both, **span)))
    assert [("1.0", 1.0), ("+Inf", 1.0)] == buckets(read(native(**both, **span, schema=-53)))


def test_observations_that_are_no_number_are_in_the_last_bucket_alone():
    """A count beyond that of all buckets is what +Inf says."""
    page = read(native(positive_span=[{"offset": 0, "length": 1}], positive_delta=[2], sample_count=5))
    assert [("1.0", 2.0), ("+Inf", 5.0)] == buckets(page)


def test_gauge_histogram_has_gsum_and_gcount():
    """A gauge histogram's names are those of OpenMetrics."""
    family = native(sample_count=1, sample_sum=2.0)
    family.type = 5
    page = read(family)
    assert [("h_bucket", "gaugehistogram"), ("h_gsum", "gaugehistogram"), ("h_gcount", "gaugehistogram")] == [
        (one.name, one.type) for one in page.series
    ]


SPAN = [{"offset": 0, "length": 1}]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (Family(type=1), "without a name"),
        (Family(name="x", type=9), "unknown type"),
        (Family(name="x", type=1, metric=[{"counter": {"value": 1}}]), "without a gauge"),
        (Family(name="x", type=1, metric=[{"label": [{"name": "a"}, {"name": "a"}], "gauge": {}}]), "label a twice"),
        (Family(name="x", type=4, metric=[{"label": [{"name": "le"}], "histogram": {}}]), "label le twice"),
        (native(bucket=[{"upper_bound": math.nan}]), "without a readable le"),
        (native(positive_span=SPAN, positive_delta=[1], sample_count=1, schema=9), "schema 9"),
        (native(positive_span=SPAN, positive_delta=[1], sample_count=1, schema=-53), "schema -53"),
        (native(positive_span=SPAN, positive_delta=[-1], sample_count=1), "negative count"),
        (native(positive_span=SPAN, positive_count=[math.nan], sample_count=1), "negative count"),
        (native(positive_span=SPAN, sample_count=1), "do not fit"),
        (native(positive_span=[{"offset": 0, "length": 2**32 - 1}], positive_delta=[1], sample_count=1), "do not fit"),
        (native(positive_span=[*SPAN, {"offset": -1, "length": 1}], positive_delta=[1, 0], sample_count=2), "overlap"),
        (native(positive_span=SPAN, positive_delta=[2], sample_count=1), "more than its count"),
        (Family(name="x", type=1, metric=[{"gauge": {}}] * (MAX_SERIES + 1)), "more than"),
    ],
)
def test_broken_family_refuses_the_page_where_it_starts(family: Any, reason: str):
    """What is no metric refuses the page, with the number of the message and its first byte."""
    good = delimited([Family(name="g", type=1, metric=[{"gauge": {"value": 1}}])])
    with pytest.raises(MalformedPage, match=reason) as refused:
        PageReader().read(good + delimited([family]), PROTOBUF)
    assert (2, len(good)) == (refused.value.line, refused.value.byte)


def test_every_cut_is_refused_or_ends_between_families(vllm_scrapes: list[Scrape]):
    """A page cut inside a message is refused; cut between two it is a prefix."""
    families = encoded(vllm_scrapes[0].body.decode())[::5]
    body = delimited(families)
    whole = PageReader().read(body, PROTOBUF)
    ends = {len(delimited(families[:upto])) for upto in range(len(families) + 1)}
    for at in range(len(body)):
        if at in ends:
            assert whole.series[: len(part := PageReader().read(body[:at], PROTOBUF).series)] == part
        else:
            with pytest.raises(MalformedPage, match="cut off"):
                PageReader().read(body[:at], PROTOBUF)


@pytest.mark.parametrize("body", [b"\xff" * 20, b"\x02\xff\xff", b"\x04\x0a\x02\xff\xff", b"<html></html>"])
def test_what_is_no_protobuf_is_refused(body: bytes):
    """Endless lengths, unreadable messages, names that are not UTF-8 and text."""
    with pytest.raises(MalformedPage):
        PageReader().read(body, PROTOBUF)


def test_other_encodings_of_protobuf_are_refused():
    """Only delimited messages are read."""
    with pytest.raises(MalformedPage, match="not delimited"):
        PageReader().read(b"", PROTOBUF.replace("delimited", "text"))


def gauge(name: str, value: float) -> Any:
    return Family(name=name, type=1, metric=[{"gauge": {"value": value}}])


def test_known_layout_keeps_its_series():
    """Pages whose metrics are the same share one tuple of series, and so does a layout that returns."""
    reader = PageReader()
    pages = [
        (gauge("a", 1), gauge("b", 2)),
        (gauge("a", 3), gauge("b", 2)),
        (gauge("a", 3),),
        (gauge("a", 1), gauge("b", 4)),
    ]
    first, second, other, again = (reader.read(delimited(page), PROTOBUF) for page in pages)
    assert first.series is second.series
    assert first.series is again.series
    assert first.series is not other.series
    assert [[1.0, 2.0], [3.0, 2.0], [3.0], [1.0, 4.0]] == [p.values.tolist() for p in (first, second, other, again)]
