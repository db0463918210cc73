"""Panels as Grafana has them: what each kind of panel looks like."""

from __future__ import annotations

from string import ascii_uppercase

from grafana_foundation_sdk.builders import barchart, common, dashboard, heatmap, prometheus, stat, table, timeseries
from grafana_foundation_sdk.models import common as common_model
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models import prometheus as prometheus_model
from panels import COLOURS, LABEL_COLOURS, Panel, Steps

DATASOURCE = common_model.DataSourceRef(type_val="prometheus", uid="${datasource}")
# Quantiles over fewer seconds hold too few requests to mean anything.
MIN_INTERVAL = "5s"
# The legend of more series stands beside the graph, where all its rows have room, but for narrow panels.
MOST_BELOW, NARROW = 2, 8
TITLE_PX, VALUE_PX = 12, {"value": 28, "value_and_name": 22, "name": 18}
HIDDEN = {"legend": True, "tooltip": True, "viz": True}
NO_YES: Steps = ((None, "red"), (1.0, "green"))
# Labels that a table does not show.
UNSHOWN = ("Time", "instance", "job", "phase")

AnyPanel = stat.Panel | timeseries.Panel | heatmap.Panel | table.Panel | barchart.Panel
_Value = model.DynamicConfigValue


def shaped(panel: Panel) -> AnyPanel:
    """Return a panel as the SDK builds it."""
    makers = {"tile": _tile, "heatmap": _heatmap, "table": _table, "bars": _bars}
    shape: AnyPanel = makers.get(panel.kind, _graph)(panel)
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
    if panel.unit == "percentunit" and panel.kind == "tile":  # by itself Grafana writes 7.44e-7%
        shape = shape.decimals(1)
    if panel.words:
        words = {value: model.ValueMappingResult(text=text) for value, text in panel.words.items()}
        shape = shape.mappings([model.ValueMap(options=words)])
    if panel.link is not None and panel.kind != "table":
        title, url = panel.link
        shape = shape.data_links([dashboard.DashboardLink(title).url(url).target_blank(True)])
    for ref_id, (legend, expr) in zip(ascii_uppercase, panel.queries.items(), strict=False):
        shape = shape.with_target(_target(panel, ref_id, legend, expr))
    return shape


def _target(panel: Panel, ref_id: str, legend: str, expr: str) -> prometheus.Dataquery:
    formats = prometheus_model.PromQueryFormat
    tabular = {"heatmap": formats.HEATMAP, "table": formats.TABLE, "bars": formats.TABLE}
    target = (
        prometheus.Dataquery()
        .expr(expr)
        .legend_format(legend)
        .format(tabular.get(panel.kind, formats.TIME_SERIES))
        .editor_mode(prometheus_model.QueryEditorMode.CODE)
        .datasource(DATASOURCE)
        .ref_id(ref_id)
    )
    if panel.exemplars:
        target = target.exemplar(True)
    return target.instant() if panel.instant else target.range()


def _tile(panel: Panel) -> stat.Panel:
    # Sizes that Grafana chooses itself run out of narrow tiles, and of those of several values.
    sizes = common.VizTextDisplayOptions().title_size(TITLE_PX).value_size(VALUE_PX[panel.shows])
    tile = (
        stat.Panel()
        .text(sizes)
        .text_mode(common_model.BigValueTextMode(panel.shows))
        .color_mode(common_model.BigValueColorMode.VALUE)
        .graph_mode(common_model.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]).values(False))
        .thresholds(_thresholds(panel.steps))
    )
    for names, steps in panel.coloured.items():
        tile = tile.override_by_regexp(names, [_colour(steps[0][1])])
    return tile


def _graph(panel: Panel) -> timeseries.Panel:
    is_wide = panel.width > NARROW
    beside = is_wide and (len(panel.queries) > MOST_BELOW or any("{{" in name for name in panel.queries))
    placement, mode = common_model.LegendPlacement, common_model.LegendDisplayMode
    graph = (
        timeseries.Panel()
        .min(0)
        .line_width(1)
        .fill_opacity(60 if panel.kind == "stack" else 5)
        .show_points(common_model.VisibilityMode.AUTO)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(mode.TABLE if is_wide else mode.LIST)
            .placement(placement.RIGHT if beside else placement.BOTTOM)
            .calcs(["mean", "max"] if is_wide else ["max"])
        )
        .color_scheme(dashboard.FieldColor().mode(model.FieldColorModeId.PALETTE_CLASSIC))
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
    )
    if panel.highest is not None:
        graph = graph.max(panel.highest)
    if panel.kind == "stack":
        graph = graph.stacking(common.StackingConfig().mode(common_model.StackingMode.NORMAL).group("A"))
    for name in sorted(panel.queries):
        graph = graph.override_by_name(name, _line(name)) if _line(name) else graph
        for value, colour in LABEL_COLOURS.get(name.strip("{}"), {}).items():
            graph = graph.override_by_name(value, [_colour(colour)])
    # A part that no request has is a line along zero, or none: it takes a row of the legend, and says nothing.
    for nothing in ("allIsZero", "allIsNull") if panel.kind == "stack" else ("allIsNull",):
        matcher = model.MatcherConfig(id_val="byValue", options={"reducer": nothing, "op": "gte", "value": 0})
        graph = graph.with_override(matcher, [_Value(id_val="custom.hideFrom", value=HIDDEN)])
    return graph


def _line(name: str) -> list[_Value]:
    """Return the overrides of a named line: its colour, or its role as a bound.

    A bound is that of a band.
    """
    whole, _, bound = name.partition(", ")
    if bound not in {"low", "high"}:
        return [_colour(COLOURS[name])] if name in COLOURS else []
    band = [_Value(id_val="custom.fillBelowTo", value=f"{whole}, low")] if bound == "high" else []
    return [
        _colour(COLOURS[whole]),
        _Value(id_val="custom.lineWidth", value=0),
        _Value(id_val="custom.fillOpacity", value=20 if band else 0),
        *band,
    ]


def _colour(colour: str) -> _Value:
    return _Value(id_val="color", value={"mode": "fixed", "fixedColor": colour})


def _thresholds(steps: Steps) -> dashboard.ThresholdsConfig:
    levels = [model.Threshold(value=value, color=colour) for value, colour in steps]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(levels)


def _heatmap(panel: Panel) -> heatmap.Panel:
    return (
        heatmap.Panel()
        .calculate(False)
        .y_axis(heatmap.YAxisConfig().unit(panel.unit).axis_placement(common_model.AxisPlacement.LEFT))
        .cell_values(heatmap.CellValues().unit("short"))
        .color(heatmap.HeatmapColorOptions().mode(heatmap_model.HeatmapColorMode.SCHEME).scheme("Blues").steps(32))
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .exemplars_color("light-red")
        .tooltip(heatmap.HeatmapTooltip().mode(common_model.TooltipDisplayMode.SINGLE).y_histogram(True))
        .show_legend()
    )


def _one_row_a_label(panel: Panel) -> list[model.DataTransformerConfig]:
    """Return the transformations that merge several queries' answers into one table.

    It has a column a query, named after it.
    """
    names = {f"Value #{ref_id}": name for ref_id, name in zip(ascii_uppercase, panel.queries, strict=False)}
    about = {value for value, name in names.items() if name == "About"}
    labels = {"run_id": "Run"} | {
        name: name.capitalize()
        for name in ("objective", "class", "model", "workload", "engine", "version", "verdict", "sentence")
    }
    organised = {
        "excludeByName": dict.fromkeys((*UNSHOWN, *about), True),
        "renameByName": labels | names,
        "indexByName": {name: place for place, name in enumerate((*labels, *names))},
    }
    return [
        model.DataTransformerConfig(id_val="merge", options={}),
        model.DataTransformerConfig(id_val="organize", options=organised),
    ]


def _table(panel: Panel) -> table.Panel:
    shape = table.Panel().show_header(True).min_width(60).transformations(_one_row_a_label(panel))
    columns: dict[str, list[_Value]] = {}
    for name, unit in panel.units.items():
        columns.setdefault(name, []).append(_Value(id_val="unit", value=unit))
    for name, steps in (dict(panel.coloured) | dict.fromkeys(panel.verdicts, NO_YES)).items():
        levels = [{"value": value, "color": colour} for value, colour in steps]
        columns.setdefault(name, []).extend(
            [
                _Value(id_val="thresholds", value={"mode": "absolute", "steps": levels}),
                _Value(id_val="custom.cellOptions", value={"type": "color-text"}),
            ]
        )
    words = {"0": {"text": "no"}, "1": {"text": "yes"}}
    for name in panel.verdicts:
        columns[name].append(_Value(id_val="mappings", value=[{"type": "value", "options": words}]))
    if panel.link is not None:
        title, url = panel.link
        columns["Run"] = [
            _Value(id_val="custom.width", value=190),
            _Value(id_val="links", value=[{"title": title, "url": url, "targetBlank": False}]),
        ]
    for name, values in sorted(columns.items()):
        shape = shape.override_by_name(name, values)
    return shape


def _bars(panel: Panel) -> barchart.Panel:
    shape = (
        barchart.Panel()
        .x_field("Run")
        .orientation(common_model.VizOrientation.HORIZONTAL)
        .stacking(common_model.StackingMode.NORMAL)
        .show_value(common_model.VisibilityMode.NEVER)
        .fill_opacity(80)
        .transformations(_one_row_a_label(panel))
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(common_model.LegendDisplayMode.LIST)
            .placement(common_model.LegendPlacement.BOTTOM)
            .calcs([])
        )
        .tooltip(common.VizTooltipOptions().mode(common_model.TooltipDisplayMode.MULTI))
    )
    for name in sorted(panel.queries.keys() & COLOURS.keys()):
        shape = shape.override_by_name(name, [_colour(COLOURS[name])])
    return shape
