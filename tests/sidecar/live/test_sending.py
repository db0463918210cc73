"""`--prometheus-write` of whole processes: a real Prometheus has a run while it goes, and all of it in the end."""

from __future__ import annotations

import asyncio
import json
import math
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import aiohttp
import promql
import pytest
from processes import ended, engine, sidelight, start, until
from waiting import BOUND_S
from written import received


async def samples(base_url: str, name: str) -> dict[str, list[tuple[float, str]]]:
    """Return the samples of each series of a name in the last hour, by its labels."""
    asked = {"query": f"{name}[1h]"}
    async with aiohttp.ClientSession() as session, session.post(f"{base_url}/api/v1/query", data=asked) as response:
        reply = await response.json()
    return {json.dumps(series["metric"]): series["values"] for series in reply["data"]["result"]}


async def risen(base_url: str, name: str) -> dict[str, list[tuple[float, str]]]:
    """Wait until some series of a name has risen; return the samples of all."""
    async with asyncio.timeout(BOUND_S):
        while True:
            came = await samples(base_url, name)
            if any(float(points[-1][1]) > float(points[0][1]) for points in came.values()):
                return came
            await asyncio.sleep(0.1)


async def test_a_run_that_is_killed_half_way_is_completed_by_its_report(tmp_path: Path):
    """What came while it went stays as it is; then Prometheus holds the report's numbers. Sending it again
    changes nothing.
    """
    if promql.PROMETHEUS is None:
        pytest.skip("prometheus is not installed (Debian package prometheus)")
    out, count = tmp_path / "run", "sidelight_client_ttft_seconds_count"
    async with promql.prometheus(scraping=[], directory=tmp_path) as base_url:
        write = ("--prometheus-write", f"{base_url}/api/v1/write")
        with engine() as (url, _):
            load = ("--rate", "5", "--duration", "100", "--warmup", "0", "--listen", "off")
            with start("run", url, *load, *write, "--out", out) as process:
                live = await risen(base_url, count)
                process.kill()
        report = await asyncio.to_thread(sidelight, "report", out, *write, path=out)
        assert (report.code, "!" in report.err) == (0, False), report.err
        (before,), (after,) = live.values(), (await samples(base_url, count)).values()
        assert (after[: len(before)], len(after) > len(before)) == (before, True)
        # Of those in flight when it was killed, too.
        ttft_ms = [row["ttft_ms"] for row in report.requests() if row["ttft_ms"] is not None]
        assert len(ttft_ms) == await promql.value_at(base_url, count, after[-1][0])
        sum_s = await promql.value_at(base_url, "sidelight_client_ttft_seconds_sum", after[-1][0])
        assert sum_s == pytest.approx(math.fsum(ttft_ms) / 1e3, rel=1e-9)
        again = await asyncio.to_thread(sidelight, "report", out, *write, path=out)
        assert (again.code, "!" in again.err) == (0, False), again.err
        assert [after] == list((await samples(base_url, count)).values())


def test_a_watch_sends_its_last_page_when_it_ends(tmp_path: Path):
    """With the labels by which a scrape would tell it from other sidecars."""
    bodies: list[bytes] = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    out = tmp_path / "watch"
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/api/v1/write"
        addresses = ("--otlp-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0")
        with start("watch", *addresses, "--prometheus-write", url, "--out", out, "--quiet") as process:
            until(lambda: any((out / "raw").glob("spans-*.log")), "the receiver's log")
            process.send_signal(signal.SIGTERM)
            watched = ended(process, out)
        server.shutdown()
    assert (watched.code, watched.err) == (0, "")
    assert b"sidelight_receiver_spans_total" in received(bodies[-1]).SerializeToString()
    assert socket.gethostname().encode() in bodies[-1]
