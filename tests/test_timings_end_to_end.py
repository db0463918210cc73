"""Whole runs with an engine that reports times without ids: as users start them, over loopback, against its truth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from processes import Ended, engine, sidelight
from waiting import BOUND_S

from sidelight.sidecar.report.derive import derive
from sidelight.sidecar.run import open_run

LOAD = ("--rate", "20", "--requests", "60", "--warmup", "2", "--listen", "off", "--quiet")
PARTS = {
    "queue_ms": ("arrival_ns", "scheduled_ns"),
    "prefill_ms": ("scheduled_ns", "first_token_ns"),
    "decode_ms": ("first_token_ns", "finished_ns"),
}


def errors_ms(run: Ended, truth: Path) -> list[float]:
    """By how much each joined request's worst part is off."""
    true: dict[str, dict[str, Any]] = {
        record["response_id"]: record for record in map(json.loads, truth.read_text().splitlines())
    }
    return [
        max(abs(row[part] - (record[end] - record[begin]) / 1e6) for part, (begin, end) in PARTS.items())
        for row in run.requests()
        if row["breakdown_source"] == "response" and (record := true[row["response_id"]])
    ]


def test_a_run_is_joined_by_time(tmp_path: Path):
    """Each join is true to a microsecond, and a request without one is counted with its reason.

    How many are joined depends on how late this machine wakes both sides; tests/correlator/exact/test_matching.py
    bounds that in virtual time. The usual page is found all the same, request and response network are separated, and
    the same is derived again.
    """
    options = ("--engine", "trtllm", "--perf-metrics", "1000", "--truth", tmp_path / "truth")
    with engine(*options) as (url, _):
        metrics = ("--metrics", f"{url}/perf_metrics")
        done = sidelight("run", "--url", url, *LOAD, *metrics, "--out", tmp_path / "run", path=tmp_path / "run")
    assert 0 == done.code, done.err
    ended = [row for row in done.requests() if row["status"] == "ok"]
    errors = errors_ms(done, tmp_path / "truth")
    assert max(errors) < 1e-3
    correlation = done.summary["correlation"]
    records = correlation["perf_metrics"]
    assert len(errors) == records["matched"] > len(ended) / 2
    assert len(ended) == records["matched"] + records["ambiguous_requests"] + records["unmatched_requests"]
    measured = [row["breakdown_source"] == "response" for row in ended if row["phase"] == "measure"]
    assert correlation["coverage"]["response"] == sum(measured) / len(measured)
    assert correlation["clock"]["error_ms"] is not None
    assert correlation["breakdown"]["request_network_ms"]["mean"] >= 0
    assert [f"{url}/perf_metrics"] == done.manifest["timing_targets"]
    assert [f"{url}/prometheus/metrics"] == [target["url"] for target in done.manifest["metrics_targets"]]
    before = (done.path / "requests.parquet").read_bytes()
    derive(done.path)
    assert before == (done.path / "requests.parquet").read_bytes()


def test_records_that_are_off_are_a_warning(tmp_path: Path):
    """The page is there and always empty: a warning says so, and the breakdown is estimated."""
    with engine("--engine", "trtllm") as (url, _):
        metrics = ("--metrics", f"{url}/perf_metrics")
        done = sidelight("run", "--url", url, *LOAD, *metrics, "--out", tmp_path / "run", path=tmp_path / "run")
    assert 0 == done.code, done.err
    assert 0 == done.summary["correlation"]["perf_metrics"]["records"]
    assert any(
        warning.startswith("records of /perf_metrics that match requests of this run: 0 of 0")
        for warning in done.summary["warnings"]
    )
    assert done.summary["correlation"]["coverage"]["histogram"] > 0.9


def test_a_scrape_keeps_them(tmp_path: Path):
    """Beside the usual page, which is still looked for, or alone."""
    out = ("--duration", "0.3", "--quiet")
    with engine("--engine", "trtllm", "--perf-metrics", "1000") as (url, _):
        metrics = ("--metrics", f"{url}/perf_metrics")
        for _ in range(3):
            ask = Request(f"{url}/v1/completions", b'{"prompt": "hello", "max_tokens": 2}')  # noqa: S310  our own URL
            with urlopen(ask, timeout=BOUND_S) as answer:  # noqa: S310
                assert 200 == answer.status
        both = sidelight("scrape", "--url", url, *metrics, *out, "--out", tmp_path / "both", path=tmp_path / "both")
        assert 0 == both.code, both.err
        alone = sidelight("scrape", *metrics, *out, "--out", tmp_path / "alone", path=tmp_path / "alone")
        assert 0 == alone.code, alone.err
    runs = [open_run(path) for path in (both.path, alone.path)]
    assert [1, 0] == [len(run.endpoints) for run in runs]
    assert 3 == len(runs[0].timings)
    assert (0, 1) == (len(runs[1].timings), len(runs[1].timings.clocks))
