"""Made-up values whose neighbours resemble each other."""

from __future__ import annotations

import numpy as np


def autoregressive(random: np.random.Generator, size: int, phi: float) -> np.ndarray:
    """An AR(1) of variance 1, stationary from its start."""
    from scipy.signal import lfilter  # noqa: PLC0415  a second, which every process of the suite would take

    values = random.normal(size=size)
    values[1:] *= np.sqrt(1 - phi * phi)
    return lfilter([1.0], [1.0, -phi], values)
