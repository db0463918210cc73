"""Virtual days of a watch: what it says of its engine, and its headroom against the truth.

    PYTHONPATH=tests python benchmarks/watched_days.py --days 7
    PYTHONPATH=tests python benchmarks/watched_days.py --days 30 --rate 5 --unchanged  # false alarms
    PYTHONPATH=tests python benchmarks/watched_days.py --days 0.3 --rate 5  # the delay of what is said

Traffic with a day that goes from half of a mean rate to one and a half, on an engine of 16 seats. At 0.4 of the time
its steps take 5 % longer, at 0.6 prompts become 1.6 times as long, and at 0.8 it restarts with 12 seats. The watch
takes requests each ten seconds and looks each minute, as a true one does, but at headroom each hour. The truth is the
highest rate at which the median of nine runs of 800 requests on the true engine meets the objective.
"""

from __future__ import annotations

import argparse
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from played_runs import NETWORK_S, arrivals, engine, lengths
from played_twins import ended, longer

from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.rundir.columns import Floats, concat, same_text, take
from sidelight.twin.check import PLACES, latencies_ms, quantiles_of
from sidelight.twin.engine.play import EngineLoad, EngineTimes, play
from sidelight.twin.engine.spans import SpannedRequests
from sidelight.twin.headroom import LAST_S, MOST
from sidelight.twin.watched import WatchedEngines

BEGIN_S, DAY_S, SWING = 1_700_006_400.0, 86_400, 0.5  # a midnight, s Unix
POLL_S, LOOK_S, HEADROOM_S = 10, 60, 3600
OBJECTIVES = parse_slo("ttft_p99<1s").objectives
PROMPT, SEATS = 300, 16


@dataclass(frozen=True, slots=True)
class Stage:
    """An engine and its traffic from a share of the time on."""

    share: float
    what: str = ""
    slower: float = 1.0
    prompt: int = PROMPT
    seats: int = SEATS


CHANGES = (
    Stage(0.4, "steps take 5 % longer", slower=1.05),
    Stage(0.6, "prompts are 1.6 times as long", slower=1.05, prompt=480),
    Stage(0.8, "restarted with 12 seats", slower=1.05, prompt=480, seats=12),
)


def played(stage: Stage, at_s: Floats, seed: int) -> tuple[EngineLoad, EngineTimes]:
    """Return requests and their times at the engine."""
    prompts, outputs = lengths(len(at_s), seed, prompt=stage.prompt)
    load = EngineLoad(
        prompt_tokens=prompts,
        cached_tokens=np.zeros(len(at_s), np.int64),
        output_tokens=outputs,
        arrival_s=at_s + NETWORK_S,
    )
    return load, play(load, engine(max_num_seqs=stage.seats, speed=longer(stage.slower)), seed=seed)


def traffic(stage: Stage, begin_s: float, end_s: float, rate_per_s: float, seed: int) -> SpannedRequests:
    """Return the requests of a time, s Unix, as spans have them."""
    random = np.random.default_rng(seed)
    most_per_s = rate_per_s * (1 + SWING)
    at_s = np.cumsum(random.exponential(1 / most_per_s, round(1.1 * most_per_s * (end_s - begin_s)) + 100))
    shape = 1 + SWING * np.sin(2 * np.pi * (begin_s + at_s) / DAY_S)
    at_s = at_s[(random.random(len(at_s)) < shape / (1 + SWING)) & (at_s < end_s - begin_s)]
    load, times = played(stage, at_s, seed)
    return SpannedRequests(
        submit_s=begin_s + at_s,
        prompt_tokens=load.prompt_tokens,
        cached_tokens=load.cached_tokens,
        output_tokens=load.output_tokens,
        first_s=begin_s + times.first_s + NETWORK_S,
        last_s=begin_s + times.last_s + NETWORK_S,
        served_by=same_text("", len(at_s)),
    )


@cache
def highest_rate(stage: Stage) -> float:
    """Return the highest rate at which the true engine meets the objective, by bisection."""
    (objective,) = OBJECTIVES
    at = PLACES[objective.metric, objective.quantile]

    def is_met(rate_per_s: float) -> bool:
        runs = (played(stage, arrivals(MOST, rate_per_s, seed), seed) for seed in range(9))
        shown = [quantiles_of(latencies_ms(load, times, np.full(MOST, NETWORK_S)))[at] for load, times in runs]
        return float(np.median(shown)) < objective.bound

    low, high = 0.5, 64.0
    while high > 1.005 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def stretches(days: float, stages: tuple[Stage, ...]) -> Iterator[tuple[Stage, float, float]]:
    """Yield each stage by days at most, with begin and end in s Unix: a play of all would take much memory."""
    ends = [*(stage.share for stage in stages[1:]), 1.0]
    for stage, end in zip(stages, ends, strict=True):
        begin_s, end_s = (BEGIN_S + LOOK_S * round(share * days * DAY_S / LOOK_S) for share in (stage.share, end))
        for part_s in np.arange(begin_s, end_s, DAY_S).tolist():
            yield stage, part_s, min(part_s + DAY_S, end_s)


class Judged:
    """Headrooms beside the truth."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.errors = list[float]()

    def add(self, watched: WatchedEngines, stage: Stage, rate_per_s: float) -> str:
        """Return a line on the headroom of now."""
        ratios, truth = watched.headroom.ratios, highest_rate(stage) / rate_per_s
        if "estimate" not in ratios:
            self.counts["without a number"] += 1
        else:
            inside = ratios["low"] <= truth <= ratios.get("high", np.inf)
            self.counts["inside" if inside else "outside"] += 1
            self.errors.append(abs(ratios["estimate"] / truth - 1))
        return f"truth {truth:.2f}: {watched.headroom.text}"


def main() -> None:
    """Print what is said, and the share of truths within the headroom's interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=float, default=0.5)
    parser.add_argument("--rate", type=float, default=4.0, help="mean, requests/s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unchanged", action="store_true", help="one engine and one traffic; no headroom")
    asked = parser.parse_args()
    watched, judged, requests, said = WatchedEngines(known={"max-num-seqs": SEATS}), Judged(), 0, 0
    left: SpannedRequests | None = None
    poll_s = LOOK_S if asked.unchanged else POLL_S
    lately = deque[int](maxlen=round(LAST_S / poll_s))
    stages = (Stage(0.0), *(() if asked.unchanged else CHANGES))
    for number, (stage, begin_s, end_s) in enumerate(stretches(asked.days, stages)):
        fresh = traffic(stage, begin_s, end_s, asked.rate, 1000 * asked.seed + number)
        is_restart = stage.seats != SEATS and begin_s == BEGIN_S + stage.share * asked.days * DAY_S
        some = fresh if left is None or is_restart else concat([left, fresh])  # what it had in flight is lost
        some = take(some, np.argsort(some.last_s, kind="stable"))
        requests += len(fresh)
        if stage.what and begin_s == BEGIN_S + stage.share * asked.days * DAY_S:
            print(f"{clock(begin_s)}: {stage.what}")
        polls_s = np.arange(begin_s + poll_s, end_s + poll_s, poll_s)
        ends = np.searchsorted(some.last_s, polls_s).tolist()
        for since, until, now_s in zip([0, *ends], ends, polls_s.tolist(), strict=False):
            now_ns = round(now_s * 1e9)
            watched.take(ended(take(some, slice(since, until))), now_ns)
            lately.append(until - since)
            if now_s % LOOK_S:
                continue
            watched.objectives = () if asked.unchanged or now_s % HEADROOM_S else OBJECTIVES
            restarted_s = begin_s if is_restart else None
            watched.estimation(now_ns, engines=1, finished_per_s=None, restarted_s=restarted_s)()
            for sentence in watched.fresh():
                said += 1
                print(f"{clock(now_s)}: {sentence}")
            if watched.objectives and watched.histories:
                print(f"{clock(now_s)}: {judged.add(watched, stage, sum(lately) / (poll_s * len(lately)))}")
        left = take(some, slice(ends[-1], None))
    print(f"{requests:,} requests in {asked.days:g} days; {said} changes said; headroom: {dict(judged.counts)}", end="")
    print(f", median error {100 * np.median(judged.errors):.1f} %" if judged.errors else "")


def clock(at_s: float) -> str:
    """Return day and time of day."""
    minute = round((at_s - BEGIN_S) / 60)
    return f"day {minute // 1440} {minute // 60 % 24:02}:{minute % 60:02}"


if __name__ == "__main__":
    main()
