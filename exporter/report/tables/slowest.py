"""The slowest requests one by one, with the ids by which other systems know them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.document import BLANK, Block, Line, numbers, table, words
from sidelight.exporter.summary.breakdown import Breakdown, json_name, short_label_of
from sidelight.exporter.summary.slowest import SlowRequest
from sidelight.rundir.printable.numbers import cell

# What ran beside a request as it was sent, by the engine's count or else ours, and how long its prompt was.
BY_ENGINE = (("requests_waiting", "waiting"), ("requests_running", "running"))
BY_CLIENT = (("in_flight", "in flight"),)
PROMPT = (("input_tokens", "input"),)


def slowest_section(requests: Sequence[SlowRequest], breakdown: Breakdown) -> Iterator[Block]:
    """Yield a row for each request, then its ids; what is known of no request has no column."""
    if not requests:
        return

    def known(name: str) -> bool:
        return any(getattr(request, name) is not None for request in requests)

    parts = [part for part in TTFT_PARTS if known(json_name(part))]
    by_engine = [(name, label) for name, label in BY_ENGINE if known(name)]
    beside = (*(by_engine or BY_CLIENT), *(PROMPT if known("input_tokens") else ()))
    classes = len({request.workload_class for request in requests}) > 1
    columns = [*numbers("TTFT", *(short_label_of(part, breakdown) for part in parts))]
    columns += numbers(*(label for _, label in beside), show=cell)
    names = ("ttft_ms", *map(json_name, parts), *(name for name, _ in beside))
    if classes:
        columns.append(words("class"))
        names = (*names, "workload_class")
    rows = ((str(at), *(getattr(request, name) for name in names)) for at, request in enumerate(requests, start=1))
    yield table("Slowest requests, ms, and what ran beside them", columns, rows, label_width=2)
    for number, request in enumerate(requests, start=1):
        status = "" if request.status == "ok" else f" {request.status}"
        identified = f" request {request.request_id}" if request.request_id else ""
        yield Line(((f" {number} trace {request.trace_id}{identified}{status}", ""),), "note")
    yield BLANK
