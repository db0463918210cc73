"""The metrics pages of the engines that are imitated, one module an engine.

Each has its engine's names, labels, buckets and moments of observation. What an engine does not show stays unshown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sidelight.simulator.engine.history import RequestRecord, StepOutcome
from sidelight.simulator.settings import SimulatorSettings
from sidelight.simulator.telemetry.pages import sglang, trtllm, vllm
from sidelight.simulator.telemetry.pages.sglang import SglangPage
from sidelight.simulator.telemetry.pages.trtllm import TrtllmPage
from sidelight.simulator.telemetry.pages.vllm import VllmPage

#: The versions whose pages are imitated; the local part says what it is.
VERSIONS = {
    name: f"{version}+simulator"
    for name, version in (("vllm", vllm.VERSION), ("sglang", sglang.VERSION), ("trtllm", trtllm.VERSION))
}


class EnginePage(Protocol):
    """Metrics of an engine, as shown to a scraper."""

    def observe(self, outcome: StepOutcome) -> None:
        """Update the metrics with the outcome of a step."""

    def abort(self, record: RequestRecord) -> None:
        """Update the metrics with an aborted request."""

    def page(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page and its content type for a request's Accept header."""


def page_of(settings: SimulatorSettings, clock: Callable[[], int], *, start_s: float | None = None) -> EnginePage:
    """Return the page of the engine that the settings name; `clock` gives int64 ns, the engine's own.

    `start_s` is when its process started, s Unix, where it is not this one.
    """
    if settings.engine == "sglang":
        return SglangPage(settings.model, settings.engine_settings, clock)
    if settings.engine == "trtllm":
        return TrtllmPage(settings.model, settings.engine_settings)
    return VllmPage(settings.model, settings.engine_settings, start_s=start_s)
