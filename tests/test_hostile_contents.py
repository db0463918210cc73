"""A law: whatever stands in the logs of a run, its report is derived, and what it calls exact adds up."""

from __future__ import annotations

import json
import zlib
from array import array
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import golden_files
import msgspec
import numpy as np
import pytest
import series
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from sent_requests import HEAD, planned
from sent_spans import MS, NOON, call, engine, export, gateway

from sidelight.correlator.exact.table import SLACK_S
from sidelight.correlator.parts import TTFT_PARTS
from sidelight.exporter.evaluation.evaluate import Evaluated
from sidelight.exporter.report.sections import as_text
from sidelight.loadgen.records import RequestPart, append_record, plan_end, trace_id
from sidelight.recorded.directory import write_json
from sidelight.recorded.events import Event
from sidelight.rundir.frames import FrameLog
from sidelight.scraper.perf_metrics import TimingLog
from sidelight.scraper.series.log import ScrapeLog
from sidelight.sidecar.report.derive import derive

REQUESTS = 6
URL = "http://h/v1/chat/completions"
RUN_ID = "20260101-000000-abcdef"
PAGE_URL = "http://h/metrics"
MOST_NS = 2**64 - 1
ODD = (0.0, -1.0, 1e-9, 0.05, 0.2, 10.0, 1e6, 1e18, 1e308, -1e308)
UNTRUE = (*ODD, float("nan"), float("inf"), float("-inf"))
seconds = st.sampled_from(UNTRUE) | st.floats(0.0, 0.4)
stamps_ms = st.sampled_from((-1e6, -300.0, 0.0, 150.0, 1e6, 1e9)) | st.floats(-500.0, 2000.0)
spans_drawn = st.lists(
    st.fixed_dictionaries(
        {
            "kind": st.sampled_from(("engine", "engine", "engine", "call", "gateway")),
            "request": st.integers(0, REQUESTS),
            "span_id": st.sampled_from(("a", "b", "c", "d", "client", "")),
            "parent": st.sampled_from(("", "a", "b", "client", "none")),
            "start_ms": stamps_ms,
            "end_ms": stamps_ms,
            "times": st.fixed_dictionaries(
                {}, optional=dict.fromkeys(("queue_ms", "prefill_ms", "decode_ms", "ttft_ms", "e2e_ms"), seconds)
            ),
            "named": st.sampled_from((True, True, False)),
            "instance": st.sampled_from(("", "one", "two")),
            "at_s": st.sampled_from((0.0, 1.0, 5.0, 1e6)),
        }
    ),
    max_size=12,
)
# How the replies of vLLM, llama.cpp, SGLang and Dynamo state times.
STATED = {
    "metrics": ("queue_time_ms", "time_to_first_token_ms", "generation_time_ms"),
    "timings": ("prompt_ms", "predicted_ms", "prompt_per_second", "predicted_per_second", "predicted_n"),
    "meta_info": (
        *("queue_time", "e2e_latency", "first_token_latency", "forward_entry_time", "prefill_finished_time"),
        *("api_server_dispatch_finish_ts", "decode_throughput"),
    ),
    "nvext": ("prefill_wait_time_ms", "prefill_time_ms", "ttft_ms", "total_time_ms"),
}
milliseconds = st.sampled_from((*ODD, 1, 50, 2**62)) | st.floats(0.0, 400.0)
replies_drawn = st.lists(
    st.one_of(
        st.none(),
        *(
            st.dictionaries(st.sampled_from(keys), milliseconds).map(
                lambda times, place=place: {place: {"timing": times} if place == "nvext" else times}
            )
            for place, keys in STATED.items()
        ),
    ),
    min_size=REQUESTS,
    max_size=REQUESTS,
)
values = st.sampled_from(("0", "1", "5", "-1", "NaN", "+Inf", "-Inf", "1e308", "-1e308", "3.7", "9007199254740993"))
bounds = st.lists(st.tuples(st.sampled_from(("0.1", "0.5", "1.0", "1", "-1", "NaN", "1e308", "0")), values), max_size=4)
HISTOGRAMS = {
    "vllm": (
        *(series.QUEUE, series.PREFILL, "vllm:request_decode_time_seconds", "vllm:time_to_first_token_seconds"),
        *("vllm:e2e_request_latency_seconds", "vllm:request_prompt_tokens"),
    ),
    "sglang": (
        *("sglang:queue_time_seconds", "sglang:time_to_first_token_seconds", "sglang:e2e_request_latency_seconds"),
    ),
}
COUNTERS = {
    "vllm": ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:num_preemptions_total"),
    "sglang": ("sglang:prompt_tokens_total", "sglang:generation_tokens_total", "sglang:num_requests_total"),
}
GAUGES = {
    "vllm": (series.WAITING, "vllm:num_requests_running", "process_start_time_seconds"),
    "sglang": ("sglang:num_queue_reqs", "sglang:num_running_reqs", "process_start_time_seconds"),
}
labels = st.sampled_from(("", 'e="0"', 'e="1"', 'priority=""', 'priority="1",tp_rank="0"'))


@st.composite
def pages(draw: st.DrawFn) -> list[tuple[float, str | None]]:
    """Draw scrapes of an engine's pages: when each came, in s, and its text."""
    engine_name = draw(st.sampled_from(("vllm", "sglang")))
    steady = draw(st.booleans())
    shape = draw(bounds)
    drawn: list[tuple[float, str | None]] = []
    for number in range(draw(st.integers(0, 6))):
        at_s = draw(st.sampled_from((0.5 * number, 0.5 * number, -3.0, 0.5, 1e5)))
        page = "" if draw(st.integers(0, 9)) else None
        for family in HISTOGRAMS[engine_name]:
            if page is not None:
                counted = draw(st.integers(0, 6).map(str) | values)
                buckets = shape if steady else draw(bounds)
                labelled = "" if steady else draw(labels)
                page += series.histogram(family, counted, draw(values), buckets=buckets, labels=labelled)
        for kind, names in (("counter", COUNTERS), ("gauge", GAUGES)):
            for name in names[engine_name]:
                if page is not None:
                    page += series.gauge(name, draw(values), labels=("" if steady else draw(labels),), kind=kind)
        drawn.append((at_s, None if page is None else page + series.END))
    return drawn


MOMENTS = ("arrival_time", "first_scheduled_time", "first_token_time", "last_token_time", "server_arrival_time")
records_drawn = st.lists(
    st.dictionaries(st.sampled_from(MOMENTS), st.sampled_from(ODD) | st.floats(-1.0, 3.0), max_size=5), max_size=5
)


def reply(stated: dict[str, Any] | None) -> bytes:
    """Return the events of a reply of three tokens, the last of them with the times that it states."""
    delta = {"index": 0, "finish_reason": None}
    events = [{"choices": [{**delta, "delta": {"content": f" w{n}"}}]} for n in range(3)]
    usage = {"choices": [], "usage": {"prompt_tokens": 17, "completion_tokens": 3}, **(stated or {})}
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in (*events, end, usage)) + b"data: [DONE]\n\n"


def submitted_ms(index: int) -> float:
    return 200.0 * index


def request(index: int, stated: dict[str, Any] | None) -> RequestPart:
    """Return a request that waits 150 ms for its first token, and 400 ms for its last."""
    body, began_ns = reply(stated), NOON + round(submitted_ms(index) * MS)
    first = body.index(b"\n\n") + 2
    return RequestPart(
        index=index,
        last=True,
        url=URL,
        **dict.fromkeys(("scheduled_ns", "dispatch_ns", "connected_ns", "submit_ns"), began_ns),
        status=200,
        head=HEAD,
        reads_ns=array("q", [began_ns + 150 * MS, began_ns + 400 * MS]).tobytes(),
        read_ends=array("q", [first, len(body)]).tobytes(),
        body=zlib.compress(body, 1),
        end_ns=began_ns + 400 * MS,
    )


def span_of(drawn: dict[str, Any]) -> Any:
    """Return the span that was drawn: of one of the requests, or of another."""
    index = drawn["request"]
    whole: dict[str, Any] = {"trace": bytes.fromhex(trace_id(RUN_ID, index)) if index < REQUESTS else b"o" * 16}
    if drawn["kind"] == "engine":
        times_ms = {name: time_s * 1e3 for name, time_s in drawn["times"].items()}
        sent = engine(drawn["span_id"], drawn["parent"], start_ms=0.0, end_ms=0.0, **whole, **times_ms)
    else:
        make = call if drawn["kind"] == "call" else gateway
        sent = make(drawn["span_id"], drawn["parent"], first_ms=drawn["times"].get("ttft_ms"), **whole)
    began_ms = submitted_ms(index)
    for name in ("start", "end"):
        stamp_ns = NOON + round((began_ms + drawn[f"{name}_ms"]) * MS)
        setattr(sent, f"{name}_time_unix_nano", min(max(stamp_ns, 0), MOST_NS))
    if not drawn["named"]:
        sent.ClearField("trace_id" if drawn["parent"] else "span_id")
    return sent


def written(path: Path, spans: list[Any], replies: list[Any], scraped: list[Any], records: list[Any]) -> Path:
    """Write a run of these contents, with the writers of a run."""
    raw = path / "raw"
    raw.mkdir(parents=True)
    recorded = json.loads((golden_files.GOLDEN / "vllm_spans" / "manifest.json").read_text())
    times = {"started_ns": NOON - 10**9, "ended_ns": NOON + 5 * 10**9}
    write_json(path / "manifest.json", {**recorded, **times, "run_id": RUN_ID, "status": "complete"})
    with FrameLog(raw / "plan-measure.log") as log:
        for record in (*(planned(index, 3) for index in range(REQUESTS)), plan_end("measure")):
            append_record(log, record)
    with FrameLog(raw / "requests-0.log") as log:
        for index, stated in enumerate(replies):
            append_record(log, request(index, stated))
    with FrameLog(raw / "events.log") as log:
        about = {"phase": "measure"}
        for at_ns, name in ((NOON, "phase_start"), (NOON + 3 * 10**9, "phase_end")):
            log.append(msgspec.msgpack.encode(Event(at_ns=at_ns, name=name, data=about)))
    scrape_log = ScrapeLog(raw / "scrapes-0.log")
    for at_s, page in scraped:
        at_ns, error = NOON + round(at_s * 1e9), "" if page else "connect: refused"
        scrape_log.append(series.scraped(at_ns, page or "", url=PAGE_URL, error=error))
    scrape_log.close()
    with FrameLog(raw / "spans-0.log") as log:
        for drawn in spans:
            sent = export([span_of(drawn)], at_s=drawn["at_s"], instance=drawn["instance"])
            log.append(msgspec.msgpack.encode(sent))
    timing_log = TimingLog(raw / "timings-0.log")
    body = [{"request_id": n, "perf_metrics": {"timing_metrics": times}} for n, times in enumerate(records)]
    timing_log.append(series.scraped(NOON + 2 * 10**9, json.dumps(body), url="http://h/perf_metrics"))
    timing_log.close()
    return path


def check(derived: Evaluated) -> None:
    """Whole requests stay whole, and parts that are exact add up to what the client waited, each within it."""
    parts, client = derived.parts, derived.summary.client
    ended = client.requests
    assert REQUESTS == len(parts) == ended.sent == ended.ok
    assert 0 == ended.failed + ended.refused + ended.cancelled + ended.in_flight
    exact = parts.covered & np.isin(parts.source, ("trace", "response"))
    columns = np.column_stack([parts.seconds(part) for part in TTFT_PARTS])[exact]
    ttft_s = parts.ttft_s[exact]
    assert np.nansum(columns, axis=1) == pytest.approx(ttft_s, abs=1e-6)
    assert not np.isinf(columns).any()
    assert (np.nan_to_num(columns) >= -SLACK_S).all(), columns
    assert (np.nan_to_num(columns) <= ttft_s[:, None] + SLACK_S).all(), columns


# A queue longer by exactly the slack than what holds it: the engine's TTFT, and the client's.
AT_THE_BOUND = [
    {"nvext": {"timing": {"total_time_ms": 50, "ttft_ms": 0.0, "prefill_wait_time_ms": 10.0}}},
    {"nvext": {"timing": {"total_time_ms": 400, "prefill_wait_time_ms": 160.0}}},
    *[None] * (REQUESTS - 2),
]


# Without shrinking: an example costs a tenth of a second.
@settings(
    max_examples=20, derandomize=True, phases=(Phase.explicit, Phase.generate), suppress_health_check=list(HealthCheck)
)
@example(spans=[], replies=AT_THE_BOUND, scraped=[], records=[])
@given(spans=spans_drawn, replies=replies_drawn, scraped=pages(), records=records_drawn)
def test_no_content_of_a_log_ends_a_report(spans: Any, replies: Any, scraped: Any, records: Any):
    """Spans, times in replies, pages and records of timings of any value within their types."""
    with TemporaryDirectory() as path:
        derived = derive(written(Path(path) / "run", spans, replies, scraped, records), ("json", "text", "html"))
        assert derived.unwritten is None
        assert as_text(derived.summary)
    check(derived)
