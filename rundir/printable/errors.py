"""Errors with codes, for tests to compare and docs/troubleshooting.md to explain."""

from __future__ import annotations


class CodedError(Exception):
    """Base class of errors with a code and a message of one line.

    A code is of two words, such as `target.unreachable`; the message names the fault, its place and the cure.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)  # both are arguments, so that it can be pickled
        self.code = code

    def __str__(self) -> str:
        return str(self.args[1])


def with_code(error: CodedError) -> str:
    """Return an error's message with its code, as a user reads it."""
    return f"{error} [{error.code}]"


def code_of(error: Exception, otherwise: str) -> str:
    """Return the code of an error, `otherwise` if it has none."""
    return error.code if isinstance(error, CodedError) else otherwise
