"""The engine's own times of each request, joined exactly: by trace id, else by request id, else from its reply, else
from a record of the engine's, or a span of another trace, that fits this request alone.

Nothing is estimated here (that is `estimate`'s part), and nothing guessed: an id that several requests share joins none
of them. A new source is a module beside this one and a row in `join`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from sidelight.correlator.exact.matching import Matched, by_record
from sidelight.correlator.exact.replies import by_reply
from sidelight.correlator.exact.span_matching import by_time
from sidelight.correlator.exact.spans import by_request_id, by_trace
from sidelight.correlator.exact.table import RECORD_BY_TIME, SPAN_BY_TIME, Find, Joined, Refusal, put, unjoined
from sidelight.loadgen.requests.metrics import span_s
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.scraper.spans.requests import EngineSpans


def join(requests: RequestLog, spans: EngineSpans, records: Matched | None = None) -> Joined:
    """Find each request's own times; `records` are those of `/perf_metrics`, where it was read.

    - a trace id, or a request id, that several requests bear joins none of them
    - several spans of one request are its choices, its steps, or the engines that shared it; of others that could be
      its own, none is taken
    - times longer than the client waited, in all or for its first token, or that contradict each other, are discarded,
      whichever source states them
    """
    taken: set[int] = set()
    # The best first: a request has its times from the first source that states possible ones.
    sources: tuple[tuple[str, Find], ...] = (
        ("trace", partial(by_trace, requests, spans, taken)),
        ("request id", partial(by_request_id, requests, spans, taken)),
        ("response", partial(by_reply, requests)),
        (RECORD_BY_TIME, partial(by_record, records)),
        (SPAN_BY_TIME, partial(by_time, requests, spans, taken)),
    )
    table = unjoined(len(requests.trace_id))
    why: list[list[str]] = [[] for _ in range(len(table))]
    waited_s = np.nan_to_num(span_s(requests.submit_ns, requests.end_ns), nan=np.inf)
    ttft_s = np.nan_to_num(span_s(requests.submit_ns, requests.first_token_ns), nan=np.inf)
    whole_s = np.where(requests.status == "ok", waited_s, np.inf)  # engines go on with what a client gave up
    came_s = span_s(requests.first_output_ns, requests.last_output_ns)
    for source, find in sources:
        for row, times in find(np.flatnonzero(table.source == "none").tolist(), why):
            within = {"ttft_s": ttft_s[row], "waited_s": waited_s[row], "whole_s": whole_s[row], "came_s": came_s[row]}
            if reason := put(table, row, source, times, **within):
                why[row].append(reason)
    for row in np.flatnonzero(table.source == "none").tolist():
        table.reason[row] = _why_none(requests, row, why[row], any_spans=len(spans) > 0)
        if requests.status[row] == "ok":
            table.refusal[row] = "; ".join(dict.fromkeys(reason for reason in why[row] if isinstance(reason, Refusal)))
    return table


_FATES = {
    "cancelled": "was cancelled", "left": "was left by its client", "failed": "failed", "in_flight": "did not end",
}  # fmt: skip


def _why_none(requests: RequestLog, row: int, why: Sequence[str], *, any_spans: bool) -> str:
    """Return a reason for a request's missing times: first its own fate, as engines report only what they finished."""
    status, http_status = requests.status[row], requests.http_status[row]
    if http_status >= 400:
        return f"the server answered HTTP {http_status}"
    if fate := _FATES.get(status):
        longer = [reason for reason in why if reason.endswith("than the client waited")]
        went_on = f"the engine went on: {longer[0]}" if longer else "engines report only requests that they finished"
        return f"it {fate}, and {went_on}"
    if not any(isinstance(reason, Refusal) and not reason.startswith("its reply") for reason in why):
        why = ["no span of it came" if any_spans else "no spans came", *why]
    return "; ".join(dict.fromkeys(why))
