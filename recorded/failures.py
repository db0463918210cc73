"""What goes wrong where logs are read and shown: counted, logged once, never the end of a measurement or a service."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recorded.errors import ConfigurationError

# What evaluating raises where a file or a record says something that no run and no study does.
_IMPOSSIBLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
log = logging.getLogger(__name__)


class ErrorCount:
    """Counts the errors of blocks of code; `consequence` is what the log says of the first."""

    def __init__(self, consequence: str) -> None:
        self._consequence = consequence
        self.count = 0

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Run a block to its end or its first error, which is counted."""
        try:
            yield
        except Exception:
            if not self.count:
                log.exception(self._consequence)
            self.count += 1


@contextmanager
def evaluating(path: Path, *files: str) -> Iterator[None]:
    """Raise ConfigurationError in place of what evaluating raises where a directory holds what is never written."""
    try:
        yield
    except MemoryError as error:
        raise ConfigurationError(
            f"{path}: evaluating it takes more memory than this process may have (MemoryError): raise that (ulimit -v, "
            f"or the limit of a container), unless others wrote {' or '.join(files)} to be so large"
        ) from error
    except _IMPOSSIBLE as error:
        raise ConfigurationError(
            f"{path}: cannot be evaluated: {' or '.join(files)} holds what is never written there "
            f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); restore them from a copy, or if nothing "
            "has changed them, report this as a defect"
        ) from error
