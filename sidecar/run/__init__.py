"""A run from its options to its directory: preparation, warm-up, measurement.

What a run directory holds is `sidecar.directory`'s; `open_run` stands here for notebooks.
"""

from sidecar.directory import Run
from sidecar.directory.opening import open_run

__all__ = ["Run", "open_run"]
