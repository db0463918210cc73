"""What gateways before the engine tell of a run's requests, where they send spans as well."""

from __future__ import annotations

from collections.abc import Iterable

from correlator.live.client_spans import client_span
from scraper.spans.log import ExportRecord, SpanLogRecord, fault
from scraper.spans.requests import part_told


def first_output_s(records: Iterable[SpanLogRecord]) -> dict[str, float]:
    """Return how long gateways took to their first output, s, by trace id in hex; none of traces that do not tell.

    The client is us, so what calls a model in a trace of ours and is no engine's request is a gateway. Of several, one
    behind the other, the longest holds the others.
    """
    longest: dict[str, tuple[float, float]] = {}
    for record in records:
        if not isinstance(record, ExportRecord):
            continue
        for received_ns, scope, span in record.spans():
            told = part_told(span, scope)
            if fault(span, received_ns) or told in ("request", "stage"):
                continue
            call = client_span(span, received_ns, is_gateway=told == "gateway")
            if call.is_call and call.first_s >= 0:
                before = longest.get(span.trace_id.hex(), (0.0, 0.0))
                longest[span.trace_id.hex()] = max(before, (call.whole_s, call.first_s))
    return {trace: first_s for trace, (_, first_s) in longest.items()}
