"""Page of predictions: the report, and TTFT, TPOT and E2E over the rate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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


def write_page(path: Path, predicted: Predicted, twin: Twin, settings: Mapping[str, int]) -> None:
    """Write the page of predictions, one file that connects to nothing; curves are under `settings`, if there are.

    Raises ConfigurationError where it cannot be written.
    """
    title = f"Sidelight prediction of {predicted.run_id}"
    text = as_page(title, _sections(predicted), {"plots": _plots(twin, settings)}, styles=STYLES, scripts=SCRIPTS)
    try:
        replace_file(path, lambda file: file.write(without_secrets(text).encode()))
    except OSError as error:
        raise unusable_place("--output", path, error) from error


def _sections(predicted: Predicted) -> Iterator[str]:
    yield page_header((Line(((f"What if: {predicted.run_id}", "strong"),)), Prose(rests_on(predicted)))) + NO_SCRIPT
    yield section(Section(name="answer", content=tuple(answer_lines(predicted))))
    yield section(Section(name="details", title="p99 by rate, and scenarios", content=tuple(details(predicted))))


def _plots(twin: Twin, settings: Mapping[str, int]) -> list[dict[str, Any]]:
    lines = {"as the engine was": {}, **({_words(settings): settings} if settings else {})}
    curves = {name: _curve(twin, changed) for name, changed in lines.items()}
    shown = quantiles_of(twin.observed_ms)[:, _P99]
    measured = {"name": "measured", "x": [twin.rate_per_s], "low": [None], "high": [None]}
    is_of_run = twin.traffic is twin.requests
    return [
        {
            "name": name.replace("_", "-"),
            "title": f"{NAMES[name]} p99",
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


def _words(settings: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def _curve(twin: Twin, settings: Mapping[str, int]) -> Sequence[Prediction]:
    """Return the predictions at rates around the run's; those that are refused are left out."""
    scenarios = (Scenario(label="", rate_per_s=factor * twin.rate_per_s, settings=settings) for factor in _RATES)
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
