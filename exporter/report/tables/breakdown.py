"""Where the TTFT went: a row for each part, with its share, source and error; and by workload class and URL."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rich.table import Table
from rich.text import Text

from correlator.breakdown import ENGINE_FRONTEND, INNER_PARTS, TTFT_PARTS
from exporter.report.format import SUMMARY, table
from exporter.summary.breakdown import (
    NOT_SEEN,
    Breakdown,
    TtftPart,
    is_certain,
    json_name,
    label_of,
    short_label_of,
)
from exporter.summary.correlation import Correlation
from rundir.printable.numbers import ms, percent
from rundir.stats import Statistics

BAR = 8
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
    shown = table(title, "mean ms", "p50", tail, "share", "", "known from", label_width=18, kept_in=kept_in)
    sources = {**SOURCES, "histogram": "engine's sums"} if breakdown.means_only else SOURCES
    for part in TTFT_PARTS:
        described: TtftPart = getattr(breakdown, json_name(part))
        if described.mean is None:
            if described.missing == NOT_SEEN:
                shown.add_row(label_of(part, breakdown), *[""] * 5, "not seen")
            continue
        known_from = {**sources, "trace": GATEWAY_SPANS} if part.name == "gateway" else sources
        *cells, source = _row(label_of(part, breakdown), described, known_from, tail)
        some = described.count < breakdown.ttft_ms.count and not breakdown.means_only and described.source != "mixed"
        shown.add_row(*cells, f"{source}, {described.count:,} requests" if some else source)
        for division in INNER_PARTS if inner and (described.share_of_ttft or 0.0) > LEAST_SHARE else ():
            divided: TtftPart = getattr(breakdown, json_name(division))
            if division.within == part.name and divided.share_of_ttft:
                label = FRONTEND if division is ENGINE_FRONTEND else division.label
                shown.add_row(*_row(f"  {label}", divided, known_from, tail, bar=False), style="dim")
    shown.add_row(
        Text("TTFT", style="bold"), *_times(breakdown.ttft_ms, tail), "100 %", "", WHOLES[breakdown.ttft_ms.source]
    )
    if breakdown.send_ms.mean is not None:
        shown.add_row("connect and send", *_times(breakdown.send_ms, tail), "", "", "before TTFT", style="dim")
    return shown


def group_tables(correlation: Correlation) -> Iterator[Table]:
    """Yield tables of the mean parts by workload class, and by requested URL if several."""
    for groups, title in ((correlation.classes, "class"), (correlation.urls, "URL")):
        if not groups:
            continue
        known = [part for part in TTFT_PARTS if getattr(correlation.breakdown, json_name(part)).mean is not None]
        labels = (short_label_of(part, correlation.breakdown) for part in known)
        shown = table(f"Where the TTFT went, by {title}, mean ms", "requests", "TTFT", *labels)
        for label, group in groups.items():
            means = (getattr(group.breakdown, name).mean for name in ("ttft_ms", *map(json_name, known)))
            shown.add_row(Text(label), f"{group.requests:,}", *map(ms, means))
        yield shown


def _row(
    label: str, part: TtftPart, sources: Mapping[str, str], tail: str, *, bar: bool = True
) -> tuple[str | Text, ...]:
    share = part.share_of_ttft
    if share and not is_certain(part) and (part.error_ms or 0.0) * abs(share) > HARDLY * abs(part.mean or 0.0):
        share = None
    drawn = Text("█" * max(0, round(BAR * (share or 0.0))) if bar else "", style="cyan")
    return label, *_times(part, tail), percent(share), drawn, _known_from(part, sources)


def _known_from(part: TtftPart, sources: Mapping[str, str]) -> str:
    """Return the source of a part; of several, how many requests are exact, and the error of an estimated one."""
    if not part.estimated:
        return sources[part.source or ""] + (f" ±{ms(part.error_ms)}" if part.error_ms else "")
    error_ms = (part.error_ms or 0.0) * math.sqrt(part.count / part.estimated)
    return f"{part.count - part.estimated:,} exact, {part.estimated:,} estimate ±{ms(error_ms)}"


def _times(part: Statistics, tail: str) -> tuple[str, ...]:
    return tuple(map(ms, (part.mean, part.p50, getattr(part, tail))))
