"""The Grafana dashboard is what its source says, reads well, and every panel has data when a run is scraped."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql
import pytest
import snapshots
from prometheus_client.parser import text_string_to_metric_families
from waiting import BOUND_S

from exporter.prometheus.page import LivePage
from exporter.prometheus.server import serving

REPOSITORY = Path(__file__).parents[2]
GENERATOR = REPOSITORY / "dashboards" / "generate.py"
OUR_NAME = re.compile(r"\bsidelight_[a-z0-9_]+")


DASHBOARD: dict[str, Any] = json.loads(promql.DASHBOARD.read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TITLES = [panel["title"] for panel in PANELS]


def exposed_names() -> set[str]:
    """Return every sample name that a full page has."""
    page = LivePage()
    page.update(snapshots.snapshot(3))
    families = text_string_to_metric_families(page.render().decode())
    return {sample.name for family in families for sample in family.samples}


def test_the_file_is_what_the_generator_writes() -> None:
    """The committed JSON and its source never drift apart: `generate.py --check` says so."""
    pytest.importorskip("grafana_foundation_sdk")
    done = subprocess.run([sys.executable, GENERATOR, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_rows_are_in_the_order_of_a_diagnosis() -> None:
    """From the answer at the top to the tool's own error at the bottom."""
    assert [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"] == [
        "Answer first",
        "Client and server on one time axis",
        "Where the TTFT went",
        "Engine",
        "Latency distributions",
        "The generator itself",
        "Receiver of spans (sidelight watch)",
    ]


def test_ids_and_titles_are_unique() -> None:
    """Grafana needs one id a panel, and a reader one title."""
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert len(set(TITLES)) == len(TITLES)


def test_no_two_panels_overlap() -> None:
    """Every cell of the 24-column grid belongs to one panel at most, and no panel sticks out."""
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        columns, lines = range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])
        for cell in itertools.product(columns, lines):
            assert cell not in taken, f"{panel['title']} covers {taken[cell]}"
            taken[cell] = panel["title"]


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_a_panel_can_be_read(panel: dict[str, Any]) -> None:
    """Each has a unit, says what to conclude, names its series, and asks the chosen data source."""
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert len(panel["description"].split()) >= 8
    assert panel["targets"]
    assert panel["fieldConfig"]["defaults"]["noValue"]
    for part in (panel, *panel["targets"]):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        assert target["legendFormat"]
    if panel["type"] == "timeseries":
        assert panel["options"]["legend"]["showLegend"]
    if panel["type"] == "heatmap":
        assert panel["options"]["yAxis"]["unit"] == "s"
        assert {target["format"] for target in panel["targets"]} == {"heatmap"}


@pytest.mark.parametrize("panel", PANELS, ids=TITLES)
def test_a_query_keeps_the_rules(panel: dict[str, Any]) -> None:
    """Series are filtered by sidecar, aggregated in the open, and nothing is divided by a possible zero."""
    for target in panel["targets"]:
        expr = target["expr"]
        selectors = re.findall(r"sidelight_[a-z0-9_]+(\{[^}]*\})?", expr)
        assert all('instance=~"$instance"' in selector for selector in selectors), expr
        engine_names = re.findall(r"sidelight_(?:engine|scrapes?)_[a-z0-9_]+(\{[^}]*\})", expr)
        assert all('endpoint=~"$endpoint"' in selector for selector in engine_names), expr
        assert "histogram_quantile" not in expr or "sum by (le)" in expr
        assert re.findall(r"\[([^]]+)\]", expr) in ([], *([window] * n for n in (1, 2) for window in WINDOWS)), expr
        assert expr.count(" / ") == expr.count("> 0)"), expr


WINDOWS = ("$__rate_interval", "$__range")


def test_every_metric_name_is_exposed() -> None:
    """A renamed metric cannot leave a panel, a variable or an annotation silently empty."""
    variables = [variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable]
    expressions = [query.expr for query in promql.panel_queries(DASHBOARD)] + variables
    used = {name for expr in expressions for name in OUR_NAME.findall(expr)}
    assert used - exposed_names() == set()


def test_every_exposed_metric_is_looked_at() -> None:
    """What the sidecar measures has a place on the dashboard."""
    used = {name for query in promql.panel_queries(DASHBOARD) for name in OUR_NAME.findall(query.expr)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    exposed = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed_names()}
    # The one feeds the variable that picks the sidecar; the others have no panel yet.
    of_objectives = {"limit", "value", "met"}
    assert exposed - families == {
        "sidelight_engine_quantile_seconds",
        "sidelight_build_info",
        *(f"sidelight_slo_{name}" for name in of_objectives),
        "sidelight_client_requests_good_total",
        "sidelight_generator_schedule_lateness_quantile_seconds",
    }


def test_variables_pick_source_sidecar_and_endpoint() -> None:
    """The dashboard works in any Grafana: nothing about a data source or a run is fixed in it."""
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "instance", "endpoint"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["instance"]["definition"] == "label_values(sidelight_build_info, instance)"
    assert "$instance" in variables["endpoint"]["definition"]


@pytest.mark.parametrize(
    ("expr", "substituted"),
    [
        ("rate(a[$__rate_interval])", "rate(a[5s])"),
        ("rate(a[$__range])", "rate(a[60s])"),
        ('a{instance=~"$instance", endpoint=~"${endpoint}"}', 'a{instance=~".*", endpoint=~".*"}'),
    ],
)
def test_variables_are_substituted(expr: str, substituted: str) -> None:
    """The test asks Prometheus what Grafana would ask it."""
    assert promql.substitute(expr) == substituted


def test_an_unknown_variable_is_an_error() -> None:
    """A query that Grafana could not fill in is not sent."""
    with pytest.raises(ValueError, match="without a value"):
        promql.substitute("a[$nothing]")


async def test_every_panel_has_data(tmp_path: Path) -> None:
    """A real Prometheus that scrapes the live page answers each panel's and annotation's query with numbers."""
    if promql.PROMETHEUS is None:
        pytest.skip("prometheus is not installed (Debian package prometheus)")
    page = LivePage()
    page.update(snapshots.snapshot(1))

    async def advance() -> None:
        for step in itertools.count(2):
            await asyncio.sleep(0.5)
            page.update(snapshots.snapshot(step))

    async with serving(page, "127.0.0.1", 0) as url:
        run = asyncio.create_task(advance())
        try:
            target = url.removeprefix("http://").removesuffix("/metrics")
            async with promql.prometheus(scraping=[target], directory=tmp_path) as base_url:
                assert await promql.empty_queries(base_url, DASHBOARD, deadline_s=BOUND_S) == {}
        finally:
            run.cancel()
            await asyncio.gather(run, return_exceptions=True)


async def test_a_panel_without_data_is_named(tmp_path: Path) -> None:
    """The check can fail: a query for a metric that is not exposed is returned, with its place."""
    if promql.PROMETHEUS is None:
        pytest.skip("prometheus is not installed (Debian package prometheus)")
    board = {"panels": [{"title": "Nothing", "targets": [{"refId": "A", "expr": 'nobody{a=~"$instance"}'}]}]}
    async with promql.prometheus(scraping=[], directory=tmp_path) as base_url:
        empty = await promql.empty_queries(base_url, board, deadline_s=0.0)
    assert empty == {"Nothing / A": 'nobody{a=~".*"}'}
