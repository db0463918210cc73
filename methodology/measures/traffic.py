"""Classes of requests that share a system: the draft's short and long ones, or those of a workload."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sidelight.loadgen.plan.fitting import TEMPLATE_TOKENS
from sidelight.loadgen.plan.workloads import custom
from sidelight.loadgen.plan.workloads.distributions import whole
from sidelight.loadgen.plan.workloads.fields import WorkloadError, read_yaml
from sidelight.methodology.study.model import StudySettings

NAME = "synthetic-skewed"
# By class: input and output ranges of the draft.
RANGES = {"short": ((64, 256), (32, 128)), "long": ((1024, 4096), (256, 1024))}
SKEWED = {"input": (5.5, 1.0), "output": (4.5, 1.2)}  # mu and sigma of Synthetic-Skewed
_DRAWN = 20_000  # lengths, for their mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Classes of a workload, shortest inputs first, each with its share and mean tokens."""

    name: str
    classes: tuple[dict[str, Any], ...]
    shares: tuple[float, ...]
    tokens: tuple[float, ...]
    scale: float = 1.0

    @property
    def names(self) -> list[str]:
        return [str(each["name"]) for each in self.classes]

    @property
    def mean_tokens(self) -> float:
        return sum(share * tokens for share, tokens in zip(self.shares, self.tokens, strict=True))

    def mapping(self, *indices: int) -> dict[str, Any]:
        """Return the workload of some classes, of all where none is named."""
        return {"name": self.name, "classes": [self.classes[at] for at in indices or range(len(self.classes))]}

    def per_s(self, at: int, mixed_per_s: float) -> float:
        """Return the requests/s of one class alone with the mixed load's tokens/s."""
        return mixed_per_s * self.mean_tokens / self.tokens[at]


def traffic(asked: StudySettings) -> Traffic:
    """Return the classes: those of a workload that has several, else the draft's, scaled to the model's length."""
    given = _classes(asked.options.get("workload", NAME))
    if given is not None:
        return _traffic(str(given.get("name", "classes")), given)
    longest = sum(most for _, most in RANGES["long"])
    room = max(1, asked.max_model_len - TEMPLATE_TOKENS) if asked.max_model_len else longest
    scale = min(1.0, room / longest)
    mix = 0.8 if asked.parameters.mix is None else asked.parameters.mix
    if not 0 < mix < 1:
        raise WorkloadError(
            "workload.weights",
            f"--mix {mix:.0%}: both classes need a share of the requests; give one between 0 and 100 %",
        )
    classes = [
        {"name": name, "weight": weight, "content": "random-tokens"}
        | {
            field: _truncated(*SKEWED[field], bounds, scale)
            for field, bounds in zip(("input", "output"), RANGES[name], strict=True)
        }
        for name, weight in (("short", mix), ("long", 1 - mix))
    ]
    return _traffic(NAME, {"classes": classes}, scale)


def _classes(workload: object) -> Mapping[str, Any] | None:
    """Return a workload's mapping where it has several classes."""
    if isinstance(workload, str) and workload.lstrip().startswith("{"):
        workload = json.loads(workload)
    elif isinstance(workload, str) and Path(workload).suffix in (".yaml", ".yml"):
        workload = read_yaml(Path(workload))
    return workload if isinstance(workload, Mapping) and len(workload.get("classes") or ()) > 1 else None


def _truncated(mu: float, sigma: float, bounds: tuple[int, int], scale: float) -> dict[str, Any]:
    least, most = (max(1, round(scale * bound)) for bound in bounds)
    return {
        "log-normal": {"mu": mu + float(np.log(scale)), "sigma": sigma, "min": least, "max": most, "truncated": True}
    }


def _traffic(name: str, workload: Mapping[str, Any], scale: float = 1.0) -> Traffic:
    above = {field: value for field, value in workload.items() if field not in ("name", "classes")}
    classes = [above | each for each in workload["classes"]]
    read = custom.parse({"classes": classes}, name=name).classes
    random = np.random.default_rng(np.random.SeedSequence(1))
    inputs = [float(whole(each.input_tokens, random, _DRAWN).mean()) for each in read]
    outputs = [float(whole(each.output_tokens, random, _DRAWN).mean()) for each in read]
    order = sorted(range(len(read)), key=inputs.__getitem__)
    total = sum(each.weight for each in read)
    return Traffic(
        name=name,
        classes=tuple(classes[at] for at in order),
        shares=tuple(read[at].weight / total for at in order),
        tokens=tuple(inputs[at] + outputs[at] for at in order),
        scale=scale,
    )
