"""The slowest requests one by one, with the ids by which other systems know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from correlator.breakdown import TTFT_PARTS
from exporter.report.format import cell, ms, table
from exporter.summary.breakdown import Breakdown, json_name, short_label_of
from exporter.summary.slowest import SlowRequest

# What ran beside a request as it was sent, by the engine or else of ours, and how long its prompt was.
BY_ENGINE = (("requests_waiting", "waiting"), ("requests_running", "running"))
BY_CLIENT = (("in_flight", "in flight"),)
PROMPT = (("input_tokens", "input"),)


def slowest_section(requests: Sequence[SlowRequest], breakdown: Breakdown) -> Iterator[RenderableType]:
    """Yield a row for each request, then its ids; what is known of no request has no column."""
    if not requests:
        return

    def known(name: str) -> bool:
        return any(getattr(one, name) is not None for one in requests)

    parts = [part for part in TTFT_PARTS if known(json_name(part))]
    by_engine = [(name, label) for name, label in BY_ENGINE if known(name)]
    beside = (*(by_engine or BY_CLIENT), *(PROMPT if known("input_tokens") else ()))
    classes = len({one.workload_class for one in requests}) > 1
    shown = table(
        "Slowest requests, ms, and what ran beside them",
        "TTFT",
        *(short_label_of(part, breakdown) for part in parts),
        *(label for _, label in beside),
        *(["class"] if classes else []),
        label_width=2,
    )
    for number, one in enumerate(requests, start=1):
        times = (getattr(one, json_name(part)) for part in parts)
        around = (cell(getattr(one, name)) for name, _ in beside)
        ending = [Text(one.workload_class)] if classes else []
        shown.add_row(str(number), ms(one.ttft_ms), *map(ms, times), *around, *ending)
    yield shown
    for number, one in enumerate(requests, start=1):
        status = "" if one.status == "ok" else f" {one.status}"
        request = f" request {one.request_id}" if one.request_id else ""
        yield Text(f" {number} trace {one.trace_id}{request}{status}", style="dim")
    yield Text("")
