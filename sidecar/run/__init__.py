"""A run from its options to its directory: preparation, warm-up, measurement.

What a run directory holds, and how it is read, is `sidecar.directory`'s; `open_run` stands here for notebooks.
"""

from sidecar.directory import Run, open_run

__all__ = ["Run", "open_run"]
