"""A recorded run: the logs of its directory as columnar tables."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sidelight.loadgen.records import PlannedRequest, WorkerStat, read_plan
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.events import NOTE, PHASE_END, PHASE_START, Event
from sidelight.recorded.integrity import NOTHING_READ, Integrity
from sidelight.recorded.nodes import NodeTime
from sidelight.scraper import perf_metrics
from sidelight.scraper.hardware import records as readings
from sidelight.scraper.series import table as series

if TYPE_CHECKING:
    from sidelight.recorded.gateway_spans import GatewaySpan, RouterChoice
    from sidelight.scraper.spans.log import ReceiverCounts
    from sidelight.scraper.spans.requests import EngineSpans


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of a run; `end_ns` is None if the run was cut short within it."""

    name: str
    start_ns: int
    end_ns: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The logs of a run directory as columnar tables.

    `timings` are the times of requests that `/perf_metrics` of TensorRT-LLM states. `gateways` are those that
    requests passed, outermost first, and `choices` those of routers, by trace id in hex. `span_counts` is what the
    receivers of spans have counted, all together, None where none was; `receiver_deaths` are those that ended without
    a record, and their counts since they started are lost, but for the spans in the log. `offsets_ns` are when requests
    were to be sent, from the start of their phase, of phases with a schedule. `nodes` are the clocks of the nodes whose
    load workers sent requests, empty where the conductor's machine has sent all.

    Of a watch, `requests` are by the clients' spans, and `spans` is empty. Where the wall clock was set meanwhile, all
    stamps are by the last time.
    """

    path: Path
    manifest: Mapping[str, Any]
    requests: RequestLog
    worker_stats: tuple[WorkerStat, ...]
    endpoints: tuple[series.EndpointSeries, ...]
    spans: EngineSpans
    gateways: Mapping[str, tuple[GatewaySpan, ...]] = field(default_factory=dict)
    choices: Mapping[str, RouterChoice] = field(default_factory=dict)
    timings: perf_metrics.Timings = field(default_factory=perf_metrics.none)
    hardware: tuple[readings.HardwareLogRecord, ...] = ()
    events: tuple[Event, ...]
    span_counts: ReceiverCounts | None = None
    receiver_deaths: int = 0
    integrity: Integrity = NOTHING_READ
    offsets_ns: Mapping[str, Sequence[int]] = field(default_factory=dict)
    nodes: tuple[NodeTime, ...] = ()

    def scheduled_by(self, phase: str, at_ns: int | None = None) -> int | None:
        """Return the number of a phase's requests scheduled before a time, or before its end.

        None without a schedule.
        """
        offsets_ns = self.offsets_ns.get(phase)
        began = next((each for each in self.phases if each.name == phase), None)
        if offsets_ns is None or began is None:
            return None
        ends_ns = [end_ns for end_ns in (at_ns, began.end_ns) if end_ns is not None]
        return bisect_right(offsets_ns, min(ends_ns) - began.start_ns) if ends_ns else len(offsets_ns)

    def plans(self) -> Iterator[PlannedRequest]:
        """Yield the planned requests of all phases, with their bodies; of torn logs their beginnings."""
        for path in sorted((self.path / "raw").glob("plan-*.log")):
            yield from read_plan(path)

    def stated(self, *labels: str) -> list[str]:
        """Return the values of labels on all pages, as often as they stand there."""
        pairs = (pair for page in self.endpoints for each in page.series for pair in each.labels)
        return [value for label, value in pairs if label in labels]

    @property
    def status(self) -> str:
        """Return `complete`, `interrupted` or, where no end was written, `crashed`."""
        return str(self.manifest.get("status") or "crashed")

    @property
    def phases(self) -> tuple[Phase, ...]:
        ends = {event.data["phase"]: event.at_ns for event in self.events if event.name == PHASE_END}
        starts = [event for event in self.events if event.name == PHASE_START]
        return tuple(
            Phase(name=event.data["phase"], start_ns=event.at_ns, end_ns=ends.get(event.data["phase"]))
            for event in starts
        )

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(event.data["text"] for event in self.events if event.name == NOTE)
