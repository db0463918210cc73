"""A whole demo, as users start it, while a real Prometheus scrapes it and asks what the dashboard would ask."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import aiohttp
import promql
import pytest
from waiting import BOUND_S

from sidecar.cli import free_pair

PROMTOOL = shutil.which("promtool")
DEADLINE_S = 60.0


DASHBOARD = promql.board("run")
# What a run of vLLM without a gateway or objectives has not: a gateway's part and page, and SGLang's own.
ABSENT = re.compile(
    r'sidelight_(slo|gateway_(?!requests_total)|client_requests_good)|part="(gateway|scheduler_intake)"'
)


def of_a_run(panel: dict[str, Any]) -> dict[str, Any]:
    """Return a panel with the queries alone that a run has data for."""
    queries = [query for query in panel["targets"] if not ABSENT.search(query["expr"])]
    return {**panel, "targets": queries}


async def page_of_a_run(url: str, demo: asyncio.subprocess.Process) -> bytes:
    """Return the live page as soon as it counts an answered request."""
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
        while demo.returncode is None:
            try:
                async with session.get(url) as response:
                    page = await response.read()
            except aiohttp.ClientConnectionError:
                page = b""
            answered = [row for row in page.splitlines() if row.startswith(b"sidelight_client_ttft_seconds_count")]
            if any(float(row.split()[-1]) > 0 for row in answered):
                return page
            await asyncio.sleep(0.05)
    raise AssertionError("the demo ended before its page showed an answer")


async def check_metrics(page: bytes) -> tuple[int, str]:
    """Return how `promtool check metrics` ends on a page, and what it says."""
    assert PROMTOOL is not None
    tool = await asyncio.create_subprocess_exec(
        PROMTOOL,
        "check",
        "metrics",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await tool.communicate(page)
    return tool.returncode or 0, said.decode()


async def test_prometheus_scrapes_a_demo_and_every_panel_has_data(tmp_path: Path):
    """The demo ends well; promtool accepts its page; each panel's and annotation's query has data by its end."""
    if promql.PROMETHEUS is None or PROMTOOL is None:
        pytest.skip("prometheus and promtool are not installed (Debian package prometheus)")
    address = free_pair()
    out = tmp_path / "run"
    async with promql.prometheus(scraping=[address], directory=tmp_path) as base_url:
        demo = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sidecar", "demo", "--listen", address, "--out", str(out), "--quiet"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        ending = asyncio.ensure_future(demo.communicate())
        try:
            page = await page_of_a_run(f"http://{address}/metrics", demo)
            assert (0, "") == await check_metrics(page)
            (run_id,) = set(re.findall(rb'run_id="([^"]+)"', page))
            asked = json.loads(
                json.dumps({"panels": [of_a_run(panel) for panel in promql.panels(DASHBOARD)]}).replace(
                    "$run", run_id.decode()
                )
            )
            assert {} == await promql.empty_queries(base_url, asked, deadline_s=BOUND_S)
            said, complained = await asyncio.wait_for(ending, DEADLINE_S)
        finally:
            if demo.returncode is None:
                demo.kill()
            await asyncio.gather(ending, return_exceptions=True)
    assert (0, b"") == (demo.returncode, complained)
    assert "complete" == json.loads((out / "manifest.json").read_text())["status"]
    shown = said.decode()
    assert "Where the TTFT went" in shown
    assert str(out) in shown
    assert all(name in shown for name in ("summary.json", "report.txt", "requests.parquet"))
