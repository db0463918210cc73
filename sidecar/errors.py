"""What can go wrong, split by the question a caller asks, with the exit code each ends in.

* SidelightError
  + ConfigurationError      2  an option, a configuration file or a run directory is not usable as given
  + TargetUnreachable       3  nothing answers at the address
  + TargetSpeaksElse        3  something answers, but not what was asked for
  + TargetNotMeasured       3  it was loaded, but no request succeeded
  + CannotWrite             3  a file of the run directory cannot be written
  + WorkerDied              3  one of our own processes ended before its work was done
  + Interrupted           130  stopped by the user; what was recorded up to then is kept

A failed request is data, not an exception. Lower packages raise their own, narrower errors; `session` and `cli` map
them here, once.
"""

from __future__ import annotations

from pathlib import Path


class SidelightError(Exception):
    """An error with a one-line message that says what, where and the cure."""

    exit_code = 3
    run_directory: Path | None = None  # where there is something to report all the same


class ConfigurationError(SidelightError):
    """The configuration names something that does not exist or is out of range."""

    exit_code = 2


class TargetUnreachable(SidelightError):
    """Nothing answers at the address."""


class TargetSpeaksElse(SidelightError):
    """Something answers, but it is not an OpenAI-compatible endpoint (or not the one asked for)."""


class TargetNotMeasured(SidelightError):
    """The target was loaded, but no request succeeded."""


class CannotWrite(SidelightError):
    """A file of the run directory cannot be written."""


class WorkerDied(SidelightError):
    """A load worker or the scraper ended before its work was done."""


class Interrupted(SidelightError):
    """The user stopped the run."""

    exit_code = 130
