"""docs/metrics.md tells what every number of the client's side is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from logs import request_log
from msgspec import to_builtins

from loadgen.host.clock_sync import clock_state, clock_summary
from loadgen.host.cpu_steal import machine_load, read_ticks
from loadgen.host.round_trip import Rtt, round_trip
from loadgen.requests import warmup
from loadgen.requests.self_check import self_check
from loadgen.requests.slo import parse_slo
from loadgen.requests.summary import client_summary
from rundir.stats import QUANTILES, Missing

DOCUMENT = Path(__file__).parents[2] / "docs/metrics.md"
# Statistics, reasons, and the parts of what a system call answers.
EXPLAINED = {*QUANTILES, "count", "mean", "std", "min", "max", "missing"}


THREE = {"submit": 100, "first": 120, "last": 140, "end": 145, "output": 3, "chunks": (120, 130, 140), "class": "only"}


def _names(block: object) -> Iterator[str]:
    """The names of a block of summary.json, however deep; those of classes and of errors are the user's."""
    if isinstance(block, dict):
        for name, value in block.items():
            if name == "classes":
                yield name
                yield from _names(next(iter(value.values())))
            elif name in ("errors", "kernel", "chrony"):
                yield name
            elif name == "missing":
                continue
            else:
                yield name
                yield from _names(value)
    elif isinstance(block, list):
        for value in block:
            yield from _names(value)


def _blocks() -> dict[str, dict[str, object]]:
    log, slo = request_log(THREE, THREE), parse_slo("ttft<1s")
    rtt = Rtt(host="h", port=1, connect_ms=(1.0,), kernel_ms=Missing(reason="none"))
    return {
        "client": to_builtins(client_summary(log, slo=slo)),
        "chunked": to_builtins(client_summary(request_log(THREE | {"output": 9}))),
        "self_check": to_builtins(self_check(log, [], open_loop=True)),
        "clock": to_builtins(clock_summary(clock_state())),
        "rtt": to_builtins(round_trip("http://h", rtt)),
        "steal": to_builtins(machine_load(read_ticks(), read_ticks())),
        "warmup": to_builtins(warmup.statement(warmup.DRAFT, log, drained=True)),
    }


@pytest.mark.parametrize("name", _blocks())
def test_every_number_is_explained(name: str):
    """Each name stands in the document in backticks."""
    told = set(re.findall(r"`([a-z0-9_]+)`", DOCUMENT.read_text(encoding="utf-8")))
    assert set() == set(_names(_blocks()[name])) - told - EXPLAINED
