"""Summaries for the tests of the report: the shape of a real run's, small and of round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from logs import request_log

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.estimate.table import Attribution, nothing
from sidelight.correlator.exact.clock_offset import ClockOffset
from sidelight.correlator.load.stability import Stability
from sidelight.correlator.statistics.association import Association
from sidelight.correlator.statistics.queueing import NEVER_WAITED, WhileWaiting
from sidelight.correlator.statistics.server_times import ServerMeans, ServerPercentiles
from sidelight.correlator.statistics.tail import tail_shares
from sidelight.exporter.summary.correlation import Correlation, Evidence, Findings, correlation
from sidelight.exporter.summary.result import MeasuredWindow, Methodology, Summary, Tokenizer, Tool, Workload
from sidelight.exporter.summary.slowest import EngineWork
from sidelight.exporter.summary.watched import WatchedTraffic
from sidelight.loadgen.requests.self_check.check import self_check
from sidelight.loadgen.requests.self_check.workers import CpuRatio, Spread
from sidelight.loadgen.requests.summary import ClientSummary, RequestCounts, Throughput, client_summary
from sidelight.recorded.integrity import Integrity
from sidelight.rundir.fields import UNSET
from sidelight.rundir.stats import Missing, describe
from sidelight.scraper.hardware.summary import hardware_summary
from sidelight.scraper.window.quantities import (
    Counter,
    CounterStatistics,
    Gauge,
    Histogram,
    Range,
    SampleStatistics,
)
from sidelight.scraper.window.summary import DetectedEngine, Server
from sidelight.scraper.window.window import Window

SECOND = 10**9
WINDOW = Window(start_ns=1_795_256_419_150_000_000, end_ns=1_795_256_429_150_000_000)
SIZE = 100
BLOCK = msgspec.structs.replace(
    describe(np.full(100, 180.0), ""), mean=200.0, p90=350.5, p95=400.0, p99=1234.5, max=2000.25
)
ASSOCIATION = Association(
    client="ttft_ms",
    server="requests_waiting",
    combined="one",
    lag_s=0.25,
    rho=0.88,
    ci95=(0.62, 0.97),
    rho_lag0=0.84,
    ci95_lag0=(0.6, 0.95),
    pairs=100,
    blocks=12,
)
UNKNOWN = Association(client="ttft_ms", server="requests_waiting", missing="the gauge never changed")
PERCENTILES = ServerPercentiles(
    values_s=np.full(10, 0.16),
    low_s=np.full(10, 0.1),
    high_s=np.full(10, 0.5),
    source="buckets and sums",
    covered_ratio=0.5,
)
CLOCK = ClockOffset(offset_ns=-30_000_000, error_ns=500_000, pairs=100)
NO_CLOCK = ClockOffset(offset_ns=None, error_ns=None, pairs=0, reason="no request was joined")

EVIDENCE = Evidence(while_waiting=WhileWaiting(missing=NEVER_WAITED), prefill_input_tokens_rho=None)
WATCH = WatchedTraffic(
    begun_ns=0,
    begun="2026-01-01T00:00:00.000Z",
    shortened=False,
    missing={},
    engine_only_ms={},
    engine_spans=0,
    repeated_spans=0,
    evicted_spans=0,
    whole_traces=0,
    broken_traces=[],
    left_out_requests=0,
    since_start=None,
)
NO_SERVER = Server(engine=None, reason="no metrics endpoint was scraped", missing={}, endpoints=[])


def parts(source: str = "trace", *, ttft_ms: float = 200.0, merged: str = "", reason: str = "") -> Parts:
    """100 requests, 10 a second, of 200 ms: 5 network (2 in, 3 out), 150 queue, 30 prefill, 13 front end, 2 blank."""
    server = {"network_ms": 5.0, "queue_ms": 150.0, "prefill_ms": 30.0, "engine_frontend_ms": 13.0, "other_ms": 15.0}
    if source == "trace":
        server |= {
            "request_network_ms": 2.0,
            "response_network_ms": 3.0,
            "network_split_error_ms": 0.5,
            "decode_ms": 1000.0,
            "e2e_other_ms": 15.0,
        }
    if merged:
        server = {"queue_ms": 150.0, "prefill_ms": 30.0, "other_ms": 20.0}
    if source == "none":
        server = {}
    client = {"ttft_ms": ttft_ms, "e2e_ms": 1200.0, "send_ms": 0.5, "blank_output_ms": 2.0}
    error = {"trace": 0.0, "response": 0.0, "histogram": 4.0}.get(source, np.nan)
    numbers = {
        f"{name[:-3]}_s": np.full(SIZE, value / 1e3) for name, value in {**client, **server, "error_ms": error}.items()
    }
    quality = {"histogram": "shared", "none": "none"}.get(source, "exact")
    decode_source = "trace" if source == "trace" else "none"
    texts = {
        "source": source,
        "decode_source": decode_source,
        "merged": merged,
        "reason": reason,
        "quality": quality,
        "engine_span_id": "",
    }
    columns: dict[str, npt.NDArray[Any]] = {}
    for name in Parts.__dataclass_fields__:
        if name in texts:
            columns[name] = np.full(SIZE, texts[name], dtype=np.object_)
        elif name == "gateways":
            columns[name] = np.empty(SIZE, dtype=np.object_)
            columns[name].fill(())
        elif name.endswith("_ns"):
            columns[name] = np.full(SIZE, -1, dtype=np.int64)
        else:
            columns[name] = numbers.get(name, np.full(SIZE, np.nan))
    return Parts(**columns)


def estimates(reason: str = "no scrape succeeded") -> Attribution:
    """Standard errors of 3 ms in the queue, 4 in prefill, 1 in network and 2 in the rest; no values."""
    table = nothing(SIZE, reason)
    for name, error_ms in {"queue": 3.0, "prefill": 4.0, "network": 1.0, "engine_frontend": 2.0}.items():
        getattr(table, f"{name}_sd_s")[:] = error_ms / 1e3
    return table


def means(*, server_requests: int = SIZE, missing: str | None = None) -> ServerMeans:
    """What the histograms tell of the run as a whole."""
    known = {"queue_s": 0.15, "prefill_s": 0.03}
    return ServerMeans(
        client_requests=SIZE,
        server_requests=0 if missing else server_requests,
        ratio=None if missing else server_requests / SIZE,
        ttft_s=0.2,
        **(dict.fromkeys(known) if missing else known),
        missing=missing,
    )


def findings(
    of: Parts | None = None, *, whole: ServerMeans | None = None, clock: ClockOffset = CLOCK, why: str = "no cell"
) -> Findings:
    """Requests of one class at one URL, in five slices of 2 s."""
    columns, submit_ns = of or parts(), np.arange(SIZE) * (SECOND // 10)
    return Findings(
        parts=columns,
        attribution=estimates(why),
        clocks={"http://127.0.0.1:8000": clock},
        means=whole or means(),
        ok=np.ones(SIZE, dtype=np.bool_),
        submit_ns=submit_ns,
        workload_class=np.full(SIZE, "chat", dtype=np.object_),
        endpoint_url=np.full(SIZE, "http://127.0.0.1:8000", dtype=np.object_),
        model=np.full(SIZE, "m", dtype=np.object_),
        edges_ns=[number * 2 * SECOND for number in range(6)],
        percentiles={"queue_ms": PERCENTILES, "prefill_ms": Missing("no buckets")},
        refusal=np.full(SIZE, "", dtype=np.object_),
        spans=None,
        records=None,
        associations=[ASSOCIATION],
        tail=tail_shares(columns, submit_ns, Missing("no gauge")),
        slowest=[],
        work=EngineWork(missing="no spans"),
        evidence=EVIDENCE,
    )


def correlated(evidence: Findings | None = None) -> Correlation:
    """The object of 100 requests that their spans tell of, or of what was found."""
    return correlation(evidence or findings())


def uncorrelated(reason: str) -> Correlation:
    """The client's TTFT is known, nothing of the server's part in it."""
    evidence = findings(parts("none", reason=reason), whole=means(missing=reason), clock=NO_CLOCK, why=reason)
    return correlation(replace(evidence, associations=[UNKNOWN]))


def histogram(
    mean_s: float, p50_s: float | None, low_s: float = 0.0, high_s: float | None = None, *, resolved: bool = True
) -> Histogram:
    """100 observations, whose percentiles are all the same and lie in a range."""
    percentiles = {} if p50_s is None else {"p50": p50_s, "p99": p50_s}
    interval = Range(low=low_s, high=UNSET if high_s is None else high_s)
    return Histogram(
        **described("histogram"),
        stats=SampleStatistics(count=100, sum=100 * mean_s, mean=mean_s, **percentiles),
        intervals={"p50": interval, "p99": interval},
        unresolved=[] if resolved else ["p50", "p99"],
        timeslices=[],
    )


def gauge(missing: str = "", **stats: float) -> Gauge:
    """A gauge with these statistics, or without any."""
    reasons = {"stats": missing} if missing else UNSET
    return Gauge(**described("gauge"), across="sum", stats=SampleStatistics(**stats), timeslices=[], missing=reasons)


def counter(total: float, rate_per_s: float) -> Counter:
    """A counter that was never reset."""
    stats = CounterStatistics(total=total, rate_per_s=rate_per_s)
    return Counter(**described("counter"), stats=stats, resets=0, timeslices=[])


def described(kind: str) -> dict[str, Any]:
    return {"metric": "some", "type": kind, "unit": "seconds", "observed": "finish"}


def server(**quantities: Any) -> Server:
    """One quantity of each kind, and one of each width of bucket; `quantities` stand in their place."""
    shown = {
        "queue_time": histogram(0.15, 0.16, 0.1, 0.5),
        "prefill_time": histogram(0.03, 0.15, 0.0, 0.3, resolved=False),
        "ttft": histogram(0.18, 0.2, 0.19, 0.2),
        "e2e_latency": histogram(3000.0, None),
        "requests_waiting": gauge(count=40, mean=7.8, p50=8.0, p99=21.45, max=22.0),
        "requests_running": gauge("no value inside the window"),
        "preemptions": counter(0.0, 0.0),
        "prompt_tokens": counter(38752.0, 3875.2),
    }
    engine = DetectedEngine(name="vllm", version="0.32.0", detected_by="metric vllm:num_requests_running")
    return Server(engine=engine, **shown | quantities, missing={}, endpoints=[])


def client() -> ClientSummary:
    """100 requests of which all succeeded, whose replies had one token and no usage."""
    return msgspec.structs.replace(
        client_summary(request_log()),
        requests=RequestCounts(sent=100, ok=100, failed=0, refused=0, cancelled=0, in_flight=0),
        ttft_ms=BLOCK,
        tpot_ms=describe([], "no reply had two tokens"),
        throughput=Throughput(
            duration_s=10.0,
            output_tokens_per_s=None,
            input_tokens_per_s=3333.3,
            requests_per_s=10.0,
            goodput_requests_per_s=None,
        ),
    )


def workload() -> Workload:
    return Workload(
        name="synthetic-uniform",
        seed=1,
        tokenizer=Tokenizer(
            name="tiny-llama (the server's)",
            version="",
            vocab_size=None,
            source="the server",
            option="A",
            special_tokens={},
        ),
        max_model_len=4096,
        planned_requests=100,
        clipped_inputs=0,
        clipped_outputs=0,
        requests_sha256=None,
        dropped_turns=0,
        missed_lengths=0,
        stated=None,
        warmup_requests=10,
    )


def summary(correlated_as: Correlation, server_as: Server | None = None) -> Summary:
    """A finished run at 10 requests/s."""
    return Summary(
        run_id="20261121-101012-d968f0",
        tool=Tool(name="sidelight", version="0.1.0"),
        status="complete",
        started_at="2026-11-21T10:10:12.150Z",
        ended_at="2026-11-21T10:10:30.150Z",
        integrity=Integrity(state="whole", logs=[], disagreements=[]),
        window=MeasuredWindow(
            start_ns=WINDOW.start_ns,
            end_ns=WINDOW.end_ns,
            start="2026-11-21T10:10:19.150Z",
            end="2026-11-21T10:10:29.150Z",
            duration_s=10.0,
        ),
        warnings=["the load generator was slow, and its own delays may show in the results: submissions were late"],
        config={
            "url": "http://127.0.0.1:8000",
            "model": "tiny-llama",
            "rate": 10.0,
            "arrival": "poisson",
            "concurrency": None,
            "requests": None,
            "duration": 10.0,
            "warmup": 10,
            "metrics": [],
        },
        workload=workload(),
        client=client(),
        server=server_as if server_as is not None else server(),
        correlation=correlated_as,
        hardware=hardware_summary([], window=WINDOW, output_tokens=None),
        self_check=msgspec.structs.replace(
            self_check(request_log(), [], open_loop=True),
            verdict="kept up",
            trusted=True,
            schedule_lateness_ms=Spread(count=100, p50=0.1, p99=0.5, max=1.0),
            cpu_ratio=CpuRatio(by_worker=[0.02], max=0.02),
        ),
        methodology=Methodology(
            draft="draft-gaikwad-00",
            tests={},
            missing="none of the draft's tests",
            warmup=None,
            stability=Stability(verdict="stable", reason="nothing waited"),
            percentiles={},
        ),
    )
