"""`--otlp-export`: a run's spans reach the collector that is named; one that fails costs a warning and nothing else."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from codes import raises
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from processes import Ended
from sent_requests import parts, planned
from waiting import BOUND_S

from sidelight.loadgen.records import append_record, plan_end, span_id, trace_id
from sidelight.recorded.directory import MANIFEST, RAW, create, write_json
from sidelight.recorded.events import Event, append_event
from sidelight.rundir.frames import FrameLog
from sidelight.scraper.spans.receiver import Receiver
from sidelight.scraper.spans.spec import ReceiverSpec
from sidelight.sidecar.options.checks import check_run
from sidelight.sidecar.options.config import as_recorded
from sidelight.sidecar.options.load import RunOptions

S = 10**9
RUN = "20261121-120000-abcdef"
WRITTEN = {"manifest.json", "raw", "summary.json", "report.txt", "requests.parquet", "timeslices.parquet"}

Sidelight = Callable[..., Ended]


@pytest.fixture
def collector() -> Iterator[tuple[Receiver, list[ExportTraceServiceRequest]]]:
    """A collector in a thread of its own, and what it was given."""
    given: list[ExportTraceServiceRequest] = []
    started: list[Receiver] = []
    ready, ended = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        # By its clock the year is 1970, as it is by these runs.
        spec = ReceiverSpec(grpc="127.0.0.1:0", http="127.0.0.1:0", clock_offset_ns=-time.monotonic_ns())
        async with Receiver(spec, log=None, say=print, deliver=lambda _, export: given.append(export)) as receiver:
            started.append(receiver)
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(BOUND_S)
    yield started[0], given
    loop.call_soon_threadsafe(ended.set)
    thread.join(BOUND_S)
    loop.close()


def recorded(path: Path, requests: int) -> Path:
    """Make the directory of a run of so many requests, each of a second."""
    run = create(path)
    config = as_recorded(RunOptions(url=("http://h:1",), model="m", concurrency=1))
    manifest = {"run_id": RUN, "tool": {"name": "sidelight", "version": "0"}, "config": config, "started_ns": S}
    ends = {"started_at": "1970-01-01T00:00:01.000Z", "status": "complete", "metrics_targets": []}
    write_json(run / MANIFEST, {**manifest, **ends})
    for name, at_ns in (("phase_start", S), ("phase_end", (requests + 2) * S)):
        append_event(run, Event(at_ns, name, {"phase": "measure"}))
    plan, log = FrameLog(run / RAW / "plan-measure.log"), FrameLog(run / RAW / "requests-0.log")
    for index in range(requests):
        append_record(plan, planned(index, 1))
        for part in parts(index, 1):
            append_record(log, part)
    append_record(plan, plan_end("measure"))
    plan.close()
    log.close()
    return run


@pytest.mark.parametrize("wire", ["grpc", "http"])
def test_report_sends_a_span_of_every_request(
    sidelight: Sidelight, collector: tuple[Receiver, list[ExportTraceServiceRequest]], tmp_path: Path, wire: str
):
    """With the ids that they were sent with, over either wire; the report is as without."""
    run = recorded(tmp_path / "run", 3)
    plain = sidelight("report", run)
    receiver, given = collector
    url = f"{wire}://127.0.0.1:{receiver.grpc_port if wire == 'grpc' else receiver.http_port}"
    done = sidelight("report", run, "--otlp-export", url)
    assert (0, plain.out) == (done.code, done.out)
    *lines, last = (line.strip() for line in done.err.splitlines())
    assert [f"sending the spans of 3 requests to {url}", f"{url} accepted 6 spans"] == lines
    assert re.fullmatch(re.escape(url) + r" accepted \d+ metric points", last)
    spans = given[0].resource_spans[0].scope_spans[0].spans
    assert [(trace_id(RUN, index), span_id(RUN, index)) for index in range(3)] == [
        (span.trace_id.hex(), span.span_id.hex()) for span in spans if not span.parent_span_id
    ]
    assert {"chat m", "send"} == {span.name for span in spans}


def test_a_collector_that_is_not_there_is_a_warning(
    sidelight: Sidelight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """One line that names the option, the URL and the cure; the results are written and the exit code is theirs."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    run = recorded(tmp_path / "run", 2)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # and never listens
        host = f"127.0.0.1:{reserved.getsockname()[1]}"
        done = sidelight("report", run, "--otlp-export", f"http://me:secret@{host}")
    assert 0 == done.code
    first, last = (line.strip() for line in done.err.splitlines())
    assert f"sending the spans of 2 requests to http://***@{host}" == first
    assert last == (
        f"! --otlp-export http://***@{host}: connect: Connection refused; no span was accepted; "
        f"`sidelight report {run} --otlp-export URL` sends all again"
    )
    assert {path.name for path in run.iterdir()} >= WRITTEN


@pytest.mark.parametrize(
    ("path", "lines"),
    [
        ("", ["{} accepted 6 spans", "{} takes no metrics (HTTP 404)"]),
        ("/otlp/v1/metrics", ["{} accepted N metric points"]),
        ("/refusing/v1/metrics", ["! --otlp-export {}: HTTP 400: no such tenant; no metric point was accepted; `..."]),
    ],
)
def test_a_collector_of_one_signal_is_given_that(sidelight: Sidelight, tmp_path: Path, path: str, lines: list[str]):
    """A store of traces does not know the path of metrics: no warning. A URL that ends in /v1/metrics gets no spans."""

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            known = {"/v1/traces": 200, "/otlp/v1/metrics": 200, "/refusing/v1/metrics": 400}
            self.send_response(known.get(self.path, 404))
            self.send_header("Content-Type", "text/plain")
            self.end_headers()
            self.wfile.write(b"" if known.get(self.path) == 200 else b"no such tenant" if self.path in known else b"")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    run = recorded(tmp_path / "run", 3)
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}{path}"
        done = sidelight("report", run, "--otlp-export", url)
        server.shutdown()
    said = re.sub(r"`.*", "`...", re.sub(r"accepted \d\d+ m", "accepted N m", done.err))
    assert [line.format(url) for line in lines] == [
        line.strip() for line in said.splitlines() if "sending the spans" not in line
    ]


def test_a_run_without_requests_says_that_there_are_no_spans(sidelight: Sidelight, tmp_path: Path):
    """A scrape, for instance."""
    run = recorded(tmp_path / "run", 0)
    done = sidelight("report", run, "--otlp-export", "http://127.0.0.1:9")
    assert 0 == done.code
    assert "! --otlp-export http://127.0.0.1:9: the run has no requests, so there are no spans to send\n" == done.err


@pytest.mark.parametrize("url", ["collector:4317", "grpc://collector", "ftp://collector"])
def test_an_invalid_url_is_refused_before_anything_is_done(sidelight: Sidelight, tmp_path: Path, url: str):
    """By `run` and by `report`, naming the option."""
    with raises("option.value"):
        check_run(RunOptions(url=("http://h",), otlp_export=url))
    done = sidelight("report", tmp_path, "--otlp-export", url)
    assert (2, "") == (done.code, done.out)
    assert done.err.startswith("sidelight: --otlp-export: ")
