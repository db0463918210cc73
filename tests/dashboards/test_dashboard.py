"""The Grafana dashboards are what their source says, and read well; `test_prometheus_of_runs` has data in them."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import promql
import pytest
import snapshots
from prometheus_client.parser import text_string_to_metric_families

from sidelight.correlator.parts import E2E_PARTS, NETWORK, OUTSIDE_ENGINE
from sidelight.exporter.prometheus.page import LivePage

REPOSITORY = Path(__file__).parents[2]
GENERATOR = REPOSITORY / "dashboards" / "generate.py"
OUR_NAME = re.compile(r"\bsidelight_[a-z0-9_]+")


BOARDS: dict[str, dict[str, Any]] = {name: promql.board(name) for name in promql.NAMES}
PANELS = [(name, panel) for name, board in BOARDS.items() for panel in promql.panels(board)]
every_board = pytest.mark.parametrize("board", BOARDS.values(), ids=list(BOARDS))
every_panel = pytest.mark.parametrize(
    ("name", "panel"), PANELS, ids=[f"{name}: {panel['title']}" for name, panel in PANELS]
)
QUERIES = [query for board in BOARDS.values() for query in promql.panel_queries(board)]
# What a dashboard is about, by the labels that each of its selectors has.
SCOPES = {"run": 'run_id="$run"', "compare": "run_id", "watch": 'run_id=""'}


def exposed_names() -> set[str]:
    """Return every sample name that a full page has."""
    page = LivePage()
    page.update(snapshots.snapshot(3))
    families = text_string_to_metric_families(page.render().decode())
    return {sample.name for family in families for sample in family.samples}


def test_the_files_are_what_the_generator_writes() -> None:
    """The committed JSON and its source never drift apart: `generate.py --check` says so."""
    pytest.importorskip("grafana_foundation_sdk")
    done = subprocess.run([sys.executable, GENERATOR, "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_each_dashboard_is_found_by_its_uid() -> None:
    """Links between them, and those of users, go by it; the file is named after it."""
    assert {name: board["uid"] for name, board in BOARDS.items()} == {
        name: f"sidelight-{name}" for name in promql.NAMES
    }
    assert sorted(path.name for path in promql.BOARDS.glob("*.json")) == sorted(
        f"sidelight-{name}.json" for name in promql.NAMES
    )


def test_the_rows_are_in_the_order_of_a_diagnosis() -> None:
    """From the answer at the top to the tool's own error at the bottom; collapsed is what is empty in most runs."""
    rows = {
        name: [
            panel["title"] + " (collapsed)" * panel["collapsed"] for panel in board["panels"] if panel["type"] == "row"
        ]
        for name, board in BOARDS.items()
    }
    assert rows == {
        "run": [
            "Answer first",
            "Objectives (--slo) (collapsed)",
            "Where the TTFT went",
            "Client and engine on one time axis",
            "Engine",
            "Latency distributions",
            "By class of request (collapsed)",
            "Gateways (collapsed)",
            "The generator itself",
        ],
        "compare": ["Runs of the range shown", "Change against the base run ($base)"],
        "watch": [
            "Answer first",
            "Where the TTFT went",
            "Client and engine on one time axis",
            "Engine",
            "Latency distributions",
            "Gateways (collapsed)",
            "The sidecar itself",
        ],
    }


@every_board
def test_ids_and_titles_are_unique(board: dict[str, Any]) -> None:
    """Grafana needs one id a panel, and a reader one title."""
    ids = [panel["id"] for row in board["panels"] for panel in (row, *row.get("panels", ()))]
    titles = [panel["title"] for panel in promql.panels(board)]
    assert len(set(ids)) == len(ids)
    assert len(set(titles)) == len(titles)


@every_board
def test_panels_fill_their_lines_and_none_overlaps(board: dict[str, Any]) -> None:
    """Every cell of the 24-column grid belongs to one panel at most, no panel sticks out, and no line has a gap."""
    for row in ({"panels": board["panels"]}, *board["panels"]):
        taken: dict[tuple[int, int], str] = {}
        for panel in row.get("panels", ()):
            grid = panel["gridPos"]
            columns, lines = range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])
            for cell in itertools.product(columns, lines):
                assert cell not in taken, f"{panel['title']} covers {taken[cell]}"
                taken[cell] = panel["title"]
        widths = Counter(line for _, line in taken)
        assert set(widths.values()) <= {24}, [name for (_, line), name in taken.items() if widths[line] != 24]


@every_panel
def test_a_panel_can_be_read(name: str, panel: dict[str, Any]) -> None:
    """Each has a unit, says what to conclude, names its series, and asks the chosen data source."""
    assert panel["fieldConfig"]["defaults"]["unit"], name
    assert len(panel["description"].split()) >= 8
    assert panel["targets"]
    assert panel["fieldConfig"]["defaults"]["noValue"]
    for part in (panel, *panel["targets"]):
        assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        assert target["legendFormat"]
        assert target.get("instant", False) == (panel["type"] in {"stat", "table", "barchart"})
    if panel["type"] == "stat":  # by itself Grafana takes letters that run out of narrow tiles
        assert {"titleSize", "valueSize"} == panel["options"]["text"].keys()
        if panel["fieldConfig"]["defaults"]["unit"] == "percentunit":  # by itself it writes 7.44e-7%
            assert panel["fieldConfig"]["defaults"]["decimals"] == 1
    if panel["type"] == "timeseries":
        assert panel["options"]["legend"]["showLegend"]
    if panel["type"] == "heatmap":
        assert panel["options"]["yAxis"]["unit"] == "s"
        assert {target["format"] for target in panel["targets"]} == {"heatmap"}


@every_panel
def test_a_legend_has_room_for_all_its_rows(name: str, panel: dict[str, Any]) -> None:
    """Below a graph Grafana shows two rows of a table and scrolls the rest: more stand beside it, or in a line."""
    if panel["type"] == "timeseries":
        legend, names = panel["options"]["legend"], [target["legendFormat"] for target in panel["targets"]]
        is_short = len(names) <= 2 and not any("{{" in legend_name for legend_name in names)
        assert legend["placement"] == "right" or legend["displayMode"] == "list" or is_short, name


@every_panel
def test_a_query_keeps_the_rules(name: str, panel: dict[str, Any]) -> None:
    """Series are those of the dashboard's run or watch, aggregated in the open, and no possible zero divides."""
    for target in panel["targets"]:
        expr = target["expr"]
        selectors = re.findall(r"sidelight_[a-z0-9_]+(\{[^}]*\})?", expr)
        assert all(SCOPES[name] in selector for selector in selectors), expr
        # Scrapes that are not written are counted of all endpoints together.
        engine_names = re.findall(r"sidelight_(?:engine|scrapes?)_(?!unwritten_)[a-z0-9_]+(\{[^}]*\})", expr)
        assert all('endpoint=~"$endpoint"' in selector for selector in engine_names), expr
        assert "histogram_quantile" not in expr or "sum by (le)" in expr
        windows = {window.removesuffix(":$__interval") for window in re.findall(r"\[([^]]+)\]", expr)}
        assert windows in (set(), {"$__rate_interval"}, {"$__range"}), expr
        assert "$__rate_interval" not in windows or panel["type"] in {"timeseries", "heatmap"}
        assert expr.count(" / ") == expr.count("> 0)"), expr


def test_no_tile_of_a_run_shows_a_percentile_from_buckets() -> None:
    """Interpolated ones contradicted the report by up to a third: tiles and tables read exact gauges."""
    tiles = [panel for name, panel in PANELS if name != "watch" and panel["type"] != "timeseries"]
    assert [panel["title"] for panel in tiles for target in panel["targets"] if "_quantile(" in target["expr"]] == []
    exact = {target["expr"] for panel in tiles for target in panel["targets"] if "quantile_seconds{" in target["expr"]}
    assert exact


def test_the_boards_begin_with_the_verdict_and_stay_short() -> None:
    """Seventy panels in all: more are not read."""
    first = {name: [title for of, panel in PANELS if of == name and (title := panel["title"])][:4] for name in BOARDS}
    assert first["run"][0] == first["watch"][0] == "Verdict"
    assert len(PANELS) <= 70


def test_a_tile_of_a_watch_without_clients_is_empty() -> None:
    """A counter of 0 and a quantile of no request, NaN, are of no request that a client stated."""
    tiles = {panel["title"]: panel for name, panel in PANELS if name == "watch" and panel["type"] == "stat"}
    ends = {title: {target["expr"][-4:] for target in tiles[title]["targets"]} for title in ("TTFT", "Requests / s")}
    assert ends == {"TTFT": {">= 0"}, "Requests / s": {" > 0"}}


def test_a_part_has_one_name_and_one_colour_everywhere() -> None:
    """The report's names; a reader who learnt a colour in one panel knows it in the next."""
    labels = {OUTSIDE_ENGINE if part.name == NETWORK else part.label for part in E2E_PARTS}
    colours: dict[str, set[str]] = {}
    for _, panel in PANELS:
        if "part=" not in str(panel["targets"]) or panel["type"] not in {"timeseries", "barchart"}:
            continue
        fixed = {
            rule["matcher"]["options"]: rule["properties"][0]["value"]["fixedColor"]
            for rule in panel["fieldConfig"]["overrides"]
            if rule["matcher"]["id"] == "byName"
        }
        for target in panel["targets"]:
            assert "{{" not in target["legendFormat"]
            colours.setdefault(target["legendFormat"], set()).add(fixed[target["legendFormat"]])
    assert labels <= colours.keys()
    assert {label: several for label, several in colours.items() if len(several) != 1} == {}
    assert len({min(colours[label]) for label in labels}) == len(labels)


def test_panels_of_single_requests_ask_for_exemplars() -> None:
    """A long wait leads to its trace, where the data source names a store of traces."""
    marked = {(name, panel["title"]) for name, panel in PANELS for target in panel["targets"] if target.get("exemplar")}
    assert marked == {(name, title) for name in ("run", "watch") for title in ("TTFT over time", "TTFT, client")}


# Of a page that has them only where a gateway's page is scraped.
OF_GATEWAYS = re.compile(r"sidelight_gateway_(?!requests_total)")


def test_every_metric_name_is_exposed() -> None:
    """A renamed metric cannot leave a panel, a variable or an annotation silently empty."""
    variables = [each for board in BOARDS.values() for each in board["templating"]["list"] if "definition" in each]
    expressions = [query.expr for query in QUERIES] + [variable["definition"] for variable in variables]
    used = {name for expr in expressions for name in OUR_NAME.findall(expr)}
    assert {name for name in used - exposed_names() if not OF_GATEWAYS.match(name)} == set()


# For alerts, and for queries of a user's own.
UNDRAWN = {
    "sidelight_breakdown_quality_total",
    "sidelight_build_info",
    "sidelight_client_e2e_latency_seconds",
    "sidelight_client_input_tokens_total",
    "sidelight_client_inter_token_latency_seconds",
    "sidelight_client_requests_good_total",
    "sidelight_drift_ratio",  # an alert carries it
    "sidelight_drift_since_seconds",
    "sidelight_engine_e2e_latency_seconds",
    "sidelight_engine_feature",
    "sidelight_engine_feature_counted_total",
    "sidelight_engine_feature_time_seconds",
    "sidelight_engine_inter_token_latency_seconds",
    "sidelight_engine_last_answer_timestamp_seconds",
    "sidelight_engine_prompt_tokens_total",
    "sidelight_engine_quantile_seconds",
    "sidelight_gateway_requests_total",
    "sidelight_generator_loop_delay_max_seconds",
    "sidelight_live_errors_total",
    "sidelight_receiver_forward_queue",
    "sidelight_scrape_duration_seconds",
    "sidelight_ttft_largest_part_ratio",
    "sidelight_window_size",
}


def test_a_metric_without_a_panel_is_one_on_purpose() -> None:
    """What else the sidecar measures has a place on a dashboard."""
    used = {name for query in QUERIES for name in OUR_NAME.findall(query.expr)}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in used}
    exposed = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed_names()}
    assert exposed - families == UNDRAWN


def test_variables_pick_what_is_shown() -> None:
    """The dashboards work in any Grafana: nothing about a data source or a run is fixed in them."""
    picked = {name: [variable["name"] for variable in board["templating"]["list"]] for name, board in BOARDS.items()}
    assert picked == {
        "run": ["datasource", "model", "instance", "run", "endpoint", "class"],
        "compare": ["datasource", "model", "run", "base"],
        "watch": ["datasource", "instance", "endpoint"],
    }
    (run,) = (variable for variable in BOARDS["run"]["templating"]["list"] if variable["name"] == "run")
    assert (run["multi"], run["sort"]) == (False, 2)  # the newest of the range: run ids begin with their date


@pytest.mark.parametrize(
    ("expr", "substituted"),
    [
        ("rate(a[$__rate_interval])", "rate(a[20s])"),
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
