"""Drift of a watch's engine: lasting changes of its steps at equal batch and length, against a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from sidelight.correlator.opening import WatchRun, open_run
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.clock import time_of_day_ns
from sidelight.rundir.stats import Missing
from sidelight.twin.drift import EngineHistory, LastingChange, begun, continued, history_of, said
from sidelight.twin.engine.spans import from_origin, spanned_requests
from sidelight.twin.headroom import RecentTraffic, TrafficSample

FIRST_S = 900.0  # of a watch: what the engine's steps are fitted to
_LAST_S, _MOST = 420.0, 6000  # requests: a minute of 100 requests/s that last some seconds


@dataclass(slots=True)
class WatchedEngine:
    """Drift of a watch's engine: its history, None until the twin of its first quarter of an hour is known.

    A `baseline` is the history of a recorded watch. `changes` are those that last, by part, as of the last minute that
    was followed. The last restart is remembered, s Unix.
    """

    baseline: EngineHistory | None = None
    history: EngineHistory | None = None
    restarted_s: float | None = None
    traffic: RecentTraffic = field(default_factory=lambda: RecentTraffic(last_s=_LAST_S, most=_MOST))
    _begun_ns: int | None = None
    changes: Mapping[str, LastingChange] = field(default_factory=dict)
    _said: set[tuple[str, float]] = field(default_factory=set)

    def follow(self, lately: TrafficSample, of_twin: TrafficSample, now_ns: int) -> None:
        """Add the minute since the last time."""
        self._begun_ns = now_ns if self._begun_ns is None else self._begun_ns
        if lately.engines > 1 or lately.requests is None:
            return
        if self.history is None and self.baseline is not None:
            self.history = replace(self.baseline, until_s=self._begun_ns / 1e9)
        if self.history is None and now_ns - self._begun_ns >= FIRST_S * 1e9:
            twin = of_twin.twin({})
            self.history = None if isinstance(twin, Missing) else begun(twin.fitted, now_ns / 1e9)
        if self.history is not None:
            origin_s = now_ns / 1e9 - _LAST_S
            self.history = continued(self.history, from_origin(lately.requests, origin_s), origin_s, now_ns / 1e9)
            self.changes = self.history.changes()

    def said(self) -> list[str]:
        """Return these changes in sentences."""
        return [said(part, change, self.restarted_s) for part, change in self.changes.items()]

    def fresh(self) -> list[str]:
        """Return the sentences of changes that were not returned before."""
        begins = {(part, change.since_s): part for part, change in self.changes.items()}
        new = [
            said(part, self.changes[part], self.restarted_s) for key, part in begins.items() if key not in self._said
        ]
        self._said = set(begins)
        return new

    def ratios(self) -> dict[tuple[str, str], float]:
        """Return the ratios of the last quarter of an hour, by part and bound."""
        ratios = {} if self.history is None else self.history.ratios()
        return {
            (part, bound): value
            for part, change in ratios.items()
            for bound, value in (("low", change.low), ("estimate", change.ratio), ("high", change.high))
        }


def baseline_of(path: Path | None) -> EngineHistory | None:
    """Return the history of the engine of a recorded watch, None without one.

    Raises ConfigurationError where it says too little.
    """
    if path is None:
        return None
    run = open_run(path)
    if not isinstance(run, WatchRun):
        raise ConfigurationError("watch.baseline", f"--baseline {path}: is of a run; give the directory of a watch")
    begin_ns = int(run.requests.submit_ns.min(initial=time_of_day_ns()))
    requests = spanned_requests(run.requests, run.watched.parts.decode_s, origin_ns=begin_ns)
    history = history_of(requests, begin_ns / 1e9)
    if isinstance(history, Missing):
        raise ConfigurationError(
            "watch.baseline", f"--baseline {path}: {history.reason}; give a watch of one engine, of 40 minutes or more"
        )
    return replace(history, minutes=begun(history.fitted, 0.0).minutes)
