"""Errors in reading and showing logs: counted, logged once, never fatal to a measurement or service."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sidelight.recorded.errors import ConfigurationError

# What evaluating raises where a file or a record says something that no run and no study does.
_IMPOSSIBLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
log = logging.getLogger(__name__)


class ErrorCount:
    """Counter of the errors in blocks of code; `consequence` is logged with the first."""

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self.count = 0

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run a block to its end or its first error, which is counted. Raises ConfigurationError as it comes."""
        try:
            yield
        except ConfigurationError:
            raise  # not an error of the block: the bound on this process's time, which may run out anywhere
        except Exception:
            if not self.count:
                log.exception(self._consequence)
            self.count += 1


@contextmanager
def evaluating(path: Path | str, *files: str) -> Iterator[None]:
    """Raise ConfigurationError in place of errors from evaluating a directory with invalid contents."""
    try:
        yield
    except MemoryError as error:
        raise ConfigurationError(
            "memory.limit",
            f"{path}: evaluating it takes more memory than this process may have (MemoryError): raise that (ulimit -v, "
            f"the limit of a container, report --no-untrusted), unless others wrote {' or '.join(files)} to be so "
            "large",
        ) from error
    except _IMPOSSIBLE as error:
        raise ConfigurationError(
            "run.impossible",
            f"{path}: cannot be evaluated: {' or '.join(files)} holds what is never written there "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); restore them from a copy, or if nothing "
            "has changed them, report this as a defect",
        ) from error
