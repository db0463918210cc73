"""Warnings of a run that is fine but for some changes."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import summaries
from logs import request_log

from sidelight.correlator.opening import WatchRun
from sidelight.exporter.evaluation.client import workload
from sidelight.exporter.evaluation.warnings import warnings
from sidelight.exporter.summary.correlation import Correlation, ReceivedSpans
from sidelight.loadgen.requests.self_check.check import SelfCheck, self_check
from sidelight.loadgen.requests.summary import ClientSummary, client_summary
from sidelight.recorded.events import Event
from sidelight.recorded.run import Run
from sidelight.scraper.series.table import EndpointSeries
from sidelight.scraper.spans.requests import engine_spans
from sidelight.scraper.window.summary import Endpoint, Scrapes, Server

REPLY = {"submit": 100, "first": 120, "last": 140, "end": 145, "output": 3, "chunks": (120, 130, 140)}
COUNTED = summaries.counter(1000.0, 100.0)
ENDPOINT = Endpoint(
    url="http://e/metrics",
    engine="vllm",
    scrapes=Scrapes(ok=80, failed=0, failures={}),
    requests_finished=COUNTED,
)
PROBED = dict.fromkeys(ReceivedSpans.__struct_fields__, 0) | {"health_probes": 5}
BLANK = "correlation.breakdown.blank_output_ms"
SERVER = summaries.server(prefix_cache_hits=summaries.counter(0.0, 0.0), prefix_cache_queries=COUNTED)
CORRELATION = msgspec.structs.replace(summaries.correlated(), client_requests=50, server_requests=50)
FINE: dict[str, Any] = {
    "client": msgspec.to_builtins(client_summary(request_log(*[REPLY] * 50))),
    "server": msgspec.to_builtins(msgspec.structs.replace(SERVER, endpoints=[ENDPOINT])),
    "correlation": msgspec.to_builtins(CORRELATION),
    "check": msgspec.to_builtins(msgspec.structs.replace(self_check(request_log(), [], open_loop=True), trusted=True)),
}


def said(
    change: dict[str, Any],
    *,
    sent: Sequence[dict[str, Any]] = (),
    watched: Any = None,
    endpoints: Sequence[EndpointSeries] = (),
    **manifest: Any,
) -> list[str]:
    """Return the warnings of a run that is fine but for these changes."""
    sections = deepcopy(FINE)
    for path, value in change.items():
        *above, last = path.split(".")
        place: Any = sections
        for key in above:
            place = place[int(key) if key.isdigit() else key]
        place[last] = value
    sections["server"] = msgspec.convert(sections["server"], Server)
    sections["check"] = msgspec.convert(sections["check"], SelfCheck)
    sections["correlation"] = msgspec.convert(sections["correlation"], Correlation)
    sections["client"] = msgspec.convert(sections["client"], ClientSummary)
    logs = {
        "path": Path(),
        "manifest": {"status": "complete", "config": {}, **manifest},
        "requests": request_log(*sent),
        "worker_stats": (),
        "endpoints": tuple(endpoints),
        "spans": engine_spans([]),
        "events": (
            Event(at_ns=1, name="planned", data=manifest.get("planned", {"phase": "measure"})),
            *(Event(at_ns=1, name="note", data={"text": text}) for text in manifest.get("notes", ())),
        ),
    }
    run = Run(**logs) if watched is None else WatchRun(**logs, watched=watched)
    return list(warnings(run, workload(run), **sections))
