"""Page of predictions: the report, and TTFT, TPOT and E2E over the rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sidelight.exporter.document import Line, Prose, Section
from sidelight.exporter.html.markup import page_header, section
from sidelight.exporter.html.page import as_page
from sidelight.exporter.html.sections import NO_SCRIPT
from sidelight.recorded.errors import unusable_place
from sidelight.rundir.files import replace_file
from sidelight.rundir.printable.masking import without_secrets
from sidelight.sidecar.predict.report import NAMES, answer_lines, details, rests_on
from sidelight.sidecar.predict.result import Predicted
from sidelight.twin.check import METRICS, QUANTILES, quantiles_of
from sidelight.twin.scenario import Prediction, Scenario, Twin, predict

STYLES = ("page.css", "study.css")
SCRIPTS = ("plot.js", "hues.js", "study.js")
_RATES = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5)  # times the run's
_PLAYS = 12
_P99 = QUANTILES.index(0.99)


def write_page(path: Path, predicted: Predicted, twin: Twin, scenario: Scenario) -> None:
    """Write the page of predictions, one file that connects to nothing.

    Curves have the arrivals, replicas and router of a scenario, without its settings, and with them if there are.

    Raises ConfigurationError where it cannot be written.
    """
    title = f"Sidelight prediction of {predicted.run_id}"
    text = as_page(title, _sections(predicted), {"plots": _plots(twin, scenario)}, styles=STYLES, scripts=SCRIPTS)
    try:
        replace_file(path, lambda file: file.write(without_secrets(text).encode()))
    except OSError as error:
        raise unusable_place("--output", path, error) from error


def _sections(predicted: Predicted) -> Iterator[str]:
    yield page_header((Line(((f"What if: {predicted.run_id}", "strong"),)), Prose(rests_on(predicted)))) + NO_SCRIPT
    yield section(Section(name="answer", content=tuple(answer_lines(predicted))))
    yield section(Section(name="details", title="p99 by rate, and scenarios", content=tuple(details(predicted))))


def _plots(twin: Twin, scenario: Scenario) -> list[dict[str, Any]]:
    lines = {"as the engine was": replace(scenario, settings={})}
    if scenario.settings:
        lines[", ".join(f"{name}={value}" for name, value in scenario.settings.items())] = scenario
    curves = {name: _curve(twin, each) for name, each in lines.items()}
    shown = quantiles_of(twin.observed_ms)[:, _P99]
    measured = {"name": "measured", "x": [twin.rate_per_s], "low": [None], "high": [None]}
    is_of_run = twin.traffic is twin.requests and scenario.replicas == 1 and scenario.arrival is None
    also = f", {scenario.replicas} replicas by {scenario.router}" if scenario.replicas > 1 else ""
    return [
        {
            "name": name.replace("_", "-"),
            "title": f"{NAMES[name]} p99{also}",
            "kind": "line",
            "level": "90 %",
            "x_title": "requests/s",
            "y_title": "ms",
            "log_x": False,
            "log_y": True,
            "lines": [
                *(_line(label, curve, at) for label, curve in curves.items()),
                *([{**measured, "y": [_number(shown[at])]}] if is_of_run else []),
            ],
        }
        for at, name in enumerate(METRICS)
    ]


def _curve(twin: Twin, scenario: Scenario) -> Sequence[Prediction]:
    """Return the predictions at rates around the run's; those that are refused are left out."""
    rates = (factor * twin.rate_per_s * scenario.replicas for factor in _RATES)
    scenarios = (replace(scenario, rate_per_s=rate, concurrency=None) for rate in rates)
    predictions = (predict(twin, each, plays=_PLAYS) for each in scenarios)
    return [each for each in predictions if isinstance(each, Prediction)]


def _line(label: str, curve: Sequence[Prediction], at: int) -> dict[str, Any]:
    return {
        "name": label,
        "x": [_number(each.scenario.rate_per_s or 0.0) for each in curve],
        "y": [_number(each.median[at, _P99]) for each in curve],
        "low": [_number(each.low[at, _P99]) for each in curve],
        "high": [_number(each.high[at, _P99]) for each in curve],
    }


def _number(value: float) -> float:
    return float(f"{value:.5g}")
