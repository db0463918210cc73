"""Where the TTFT went: a row for each part, with its share, source and error; and by workload class and URL."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from sidelight.correlator.parts import ENGINE_FRONTEND, INNER_PARTS, TTFT_PARTS, Part
from sidelight.exporter.document import BARS, SUMMARY, Cell, Row, Table, numbers, table, words
from sidelight.exporter.summary.breakdown import (
    NOT_SEEN,
    Breakdown,
    E2ePart,
    TtftPart,
    is_certain,
    json_name,
    label_of,
    short_label_of,
)
from sidelight.exporter.summary.correlation import Correlation
from sidelight.rundir.printable.numbers import cell, count_of, ms, percent
from sidelight.rundir.stats import Statistics

SOURCES = {
    "trace": "engine spans",
    "response": "replies",
    "histogram": "estimate",
    "mixed": "several",
    "client": "client",
}
GATEWAY_SPANS = "gateway's spans"
WHOLES = {"client": "client", "gateway": GATEWAY_SPANS, "mixed": "client or gateway"}
HARDLY = 0.005  # of TTFT: an error of less changes no whole percent
LEAST_SHARE = 0.02  # of TTFT: what is less is not divided further
FRONTEND = f"{ENGINE_FRONTEND.label}: tokenise, wait, output"


def breakdown_table(
    breakdown: Breakdown,
    *,
    title: str = "Where the TTFT went",
    tail: str = "p99",
    inner: bool = True,
    kept_in: str = SUMMARY,
) -> Table:
    """Return a table of the parts of the TTFT, each with its share and source. Each part is over the requests that know
    it.

    A row within another makes that up; its share is of TTFT too. A part within its own error has no share. An estimate
    bears its standard error, and a part that adds up with the others how many requests know it, where not all do.
    `tail` is the percentile beside the median; without `inner`, only what adds up is shown.
    """
    columns = (*numbers("mean ms", "p50", tail), *numbers("share", show=percent), BARS, words("known from"))
    rows = _rows(breakdown, tail, inner=inner)
    return table(title, columns, rows, label_width=18, kept_in=kept_in)


def _rows(breakdown: Breakdown, tail: str, *, inner: bool) -> Iterator[Row]:
    sources = {**SOURCES, "histogram": "engine's sums"} if breakdown.means_only else SOURCES
    for part in TTFT_PARTS:
        described: TtftPart = getattr(breakdown, json_name(part))
        if described.mean is None:
            if described.missing == NOT_SEEN:
                yield Row((label_of(part, breakdown), *[""] * 4, None, "not seen"))
            continue
        known_from = {**sources, "trace": GATEWAY_SPANS} if part.name == "gateway" else sources
        some = described.count < breakdown.ttft_ms.count and not breakdown.means_only and described.source != "mixed"
        source = _known_from(described, known_from) + (f", {count_of(described.count, 'request')}" if some else "")
        share = _share(described)
        yield Row((label_of(part, breakdown), *_times(described, tail), share, share, source))
        for division in INNER_PARTS if inner and (described.share_of_ttft or 0.0) > LEAST_SHARE else ():
            divided: TtftPart = getattr(breakdown, json_name(division))
            if division.within == part.name and divided.share_of_ttft:
                label = FRONTEND if division is ENGINE_FRONTEND else division.label
                known = _known_from(divided, known_from)
                yield Row((label, *_times(divided, tail), _share(divided), None, known), "inner")
    whole = breakdown.ttft_ms
    yield Row(("TTFT", *_times(whole, tail), 1.0, None, WHOLES[whole.source]), "strong")
    if breakdown.send_ms.mean is not None:
        yield Row(("connect and send", *_times(breakdown.send_ms, tail), "", None, "before TTFT"), "note")


def breakdown_tables(correlation: Correlation) -> Iterator[Table]:
    """Yield the table of the parts, and of their means by group."""
    yield breakdown_table(correlation.breakdown)
    for groups, title in (
        (correlation.classes, "class"),
        (correlation.urls, "URL"),
        (correlation.models or {}, "model"),
    ):
        if not groups:
            continue
        known = [part for part in TTFT_PARTS if getattr(correlation.breakdown, json_name(part)).mean is not None]
        names = ("ttft_ms", *map(json_name, known))
        labels = (short_label_of(part, correlation.breakdown) for part in known)
        rows = (
            (label, group.requests, *(getattr(group.breakdown, name).mean for name in names))
            for label, group in groups.items()
        )
        columns = (*numbers("requests", show=cell), *numbers("TTFT", *labels))
        yield table(f"Where the TTFT went, by {title}, mean ms", columns, rows)


def _share(part: TtftPart) -> float | None:
    """Return the share of the TTFT, None of a part within its own error."""
    share = part.share_of_ttft
    is_sure = is_certain(part) or (part.error_ms or 0.0) * abs(share or 0.0) <= HARDLY * abs(part.mean or 0.0)
    return share if is_sure else None


def source_words(part: Part, described: TtftPart | E2ePart, breakdown: Breakdown) -> str:
    """Return where a part is known from, in a word or two."""
    if breakdown.means_only:
        return "engine's sums"
    is_gateways = part.name == "gateway" and described.source == "trace"
    return GATEWAY_SPANS if is_gateways else SOURCES[described.source or "client"]


def _known_from(part: TtftPart, sources: Mapping[str, str]) -> str:
    """Return the source of a part; of several, how many requests are exact, and the error of an estimated one."""
    if part.mean_ci90:
        return f"{sources['histogram']}, {ms(part.mean_ci90[0])} to {ms(part.mean_ci90[1])}"
    if not part.estimated:
        return sources[part.source or ""] + (f" ±{ms(part.error_ms)}" if part.error_ms else "")
    error_ms = (part.error_ms or 0.0) * math.sqrt(part.count / part.estimated)
    return f"{part.count - part.estimated:,} exact, {part.estimated:,} estimate ±{ms(error_ms)}"


def _times(part: Statistics, tail: str) -> tuple[Cell, ...]:
    return part.mean, part.p50, getattr(part, tail)
