"""What a run against a real engine has to agree with: the engine's page, its spans, and the times in its replies."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live.runs import Measured
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from sidelight import open_run
from sidelight.loadgen import records
from sidelight.loadgen.protocols.reading.reply import unpack
from sidelight.rundir.stats import Missing
from sidelight.scraper.engines.recognition import canonical
from sidelight.scraper.spans.log import ExportRecord, read_log

WITHIN_MS = 1.0
SENT_AGAIN = "sent a second time, on a new connection"
#: A part, the attribute of the request's span that has it, and the stage that is it.
STATED = {
    "queue_ms": ("gen_ai.latency.time_in_queue", "prefill_waiting"),
    "prefill_ms": ("gen_ai.latency.time_in_model_prefill", "prefill_forward"),
}
#: A column of the requests, and the page's quantity that counts the same.
TOKENS = {"input_tokens": "prompt_tokens", "output_tokens": "generation_tokens"}
Times = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a run showed: a row of the table, and what is wrong with it in sentences."""

    row: Mapping[str, object]
    wrong: tuple[str, ...]


def check(run: Measured, names: Mapping[str, str], *, requests: int, has_spans: bool) -> Checked:
    """Compare a run of so many requests with what the engine said; `names` begin its row."""
    rows, report = run.requests(), " ".join(run.report.split())
    failed = sum(row["status"] != "ok" for row in rows)
    retried = int(run.summary["client"]["retried"])
    tokens = {name: (_total(rows, name), _page_increase(run, quantity)) for name, quantity in TOKENS.items()}
    stated = (_span_times if has_spans else _reply_times)(run.directory)
    differences = {part: list(_differences(rows, stated, part)) for part in STATED}
    worst = {part: round(max(values), 6) for part, values in differences.items() if values}
    impossible = [row["request_id"] for row in rows if row["breakdown_quality"] == "exact" and _is_impossible(row)]
    wrong = [
        *([f"{failed} of {len(rows)} requests failed"] if failed else []),
        *([f"{len(rows)} requests instead of {requests}"] if len(rows) != requests else []),
        *(f"{name}: {ours} here, {theirs:g} by the page" for name, (ours, theirs) in tokens.items() if ours != theirs),
        *(f"{part} differs by {value:.3f} ms" for part, value in worst.items() if value > WITHIN_MS),
        *(f"an exact breakdown of {each} has a part that cannot be" for each in impossible),
        *([f"the report does not say that {retried} were sent again"] if retried and SENT_AGAIN not in report else []),
        *([] if any(differences.values()) else ["no request has a time to compare with the engine's own"]),
    ]
    row: dict[str, object] = {
        **names,
        "failed": f"{failed} of {len(rows)}",
        "sent again": retried,
        **{f"{name}, here / page": f"{ours} / {theirs:g}" for name, (ours, theirs) in tokens.items()},
        "with times": max(map(len, differences.values())),
        **{f"{part.removesuffix('_ms')} off by, ms": worst.get(part, "not stated") for part in STATED},
        "exact": sum(row["breakdown_quality"] == "exact" for row in rows),
        "preempted": _page_increase(run, "preemptions"),
        "load average": run.load_average,
        "as it should": "no" if wrong else "yes",
    }
    return Checked(row=row, wrong=tuple(wrong))


def _total(rows: Iterable[Mapping[str, Any]], column: str) -> int:
    return sum(row[column] or 0 for row in rows)


def _page_increase(run: Measured, quantity: str) -> float:
    """Return by how much a counter rose between the first scrape and the last; NaN where the page does not show it."""
    (endpoint,) = open_run(run.directory).scrapes
    source = canonical(endpoint.series, run.summary["server"]["engine"]["name"])[quantity]
    if isinstance(source, Missing):
        return math.nan
    first, last = (endpoint.values[row][list(source.columns)] for row in (0, -1))
    return float(sum(last) - sum(value for value in first if not math.isnan(value)))


def _reply_times(directory: Path) -> Times:
    """Return what replies said, by response id, out of their bytes as they came."""
    bodies: dict[int, bytes] = {}
    for path in (directory / "raw").glob("requests-*.log"):
        for record in records.read_log(path):
            if isinstance(record, records.RequestPart):
                bodies[record.index] = bodies.get(record.index, b"") + unpack(record).body
    times = {}
    for body in bodies.values():
        name = re.search(rb'"id":"([^"]+)"', body)
        last = {key.decode(): float(value) for key, value in re.findall(rb'"(\w+)":(-?\d[\d.e+-]*)', body)}
        if name:
            times[name[1].decode()] = {part: value for part, value in _times_in(last).items() if value is not None}
    return times


def _times_in(last: Mapping[str, float]) -> dict[str, float | None]:
    """Return queue and prefill among the numbers that a reply had last: llama.cpp's, vLLM's or SGLang's."""
    if "prompt_ms" in last:
        return {"prefill_ms": last["prompt_ms"]}
    if "queue_time_ms" in last:
        return {"queue_ms": last["queue_time_ms"], "prefill_ms": last.get("time_to_first_token_ms")}
    if "queue_time" in last and not last.get("num_retractions"):
        prefill_s = last["prefill_finished_time"] - last["forward_entry_time"]
        return {"queue_ms": last["queue_time"] * 1e3, "prefill_ms": prefill_s * 1e3}
    return {}


def _span_times(directory: Path) -> Times:
    """Return what spans said, by response id: vLLM's in attributes, SGLang's as stages in the request's trace.

    The span between a stage and its request's may be missing: it ends behind both, and the run does not wait for it.
    """
    spans = list(_spans(directory))
    names = {span["trace"]: str(name) for span in spans if (name := span["attributes"].get("gen_ai.request.id"))}
    times: dict[str, dict[str, float]] = {name: {} for name in names.values()}
    for span in (span for span in spans if span["trace"] in names):
        for part, (attribute, stage) in STATED.items():
            if span["name"] == stage:
                times[names[span["trace"]]][part] = span["ms"]
            elif attribute in span["attributes"]:
                times[names[span["trace"]]].setdefault(part, span["attributes"][attribute] * 1e3)
    return times


def _spans(directory: Path) -> Iterator[dict[str, Any]]:
    """Give all spans as they came; nothing of the product reads them here but the log's frames."""
    records = (record for path in sorted((directory / "raw").glob("spans-*.log")) for record in read_log(path))
    for record in records:
        export = ExportTraceServiceRequest.FromString(record.body() if isinstance(record, ExportRecord) else b"")
        scopes = (scope for resource in export.resource_spans for scope in resource.scope_spans)
        for span in (span for scope in scopes for span in scope.spans):
            values = ((each.key, each.value) for each in span.attributes)
            yield {
                "trace": span.trace_id.hex(),
                "name": span.name,
                "ms": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6,
                "attributes": {key: getattr(value, str(value.WhichOneof("value"))) for key, value in values},
            }


def _differences(rows: Iterable[Mapping[str, Any]], stated: Times, part: str) -> Iterator[float]:
    """Give by how much a part of each joined request is off what the engine said."""
    for row in rows:
        theirs = stated.get(row["response_id"] or "", {}).get(part)
        if theirs is not None and row["breakdown_source"] in {"trace", "response"}:
            yield math.inf if row[part] is None else abs(row[part] - theirs)


def _is_impossible(row: Mapping[str, Any]) -> bool:
    """Return whether a part is negative, or larger than the whole."""
    parts = [row[f"{name}_ms"] for name in ("network", "gateway", "queue", "prefill", "other")]
    # Without a character of text there is no TTFT.
    most = math.inf if row["ttft_ms"] is None else row["ttft_ms"] + WITHIN_MS
    return any(part is not None and not -WITHIN_MS <= part <= most for part in parts)
