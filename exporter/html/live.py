"""Server-sent events of the live page: the columns of new rows, and the text of a terminal.

Columns are made as the report makes them. What is known of requests is handed in; nothing is counted here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sidelight.correlator.breakdown import Parts, gateway_label, network_label
from sidelight.correlator.parts import DECODE, INNER_PARTS, TTFT_PARTS, Part
from sidelight.exporter.document import Block, Prose
from sidelight.exporter.html.columns import TIME_UNIT_MS, PackedColumn, ascending_column, number_column, pack
from sidelight.exporter.html.data import GAUGES, gauge_unit, part_columns, request_columns, sent_ns_of
from sidelight.exporter.html.markup import blocks
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.clock import iso_ms
from sidelight.rundir.columns import Ints, concat, take
from sidelight.rundir.printable.numbers import duration
from sidelight.rundir.printable.text import escaped, printable, printable_all
from sidelight.scraper.series.log import FailureRecord, ScrapeRow

SHOWN_S = 900.0  # as the headings of the page say
MINUTE_NS = 60_000_000_000
MOST_GAUGES, MOST_MARKS = 64, 1000
LEVEL = 6  # of DEFLATE: 9 is 3 % smaller and takes three times as long


@dataclass(slots=True, kw_only=True)
class _News:
    """New rows since the last event, as handed to `LiveColumns`."""

    ended: list[RequestLog] = field(default_factory=list)
    counted: list[tuple[Ints, Parts]] = field(default_factory=list)
    known: list[tuple[RequestLog, Parts]] = field(default_factory=list)
    gauges: dict[tuple[str, str], list[tuple[int, float]]] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)


class LiveColumns:
    """Owner of the new rows since the last event. Times are shown since `start_ns`; `is_by_clock`: as the time of
    day.
    """

    def __init__(self, run_id: str, start_ns: int, *, is_by_clock: bool = False, trace_url: str = "") -> None:
        # Ticks of an axis by the clock stand at whole minutes and their parts.
        self._start_ns = start_ns - start_ns % MINUTE_NS if is_by_clock else start_ns
        self._begun_ns = start_ns
        self._facts = {
            "run": run_id,
            "byClock": is_by_clock,
            "traceUrl": trace_url,
            "parts": list(map(_described, TTFT_PARTS)),
            "inner": list(map(_described, (*INNER_PARTS, DECODE))),
        }
        self._news = _News()

    def ended(self, log: RequestLog) -> None:
        """Add ended requests of a run; their parts may come later."""
        if len(log):
            self._news.ended.append(log)

    def counted(self, index: Ints, parts: Parts) -> None:
        """Add the parts of requests of a run, by their index."""
        if len(index):
            self._news.counted.append((index, parts))

    def known(self, log: RequestLog, parts: Parts) -> None:
        """Add ended requests with their parts. Their index is not used."""
        if len(log):
            self._news.known.append((log, parts))

    def in_flight(self, count: int, now_ns: int) -> None:
        """Add the client's number of requests in flight."""
        self._news.gauges.setdefault(("client", "in_flight"), []).append((now_ns, count))

    def scraped(self, scrape: ScrapeRow | FailureRecord, gauges: Mapping[str, float]) -> None:
        """Add the gauges of an engine's page, or the failure of a scrape."""
        at_ns = (scrape.request_ns + scrape.response_ns) // 2
        if isinstance(scrape, FailureRecord):
            if len(self._news.marks) < MOST_MARKS:
                text = f"{scrape.url}: {scrape.error}"
                self._news.marks.append({"at": (at_ns - self._start_ns) / 1e6, "kind": "scrape", "text": text})
            return
        for name in GAUGES.keys() & gauges.keys():
            if (scrape.url, name) in self._news.gauges or len(self._news.gauges) < MOST_GAUGES:
                self._news.gauges.setdefault((scrape.url, name), []).append((at_ns, gauges[name]))

    def rows(self) -> bytes:
        """Return the event of the rows since the last one, b"" without any."""
        news, self._news = self._news, _News()
        return b"" if news == _News() else event("rows", printable_all(_rows(news, self._start_ns), escaped))

    def facts(self, now_ns: int) -> dict[str, Any]:
        """Return the run's facts for the page's script, beside its rows."""
        begin_ns = max(self._begun_ns, now_ns - round(1e9 * SHOWN_S))
        span = {"begin": (begin_ns - self._start_ns) / 1e6, "duration": (now_ns - self._start_ns) / 1e6}
        return {**self._facts, "startsAt": iso_ms(self._start_ns), **span}


def state_event(title: str, lines: Iterable[Block], facts: Mapping[str, Any], *, kept_s: float) -> bytes:
    """Return the event of the page's text, above charts of the last `kept_s` seconds."""
    paragraphs = list(lines)
    if kept_s < SHOWN_S:
        text = f"Only the last {duration(kept_s)} are shown: more requests ended before than the page keeps."
        paragraphs.append(Prose(text, "warning"))
    if not facts:
        paragraphs.append(Prose("Charts come once a request of the measured phase has ended.", "note"))
    return event("state", {"facts": printable_all(facts), "title": printable(title), "html": blocks(paragraphs)})


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Return a server-sent event; JSON has no line breaks of its own."""
    return f"event: {name}\ndata: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode()


def _described(part: Part) -> dict[str, str]:
    return {"name": part.name, "label": part.label, "within": part.within}


def _rows(news: _News, start_ns: int) -> dict[str, Any]:
    tables: list[dict[str, PackedColumn]] = []
    labels: dict[str, str] = {}
    if news.ended:
        tables.append(_in_order(concat(news.ended), start_ns, with_ids=False)[0])
    if news.counted:
        parts = concat([parts for _, parts in news.counted])
        index = np.concatenate([index for index, _ in news.counted])
        tables.append({"index": number_column(index.astype(np.float64)), **part_columns(parts)})
        labels = _labels(parts)
    if news.known:
        columns, rows = _in_order(concat([log for log, _ in news.known]), start_ns, with_ids=True)
        parts = take(concat([parts for _, parts in news.known]), rows)
        del columns["index"]
        tables.append(columns | part_columns(parts))
        labels = _labels(parts)
    gauges, readings = [], dict[str, PackedColumn]()
    for at, ((address, name), read) in enumerate(news.gauges.items()):
        times_ns, values = map(np.array, zip(*read, strict=True))
        gauges.append({"name": name, "label": GAUGES.get(name, "in flight"), "address": address})
        readings[f"time{at}"] = ascending_column((times_ns - start_ns) / 1e6, TIME_UNIT_MS)
        readings[f"value{at}"] = number_column(values.astype(np.float64), gauge_unit(name))
    return {
        "tables": [pack(columns, level=LEVEL) for columns in tables],
        "labels": labels,
        "gauges": gauges,
        "gaugesAt": pack(readings, level=LEVEL),
        "marks": news.marks,
    }


def _in_order(log: RequestLog, start_ns: int, *, with_ids: bool) -> tuple[dict[str, PackedColumn], Ints]:
    """Return the columns of requests in the order of their sending, and their rows."""
    sent_ns = sent_ns_of(log)
    rows = np.argsort(sent_ns, kind="stable")
    rows = rows[sent_ns[rows] >= 0]
    return request_columns(take(log, rows), sent_ns[rows], start_ns, with_ids=with_ids), rows


def _labels(parts: Parts) -> dict[str, str]:
    """Return the labels of the parts with names that depend on the requests' sources."""
    if not parts.covered.any():
        return {}
    return {"network": network_label(parts, parts.covered), "gateway": gateway_label(parts, parts.covered)}
