"""The error codes of the product, as tests compare them."""

from __future__ import annotations

import pytest

from sidelight.rundir.printable.errors import CodedError


def raises(code: str, *, says: str | None = None) -> pytest.RaisesExc[CodedError]:
    """Return a context that an error with this code leaves. Its message matches `says` where a fact stands there."""
    return pytest.raises(CodedError, match=says, check=lambda error: error.code == code)
