"""The command `predict`: a run's engine under other loads and settings."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Group, Parameter
from msgspec import UNSET, UnsetType

from sidelight.correlator.opening import open_run
from sidelight.exporter.evaluation.measured import window_of
from sidelight.exporter.evaluation.server import engines_of, finished_requests, server_of
from sidelight.exporter.text import print_on
from sidelight.loadgen.plan.arrivals import Arrival
from sidelight.loadgen.requests.slo.objectives import Slo, parse_typed_slo
from sidelight.recorded.errors import ConfigurationError
from sidelight.recorded.run import Run
from sidelight.rundir.printable.numbers import figure
from sidelight.rundir.stats import Missing
from sidelight.sidecar.options.fields import CRITERIA, OUTPUT, Verbose, flag, option
from sidelight.sidecar.predict.page import write_page
from sidelight.sidecar.predict.report import report
from sidelight.sidecar.predict.result import MeasuredLoad, answer
from sidelight.sidecar.predict.validation import validated
from sidelight.sidecar.progress.reporter import Terminal
from sidelight.twin.engine.play import Router
from sidelight.twin.model import twin_of
from sidelight.twin.scenario import Prediction, Scenario, Twin, settings_of
from sidelight.twin.traffic import OtherTraffic

SCENARIO = Group("What if", sort_key=1)
DEFAULT_RATES = "x0.5,x1,x1.5,x2"
_MOST_RATE, _MOST_COUNT = 1e6, 100_000
_what_if = partial(option, SCENARIO, show_default=False)

Rates = Annotated[
    str,
    _what_if("Requests per second, several with commas: 4,6,8; or times the run's: x1.5,x2. Default: x0.5,x1,x1.5,x2."),
]
Counts = Annotated[str, _what_if("Requests in flight of a closed loop, several with commas.")]
Process = Annotated[
    Literal["poisson", "uniform", "burst"] | None,
    _what_if("Arrivals of the rates, where they are not those of the run."),
]
Replicas = Annotated[str, option(SCENARIO, "Equal engines that share the rate, several with commas.")]
Routing = Annotated[Router, option(SCENARIO, "Which replica gets a request: by turns, or the one that has the fewest.")]
Workload = Annotated[str, _what_if("Other requests: a workload's, by the name or YAML file that run takes.")]
Trace = Annotated[Path | None, _what_if("Other requests at their own times: a trace, as run --trace takes it.")]
Prompts = Annotated[str, _what_if("Other lengths of prompts, like 2048 or uniform:128-1024.")]
Outputs = Annotated[str, _what_if("Other lengths of outputs, likewise.")]
Settings = Annotated[
    tuple[str, ...],
    _what_if(
        "Settings to compare with the run's: max-num-seqs=32, max-num-batched-tokens=2048, kv-blocks=4096; with commas "
        "together, and repeated one after another.",
        name="--set",
        negative="",
    ),
]
Known = Annotated[str, _what_if("Settings that the engine had, where the run does not show them.")]
Objectives = Annotated[
    str | None,
    option(CRITERIA, "Objectives, like ttft_p99<2s: whether they are met, up to which rate, and by how many replicas."),
]
Page = Annotated[Path | None, option(OUTPUT, "Write a page with p99 by rate to this file, beside the report.")]
Server = Annotated[
    str | None,
    _what_if(
        "Send the loads to this server, or several with commas, whose settings are those of the last --set, and show "
        "measured times beside the predicted."
    ),
]
Price = Annotated[float | None, option(CRITERIA, "What an engine costs an hour, in any currency.")]


def predict(  # noqa: PLR0913  an argument is an option
    run_directory: Annotated[Path, Parameter(name="RUN", help="A run directory, or a watch's.")],
    *,
    rate: Rates = "",
    concurrency: Counts = "",
    arrival: Process = None,
    replicas: Replicas = "1",
    router: Routing = "round-robin",
    input_tokens: Prompts = "",
    output_tokens: Outputs = "",
    workload: Workload = "",
    trace: Trace = None,
    settings: Settings = (),
    known: Known = "",
    slo: Objectives = None,
    price: Price = None,
    validate: Server = None,
    output: Page = None,
    as_json: Annotated[bool, flag(OUTPUT, "Print the predictions as JSON.", name="--json")] = False,
    verbose: Verbose = False,
) -> int:
    """Predict a recorded run's times at other rates and settings, each with its 90 % interval.

    The engine's speed is fitted to the run, tested on the part of the run that the fit has not seen, and played in
    virtual time. Where the test fails, there is no prediction, and the reason is given.

    sidelight predict runs/today --rate x1.5,x2,x3

    sidelight predict runs/today --rate 8 --set max-num-seqs=32 --slo 'ttft_p99<2s'

    sidelight predict runs/today --trace monday.jsonl --rate x1 --replicas 2,3 --router least-requests
    """
    del verbose  # which is read before
    objectives = _objectives(slo, price)
    _refuse_other_times(trace, concurrency, arrival)
    run = open_run(run_directory)
    other = OtherTraffic(workload=workload, trace=trace, input_tokens=input_tokens, output_tokens=output_tokens)
    twin = other.of(_twin(run, settings_of("--known", known)))
    base = Scenario(label="", router=router, arrival=Arrival(kind=arrival, rate_per_s=1.0) if arrival else None)
    loads = list(_loads(rate, concurrency, replicas, base, settings, twin.rate_per_s))
    there = loads[-1].settings, loads[-1].replicas  # of the server to be loaded

    def measure(prediction: Prediction) -> MeasuredLoad | UnsetType:
        of = prediction.scenario
        if validate is None or (of.settings, of.replicas) != there:
            return UNSET
        return validated(
            run, prediction, validate, seed=1 + loads.index(of), duration_s=twin.duration_s, traffic=other.options
        )

    predicted = answer(
        twin, loads, run_id=run.manifest["run_id"], traffic=other.text, slo=objectives, price=price, measure=measure
    )
    if output is not None:
        write_page(output, predicted, twin, loads[-1])
    if as_json:
        sys.stdout.write(json.dumps(msgspec.to_builtins(predicted), indent=2) + "\n")
    else:
        print_on(Terminal(highlight=False), report(predicted))
    return 0


def _refuse_other_times(trace: Path | None, concurrency: str, arrival: str | None) -> None:
    if trace is not None and (concurrency or arrival):
        raise ConfigurationError(
            "option.contradictory",
            f"--trace {trace}: comes at its own times; give --rate, without --concurrency and --arrival",
        )


def _objectives(slo: str | None, price: float | None) -> Slo | None:
    """Return the objectives; raises ConfigurationError for them or a price that cannot be."""
    if price is not None and not 0 <= price < math.inf:
        raise ConfigurationError("option.value", f"--price {price:g}: must be a number of 0 or more")
    try:
        return parse_typed_slo(slo) if slo else None
    except ValueError as error:
        raise ConfigurationError("option.value", str(error)) from None


def _twin(run: Run, known: Mapping[str, int]) -> Twin:
    """Return the twin of a run; raises ConfigurationError where a prediction would be a guess."""
    window = window_of(run)
    server = server_of(run, window, window.end_ns - window.start_ns)
    twin = twin_of(run, finished_requests(server), known, pages=engines_of(run))
    if isinstance(twin, Missing):
        raise ConfigurationError("predict.refused", f"{run.path}: no prediction: {twin.reason}")
    return twin


def _loads(
    rate: str, concurrency: str, replicas: str, base: Scenario, settings: Sequence[str], of_run: float
) -> Iterator[Scenario]:
    """Yield all scenarios: each load on each number of replicas, as the engine was and under each setting."""
    changes = [settings_of("--set", each) for each in settings]
    counts = _counts("--concurrency", concurrency)
    loads = [replace(base, label=f"{count} in flight", concurrency=count) for count in counts]
    for text in (rate or ("" if loads else DEFAULT_RATES)).split(","):
        if text:
            per_s = _rate(text.strip(), of_run)
            loads.append(replace(base, label=f"{figure(per_s)}/s", rate_per_s=per_s))
    for load in loads:
        for count in _counts("--replicas", replicas):
            for changed in ({}, *changes):
                also = [f"{count} replicas"] if count > 1 else []
                label = ", ".join([load.label, *also, *(f"{name}={value}" for name, value in changed.items())])
                yield replace(load, label=label, replicas=count, settings=changed)


def _rate(text: str, of_run: float) -> float:
    try:
        rate = float(text.removeprefix("x")) * (of_run if text.startswith("x") else 1.0)
    except ValueError:
        rate = 0.0
    if not 0 < rate < _MOST_RATE:
        raise ConfigurationError(
            "option.value", f"--rate {text}: must be requests per second, or times the run's rate, as 4,6,8 or x1.5,x2"
        )
    return rate


def _counts(name: str, text: str) -> list[int]:
    counts = [each.strip() for each in text.split(",") if each.strip()]
    for each in counts:
        if not (each.isdecimal() and 0 < int(each) <= _MOST_COUNT):
            raise ConfigurationError(
                "option.value", f"{name} {each}: must be a number from 1 to {_MOST_COUNT}, several with commas"
            )
    return [int(each) for each in counts]
