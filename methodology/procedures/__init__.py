"""The draft's tests, one module each, and what is run in the same way: comparisons and sweeps."""

from __future__ import annotations

from methodology.procedures.compare import COMPARE
from methodology.procedures.sweep import SWEEP
from methodology.procedures.ttft import TTFT
from methodology.study.model import Procedure

PROCEDURES: dict[str, Procedure] = {procedure.name: procedure for procedure in (TTFT, COMPARE, SWEEP)}
