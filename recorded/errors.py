"""The error tree with exit codes, split by the question that a caller asks.

* SidelightError
  + ConfigurationError      2  an option, a file, a run directory or a port is not usable as given
  + TargetUnreachable       3  nothing answers at the address
  + TargetIncompatible      3  a server answers, but does not offer the API that was asked for
  + TargetNotMeasured       3  the target was loaded, but no request succeeded, or none any more
  + CannotWrite             3  a file of the run directory cannot be written
  + DamagedRun              3  records are missing of a run that ended by itself; its results are written all the same
  + LoadIncomplete          3  a share of the load was not sent, since a node was lost; its results are written
  + WorkerDied              3  one of our own processes ended before its work was done
  + Interrupted           130  stopped by the user or by --deadline; the records up to then are kept

Besides these, a command exits with 0 when it is done, with 1 when the run finished but missed an objective of --slo, or
an examination found something to change between us and the engine, and with 3 after an OSError or a defect.

A failed request is data, not an exception. Lower packages raise their own, narrower errors; `sidecar.run` and
`sidecar.options` turn them into these, with the same code. Codes are listed in docs/troubleshooting.md, and the
sentences of each in tests/golden/errors.yaml.
"""

from __future__ import annotations

import errno
from pathlib import Path

from sidelight.rundir.printable.errors import CodedError

# What the machine is to blame for, rather than a path: its disk is full, or fails, or nothing more can be opened.
_OF_THE_MACHINE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class SidelightError(CodedError):
    """Base class of the errors that end a command."""

    exit_code = 3
    run_directory: Path | None = None  # of the run that was recorded up to the error, if there is one


class ConfigurationError(SidelightError):
    """A configured thing that does not exist or is out of range."""

    exit_code = 2


class TargetUnreachable(SidelightError):
    """An address where nothing answers."""


class TargetIncompatible(SidelightError):
    """A server that answers, but does not offer the requested API."""


class TargetNotMeasured(SidelightError):
    """A target that was loaded without a successful request."""


class LoadIncomplete(SidelightError):
    """A load without the share of a lost load worker."""


class CannotWrite(SidelightError):
    """A file of the run directory that cannot be written."""


class DamagedRun(SidelightError):
    """A run that ended by itself with missing records."""


class WorkerDied(SidelightError):
    """A load worker or scraper that ended before its work was done."""


class Interrupted(SidelightError):
    """An interruption of the run by the user."""

    exit_code = 130


def unwritten(path: Path, error: OSError) -> CannotWrite:
    """Return the error of a write below a path that failed."""
    return CannotWrite("disk.unwritable", f"{error.filename or path}: {error.strerror}")


def unusable_place(flag: str, path: Path, error: OSError) -> SidelightError:
    """Return the error of an unwritable place: the user's, or the machine's."""
    if error.errno in _OF_THE_MACHINE:
        return CannotWrite("disk.unwritable", f"{flag} {path}: {error.strerror}")
    return ConfigurationError("out.unusable", f"{flag} {path}: {error.strerror}; give a place that you can write to")


def unsaved(error: CannotWrite) -> SidelightError:
    """Return the error of a printed but unsaved report, as `unusable_place` does."""
    text = f"the report could not be saved: {error}"
    if isinstance(cause := error.__cause__, OSError) and cause.errno not in _OF_THE_MACHINE:
        return ConfigurationError("report.unsaved", f"{text}; copy the directory to a place that you can write to")
    return CannotWrite("report.unsaved", text)
