"""Recordings of a real vLLM as the logs of a run have them: requests, the engine's spans, and its scraped pages."""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadgen.log import RequestLog
from scraper.endpoint import Scrape
from scraper.engine_spans import EngineSpans, engine_spans
from scraper.log import rows
from scraper.series import EndpointSeries, build
from scraper.span_log import packed

SHARED = Path(os.environ.get("SIDELIGHT_SHARED", Path(__file__).parents[3] / "shared"))
URL = "http://engine.test"
MISSING: Mapping[str, Any] = {"Int64s": -1, "Texts": "", "Float64s": np.nan}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorded run. `rows` are the requests as they were noted, in the order of the log's."""

    rows: list[dict[str, Any]]
    requests: RequestLog
    spans: EngineSpans
    endpoints: tuple[EndpointSeries, ...]


def recording(name: str) -> Recording:
    """Read a recording of those in `shared`; where there is none, the test is skipped."""
    path = SHARED / "fixtures/vllm/recorded" / name
    if not path.is_dir():
        pytest.skip(f"no recording at {path}")
    anchor = json.loads((path / "load_meta.json").read_text(encoding="utf-8"))["anchor_start"]
    offset_ns = anchor["unix_ns"] - anchor["mono_ns"]
    made = list(lines(path / "requests.jsonl.gz"))
    exports = lines(path / "otlp_exports.jsonl.gz")
    return Recording(
        rows=made,
        requests=request_log([request(one, offset_ns) for one in made]),
        spans=engine_spans(packed(one["recv_unix_ns"], "grpc", base64.b64decode(one["body_b64"])) for one in exports),
        endpoints=build(rows(pages(path / "scrapes.jsonl.gz", offset_ns))),
    )


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def pages(path: Path, offset_ns: int) -> Iterator[Scrape]:
    """Read the pages; the first line is an anchor."""
    for one in lines(path):
        if "k" in one:
            yield Scrape(
                url=f"{URL}/metrics",
                tick_ns=one["due_ns"] + offset_ns,
                request_ns=one["t0_ns"] + offset_ns,
                response_ns=one["t1_ns"] + offset_ns,
                status=one["status"],
                content_type=one["ctype"],
                body=one["body"].encode(),
                error="",
            )


def request(one: Mapping[str, Any], offset_ns: int) -> dict[str, Any]:
    """Put what was noted of a request into the columns of a log; what was not noted is left out."""
    metrics = {key: value for key, value in (one.get("server_metrics") or {}).items() if value is not None}
    chunks = [event[0] + offset_ns for event in one["events"] if event[3]]
    stamps = {
        "dispatch_ns": one["submit_ns"],
        "submit_ns": one["submit_ns"],
        "first_output_ns": one["first_token_ns"] if one["stream"] else None,
        "first_token_ns": one["first_token_ns"] if one["stream"] else None,
        "last_token_ns": one["events"][-1][0] if one["stream"] and one["events"] and chunks else None,
        "end_ns": one["done_ns"],
    }
    usage = one["usage"] or {}
    return {
        "phase": "measure",
        "workload_class": one["phase"],
        "endpoint_url": URL,
        "trace_id": one["trace_id"],
        "request_id": one["request_id"] or "",
        "response_id": one["response_id"] or "",
        "status": status(one),
        "http_status": one["status"] or 0,
        **{name: stamp + offset_ns for name, stamp in stamps.items() if stamp is not None},
        "input_tokens": usage.get("prompt_tokens", -1),
        "output_tokens": usage.get("completion_tokens", -1),
        "finish_reason": one["finish_reason"] or "",
        "timings_source": "vllm" if metrics else "",
        "server_queue_ms": metrics.get("queue_time_ms", np.nan),
        "server_prefill_ms": metrics.get("time_to_first_token_ms", np.nan),
        "server_decode_ms": metrics.get("generation_time_ms", np.nan),
        "chunks": chunks,
    }


def status(one: Mapping[str, Any]) -> str:
    """The status that a request log gives such a reply."""
    if one["error"] == "client_cancelled":
        return "cancelled"
    if (one["status"] or 0) >= 400:
        return "refused" if one["status"] < 500 else "failed"
    return "ok" if one["finish_reason"] else "failed"


def request_log(told: list[dict[str, Any]]) -> RequestLog:
    """Make a log of requests told by what is known of each; `chunks` are the stamps of its chunks."""
    columns: dict[str, Any] = {}
    for column in fields(RequestLog):
        kind = str(column.type)
        missing = MISSING.get(kind, False)
        dtype = {"Int64s": np.int64, "Texts": np.object_, "Float64s": np.float64}.get(kind, np.bool_)
        columns[column.name] = np.array([one.get(column.name, missing) for one in told], dtype=dtype)
    chunks = [np.array(one.get("chunks", ()), dtype=np.int64) for one in told]
    columns["index"] = np.arange(len(told))
    columns["chunk_ns"] = np.concatenate([np.empty(0, np.int64), *chunks])
    columns["chunk_chars"] = np.ones(len(columns["chunk_ns"]), dtype=np.int64)
    columns["chunk_start"] = np.concatenate([[0], np.cumsum([len(one) for one in chunks])]).astype(np.int64)
    return RequestLog(**columns)
