"""Ask a Prometheus what the dashboards' panels would show, as Grafana does.

async with prometheus(scraping=["127.0.0.1:9464"], directory=tmp_path) as base_url:
    ... the run goes on ...
    shown = await answers(base_url, board("run"), start_s=..., end_s=..., run="20261122-140450-da8a62")
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from waiting import BOUND_S

BOARDS = Path(__file__).parents[1] / "dashboards" / "grafana"
NAMES = ("run", "compare", "watch")
PROMETHEUS = shutil.which("prometheus")
# What Prometheus logs once it has the port that the system gave it.
LISTENING = re.compile(r'Listening on" address=(\S+)')
# "All" of each, and windows in which a busy machine has two scrapes.
VARIABLES = {
    **dict.fromkeys(("instance", "endpoint", "model", "class"), ".*"),
    "run": "run-1",
    "base": "run-1",
    "__rate_interval": "20s",
    "__range": "60s",
    "__interval": "1s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelQuery:
    """One expression of a dashboard and where it stands."""

    where: str
    expr: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemplar:
    """One request of a bucket, whose labels are those of the series."""

    series: Mapping[str, str]
    trace_id: str
    value: float


def board(name: str) -> dict[str, Any]:
    """Return the dashboard `run`, `compare` or `watch`."""
    loaded: dict[str, Any] = json.loads((BOARDS / f"sidelight-{name}.json").read_text(encoding="utf-8"))
    return loaded


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels of a dashboard, also those in collapsed rows."""
    inner = [panel for row in dashboard["panels"] for panel in (row, *row.get("panels", ()))]
    return [panel for panel in inner if panel.get("type") != "row"]


def panel_queries(dashboard: dict[str, Any]) -> tuple[PanelQuery, ...]:
    """Return every query of every panel, of panels inside collapsed rows too, and those of the annotations."""
    queries = [
        PanelQuery(where=f"{panel['title']} / {target['refId']}", expr=target["expr"])
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]
    annotations = dashboard.get("annotations", {}).get("list", ())
    queries += [
        PanelQuery(where=f"annotation {annotation['name']}", expr=annotation["expr"])
        for annotation in annotations
        if "expr" in annotation
    ]
    return tuple(queries)


def substitute(expr: str, variables: Mapping[str, str] = VARIABLES) -> str:
    """Put values in place of $variables, as Grafana does. Raises ValueError where one is left; `$1` is of a regexp."""
    for name in sorted(variables, key=len, reverse=True):
        expr = expr.replace(f"${{{name}}}", variables[name]).replace(f"${name}", variables[name])
    if re.search(r"\$(?!\d)", expr):
        raise ValueError(f"a variable without a value: {expr}")
    return expr


async def answers(
    base_url: str, dashboard: dict[str, Any], *, start_s: float, end_s: float, **variables: str
) -> dict[tuple[str, str], list[float]]:
    """Return the finite values of each query, by its panel's title and its legend, over a range as Grafana asks for it.

    Tiles and tables ask for the end of the range, graphs for each second of its last ten minutes. Raises ValueError
    with Prometheus' message where it does not accept an expression.
    """
    values = VARIABLES | {"__range": f"{end_s - start_s:.0f}s"} | variables
    shown: dict[tuple[str, str], list[float]] = {}
    async with aiohttp.ClientSession() as session:
        for panel in panels(dashboard):
            for target in panel["targets"]:
                query = {"query": substitute(target["expr"], values)}
                if target.get("instant"):
                    kind, moments = "query", {"time": str(end_s)}
                else:
                    kind, moments = (
                        "query_range",
                        {"start": str(max(start_s, end_s - 600)), "end": str(end_s), "step": "1"},
                    )
                async with session.post(f"{base_url}/api/v1/{kind}", data=query | moments) as response:
                    reply = await response.json()
                if reply["status"] != "success":
                    raise ValueError(f"{reply.get('error')}: {query}")
                points = [
                    float(value)
                    for series in reply["data"]["result"]
                    for _, value in series.get("values") or [series["value"]]
                ]
                finite = [point for point in points if math.isfinite(point)]
                shown.setdefault((panel["title"], target["legendFormat"]), []).extend(finite)
    return shown


@asynccontextmanager
async def prometheus(*, scraping: Sequence[str], directory: Path) -> AsyncIterator[str]:
    """Run a real Prometheus on loopback that scrapes "host:port" targets each second; yield its base URL.

    Everything it writes is under `directory`. Raises RuntimeError with its log if it never gets ready.
    """
    if PROMETHEUS is None:
        raise RuntimeError("prometheus is not installed")
    config = directory / "prometheus.yml"
    targets = ", ".join(f'"{target}"' for target in scraping)
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs: [{{job_name: sidelight, static_configs: [{{targets: [{targets}]}}]}}]\n"
    )
    path = directory / "prometheus.log"
    with path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            PROMETHEUS,
            f"--config.file={config}",
            f"--storage.tsdb.path={directory / 'tsdb'}",
            "--web.listen-address=127.0.0.1:0",
            "--web.enable-remote-write-receiver",
            "--enable-feature=exemplar-storage",
            "--storage.tsdb.retention.time=100y",  # recorded runs are old
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(BOUND_S):
            while (listening := LISTENING.search(path.read_text())) is None:
                if process.returncode is not None:
                    raise RuntimeError(path.read_text())
                await asyncio.sleep(0.05)
        base_url = f"http://{listening[1]}"
        if not await _answers(f"{base_url}/-/ready", lambda: process.returncode is None, deadline_s=BOUND_S):
            raise RuntimeError(path.read_text())
        yield base_url
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), BOUND_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def values_at(base_url: str, expr: str, at_s: float) -> list[float]:
    """Return the numbers that an expression is at a moment."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base_url}/api/v1/query", data={"query": expr, "time": str(at_s)}) as response,
    ):
        reply = await response.json()
    return [float(series["value"][1]) for series in reply["data"]["result"]]


async def value_at(base_url: str, expr: str, at_s: float) -> float:
    """Return what an expression is at a moment. Raises ValueError where it is not one number."""
    (value,) = await values_at(base_url, expr, at_s)
    return value


async def exemplars(base_url: str, expr: str, *, since_s: float) -> list[Exemplar]:
    """Return the exemplars of the series of an expression, of a minute before a moment and all that came later."""
    asked = {"query": expr, "start": str(since_s - 60), "end": str(time.time() + 60)}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base_url}/api/v1/query_exemplars", data=asked) as response,
    ):
        reply = await response.json()
    return [
        Exemplar(series=series["seriesLabels"], trace_id=exemplar["labels"]["trace_id"], value=float(exemplar["value"]))
        for series in reply["data"]
        for exemplar in series["exemplars"]
    ]


async def _answers(url: str, alive: Callable[[], bool], *, deadline_s: float) -> bool:
    ends_at_s = time.monotonic() + deadline_s
    async with aiohttp.ClientSession() as session:
        while alive() and time.monotonic() < ends_at_s:
            try:
                async with session.get(url) as response:
                    if response.status == 200:
                        return True
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)
    return False
