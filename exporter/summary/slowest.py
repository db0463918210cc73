"""The slowest requests one by one: their parts, and what ran beside them. An object of `summary.json`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from msgspec import Struct

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.summary.breakdown import json_name, with_fields
from sidelight.loadgen.requests.metrics import input_tokens, stamped_ms
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import Amount, Count, doc
from sidelight.rundir.stats import Missing, finite

MOST = 5

PartMs = Annotated[float | None, doc("Of its TTFT; null where it is not known.", "ms")]


@with_fields(dict.fromkeys(map(json_name, TTFT_PARTS), PartMs), after="ttft_ms")
class SlowRequest(Struct, frozen=True, kw_only=True):
    """One request: its ids, its TTFT in parts, and what ran beside it as it was submitted."""

    request_id: Annotated[str, doc("Its X-Request-Id.")]
    trace_id: Annotated[str, doc("Its W3C trace id.")]
    workload_class: Annotated[str, doc("Its workload class.")]
    endpoint_url: Annotated[str, doc("The URL that was asked.")]
    status: Annotated[str, doc("What became of it.")]
    submitted_s: Annotated[float, doc("Its submission after the start of the window.", "s")]
    ttft_ms: Annotated[float, doc("Its time to first token.", "ms")]
    source: Annotated[str, doc("Where its parts are from: trace, response, histogram or none.")]
    error_ms: Annotated[Amount | None, doc("Standard error of the least certain part; null without a source.", "ms")]
    input_tokens: Annotated[int | None, doc("Its input tokens by the server's usage, else by the tokenizer.", "tokens")]
    requests_waiting: Annotated[
        float | None, doc("Requests waiting in the engine as it was submitted; null where not known.", "requests")
    ]
    requests_running: Annotated[
        float | None, doc("Requests running in the engine as it was submitted; null where not known.", "requests")
    ]
    in_flight: Annotated[Count, doc("Our other requests sent before it that had not ended.", "requests")]

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> float | None:
            """Return the part of that name."""


def slowest(
    requests: RequestLog, parts: Parts, waiting: Floats | Missing, running: Floats | Missing, *, start_ns: int
) -> list[SlowRequest]:
    """Return the five requests with the longest TTFT, the longest first; fewer where fewer have one.

    `waiting` and `running` [n] are those of the engine at each submission.
    """
    timed = np.flatnonzero(np.isfinite(parts.ttft_s))
    order = timed[np.argsort(-parts.ttft_s[timed], kind="stable")][:MOST]
    return [_request(requests, parts, row, waiting, running, start_ns) for row in order.tolist()]


def _request(
    requests: RequestLog, parts: Parts, row: int, waiting: Floats | Missing, running: Floats | Missing, start_ns: int
) -> SlowRequest:
    at_ns = requests.submit_ns[row]
    open_then = (requests.submit_ns >= 0) & (requests.submit_ns < at_ns)
    open_then &= (requests.end_ns < 0) | (requests.end_ns > at_ns)
    tokens = finite(input_tokens(requests)[row])
    return SlowRequest(
        request_id=requests.request_id[row],
        trace_id=requests.trace_id[row],
        workload_class=requests.workload_class[row],
        endpoint_url=requests.endpoint_url[row],
        status=requests.status[row],
        submitted_s=float(at_ns - start_ns) / 1e9,
        ttft_ms=float(stamped_ms(parts.ttft_s[row])),
        **{json_name(part): finite(1e3 * parts.seconds(part)[row]) for part in TTFT_PARTS},
        source=parts.source[row],
        error_ms=finite(1e3 * parts.error_s[row]),
        input_tokens=None if tokens is None else int(tokens),
        requests_waiting=None if isinstance(waiting, Missing) else finite(waiting[row]),
        requests_running=None if isinstance(running, Missing) else finite(running[row]),
        in_flight=int(open_then.sum()),
    )
