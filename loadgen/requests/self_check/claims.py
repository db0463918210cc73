"""Claims of a verdict on numbers that may be off: trust belongs to each claim, and not to a number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Claim(NamedTuple):
    """Number and its rival: the bound that it is judged by, or of the largest part the second."""

    value: float
    rival: float


def are_sure(claims: Iterable[Claim], error: float) -> bool:
    """Return whether each claim is the same for any number within the error."""
    return all(abs(claim.value - claim.rival) > error for claim in claims)
