"""What goes wrong where logs are read and shown: counted, logged once, never the end of a measurement or a service."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
