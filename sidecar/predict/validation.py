"""Predicted loads, sent to a server and measured."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sidelight.correlator.opening import open_run
from sidelight.recorded.errors import ConfigurationError
from sidelight.recorded.run import Run
from sidelight.rundir.columns import take
from sidelight.sidecar.predict.result import LEVELS, MeasuredLoad
from sidelight.twin.check import METRICS, observed_ms, quantiles_of
from sidelight.twin.engine.steps import streamed_requests
from sidelight.twin.scenario import Prediction

#: Settings of the run that the load of another does not take over; the rest of its configuration goes along.
_LEFT = {"config", "out", "listen", "metrics", "requests", "json", "quiet", "rate", "concurrency", "seed", "slo"}
_TRAFFIC = {"workload", "dataset", "prompts", "input_tokens", "output_tokens", "trace", "replay_requests", "sessions"}


def validated(
    run: Run, prediction: Prediction, url: str, *, seed: int, duration_s: float, traffic: Mapping[str, str]
) -> MeasuredLoad:
    """Return the measured times of a predicted load, sent to `url` by `sidelight run`.

    Its directory lies beside that of the fitted run. `traffic` are options in place of the run's own.

    Raises ConfigurationError where the load could not be sent.
    """
    scenario = prediction.scenario
    name = f"{run.path.name}-validate-{seed}"
    out = next(place for n in range(1000) if not (place := run.path.with_name(f"{name}-{n}" if n else name)).exists())
    config = {
        **_configuration(run.manifest["config"], traffic),
        "url": url.split(","),
        "rate": scenario.rate_per_s,
        "concurrency": scenario.concurrency,
        **({"arrival": scenario.arrival.kind, "burstiness": 1.0} if scenario.arrival and scenario.rate_per_s else {}),
        "duration": duration_s,
        "seed": seed,
        "out": str(out),
        "listen": "off",
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config, file)
        file.flush()
        command = [sys.executable, "-m", "sidelight", "run", "--config", file.name]
        code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
    if code not in {0, 1}:
        raise ConfigurationError(
            "predict.validate", f"--validate {url}: {scenario.label} could not be sent; the reason stands above"
        )
    return _measured(out, prediction)


def _configuration(config: Mapping[str, Any], traffic: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a run that its predicted loads have too; masked secrets come from the environment."""
    left = _LEFT | _TRAFFIC if {"workload", "trace"} & {*traffic} else _LEFT
    others = {
        name: value
        for name, value in config.items()
        if name not in left and value not in (None, [], False) and "***" not in str(value)
    }
    return {**others, **traffic, **({"arrival": "replay", "workload": "trace"} if "trace" in traffic else {})}


def _measured(path: Path, prediction: Prediction) -> MeasuredLoad:
    log = open_run(path).requests
    times_ms = quantiles_of(observed_ms(streamed_requests(take(log, log.phase == "measure"))))
    inside = (prediction.low <= times_ms) & (times_ms <= prediction.high)
    times = {
        name: {level: float(value) for level, value in zip(LEVELS, row, strict=True) if np.isfinite(value)}
        for name, row in zip(METRICS, times_ms, strict=True)
    }
    return MeasuredLoad(directory=str(path), inside=int(inside.sum()), **times)
