"""Descriptions of result fields: a sentence, and a unit for a number.

The schema of `summary.json` and the lists of docs/reference/metrics are generated from these descriptions:

    ttft_ms: Annotated[Statistics, doc("first token - submit", "ms", source="draft `ttft-setup`")]
"""

from __future__ import annotations

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

__all__ = ["NO_UNIT", "UNSET", "Amount", "Count", "Missing", "Ratio", "Reason", "Reasons", "StampNs", "doc"]

NO_UNIT = "1"


def doc(description: str, unit: str = "", *, source: str = "") -> Meta:
    """Return the description of a field: its unit (`NO_UNIT` of a pure number), and where its definition is from."""
    extra = {name: text for name, text in (("unit", unit), ("source", source)) if text}
    return Meta(description=description, extra_json_schema=extra or None)


Reason = Annotated[str, Meta(min_length=1)]
Count = Annotated[int, Meta(ge=0)]
StampNs = Annotated[int, Meta(ge=0, description="Nanoseconds since the Unix epoch by the run's clock.")]
Amount = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
# With UNSET as their default, so that they are written only where a number is missing.
Missing = Annotated[Reason | UnsetType, doc("Why a number is null.")]
Reasons = Annotated[dict[str, Reason] | UnsetType, doc("Why numbers are null or absent, by name.")]
