"""A run's requests in parts while it goes: by spans once those had time to come, else by estimates."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from sent_spans import S, engine, export

from loadgen.log import RequestLog, select
from scraper.exposition import Series
from scraper.log import Row
from sidecar.live_parts import LiveParts

TESTS = Path(__file__).parents[1]
Data = dict[str, npt.NDArray[Any]]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TESTS / "correlator" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


recordings = _load("recordings")


@pytest.fixture(scope="module")
def data() -> Data:
    with np.load(TESTS / "data/vllm_overload.npz") as file:
        return {name: file[name] for name in file.files}


def log_of(data: Data) -> RequestLog:
    start_ns = int(data["start_ns"])
    chunks = np.split(np.cumsum(data["chunk_ns"]) + start_ns, data["chunk_start"][1:-1])
    rows = [
        {
            "phase": "measure",
            "status": "ok",
            "finish_reason": "length",
            "trace_id": (place + 1).to_bytes(16).hex(),
            "dispatch_ns": int(data["submit_ns"][place]) + start_ns,
            "submit_ns": int(data["submit_ns"][place]) + start_ns,
            "first_output_ns": int(data["first_output_ns"][place]) + start_ns,
            "first_token_ns": int(data["first_output_ns"][place]) + start_ns,
            "last_token_ns": int(data["end_ns"][place]) + start_ns,
            "end_ns": int(data["end_ns"][place]) + start_ns,
            "input_tokens": int(data["input_tokens"][place]),
            "output_tokens": int(data["output_tokens"][place]),
            "chunks": chunks[place],
        }
        for place in range(len(data["submit_ns"]))
    ]
    log: RequestLog = recordings.request_log(rows)
    return log


def pages_of(data: Data) -> list[Row]:
    start_ns = int(data["start_ns"])
    series = tuple(
        Series(name=name, labels=tuple((key, value) for key, value in labels), family=family, type=kind, help="")
        for name, labels, family, kind in json.loads(str(data["series"]))
    )
    stamps = zip(data["scrape_request_ns"].tolist(), data["scrape_response_ns"].tolist(), strict=True)
    return [
        Row(
            url="http://engine.test/metrics",
            tick_ns=asked + start_ns,
            request_ns=asked + start_ns,
            response_ns=answered + start_ns,
            series=series,
            values=values,
            changed=True,
        )
        for (asked, answered), values in zip(stamps, data["scrape_values"], strict=True)
    ]


def passed(log: RequestLog, parts: LiveParts, pages: list[Row], spans: dict[int, bytes]) -> None:
    """Let a run go by, a second at a time; spans come a second after their request's end."""
    order = np.argsort(log.end_ns)
    now_ns, last_ns = int(log.submit_ns.min()), int(log.end_ns.max()) + 40 * S
    while now_ns < last_ns:
        for row in [row for row in order.tolist() if now_ns - 2 * S <= log.end_ns[row] < now_ns - S and row in spans]:
            parts.spans(spans[row])
        ended = order[(log.end_ns[order] >= now_ns) & (log.end_ns[order] < now_ns + S)]
        now_ns += S
        if len(ended):
            parts.ended(select(log, ended), now_ns)
        while pages and pages[0].response_ns < now_ns:
            parts.scraped(pages.pop(0))
        parts.poll(now_ns)


def sum_s(parts: LiveParts, source: str) -> float:
    return sum(one.sum_s for (_, name), one in parts.counts.ttft.items() if name == source)


def test_requests_are_estimated_as_they_end(data: Data):
    """Each is counted once, the parts add up to what they waited, and the queue is near what the engine says it was."""
    log, parts = log_of(data), LiveParts()
    passed(log, parts, pages_of(data), {})
    assert {"trace": 0, "response": 0, "histogram": 161, "none": 0} == parts.counts.requests
    assert float((log.first_token_ns - log.submit_ns).sum() / 1e9) == pytest.approx(sum_s(parts, "histogram"))
    queue_s = parts.counts.ttft["queue", "histogram"].sum_s
    assert float(data["queue_s"].sum()) == pytest.approx(queue_s, rel=0.01)


def test_spans_that_come_in_time_go_before_estimates(data: Data):
    """To the number that the engine says; what has none is estimated all the same."""
    log, parts = log_of(data), LiveParts()
    spans = {}
    for row in range(100):
        times = {"queue": data["queue_s"][row], "prefill": data["prefill_s"][row]}
        one = engine(
            trace=(row + 1).to_bytes(16),
            queue_ms=1e3 * float(times["queue"]),
            prefill_ms=1e3 * float(times["prefill"]),
            ttft_ms=1e3 * float(times["queue"] + times["prefill"]),
        )
        spans[row] = msgspec.msgpack.encode(export([one], at_s=float(log.end_ns[row] / 1e9) - 1.7e9))
    first = min(spans)
    parts.spans(spans[first])
    passed(log, parts, pages_of(data), spans)
    assert {"trace": 100, "response": 0, "histogram": 61, "none": 0} == parts.counts.requests
    assert float(data["queue_s"][:100].sum()) == pytest.approx(parts.counts.ttft["queue", "trace"].sum_s, abs=1e-6)


def test_without_pages_and_spans_requests_are_counted_as_what_they_are(data: Data):
    """Not broken down; none is forgotten, and none is kept for ever."""
    log, parts = log_of(data), LiveParts()
    passed(log, parts, [], {})
    parts.poll(int(log.end_ns.max()) + 200 * S)
    assert 161 == parts.counts.requests["none"]
