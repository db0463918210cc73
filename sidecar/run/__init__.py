"""A run from its options to its directory: preparation, warm-up, measurement.

What a run directory holds is `recorded`'s; `open_run` stands here for notebooks.
"""

from sidelight.correlator.opening import open_run
from sidelight.recorded.run import Run

__all__ = ["Run", "open_run"]
