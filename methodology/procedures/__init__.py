"""The draft's tests, one module each: objective, parameters, steps, results."""

from __future__ import annotations

from methodology.study.model import Procedure

PROCEDURES: dict[str, Procedure] = {}
