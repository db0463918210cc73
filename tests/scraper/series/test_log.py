"""The scrape log: what was scraped is what is read, at a fraction of the page's size."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidelight.scraper.exposition import Series, parse
from sidelight.scraper.series import table
from sidelight.scraper.series.log import (
    Encoder,
    FailureRecord,
    LogReader,
    ScrapeLog,
    ScrapeRow,
    SeriesLimit,
    read_log,
    rows,
)
from sidelight.scraper.series.table import SeriesTable, build
from sidelight.scraper.targets.scrape import Scrape

S = 10**9
PAGES = st.lists(
    st.lists(st.tuples(st.sampled_from("abcd"), st.floats(allow_nan=True, width=64)), max_size=4).map(
        lambda pairs: "".join(f"{name} {value!r}\n" for name, value in dict(pairs).items())
    ),
    max_size=12,
)


def scrape(number: int, page: str, *, url: str = "u", error: str = "") -> Scrape:
    return Scrape(
        url=url,
        tick_ns=1000 * number,
        request_ns=1000 * number + 10,
        response_ns=1000 * number + 20,
        content_type="text/plain; version=0.0.4",
        body=page.encode(),
        error=error,
    )


def read(path: Path) -> list[ScrapeRow | FailureRecord]:
    return list(read_log(path))


@settings(deadline=None)
@given(PAGES, PAGES)
def test_what_was_scraped_is_what_is_read(first: list[str], second: list[str]):
    """Every value of every page, bit for bit, whatever the layouts do; NaN and negative zero included. Rows of two
    targets that share a log do not lean on each other's.
    """
    mixed = [scrape(n, page, url=url) for url, pages in (("x", first), ("y", second)) for n, page in enumerate(pages)]
    mixed.sort(key=lambda record: record.tick_ns)
    for sent, row in zip(mixed, rows(mixed), strict=True):
        expected = parse(sent.body)
        assert (expected.series, sent.tick_ns, sent.url) == (row.series, row.tick_ns, row.url)
        assert expected.values.tobytes() == row.values.tobytes()


def test_a_page_that_changed_nothing_is_its_stamps():
    """Neither values nor series are written again, and the log marks the page as unchanged."""
    encoder = Encoder()
    page = "".join(f'x{{n="{n}"}} {n}\n' for n in range(1000))
    first, _ = encoder.encode(scrape(1, page))
    again, _ = encoder.encode(scrape(2, page))
    assert 2 == len(first)
    assert 1 == len(again)
    assert len(again[0]) < 64
    assert [True, False] == [
        row.changed for row in rows([scrape(1, page), scrape(2, page)]) if isinstance(row, ScrapeRow)
    ]


def test_a_layout_that_returns_is_not_written_again():
    """A series that comes and goes costs its values, not the page's series each time."""
    encoder = Encoder()
    counts = [len(encoder.encode(scrape(n, page))[0]) for n, page in enumerate(["a 1\n", "a 1\nb 2\n"] * 3)]
    assert [2, 2, 1, 1, 1, 1] == counts


def test_an_engine_that_starts_again_takes_no_names_again():
    """Its pages have new layouts each time, and their series are the same objects: a run of hours keeps all rows. Of
    pages that invent names, those of long ago are not looked for.
    """
    encoder, reader = Encoder(), LogReader()

    def series(number: int, page: str) -> tuple[Series, ...]:
        row = [reader.take(payload) for payload in encoder.encode(scrape(number, page))[0]][-1]
        assert isinstance(row, ScrapeRow)
        return row.series

    started, served = "# HELP a text\na 1\n", '# HELP a text\na 1\nb{status="200"} 1\n'
    first = series(0, served)
    for life in range(20):
        series(2 * life + 1, started + f"life{life} 1\n")
        assert all(early is late for early, late in zip(first, series(2 * life + 2, served), strict=True))
    for life in range(20):
        series(100 + life, "".join(f"new{life}_{number} 1\n" for number in range(1000)))
    assert first[0] == series(200, served)[0] is not first[0]


def test_failures_and_malformed_pages_are_records_with_reasons():
    """A scrape without a page says why; so does a page that is cut off, with the byte."""
    records = list(rows([scrape(1, "", error="connect: refused"), scrape(2, "a 1\nb 2"), scrape(3, "a 1\n")]))
    assert [FailureRecord, FailureRecord, ScrapeRow] == [type(record) for record in records]
    assert ["connect: refused", "malformed page: the page is cut off: its last line has no end (line 2, byte 7)"] == [
        record.error for record in records if isinstance(record, FailureRecord)
    ]


def test_a_torn_log_is_read_up_to_the_tear(tmp_path: Path):
    """Wherever a kill cut the last record off, all before it are there, and those only."""
    path = tmp_path / "scrapes-0.log"
    log = ScrapeLog(path)
    sizes = []
    for number in range(4):
        assert not log.append(scrape(number, f"a {number}\nb 1\n"))
        sizes.append(path.stat().st_size)
    log.close()
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        expected = [float(number) for number in range(4) if sizes[number] <= cut]
        assert expected == [row.values[0] for row in read(path) if isinstance(row, ScrapeRow)]


def test_a_log_that_was_opened_twice_is_read_whole(tmp_path: Path):
    """A second process that appends begins with its layouts; ids that repeat mean the later ones."""
    path = tmp_path / "scrapes-0.log"
    for start in (0, 10):
        log = ScrapeLog(path)
        for number in (start, start + 1):
            log.append(scrape(number, f"{'a' if start else 'b'} {number}\n"))
        log.close()
    assert [0.0, 1.0, 10.0, 11.0] == [row.values[0] for row in read(path) if isinstance(row, ScrapeRow)]


def test_recorded_run_takes_less_than_a_byte_and_a_half_a_sample(recording: Callable[[str], list[Scrape]]):
    """477 scrapes of a real vLLM under load: on disk and in memory no more than what is promised."""
    encoder = Encoder()
    scrapes = recording("main")
    written = sum(8 + len(payload) for scraped in scrapes for payload in encoder.encode(scraped)[0])
    (endpoint,) = build(rows(scrapes))
    samples = endpoint.values.size
    stamps = endpoint.tick_ns.nbytes + endpoint.request_ns.nbytes + endpoint.response_ns.nbytes
    assert written / samples < 1.5
    assert (endpoint.values.nbytes + stamps) / samples < 8.5


def test_room_is_made_for_the_rows_that_come():
    """A page whose series change all the time, as one of an engine that starts again and again, takes what its rows
    take, twice at most.
    """
    pages = ["".join(f"{name}{number} 1\n" for number in range(1000)) for name in "ab"]
    scrapes = list(rows([scrape(number, pages[number // 3 % 2]) for number in range(600)]))
    table = SeriesTable("u")
    tracemalloc.start()
    for row in scrapes:
        table.append(row)
    held_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held_bytes < 2 * 600 * 1000 * 8


@pytest.mark.parametrize("keep_s", [1, 60])
def test_a_ring_keeps_the_last_minutes(keep_s: int):
    """A resident table has everything of late and at most 64 rows more; failures go with their time."""
    table = SeriesTable("u", keep_ns=keep_s * S)
    seconds = range(1, 1001)
    pages = (scrape(at * S // 1000, f"a {at}\n", error="down" if at % 100 == 0 else "") for at in seconds)
    for row in rows(pages):
        table.append(row)
    view = table.view()
    recent = [at for at in seconds if at >= 1000 - keep_s and at % 100]
    newest = view.values[:, 0].astype(int).tolist()
    assert recent == newest[-len(recent) :]
    assert len(newest) <= keep_s + 64
    assert [1000 * S + 10] == [at_ns for at_ns, _ in view.failures]


def churning(pages: int) -> list[Scrape]:
    """Return pages of a series that stays and three that are new each time."""
    new = ["".join(f'x{{id="{page}-{n}"}} 1\n' for n in range(3)) for page in range(pages)]
    return [scrape(page, f"stays {page}\n{text}") for page, text in enumerate(new)]


def test_ever_new_series_are_left_out():
    """What came first stays complete; the page's other values are not mixed up, and it says that there were more."""
    encoder, reader = Encoder(), LogReader(SeriesLimit(most=10))
    taken = [reader.take(payload) for page in churning(40) for payload in encoder.encode(page)[0]]
    pages = [row for row in taken if isinstance(row, ScrapeRow)]
    assert [False] * 3 + [True] * 37 == [page.is_cut for page in pages]
    (endpoint,) = build(pages)
    assert endpoint.is_cut
    assert 10 == len(endpoint.series)
    assert list(range(40)) == endpoint.values[:, 0].tolist()
    assert 1 == len({id(page.series) for page in pages[3:]})  # so that their rows lie together


def test_a_table_holds_no_more_values_than_memory(monkeypatch: pytest.MonkeyPatch):
    """A few ever new series on many pages would make a table of nearly nothing: its first columns are kept."""
    monkeypatch.setattr(table, "MOST_VALUES", 400)
    (endpoint,) = build(rows(churning(40)))
    assert (endpoint.is_cut, (40, 10)) == (True, endpoint.values.shape)
    assert list(range(40)) == endpoint.values[:, 0].tolist()
    (few,) = build(rows(churning(10)))
    assert (few.is_cut, (10, 31)) == (False, few.values.shape)
