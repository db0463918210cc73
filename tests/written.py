"""Requests of remote write, read as a server reads them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from sidelight.exporter.prometheus.write_request import WriteRequest


def received(body: bytes) -> Any:
    """Return the message of a request; a block of snappy begins with its size, in base 128 from the lowest digit."""
    last = next(place for place, digit in enumerate(body) if digit < 128)
    size = sum((digit & 127) << 7 * place for place, digit in enumerate(body[: last + 1]))
    return WriteRequest.FromString(pa.decompress(body, size, codec="snappy", asbytes=True))
