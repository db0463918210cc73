"""Tests of the draft, one module each, and procedures that are run alike: comparisons and sweeps."""

from __future__ import annotations

from methodology.procedures.capacity import CAPACITY
from methodology.procedures.compare import COMPARE
from methodology.procedures.fairness import FAIRNESS
from methodology.procedures.guardrail import GUARDRAIL
from methodology.procedures.itl import ITL
from methodology.procedures.long_context import LONG_CONTEXT
from methodology.procedures.memory_pressure import MEMORY_PRESSURE
from methodology.procedures.prefix_cache import PREFIX_CACHE
from methodology.procedures.sweep import SWEEP
from methodology.procedures.throughput import THROUGHPUT
from methodology.procedures.tradeoff import TRADEOFF
from methodology.procedures.ttft import TTFT
from methodology.study.model import Procedure

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
