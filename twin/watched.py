"""The engines of a watch: the headroom of their traffic, and lasting changes of their steps against baselines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sidelight.correlator.live.breakdown import EndedRequests
from sidelight.correlator.opening import WatchRun, open_run
from sidelight.loadgen.requests.slo.objectives import Objective
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.clock import time_of_day_ns
from sidelight.rundir.printable.text import printable
from sidelight.rundir.stats import Missing
from sidelight.twin.drift import EngineHistory, LastingChange, begun, continued, history_of, said, to_the_minute
from sidelight.twin.engine.fit import fit
from sidelight.twin.engine.play import SEATS
from sidelight.twin.engine.spans import from_origin, spanned_requests
from sidelight.twin.headroom import MOST, Headroom, RecentTraffic, TrafficSample
from sidelight.twin.model import BLUR, twin_of_engines
from sidelight.twin.scenario import Twin, settings_of

FIRST_S = 900.0  # of a watch: what the engine's steps are fitted to
_SEATS_NS = round(FIRST_S * 1e9)
_LAST_S, _MOST = 420.0, 6000  # requests: a minute of 100 requests/s that last some seconds
_MOST_GONE = 8  # engines of which nothing came lately
_MOST_FITTED = 8  # engines, each with as many requests as an only one; of more, each has fewer


class ShownSeats(NamedTuple):
    """Sequences in a step: the most that traffic showed, and the limit, None where no request waited for a seat."""

    most: int = 0
    limit: int | None = None

    @property
    def is_sure(self) -> bool:
        """Return whether a limit showed and was kept to, but for the blur of stamps."""
        return self.limit is not None and self.most <= BLUR * self.limit + 1


def _of_a_minute() -> RecentTraffic:
    return RecentTraffic(last_s=_LAST_S, most=_MOST)


@dataclass(slots=True)
class WatchedEngines:
    """The engines of a watch: the headroom of their traffic within `objectives`, and the drift of each.

    `known` are settings of the engines, a `baseline` is the history of a recorded watch. `histories` are by the process
    of an engine, "" of the only one; there is none until the twin of the first quarter of an hour is known. `changes`
    are those that last, by process and part, as of the last minute, of engines with requests lately. The last restart
    is remembered, s Unix, with a sentence if the only engine has other seats since.
    """

    objectives: Sequence[Objective] = ()
    known: Mapping[str, int] = field(default_factory=dict)
    baseline: EngineHistory | None = None
    headroom: Headroom = field(default_factory=Headroom)
    histories: dict[str, EngineHistory] = field(default_factory=dict)
    changes: dict[str, Mapping[str, LastingChange]] = field(default_factory=dict)
    restarted_s: float | None = None
    restart: str = ""
    _traffic: RecentTraffic = field(default_factory=RecentTraffic)
    _lately: RecentTraffic = field(default_factory=_of_a_minute)
    _are_several: bool | None = None
    _begun_ns: int | None = None
    _seats_due_ns: int = 0
    _seats: ShownSeats = field(default_factory=ShownSeats)
    _seats_before: ShownSeats = field(default_factory=ShownSeats)
    _said: set[tuple[str, str, float]] = field(default_factory=set)

    def take(self, ended: EndedRequests, now_ns: int) -> None:
        self._traffic.take(ended, now_ns)
        self._lately.take(ended, now_ns)

    def estimation(
        self, now_ns: int, *, engines: int, finished_per_s: float | None, restarted_s: float | None
    ) -> Callable[[], None]:
        """Return an estimation of headroom and drift by requests and pages of now.

        It may run beside all else.
        """
        if self._are_several not in {None, engines > 1}:
            # The requests of several are not of the one that stays, and the history of one is of an unknown one.
            self._traffic, self._lately = RecentTraffic(), _of_a_minute()
            self.histories = {name: history for name, history in self.histories.items() if name}
        self._are_several = engines > 1
        fitted = min(max(1, engines), _MOST_FITTED)
        self._traffic.most, self._lately.most = MOST * fitted, _MOST * fitted
        sample, lately = (
            traffic.sample(now_ns, engines=engines, finished_per_s=finished_per_s)
            for traffic in (self._traffic, self._lately)
        )
        if restarted_s is not None and restarted_s != self.restarted_s:
            self.restarted_s, self.restart, self._traffic = restarted_s, "", RecentTraffic()
            self._seats_before, self._seats, self._seats_due_ns = self._seats, ShownSeats(), now_ns + _SEATS_NS

        def estimate() -> None:
            self.follow(lately, sample, now_ns)
            if now_ns >= self._seats_due_ns:
                self._compare_seats(sample, now_ns)
            if self.objectives:
                self.headroom = sample.headroom(self.objectives, self.known, self.headroom)

        return estimate

    def follow(self, lately: TrafficSample, of_twin: TrafficSample, now_ns: int) -> None:
        """Add the minute since the last time to the history of each engine."""
        self._begun_ns = now_ns if self._begun_ns is None else self._begun_ns
        engines, histories = lately.by_engine(), dict(self.histories)
        new = engines.keys() - histories.keys()
        if new and self.baseline is not None:
            histories |= dict.fromkeys(new, replace(self.baseline, until_s=self._begun_ns / 1e9))
        elif new and now_ns - self._begun_ns >= FIRST_S * 1e9 and not isinstance(served := of_twin.served(), Missing):
            twins = {name: twin_of_engines({name: served[name]}, self.known) for name in new & served.keys()}
            fits = {name: twin.fitted for name, twin in twins.items() if isinstance(twin, Twin)}
            histories |= {name: begun(fitted, now_ns / 1e9) for name, fitted in fits.items()}
        gone = sorted(histories.keys() - engines.keys(), key=lambda name: -histories[name].until_s)
        for name in gone[_MOST_GONE:]:
            del histories[name]
        now_s, changes = now_ns / 1e9, dict[str, Mapping[str, LastingChange]]()
        for name in [each for each in histories if each in engines]:
            requests = from_origin(engines[name], now_s - _LAST_S)
            histories[name] = history = continued(histories[name], requests, now_s - _LAST_S, now_s)
            changes[name] = history.changes(self.changes.get(name, {}))
        self.histories, self.changes = histories, changes  # at once: they are read beside

    def _compare_seats(self, sample: TrafficSample, now_ns: int) -> None:
        """Compare the seats that traffic shows with those before the last restart; stated ones may be others since."""
        self._seats_due_ns = now_ns + _SEATS_NS
        if sample.engines > 1 or not sample.requests:
            return
        fitted = fit(from_origin(sample.requests, float(sample.requests.submit_s[0])))
        if isinstance(fitted, Missing):
            return
        before, most = self._seats_before, max(self._seats.most, fitted.most_sequences)
        self._seats = ShownSeats(most, fitted.seats or self._seats.limit)
        if self.restarted_s is not None and (text := other_seats(before, self._seats)):
            self.restart = f"The engine restarted at {to_the_minute(self.restarted_s)}: since then {text}."
            if self._seats.limit is not None and SEATS in self.known:
                self.known = {**self.known, SEATS: self._seats.limit}

    def said(self) -> list[str]:
        return list(self._sentences().values())

    def fresh(self) -> list[str]:
        """Return the sentences of changes that were not returned before."""
        sentences = self._sentences()
        new = [text for key, text in sentences.items() if key not in self._said]
        self._said = set(sentences)
        return new

    def estimates(self) -> dict[str, Any]:
        """Return headroom and changes as a watch records them, empty where nothing is known."""
        headroom = self.headroom
        changes = [
            {"process": name, "part": part, "since_ns": round(since_s * 1e9), "text": text}
            | _bounds(self.changes.get(name, {}).get(part))
            for (name, part, since_s), text in self._sentences().items()
        ]
        said_headroom = {"text": headroom.text, **headroom.ratios} if headroom.text else {}
        return {"headroom": said_headroom, "changes": changes} if said_headroom or changes else {}

    def _sentences(self) -> dict[tuple[str, str, float], str]:
        """Return sentences by process, part and begin."""
        sentences = {
            (name, part, change.since_s): _of(name) + said(part, change, self.restarted_s, is_of_several=bool(name))
            for name, changes in self.changes.items()
            for part, change in changes.items()
        }
        return sentences | ({("", "restart", self.restarted_s or 0.0): self.restart} if self.restart else {})

    def ratios(self) -> dict[tuple[str, str, str], float]:
        """Return the ratios of the last quarter of an hour, by process, part and bound."""
        return {
            (name, part, bound): value
            for name, history in self.histories.items()
            for part, ratio in history.ratios().items()
            for bound, value in _bounds(ratio).items()
        }

    def since_s(self) -> dict[tuple[str, str], float]:
        """Return the beginnings of changes that last, s Unix, by process and part."""
        return {(name, part): each.since_s for name, parts in self.changes.items() for part, each in parts.items()}


def _of(name: str) -> str:
    return f"{printable(name)}: " if name else ""


def _bounds(change: LastingChange | None) -> dict[str, float]:
    return {} if change is None else {"low": change.low, "estimate": change.ratio, "high": change.high}


def other_seats(before: ShownSeats, since: ShownSeats) -> str:
    """Return a clause on the other seats of a restarted engine, "" for none."""
    if since.is_sure and since.limit and before.most > BLUR * since.limit + 1:
        return f"at most {since.limit} requests run at a time while others wait, and before up to {before.most} ran"
    if before.is_sure and before.limit and since.most > BLUR * before.limit + 1:
        return f"up to {since.most} requests run at a time, and before at most {before.limit} did while others waited"
    return ""


def watched_engines(
    objectives: Sequence[Objective] = (), known: str = "", baseline: Path | None = None
) -> WatchedEngines:
    """Return the engine of a watch that begins, by its options.

    Raises ConfigurationError for settings and baselines that say nothing.
    """
    return WatchedEngines(objectives, known=settings_of("--known", known), baseline=_baseline_of(baseline))


def _baseline_of(path: Path | None) -> EngineHistory | None:
    """Return the history of the engine of a recorded watch, None without one.

    Raises ConfigurationError where it says too little.
    """
    if path is None:
        return None
    run = open_run(path)
    if not isinstance(run, WatchRun):
        raise ConfigurationError("watch.baseline", f"--baseline {path}: is of a run; give the directory of a watch")
    begin_ns = int(run.requests.submit_ns.min(initial=time_of_day_ns()))
    requests = spanned_requests(run.requests, run.watched.parts, origin_ns=begin_ns)
    history = history_of(requests, begin_ns / 1e9)
    if isinstance(history, Missing):
        raise ConfigurationError(
            "watch.baseline", f"--baseline {path}: {history.reason}; give a watch of one engine, of 40 minutes or more"
        )
    return replace(history, minutes=begun(history.fitted, 0.0).minutes)
