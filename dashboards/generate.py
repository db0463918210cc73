"""Write the Grafana dashboard from `rows`, and the alerts as Kubernetes wants them, the same bytes each time.

    python dashboards/generate.py            write the files
    python dashboards/generate.py --check    exit 1 if one of them is not what would be written

Classic (v1) dashboard JSON: it loads in every Grafana since 10, by provisioning or by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from string import ascii_uppercase
from textwrap import indent

import yaml
from grafana_foundation_sdk.builders import common, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models import prometheus as prometheus_model
from panels import COLOURS, DISPLAYED, SIDECAR, Panel
from rows import ROWS

from correlator.breakdown import E2E_PARTS

with warnings.catch_warnings():
    # The SDK warns on import that v2 is preferred; v2 needs a newer Grafana than many run.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import dashboard

HERE = Path(__file__).parent
TARGET = HERE / "grafana" / "sidelight.json"
RULES = HERE / "prometheus" / "rules.yml"
PROMETHEUS_RULE = HERE / "kubernetes" / "monitoring" / "prometheusrule.yaml"
DATASOURCE = common_model.DataSourceRef(type_val="prometheus", uid="${datasource}")
# The series of a panel with one for each part.
PARTS = {part.name for part in E2E_PARTS}
# Quantiles over fewer seconds hold too few requests to mean anything.
MIN_INTERVAL = "5s"

AnyPanel = stat.Panel | timeseries.Panel | heatmap.Panel


def render() -> str:
    """Return the dashboard as JSON text, ending in a newline."""
    return json.dumps(_dashboard().build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _dashboard() -> dashboard.Dashboard:
    board = (
        dashboard.Dashboard("Sidelight: where the wait goes")
        .uid("sidelight")
        .description("A load run and the engine under it on one time axis: how long clients waited, and where.")
        .tags(["llm", "sidelight"])
        .timezone("browser")
        .time("now-15m", "now")
        .refresh("5s")
        .editable()
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .variables(
            [
                dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
                _label_variable("instance", "Sidecar", "label_values(sidelight_build_info, instance)"),
                _label_variable(
                    "endpoint", "Engine endpoint", f"label_values(sidelight_engine_info{{{SIDECAR}}}, endpoint)"
                ),
            ]
        )
        .annotation(_phases())
    )
    number = 0
    for row in ROWS:
        board = board.with_row(dashboard.Row(row.title).id(number := number + 1))
        for panel in row.panels:
            board = board.with_panel(_panel(panel).id(number := number + 1))
    return board


def _label_variable(name: str, label: str, query: str) -> dashboard.QueryVariable:
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .datasource(DATASOURCE)
        .query({"query": query, "refId": name})
        .definition(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(selected=True, text="All", value="$__all"))
    )


def _phases() -> dashboard.AnnotationQuery:
    """Mark each phase of a run as a region over all panels."""
    return (
        dashboard.AnnotationQuery()
        .name("Phases of the run")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("blue")
        .expr(f"sidelight_run_info{{{SIDECAR}}}")
        .title_format("{{phase}}")
        .text_format("run {{run_id}}")
        .tag_keys("phase")
        .step("1s")
    )


def _panel(panel: Panel) -> AnyPanel:
    shape: AnyPanel = {"tile": _tile, "heatmap": _heatmap}.get(panel.kind, _graph)(panel)
    shape = (
        shape.title(panel.title)
        .description(panel.description)
        .datasource(DATASOURCE)
        .unit(panel.unit)
        .no_value(panel.empty)
        .interval(MIN_INTERVAL)
        .span(panel.width)
        .height(panel.height)
    )
    form = prometheus_model.PromQueryFormat
    for ref_id, (legend, expr) in zip(ascii_uppercase, panel.queries.items(), strict=False):
        target = (
            prometheus.Dataquery()
            .expr(expr)
            .legend_format(legend)
            .format(form.HEATMAP if panel.kind == "heatmap" else form.TIME_SERIES)
            .editor_mode(prometheus_model.QueryEditorMode.CODE)
            .datasource(DATASOURCE)
            .ref_id(ref_id)
        )
        shape = shape.with_target(target.instant() if panel.instant else target.range())
    return shape


def _tile(panel: Panel) -> stat.Panel:
    text = common_model.BigValueTextMode.NAME if panel.shows_name else common_model.BigValueTextMode.VALUE
    steps = [model.Threshold(value=value, color=colour) for value, colour in panel.steps]
    return (
        stat.Panel()
        .text_mode(text)
        .color_mode(common_model.BigValueColorMode.VALUE)
        .graph_mode(common_model.BigValueGraphMode.NONE if panel.instant else common_model.BigValueGraphMode.AREA)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    )


def _graph(panel: Panel) -> timeseries.Panel:
    graph = (
        timeseries.Panel()
        .min(0)
        .line_width(1)
        .fill_opacity(60 if panel.kind == "stack" else 5)
        .show_points(common_model.VisibilityMode.AUTO)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_model.LegendDisplayMode.TABLE)
            .placement(common_model.LegendPlacement.BOTTOM)
            .calcs(["mean", "max", "lastNotNull"])
        )
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
    )
    if panel.highest is not None:
        graph = graph.max(panel.highest)
    if panel.kind == "stack":
        graph = graph.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    names = panel.queries.keys() | (PARTS if "{{part}}" in panel.queries else set())
    for name in sorted(names & COLOURS.keys()):
        colour = model.DynamicConfigValue(id_val="color", value={"mode": "fixed", "fixedColor": COLOURS[name]})
        shown = [model.DynamicConfigValue(id_val="displayName", value=DISPLAYED[name])] if name in DISPLAYED else []
        graph = graph.override_by_name(name, [colour, *shown])
    return graph


def _heatmap(panel: Panel) -> heatmap.Panel:
    return (
        heatmap.Panel()
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(panel.unit).axis_placement(common_model.AxisPlacement.LEFT))
        .cell_values(heatmap.CellValues().unit("short"))
        .color(heatmap.HeatmapColorOptions().mode(heatmap_model.HeatmapColorMode.SCHEME).scheme("Blues").steps(32))
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .tooltip(heatmap.HeatmapTooltip().mode(common_model.TooltipDisplayMode.SINGLE).y_histogram(True))
        .show_legend()
    )


def prometheus_rule() -> str:
    """Return the alerts of rules.yml as an object for Prometheus' operator."""
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": "sidelight"}}
    comment = "# Written by dashboards/generate.py from dashboards/prometheus/rules.yml.\n"
    return f"{comment}{yaml.safe_dump(head)}spec:\n{indent(RULES.read_text(encoding='utf-8'), '  ')}"


def main(arguments: list[str]) -> int:
    """Write or check the files; return the exit code."""
    parser = argparse.ArgumentParser(description="Generate the Grafana dashboard and the alerts for Kubernetes.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    check: bool = parser.parse_args(arguments).check
    outdated = 0
    for path, text in {TARGET: render(), PROMETHEUS_RULE: prometheus_rule()}.items():
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            print(f"{path} is out of date: run python dashboards/generate.py", file=sys.stderr)
            outdated = 1
    return outdated


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
