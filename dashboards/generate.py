"""Generator of the Grafana dashboards, and of the alerts as Kubernetes resources.

The files have the same bytes each time.

    python dashboards/generate.py            write the files
    python dashboards/generate.py --check    exit 1 if one of them is not what would be written

Classic (v1) dashboard JSON: it loads in every Grafana since 10, by provisioning or by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from textwrap import indent

import compare_board
import run_board
import watch_board
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model
from panels import Board, PanelRow, Variable
from shapes import DATASOURCE, shaped

with warnings.catch_warnings():
    # The SDK warns on import that v2 is preferred; v2 needs a newer Grafana than many run.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.builders import dashboard

HERE = Path(__file__).parent
RULES = HERE / "prometheus" / "rules.yml"
PROMETHEUS_RULE = HERE / "kubernetes" / "monitoring" / "prometheusrule.yaml"
BOARDS = (run_board.BOARD, compare_board.BOARD, watch_board.BOARD)


def rendered() -> Mapping[Path, str]:
    """Return each file and its text, ending in a newline."""
    boards = {
        HERE / "grafana" / f"{board.uid}.json": json.dumps(_built(board), cls=JSONEncoder, indent=2, sort_keys=True)
        for board in BOARDS
    }
    return {path: f"{text}\n" for path, text in boards.items()} | {PROMETHEUS_RULE: prometheus_rule()}


def _built(board: Board) -> model.Dashboard:
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["llm", "sidelight"])
        .timezone("browser")
        .time("now-15m", "now")
        .refresh("5s")
        .editable()
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .variables(
            [
                dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
                *(_variable(variable) for variable in board.variables),
            ]
        )
        .annotation(_phases(board))
        .links(
            [
                dashboard.DashboardLink("Sidelight")
                .type(model.DashboardLinkType.DASHBOARDS)
                .tags(["sidelight"])
                .keep_time(True)
                .include_vars(True)
            ]
        )
    )
    number = 0
    for row in board.rows:
        built = built.with_row(_row(row, number + 1))
        number += 1
        for place, panel in enumerate(row.panels, number + 1):
            built = built if row.collapsed else built.with_panel(shaped(panel).id(place))
        number += len(row.panels)
    return built.build()


def _row(row: PanelRow, number: int) -> dashboard.Row:
    header = dashboard.Row(row.title).id(number).collapsed(row.collapsed)
    for place, panel in enumerate(row.panels if row.collapsed else (), number + 1):
        header = header.with_panel(shaped(panel).id(place))
    return header


def _variable(variable: Variable) -> dashboard.QueryVariable:
    order = model.VariableSort.ALPHABETICAL_DESC if variable.newest_first else model.VariableSort.ALPHABETICAL_ASC
    built = (
        dashboard.QueryVariable(variable.name)
        .label(variable.label)
        .datasource(DATASOURCE)
        .query({"query": variable.query, "refId": variable.name})
        .definition(variable.query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(order)
    )
    if not variable.several:
        return built
    everything = model.VariableOption(selected=True, text="All", value="$__all")
    return built.multi(True).include_all(True).all_value(".*").current(everything)


def _phases(board: Board) -> dashboard.AnnotationQuery:
    """Mark each phase of a run as a region over all panels."""
    return (
        dashboard.AnnotationQuery()
        .name("Phases of the run")
        .datasource(DATASOURCE)
        .enable(True)
        .icon_color("blue")
        .expr(board.phases)
        .title_format("{{phase}}")
        .text_format("run {{run_id}}")
        .tag_keys("phase")
        .step("1s")
    )


def prometheus_rule() -> str:
    """Return the alerts of rules.yml as an object for Prometheus' operator."""
    head = {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule", "metadata": {"name": "sidelight"}}
    comment = "# Written by dashboards/generate.py from dashboards/prometheus/rules.yml.\n"
    return f"{comment}{yaml.safe_dump(head)}spec:\n{indent(RULES.read_text(encoding='utf-8'), '  ')}"


def main(arguments: list[str]) -> int:
    """Write or check the files; return the exit code."""
    parser = argparse.ArgumentParser(description="Generate the Grafana dashboards and the alerts for Kubernetes.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file differs")
    check: bool = parser.parse_args(arguments).check
    outdated = {path: text for path, text in rendered().items() if not path.is_file() or path.read_text() != text}
    for path, text in outdated.items():
        if check:
            print(f"{path} is out of date: run python dashboards/generate.py", file=sys.stderr)
            continue
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")
    return int(check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
