"""The estimator under the name that checks and notebooks call; it lives in `correlator.estimate`."""

from __future__ import annotations

from correlator.estimate import attribute

__all__ = ["attribute"]
