"""Commands from the conductor to the processes that scrape and receive spans.

One JSON line each: a specification first, then commands.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from sidelight.rundir.access import Access
from sidelight.rundir.child import ChildSpec
from sidelight.rundir.frames import Rotation
from sidelight.scraper.spans.spec import ReceiverSpec
from sidelight.scraper.targets.fetch import LIMIT_BYTES

MIN_INTERVAL_S = 0.01  # a scrape takes milliseconds on both sides
MAX_INTERVAL_S = 86_400.0

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]


class LogSpec(ChildSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log of a process and its rotation; None: it never goes on in a new file."""

    out: str
    rotation: Rotation | None = None


class Spec(LogSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Specification of a scraper: its targets and its logs.

    targets        resolved URLs; one that is listed twice is scraped once
    interval_s     seconds between scrapes of a target
    timeout_s      timeout of one scrape
    seed           of the jitter after failures
    hardware_out   log of this machine's hardware counters; "": they are not read
    timings_out    log of TensorRT-LLM's `/perf_metrics`, created only where a target is one
    """

    targets: list[str]
    interval_s: float
    clock_offset_ns: int
    timeout_s: float = 5.0
    limit_bytes: int = LIMIT_BYTES
    access: Access = Access()
    seed: int = 0
    hardware_out: str = ""
    timings_out: str = ""


class SpanSpec(LogSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Specification of a receiver of spans."""

    receiver: ReceiverSpec


class Settle(msgspec.Struct, frozen=True, kw_only=True, tag_field="cmd", tag="settle", forbid_unknown_fields=True):
    """Command to go on scraping for a number of seconds."""

    seconds: _Seconds = 0


class SettleSpans(msgspec.Struct, frozen=True, kw_only=True, tag_field="cmd", tag="settle", forbid_unknown_fields=True):
    """Command to wait for the spans of the requests of these traces (hex ids).

    They are waited for SETTLE_S at most; where none has ever come, for `first_span_s` at most, which is how long the
    first one may still be on its way.
    """

    trace_ids: list[Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]] = []
    first_span_s: _Seconds = 0


class SetTargets(msgspec.Struct, frozen=True, kw_only=True, tag_field="cmd", tag="scrape", forbid_unknown_fields=True):
    """Command to replace the targets, with fields as in Spec."""

    targets: list[str]
    interval_s: Annotated[float, msgspec.Meta(ge=MIN_INTERVAL_S, le=MAX_INTERVAL_S)]


class Exit(msgspec.Struct, frozen=True, tag_field="cmd", tag="exit", forbid_unknown_fields=True):
    """Scrape a last time and end; of the other, pass on what is queued and end."""


Command = Settle | SetTargets | Exit
SpanCommand = SettleSpans | Exit
