"""The list of the parts: neighbours in a bar are distinguishable."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from sidelight.correlator.parts import E2E_PARTS

LEAST_APART = 20.0  # in CIELAB; 2.3 is just noticeable


def lab(colour: str) -> np.ndarray:
    """Return a colour of sRGB in CIELAB, under D65."""
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    white = np.array([0.95047, 1.0, 1.08883])
    cube = np.cbrt(np.array(to_xyz) @ linear / white)
    return np.array([116 * cube[1] - 16, 500 * (cube[0] - cube[1]), 200 * (cube[1] - cube[2])])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_two_parts_have_colours_alike(scheme: str):
    colours = [lab(getattr(part, scheme)) for part in E2E_PARTS]
    assert LEAST_APART <= min(float(np.linalg.norm(first - second)) for first, second in combinations(colours, 2))


def test_each_part_has_a_glyph_and_a_name_of_its_own():
    """For those who see no colours."""
    assert [len(E2E_PARTS)] * 3 == [
        len({getattr(part, name) for part in E2E_PARTS}) for name in ("glyph", "name", "label")
    ]
