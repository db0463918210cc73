"""Reading the columns of `report.html` as its script does."""

from __future__ import annotations

import base64
import zlib
from typing import Any


def read(packed: dict[str, Any]) -> dict[str, list[float]]:
    """Return the columns as the script does: bytes by place, counted from the offset, 0 for missing."""
    raw, at = zlib.decompress(base64.b64decode(packed["bytes"])), 0
    columns = {}
    for column in packed["columns"]:
        count, width, position = column["count"], column["width"], 0
        values = []
        for row in range(count):
            code = sum(raw[at + place * count + row] << 8 * place for place in range(width))
            position = code - 1 + column["offset"] + (position if column.get("differences") else 0)
            values.append(position * column["unit"] if code else float("nan"))
        at += width * count
        columns[column["name"]] = values
    assert at == len(raw), "bytes are left over"
    return columns
