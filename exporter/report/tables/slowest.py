"""The slowest requests one by one, with the ids by which other systems know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.text import Text

from correlator.breakdown import TTFT_PARTS
from exporter.report.format import cell, ms, table
from exporter.summary.breakdown import Breakdown, json_name, label_of
from exporter.summary.slowest import SlowRequest


def slowest_section(requests: Sequence[SlowRequest], breakdown: Breakdown) -> Iterator[RenderableType]:
    """Yield a row for each request, then its ids; parts that no request has are left out."""
    if not requests:
        return
    known = [part for part in TTFT_PARTS if any(getattr(one, json_name(part)) is not None for one in requests)]
    labels = (label_of(part, breakdown).removesuffix(" the engine") for part in known)
    classes = len({one.workload_class for one in requests}) > 1
    columns = ("TTFT", *labels, "waiting", "running", "in flight", "input", *(("class",) if classes else ()))
    shown = table("Slowest requests: ms, then requests beside it and its own input tokens", *columns, label_width=2)
    for number, one in enumerate(requests, start=1):
        parts = (getattr(one, json_name(part)) for part in known)
        beside = (one.requests_waiting, one.requests_running, one.in_flight, one.input_tokens)
        ending = (one.workload_class,) if classes else ()
        shown.add_row(str(number), ms(one.ttft_ms), *map(ms, parts), *map(cell, beside), *ending)
    yield shown
    for number, one in enumerate(requests, start=1):
        status = "" if one.status == "ok" else f"  {one.status}"
        yield Text(f" {number}  trace {one.trace_id}  request {one.request_id}{status}", style="dim")
    yield Text("")
