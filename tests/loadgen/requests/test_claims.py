"""Claims on numbers with an error: when an error cannot change them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sidelight.loadgen.requests.self_check.claims import Claim, are_sure

NUMBERS = st.floats(0, 1e9)
CLAIMS = st.lists(st.builds(Claim, NUMBERS, NUMBERS), max_size=5)


@given(CLAIMS, NUMBERS, NUMBERS)
def test_a_smaller_error_makes_no_claim_less_sure(claims: list[Claim], error: float, other: float):
    """And with more claims none is surer."""
    less, more = sorted((error, other))
    assert are_sure(claims, less) or not are_sure(claims, more)
    assert are_sure(claims[:-1], more) or not are_sure(claims, more)


@given(CLAIMS, NUMBERS, st.floats(-1, 1))
def test_a_sure_claim_is_the_same_for_any_number_within_the_error(claims: list[Claim], error: float, part: float):
    """Whatever the number is in truth, it lies on the same side."""
    if are_sure(claims, error):
        assert all((value > rival) == (value + part * error > rival) for value, rival in claims)


def test_a_claim_at_its_bound_is_not_sure():
    assert not are_sure([Claim(500.0, 500.0)], 0.0)
