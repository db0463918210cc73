"""Whole runs with engines whose clocks are off ours: by seconds, which is allowed for, or by an hour: refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from processes import Ended, engine, sidelight
from relayed_spans import relayed

from sidelight.sidecar.cli.measuring import free_pair

LOAD = ("--rate", "20", "--requests", "40", "--warmup", "0", "--listen", "off", "--quiet")


async def run(path: Path, ahead_s: tuple[float, float]) -> Ended:
    """Run against two engines with such clocks."""
    address = free_pair()
    near, far = (round(each * 1e9) for each in ahead_s)
    async with relayed(address, lambda _: near) as first, relayed(address, lambda _: far) as second:
        with engine("--otlp-endpoint", first) as (first_url, _), engine("--otlp-endpoint", second) as (other, _):
            urls = ("--url", first_url, "--url", other)
            return await asyncio.to_thread(
                sidelight, "run", *urls, *LOAD, "--otlp-listen", address, "--out", path, path=path
            )


async def test_engines_whose_clocks_are_5_s_apart_give_both_network_times(tmp_path: Path):
    """Each by its own clock, as if that were right; the error that is stated is the larger of the two."""
    done = await run(tmp_path / "run", (0.0, 5.0))
    assert 0 == done.code, done.err
    clock = done.summary["correlation"]["clock"]
    near, far = sorted(clock["engines"].values(), key=lambda offset: abs(offset["offset_ms"]))
    assert abs(near["offset_ms"]) <= near["error_ms"]
    assert abs(far["offset_ms"] + 5000) <= far["error_ms"]
    assert max(near["error_ms"], far["error_ms"]) == clock["error_ms"]
    table = pq.read_table(done.path / "requests.parquet").to_pydict()
    for name, engine_clock in clock["engines"].items():
        at_engine = np.array(table["endpoint_url"]) == name.rpartition(" at ")[2]
        # Nine of ten requests at least agree, so that the round trip of most of them holds twice the error.
        assert 2 * engine_clock["error_ms"] <= np.median(np.array(table["network_ms"])[at_engine])
    ways_ms = np.array([table["request_network_ms"], table["response_network_ms"]], dtype=np.float64)
    assert ((ways_ms > -1e-6) & (ways_ms <= np.array(table["ttft_ms"]))).all()
    assert "The clocks of 2 engines are from " in (done.path / "report.txt").read_text()


async def test_an_engine_an_hour_off_is_refused_and_the_other_is_not_disturbed(tmp_path: Path):
    """Its requests are estimated, with the reason; it is counted, and stated in one line."""
    done = await run(tmp_path / "run", (0.0, -3600.0))
    assert 0 == done.code, done.err
    correlation = done.summary["correlation"]
    table = pq.read_table(done.path / "requests.parquet").to_pydict()
    why = "its span was stamped by a clock 60 min off ours: refused"
    refused = [text for text in table["breakdown_reason"] if text and text.startswith(why)]
    assert 0 < len(refused) < correlation["requests"]
    assert pytest.approx(1 - len(refused) / correlation["requests"]) == correlation["coverage"]["trace"]
    assert len(refused) <= correlation["spans"]["off_clock"] < correlation["spans"]["spans"]
    assert correlation["spans"]["spans"] == correlation["spans"]["off_clock"] + correlation["spans"]["request_spans"]
    (line,) = (done.path / "raw" / "receiver.stderr").read_text().splitlines()
    assert line.startswith("spans of 'vllm-simulator' that came over http are not used: their clock is 360")
    assert {} == correlation["clock"]["engines"]
    exact = np.array(table["breakdown_source"]) == "trace"
    assert 2 * correlation["clock"]["error_ms"] <= np.median(np.array(table["network_ms"])[exact])
