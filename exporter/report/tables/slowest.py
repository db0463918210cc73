"""The slowest requests one by one, with the ids by which other systems know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from correlator.breakdown import TTFT_PARTS
from exporter.report.format import table
from exporter.summary.breakdown import Breakdown, json_name, short_label_of
from exporter.summary.slowest import SlowRequest
from rundir.printable.numbers import cell, ms

# What ran beside a request as it was sent, by the engine or else of ours, and how long its prompt was.
BY_ENGINE = (("requests_waiting", "waiting"), ("requests_running", "running"))
BY_CLIENT = (("in_flight", "in flight"),)
PROMPT = (("input_tokens", "input"),)


def slowest_section(requests: Sequence[SlowRequest], breakdown: Breakdown) -> Iterator[RenderableType]:
    """Yield a row for each request, then its ids; what is known of no request has no column."""
    if not requests:
        return

    def known(name: str) -> bool:
        return any(getattr(request, name) is not None for request in requests)

    parts = [part for part in TTFT_PARTS if known(json_name(part))]
    by_engine = [(name, label) for name, label in BY_ENGINE if known(name)]
    beside = (*(by_engine or BY_CLIENT), *(PROMPT if known("input_tokens") else ()))
    classes = len({request.workload_class for request in requests}) > 1
    shown = table(
        "Slowest requests, ms, and what ran beside them",
        "TTFT",
        *(short_label_of(part, breakdown) for part in parts),
        *(label for _, label in beside),
        *(["class"] if classes else []),
        label_width=2,
    )
    for number, request in enumerate(requests, start=1):
        times = (getattr(request, json_name(part)) for part in parts)
        around = (cell(getattr(request, name)) for name, _ in beside)
        ending = [Text(request.workload_class)] if classes else []
        shown.add_row(str(number), ms(request.ttft_ms), *map(ms, times), *around, *ending)
    yield shown
    for number, request in enumerate(requests, start=1):
        status = "" if request.status == "ok" else f" {request.status}"
        identified = f" request {request.request_id}" if request.request_id else ""
        yield Text(f" {number} trace {request.trace_id}{identified}{status}", style="dim")
    yield Text("")
