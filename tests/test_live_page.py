"""The live page of a run and of a watch, as a browser gets it over real sockets."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
from packed_columns import read
from processes import engine
from server_sent import listening
from waiting import BOUND_S

from sidelight.exporter.html.page import as_parts
from sidelight.sidecar.live.final import recorded
from sidelight.sidecar.report.derive import derive


async def test_a_browser_sees_a_run_go_and_end_with_its_report(tmp_path: Path):
    """Requests as they end and then their parts, gauges at each scrape, and at the end the numbers of summary.json.

    Over another connection, after an event that it has had, a browser gets only what came behind that.
    """
    load = ("--rate", "15", "--duration", "8", "--warmup", "0", "--scrape-interval", "0.2", "--listen", "127.0.0.1:0")
    with engine() as (url, _):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "sidelight", "run", url, *load, "--json", "--out", str(tmp_path / "run")),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        async with asyncio.timeout(BOUND_S):
            assert process.stderr is not None
            page = ""
            while not page:
                said = json.loads(await process.stderr.readline())
                page = "".join(re.findall(r"live page: (\S+)", said.get("stage", "")))
            rest = asyncio.ensure_future(process.stderr.read())
            async with listening(f"{page}live") as events:
                sent = [event async for event in events]
            assert await process.wait() == 0
            await rest
    *live, final = sent
    rows = [event for event in live if event.name == "rows"]
    tables = [read(table) for event in rows for table in event.data["tables"]]
    ended = [index for table in tables if "ttft" in table for index in table["index"]]
    counted = [index for table in tables if "queue" in table for index in table["index"]]
    assert len(ended) == len(set(ended)) > 0
    assert set(counted) <= set(ended)
    assert {"waiting", "running", "in flight"} <= {gauge["label"] for event in rows for gauge in event.data["gauges"]}
    assert [str(number) for number in range(len(rows))] == [event.identity for event in rows]
    assert any("in flight" in event.data["html"] for event in live if event.name == "state")
    derived = derive(tmp_path / "run")
    report = as_parts(derived.summary, recorded(derived))
    assert final.name == "final"
    assert json.loads(json.dumps(report)).items() <= final.data.items()
    assert str(tmp_path / "run") in final.data["note"]
    every = read(final.data["data"]["requests"])
    assert sorted(every["index"]) == list(range(derived.summary.client.requests.sent))
    ttft_by_index = dict(zip(every["index"], every["ttft"], strict=True))
    for table in tables:
        if "ttft" in table:
            assert table["ttft"] == pytest.approx([ttft_by_index[index] for index in table["index"]], nan_ok=True)
