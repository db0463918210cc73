"""A whole run with an engine that sends spans, into one collector: client and engine stand in one waterfall."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from processes import engine, sidelight
from test_spans_end_to_end import LOAD

from scraper.spans.receiver import Receiver
from scraper.spans.spec import ReceiverSpec
from sidecar.cli import free_pair
from sidecar.run import open_run

TTFT = ("request network", "engine frontend", "queue", "prefill", "response network", "blank output")


def spans_of(exports: list[ExportTraceServiceRequest], *, ours: bool) -> Iterator[Span]:
    """Our spans by their resource, or all others."""
    for export in exports:
        for resource in export.resource_spans:
            names = {one.value.string_value for one in resource.resource.attributes if one.key == "service.name"}
            if ours == ("sidelight" in names):
                for scope in resource.scope_spans:
                    yield from scope.spans


async def test_client_and_engine_stand_in_one_waterfall(tmp_path: Path):
    """Each engine span is a child of its request's; the phases beside it add up to the client's TTFT."""
    exports: list[ExportTraceServiceRequest] = []
    spec = ReceiverSpec(grpc="127.0.0.1:0", http="127.0.0.1:0")
    address = free_pair()
    async with Receiver(spec, log=None, say=print, deliver=lambda _, one: exports.append(one)) as collector:
        to = ("--otlp-forward", f"grpc://127.0.0.1:{collector.grpc_port}")
        to = (*to, "--otlp-export", f"http://127.0.0.1:{collector.http_port}")
        with engine("--otlp-endpoint", f"http://{address}") as (url, _):
            done = await asyncio.to_thread(
                sidelight, "run", "--url", url, *LOAD, "--otlp-listen", address, *to, "--out", tmp_path / "run"
            )
    assert 0 == done.code, done.err
    run = open_run(tmp_path / "run")
    ours = list(spans_of(exports, ours=True))
    clients = {(span.trace_id, span.span_id): span for span in ours if not span.parent_span_id}
    assert run.requests.trace_id.tolist() == [trace.hex() for trace, _ in clients]
    # The engine tells of a request before the run as well, by which the target was tried.
    assert set(clients) <= {(span.trace_id, span.parent_span_id) for span in spans_of(exports, ours=False)}
    waits_ns = dict.fromkeys(clients, 0)
    for span in ours:
        if span.name in TTFT:
            waits_ns[span.trace_id, span.parent_span_id] += span.end_time_unix_nano - span.start_time_unix_nano
    ttft_ns = run.requests.first_token_ns - run.requests.submit_ns
    assert [] == [
        (wait_ns, ttft)
        for wait_ns, ttft in zip(waits_ns.values(), ttft_ns.tolist(), strict=True)
        if abs(wait_ns - ttft) > 10
    ]
