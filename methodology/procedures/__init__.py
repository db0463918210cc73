"""Tests of the draft, one module each, and procedures that are run alike: comparisons and sweeps."""

from __future__ import annotations

from sidelight.methodology.procedures.capacity import CAPACITY
from sidelight.methodology.procedures.compare import COMPARE
from sidelight.methodology.procedures.fairness import FAIRNESS
from sidelight.methodology.procedures.guardrail import GUARDRAIL
from sidelight.methodology.procedures.itl import ITL
from sidelight.methodology.procedures.long_context import LONG_CONTEXT
from sidelight.methodology.procedures.memory_pressure import MEMORY_PRESSURE
from sidelight.methodology.procedures.prefix_cache import PREFIX_CACHE
from sidelight.methodology.procedures.sweep import SWEEP
from sidelight.methodology.procedures.throughput import THROUGHPUT
from sidelight.methodology.procedures.tradeoff import TRADEOFF
from sidelight.methodology.procedures.ttft import TTFT
from sidelight.methodology.study.model import Procedure

PROCEDURES: dict[str, Procedure] = {
    procedure.name: procedure
    for procedure in (
        TTFT,
        THROUGHPUT,
        ITL,
        TRADEOFF,
        CAPACITY,
        FAIRNESS,
        PREFIX_CACHE,
        MEMORY_PRESSURE,
        LONG_CONTEXT,
        GUARDRAIL,
        COMPARE,
        SWEEP,
    )
}
