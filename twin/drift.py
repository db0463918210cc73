"""Lasting changes of an engine against its baseline, at equal batch and length.

Each minute has a mean of logarithms, observed over expected by the baseline's fit. Two cumulative sums of it, in
standard deviations of the baseline's minutes, say when a change began (Page 1954, "Continuous inspection schemes").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from sidelight.rundir.clock import iso_ms
from sidelight.rundir.columns import Floats, take
from sidelight.rundir.stats import Missing
from sidelight.twin.engine.fit import EngineFit, against, fit, spread
from sidelight.twin.engine.spans import SpannedRequests, from_origin

MINUTE_S, LEAST_S = 60.0, 10.0  # of a look
LEAST_MINUTES, BASELINE_MINUTES = 40, 60  # of a baseline
LEAST_VALUES = 5  # of a minute that counts
LEAST_DRIFT = 0.01  # of a logarithm: less is none
LEVEL = 0.9
_SLACK, _ALARM, _MOST = 1.0, 7.0, 4.0  # standard deviations: ignored of each minute, of an alarm, and counted at most
_BLOCK = 10  # minutes: neighbours are alike
_LEAST_SD = 1e-3
_LEAST_SHARE = 0.05  # of the one cause beside the other, else they are not separated


@dataclass(frozen=True, slots=True, kw_only=True)
class Minutes:
    """Minutes, or looks about as long, in order [k]: begin in seconds, and mean, NaN of too few values."""

    at_s: Floats
    mean: Floats

    def __len__(self) -> int:
        return len(self.at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """Median of a baseline's minutes, their standard deviation, and the number of blocks behind it."""

    mean: float
    sd: float
    blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastingChange:
    """A lasting change: its begin, and the ratio to the baseline with its 90 % interval."""

    since_s: float
    ratio: float
    low: float
    high: float


def mean_of(values: Floats) -> float:
    """Return the mean of the values of a minute, NaN of fewer than LEAST_VALUES."""
    return float(np.mean(values)) if len(values) >= LEAST_VALUES else np.nan


def split_mean(values: Floats, share: Floats) -> tuple[float, float]:
    """Return the two causes of a minute's values [m] by least squares: one has `share`, the other the rest.

    Where the shares do not separate them, the mean is of the other.
    """
    if len(values) < LEAST_VALUES:
        return np.nan, np.nan
    solved, _, rank, _ = np.linalg.lstsq(np.column_stack([1 - share, share]), values, rcond=_LEAST_SHARE)
    return (float(solved[0]), float(solved[1])) if rank == 2 else (mean_of(values), np.nan)


def baseline_of(minutes: Minutes) -> Baseline | Missing:
    """Return the baseline of minutes, or the reason against one."""
    known = minutes.mean[np.isfinite(minutes.mean)]
    if len(known) < LEAST_MINUTES:
        return Missing(f"{len(known)} minutes with requests, and a baseline needs {LEAST_MINUTES}")
    blocks = known[: len(known) // _BLOCK * _BLOCK].reshape(-1, _BLOCK).mean(axis=1)
    middle = float(np.median(known))
    together = float(blocks.std(ddof=1)) * _BLOCK**0.5
    return Baseline(mean=middle, sd=max(_LEAST_SD, spread(known), together), blocks=len(blocks))


def drift_of(minutes: Minutes, baseline: Baseline, least: float = LEAST_DRIFT) -> LastingChange | None:
    """Return the change of more than `least` that lasts to the end, else None."""
    at = np.flatnonzero(np.isfinite(minutes.mean))
    logs = minutes.mean[at] - baseline.mean
    slack = max(_SLACK, least / baseline.sd)
    sums, begun, since = [0.0, 0.0], [0, 0], -1
    for number, score in enumerate(np.clip(logs / baseline.sd, -_MOST - slack, _MOST + slack).tolist()):
        for side, towards in enumerate((score, -score)):
            sums[side] = max(0.0, min(sums[side] + towards - slack, 2 * _ALARM))
            if not sums[side]:
                begun[side] = number + 1
        highest = int(sums[1] > sums[0])
        if sums[highest] >= _ALARM:
            since = begun[highest] if since < 0 else since
        elif since >= 0 and sums[highest] < _ALARM / 2:
            since = -1
    if since < 0:
        return None
    after = logs[since + 1 :] if since + 1 < len(logs) else logs[since:]  # it began within the first
    return _drift(minutes.at_s[at[since]], after, baseline)


def ratio_of(minutes: Minutes, baseline: Baseline, last: int = 15) -> LastingChange | None:
    """Return the ratio of the last minutes to the baseline, None without any."""
    at = np.flatnonzero(np.isfinite(minutes.mean))[-last:]
    return _drift(minutes.at_s[at[0]], minutes.mean[at] - baseline.mean, baseline) if len(at) else None


def _drift(since_s: float, logs: Floats, baseline: Baseline) -> LastingChange:
    count = len(logs)
    spread = baseline.sd * (1 / count + 1 / (_BLOCK * baseline.blocks)) ** 0.5
    from scipy.special import stdtrit  # noqa: PLC0415  as in `correlator.load.steady`

    wide = float(stdtrit(baseline.blocks - 1, (1 + LEVEL) / 2)) * spread
    middle = float(np.median(logs))
    return LastingChange(
        since_s=float(since_s),
        ratio=float(np.exp(middle)),
        low=float(np.exp(middle - wide)),
        high=float(np.exp(middle + wide)),
    )


#: What is compared, in words: of the engine at equal batch and length, and of its traffic.
PARTS = {
    "step": "steps of the same batch take",
    "prefill": "the same prompt takes",
    "prompt_tokens": "prompts are",
    "output_tokens": "outputs are",
    "computed": "the computed part of equal prompts is",
}
OF_TRAFFIC = ("prompt_tokens", "output_tokens")
_LEAST = {"step": LEAST_DRIFT, "prefill": 0.025, "prompt_tokens": 0.1, "output_tokens": 0.1, "computed": 0.1}
_FIRST_S, _WINDOW_S, _RESTART_S = 900.0, 300.0, 300.0
_LATE, _MOST_LATE_S = 0.99, 300.0
_DAY = 24 * 60
_MOST_CACHED = 0.99  # of a prompt: of more, some tokens would be a large change


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHistory:
    """Minutes of an engine and its traffic by PARTS, against its first fit; `until_s` is the end of the last, s Unix.

    The baseline are the first BASELINE_MINUTES; of later ones a day is held.
    """

    fitted: EngineFit
    until_s: float
    minutes: Mapping[str, Minutes]
    baselines: Mapping[str, Baseline]

    def changes(self, before: Mapping[str, LastingChange]) -> dict[str, LastingChange]:
        """Return the changes that last, by part; those of `before` that go on began when they did."""
        changes: dict[str, LastingChange] = {}
        for name, baseline in self.baselines.items():
            if change := drift_of(self.minutes[name], baseline, _LEAST[name]):
                earlier = before.get(name, change)
                goes_on = (earlier.ratio > 1) == (change.ratio > 1)
                changes[name] = replace(change, since_s=earlier.since_s) if goes_on else change
        return changes

    def ratios(self) -> dict[str, LastingChange]:
        """Return the ratios of the last minutes to the baseline, by part."""
        return {name: ratio for name, each in self.baselines.items() if (ratio := ratio_of(self.minutes[name], each))}


def begun(fitted: EngineFit, at_s: float) -> EngineHistory:
    """Return the history of an engine from a moment on, s Unix."""
    none = Minutes(at_s=np.zeros(0), mean=np.zeros(0))
    return EngineHistory(fitted=fitted, until_s=at_s, minutes=dict.fromkeys(PARTS, none), baselines={})


def continued(history: EngineHistory, requests: SpannedRequests, origin_s: float, now_s: float) -> EngineHistory:
    """Return a history with the time since as a further minute.

    `requests` are the last that ended, in seconds from `origin_s`, Unix. Of times whose requests may go on, or came
    before these, steps had sequences that are not known.
    """
    if len(requests) < LEAST_VALUES:
        return history
    late_s = min(_MOST_LATE_S, float(np.quantile(requests.last_s - requests.submit_s, _LATE)))
    begin_s = max(history.until_s, origin_s + float(requests.submit_s[0]) + late_s)
    end_s = now_s - late_s
    if end_s - begin_s < LEAST_S:
        return history
    requests = take(requests, requests.last_s >= begin_s - origin_s - 2 * late_s)  # others ran before all that is new
    steps = against(history.fitted, requests)
    of_steps, sent = (
        (at_s >= begin_s) & (at_s < end_s) for at_s in (origin_s + steps.end_s, origin_s + requests.submit_s)
    )
    step, prefill = split_mean(steps.logs[of_steps], steps.prefill[of_steps])
    share = requests.cached_tokens / requests.prompt_tokens
    means = {
        "step": step,
        "prefill": prefill,
        "prompt_tokens": mean_of(np.log(requests.prompt_tokens[sent])),
        "output_tokens": mean_of(np.log(requests.output_tokens[sent])),
        "computed": mean_of(np.log1p(-np.minimum(share[sent], _MOST_CACHED))),
    }
    minutes = {name: _added(history.minutes[name], begin_s, means[name]) for name in PARTS}
    baselines = dict(history.baselines)
    for name in [each for each in PARTS if each not in baselines]:
        if len(minutes[name]) >= BASELINE_MINUTES and isinstance(shown := baseline_of(minutes[name]), Baseline):
            baselines[name] = shown
            minutes[name] = replace(minutes[name], at_s=minutes[name].at_s[-1:], mean=minutes[name].mean[-1:])
    return replace(history, until_s=end_s, minutes=minutes, baselines=baselines)


def _added(minutes: Minutes, at_s: float, mean: float) -> Minutes:
    return Minutes(at_s=np.append(minutes.at_s, at_s)[-_DAY:], mean=np.append(minutes.mean, mean)[-_DAY:])


def history_of(requests: SpannedRequests, origin_s: float) -> EngineHistory | Missing:
    """Return the history of an engine by a recorded watch, or the reason against one."""
    fitted = fit(between(requests, 0.0, _FIRST_S)[0])
    if isinstance(fitted, Missing):
        return fitted
    history, last_s = begun(fitted, origin_s), float(requests.last_s.max())
    for end_s in np.arange(_FIRST_S, last_s + MINUTE_S, MINUTE_S):
        some, since_s = between(requests, end_s - _WINDOW_S, end_s)
        history = continued(history, some, origin_s + since_s, origin_s + float(end_s))
    baselines = {name: baseline_of(minutes) for name, minutes in history.minutes.items()}
    if isinstance(of_steps := history.baselines.get("step") or baselines["step"], Missing):
        return of_steps
    known = {name: each for name, each in baselines.items() if isinstance(each, Baseline)}
    return replace(history, baselines={**known, **history.baselines})


def between(requests: SpannedRequests, begin_s: float, end_s: float) -> tuple[SpannedRequests, float]:
    """Return the requests sent and ended within a time, and the time of the first."""
    rows = (requests.submit_s >= begin_s) & (requests.submit_s < end_s) & (requests.last_s < end_s)
    some = take(requests, rows)
    origin_s = float(some.submit_s[0]) if len(some) else 0.0
    return from_origin(some, origin_s), origin_s


def to_the_minute(at_s: float) -> str:
    """Return the date and time in UTC of a moment, s Unix."""
    return f"{iso_ms(round(at_s * 1e9))[:16].replace('T', ' ')} UTC"


def said(part: str, change: LastingChange, restarted_s: float | None, *, is_of_several: bool = False) -> str:
    """Return a change in a sentence; `restarted_s` is when the engine last did, s Unix, None where it never did.

    Of several engines, which one restarted is not known.
    """
    more = change.ratio >= 1
    least, most = sorted(max(0.0, 100 * (each - 1) * (1 if more else -1)) for each in (change.low, change.high))
    middle = abs(100 * (change.ratio - 1))
    by = f"{middle:.1f} % {'longer' if more else 'shorter'} ({least:.1f} to {most:.1f} %)"
    since = f"Since {to_the_minute(change.since_s)} {PARTS[part]} {by}"
    if part in OF_TRAFFIC:
        return f"{since}: that is the traffic, and at equal batch and length it changes nothing."
    if part == "computed":
        return f"{since}: the prefix cache has {'less' if more else 'more'} of them."
    if restarted_s is not None and abs(restarted_s - change.since_s) <= _RESTART_S:
        return f"{since}: {'one of the engines' if is_of_several else 'the engine'} restarted then."
    if is_of_several:
        return f"{since}."
    return f"{since}; the engine did not restart."
