"""All requests of a run as columns of few bytes, which the page's script inflates: nothing is sampled.

A column holds whole multiples of its `unit`, counted from its `offset`; 0 stands for a missing value. Its bytes lie by
place (all lowest bytes, then all next ones), which deflates to about half of what it does value by value. All columns
are one stream of DEFLATE in base64.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sidelight.rundir.columns import Floats, Ints, Texts

TIME_UNIT_MS = 0.01
_MOST_BYTES = 6  # whole numbers are exact in a script up to 2**53
_MOST_STEPS = 2.0 ** (8 * _MOST_BYTES - 2)  # on either side of zero


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedColumn:
    """One column [n]: `steps` of `unit` each, int64, `missing` where there is none.

    `differences` of a column that ascends hold each step's distance from the one before. `texts` are what the steps
    stand for.
    """

    steps: Ints
    known: np.typing.NDArray[np.bool_]
    unit: float = 1.0
    differences: bool = False
    texts: tuple[str, ...] | None = None


def number_column(values: Floats, unit: float = 1.0) -> PackedColumn:
    """Return a column of numbers, NaN where missing, rounded to `unit`.

    One of more than _MOST_STEPS is missing too: servers state what they like, and no chart could show it.
    """
    known = np.abs(values) < _MOST_STEPS * unit
    steps = np.rint(np.where(known, values, 0.0) / unit).astype(np.int64)
    return PackedColumn(steps=steps, known=known, unit=unit)


def ascending_column(values: Floats, unit: float = 1.0) -> PackedColumn:
    """Return a column of finite numbers that ascend."""
    steps = np.rint(np.asarray(values) / unit).astype(np.int64)
    distances = np.diff(steps, prepend=0)
    return PackedColumn(steps=distances, known=np.ones(len(steps), dtype=np.bool_), unit=unit, differences=True)


def text_column(values: Texts | Sequence[str]) -> PackedColumn:
    """Return a column of texts, "" where missing; each different text is written once."""
    texts = sorted(set(values))  # not by numpy, whose texts each take the bytes of the longest
    places = {text: place for place, text in enumerate(texts)}
    steps = np.fromiter((places[text] for text in values), np.int64, len(values))
    known = np.fromiter((text != "" for text in values), np.bool_, len(values))
    return PackedColumn(steps=steps, known=known, texts=tuple(texts))


def pack(columns: Mapping[str, PackedColumn], *, level: int = 9) -> dict[str, Any]:
    """Return the columns for the page's script: a header of each column, in their order, and the bytes of all.

    `level` is that of DEFLATE: 9 is the smallest, 6 takes a third of the time.
    """
    headers, pieces = [], []
    for name, column in columns.items():
        header, piece = _packed(column)
        headers.append({"name": name, **header})
        pieces.append(piece)
    return {"columns": headers, "bytes": base64.b64encode(zlib.compress(b"".join(pieces), level)).decode()}


def _packed(column: PackedColumn) -> tuple[dict[str, Any], bytes]:
    known = column.steps[column.known]
    offset = int(known.min()) if len(known) else 0
    values = np.where(column.known, column.steps - offset + 1, 0)
    width = max(1, math.ceil(int(values.max(initial=0)).bit_length() / 8))
    if width > _MOST_BYTES:
        raise ValueError(f"values from {offset} on span more than {_MOST_BYTES} bytes")
    planes = values.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T
    header: dict[str, Any] = {"count": len(values), "width": width, "offset": offset, "unit": column.unit}
    header |= {"differences": True} if column.differences else {}
    header |= {"texts": list(column.texts)} if column.texts is not None else {}
    return header, planes.tobytes()
