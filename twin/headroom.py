"""Headroom of traffic: the multiple of its rate at which its engine would cross an objective."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sidelight.correlator.live.breakdown import EndedRequests
from sidelight.loadgen.requests.slo.objectives import Objective
from sidelight.rundir.columns import Floats, concat, take
from sidelight.rundir.printable.numbers import figure, spoken
from sidelight.rundir.stats import Missing
from sidelight.twin.check import PLACES
from sidelight.twin.engine.spans import SpannedRequests, from_origin, spanned_requests
from sidelight.twin.limits import overruns
from sidelight.twin.model import LEAST_WHOLE, OF_SPANS, twin_of_engines
from sidelight.twin.scenario import Scenario, Twin, predict

EVERY_S, MOST_SHARE = 60.0, 0.025  # of a core
LAST_S, MOST = 900.0, 800  # requests: of more, plays take long
_PLAYS, _STEP, _FAR, _REFINED = 5, 1.12, 4.0, 2
_FLOW_S, _MOST_OTHERS, _EDGE = 60.0, 1.1, 10
_BATCH_S = 10.0
_MOST_ENGINES = 64  # spans may name more, true or not
_BOUNDS = ("low", "estimate", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """Headroom in a sentence, and as ratios by bound: `estimate`, `low` and `high` of the 90 % interval.

    Without ratios the sentence says why.
    """

    text: str = ""
    ratios: Mapping[str, float] = field(default_factory=dict)


class _SpannedBatch(NamedTuple):
    """Requests that ended within _BATCH_S: of `logged` ones those that spans show, in s Unix, and the number of all."""

    at_ns: int
    requests: SpannedRequests
    logged: int
    ended: int


@dataclass(slots=True)
class RecentTraffic:
    """Requests of the last seconds: about `most` of them at most, and counts of all."""

    last_s: float = LAST_S
    most: int = MOST
    _batches: deque[_SpannedBatch] = field(default_factory=deque)

    def take(self, ended: EndedRequests, now_ns: int) -> None:
        requests, logged, count = ended.requests, len(ended.requests), len(ended)
        batch = _SpannedBatch(now_ns, spanned_requests(requests, ended.parts, origin_ns=0), logged, count)
        if self._batches and now_ns - self._batches[-1].at_ns < _BATCH_S * 1e9:
            at_ns, earlier, before, counted = self._batches.pop()
            batch = _SpannedBatch(at_ns, concat([earlier, batch.requests]), before + logged, counted + count)
        self._batches.append(batch)
        while self._batches[0].at_ns < now_ns - self.last_s * 1e9:
            self._batches.popleft()
        held = sum(batch.logged for batch in self._batches)
        for number, batch in enumerate(self._batches):
            if (held := held - batch.logged) < self.most:
                break
            # Its number still counts. Positions, unlike a slice, leave its columns to be freed.
            self._batches[number] = batch._replace(requests=take(batch.requests, np.zeros(0, np.int64)), logged=0)

    def sample(self, now_ns: int, *, engines: int, finished_per_s: float | None) -> TrafficSample:
        """Return the requests of now, beside the number of `engines` on pages and their rate."""
        long_ns = now_ns - self._batches[0].at_ns if self._batches else 0
        minute = [batch for batch in self._batches if batch.at_ns >= now_ns - round(_FLOW_S * 1e9)]
        # As long as its batches: one that began before the minute is not counted.
        minute_ns = now_ns - minute[0].at_ns if minute else min(round(_FLOW_S * 1e9), long_ns)
        requests = concat([batch.requests for batch in self._batches]) if self._batches else None
        return TrafficSample(
            requests=requests and take(requests, np.argsort(requests.submit_s, kind="stable")),
            count=sum(batch.logged for batch in self._batches),
            engines=engines,
            finished=(finished_per_s or 0.0) * minute_ns / 1e9,
            lately=sum(batch.ended for batch in minute),
            rate_per_s=sum(batch.ended for batch in self._batches) * 1e9 / long_ns if long_ns > _FLOW_S * 1e9 else 0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSample:
    """Requests of late, beside the state of pages.

    `requests` are those of `count` that spans show, by submission, s Unix. Pages have `engines`, by which requests were
    `finished` in a minute in which `lately` ended by spans; `rate_per_s` is that of a longer time, 0 without one.
    """

    requests: SpannedRequests | None
    count: int
    engines: int
    finished: float
    lately: int
    rate_per_s: float

    def headroom(self, objectives: Sequence[Objective], known: Mapping[str, int], before: Headroom) -> Headroom:
        """Return the headroom within objectives of p50, p90 and p99.

        It is searched for near that of before; `known` are settings of the engine.
        """
        objectives = [each for each in objectives if (each.metric, each.quantile) in PLACES]
        twin = self.twin(known) if objectives else Missing("no objective is a p50, p90 or p99 of ttft, tpot or e2e")
        if isinstance(twin, Missing):
            return Headroom(text=f"Headroom: unknown: {twin.reason}.")
        search = _Search(twin, objectives, self.rate_per_s or twin.rate_per_s)
        around = float(np.clip(before.ratios.get("estimate", 1.0), _STEP / _FAR, _FAR / _STEP))
        search.extend(around, _STEP, end=2)
        search.extend(around / _STEP, 1 / _STEP, end=0)
        if not search.overruns:
            return Headroom(text=f"Headroom: unknown: {search.refused}.")
        for _ in range(_REFINED):
            search.refine()
        return search.headroom()

    def twin(self, known: Mapping[str, int]) -> Twin | Missing:
        """Return the twin of the engines, or the reason against one."""
        engines = self.served()
        if isinstance(engines, Missing):
            return engines
        if 1 < self.engines != len(engines):
            return Missing(OF_SPANS.format(pages=self.engines, engines=len(engines)))
        return twin_of_engines(engines, known)

    def served(self) -> dict[str, SpannedRequests] | Missing:
        """Return the requests by engine, each in seconds from its first, or a reason."""
        if self.finished > _MOST_OTHERS * self.lately + _EDGE:
            return Missing(
                f"in the last minute the engine finished {self.finished:.0f} requests, and spans speak of {self.lately}"
            )
        if not self.requests:
            return Missing("no request has ended")
        engines = {name: from_origin(each, float(each.submit_s[0])) for name, each in self.by_engine().items()}
        if (whole := sum(map(len, engines.values()))) < LEAST_WHOLE * self.count:
            return Missing(
                f"of the last {self.count} requests {whole} succeeded and have a known first token, prompt and "
                f"output{', and an engine that spans name' if self.engines > 1 else ''}, and all others took steps "
                "that are not seen"
            )
        return engines

    def by_engine(self) -> dict[str, SpannedRequests]:
        """Return the requests by the engines that spans name most; those of the only engine under ""."""
        if self.requests is None or self.engines < 2:
            return {} if self.requests is None else {"": self.requests}
        counts = Counter(self.requests.served_by.tolist())
        del counts[""]
        names = sorted(name for name, _ in counts.most_common(_MOST_ENGINES))
        return {name: take(self.requests, self.requests.served_by == name) for name in names}


@dataclass(slots=True)
class _Search:
    """Predictions by multiples of the rate of late: the `overruns` of each.

    `refused` says why there is no prediction beyond the last.
    """

    twin: Twin
    objectives: Sequence[Objective]
    rate_per_s: float
    overruns: dict[float, Floats] = field(default_factory=dict)
    refused: str = ""

    def look(self, ratio: float) -> bool:
        """Predict for a rate; return whether that was possible."""
        prediction = predict(self.twin, Scenario(label="", rate_per_s=ratio * self.rate_per_s), plays=_PLAYS)
        if isinstance(prediction, Missing):
            self.refused = prediction.reason if ratio > max(self.overruns, default=0.0) else self.refused
            return False
        self.overruns[ratio] = overruns(prediction, self.objectives)
        return True

    def extend(self, ratio: float, factor: float, *, end: int) -> None:
        """Predict for further rates, to the first on the other side or _FAR."""
        while self.look(ratio) and (self.overruns[ratio][:, end].max() > 0) != (factor > 1) and 1 / _FAR < ratio < _FAR:
            ratio, factor = float(np.clip(ratio * factor, 1 / _FAR, _FAR)), factor**1.5

    def refine(self) -> None:
        """Predict once more where the rates on both sides of the estimate are far apart."""
        estimate = self._crossings()[1]
        below, above = ([each for each in self.overruns if (each < estimate) == side] for side in (True, False))
        if below and above and min(above) > _STEP**2 * max(below):
            self.look(float(np.sqrt(min(above) * max(below))))

    def _crossings(self) -> Floats:
        """Return the ratios at which the three ends cross the objectives; 0 below all, infinite beyond."""
        ratios = sorted(self.overruns)
        ends = np.maximum.accumulate([self.overruns[each].max(axis=0) for each in ratios]).T
        return np.array(
            [np.exp(np.interp(0.0, np.maximum(end, -9), np.log(ratios), left=-np.inf, right=np.inf)) for end in ends]
        )

    def headroom(self) -> Headroom:
        """Return the headroom by these predictions."""
        crossings = self._crossings()
        low, estimate, high = crossings
        if not np.isfinite(estimate):
            least, why = figure(max(self.overruns)), self.refused or "nothing was tried"
            return Headroom(text=f"Headroom: at least {least} times the traffic of late; beyond, {why}.")
        nearest = min(self.overruns, key=lambda ratio: abs(ratio - estimate))
        first = self.objectives[int(np.argmax(self.overruns[nearest][:, 1]))]
        interval = f"{figure(low)} to {figure(high)}" if np.isfinite(high) else f"{figure(low)} or more"
        return Headroom(
            text=f"Headroom: at {figure(estimate)} times the traffic of late ({interval}) {first.metric.upper()} "
            f"{first.statistic} crosses {spoken(first.bound)}.",
            ratios={name: float(each) for name, each in zip(_BOUNDS, crossings, strict=True) if np.isfinite(each)},
        )
