"""The search for the maximum throughput, against servers that are a function of the level."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from sidelight.correlator.load.stability import Stability, Verdict
from sidelight.correlator.load.steady import SteadyWindow
from sidelight.loadgen.requests.slo.results import ObjectiveResult, SloResult
from sidelight.methodology.procedures.throughput import THROUGHPUT
from sidelight.methodology.search import at_objective, bracket, contradiction, crossing_of, next_step
from sidelight.methodology.study.model import Beyond, Done, Finished, Outcome, Parameters, Step, StudySettings
from sidelight.methodology.study.planning import decide, level_label
from sidelight.methodology.study.saturation import Capacity, capacity, capacity_shown, measured_capacity

LIMIT = 10.0
WINDOW = SteadyWindow(start_ns=0, end_ns=54 * 10**9, left_out=0.1, enough=True)
Server = Callable[[Step], dict[str, Any]]


def asked(**parameters: Any) -> StudySettings:
    return StudySettings(
        test="throughput", scale="letter", parameters=Parameters(**{"duration": 60.0, **parameters}), seed=1
    )


def closed(step: Step, places: float = 32) -> dict[str, Any]:
    """What a closed loop gives of a server with so many places."""
    share = min(1.0, step.level / places)
    return {
        "completed_per_s": LIMIT * share,
        "output_tokens_per_s": 100 * LIMIT * share,
        "throughput_ci95": (0.98 * LIMIT * share, 1.02 * LIMIT * share),
        "queued_ratio": 1.0 if step.level > places else 0.0,
        "running_mean": min(step.level, places),
        "limit": "seats" if step.level > places else "client",
    }


def opened(step: Step, verdict: Verdict | None = None, bound_ms: float = 500) -> dict[str, Any]:
    """What an open loop gives: its TTFT P99 is 100 ms over the share of the limit that is free."""
    p99 = 100 / max(1e-3, 1 - step.level / LIMIT)
    judged = verdict or ("stable" if step.level < LIMIT else "growing")
    objective = ObjectiveResult(
        text="ttft_p99<500ms", metric="ttft", statistic="p99", unit="ms", bound=bound_ms, value=p99, bound_ms=bound_ms,
        value_ms=p99, count=100, requests=100, failed_requests=0, left_out_requests=0, met=p99 < bound_ms,
    )  # fmt: skip
    return {
        "realised_per_s": step.level,
        "completed_per_s": min(step.level, LIMIT),
        "stability": Stability(verdict=judged, reason="as it is"),
        "queued_ratio": 1.0 if judged == "growing" else 0.3,
        "beyond": {"ttft_p99<500ms": Beyond(share=late_at(step.level / LIMIT), allowed=0.01, n=3000, tau=3.0)},
        "slo": SloResult(
            text="ttft_p99<500ms", met=p99 < bound_ms, good_requests=1, undetermined_requests=0, objectives=[objective]
        ),
    }


def late_at(load: float, steepness: float = 15.0) -> float:
    """Share of the requests beyond the bound: 1 % at 80 % of the limit."""
    return 1 / (1 + 99 * math.exp(-steepness * (load - 0.8)))


def usual(step: Step) -> dict[str, Any]:
    return closed(step) if step.load == "closed" else opened(step)


def searched(given: StudySettings, server: Server = usual) -> tuple[list[Finished], Done]:
    """Play the search to its end."""
    finished: list[Finished] = []
    while isinstance(step := next_step(given, finished), Step):
        number = len(finished) + 1
        assert number < 25, "the search does not end"
        came = Outcome(status="complete", window=WINDOW, **server(step))
        finished.append(Finished(number=number, run=f"steps/{number:04d}", step=step, outcome=came))
    return finished, step


def measured(steps: list[Finished]) -> Capacity:
    limit = measured_capacity(steps)
    assert limit is not None
    return limit


def test_the_limit_is_enclosed_in_six_steps():
    """Two closed loops, then open ones on both sides of what they served."""
    steps, done = searched(asked())
    assert done.complete
    assert len(steps) <= 6
    limit = measured(steps)
    assert limit.per_s == pytest.approx(LIMIT, rel=0.02)
    verdicts = bracket([each for each in steps if each.step.load == "open"], limit)
    assert verdicts.stable is not None and verdicts.growing is not None  # noqa: PT018
    assert 0.9 * LIMIT < verdicts.stable.step.level < LIMIT <= verdicts.growing.step.level < 1.1 * LIMIT


def test_names_of_steps_have_no_exponent_at_thousands_of_requests():
    """A directory is `open-1215`, not `open-1.22e+03`; below a thousand the names are what they were."""

    def fast(step: Step) -> dict[str, Any]:
        share = min(1.0, step.level / 32)
        if step.load == "open":
            return opened(step, "stable" if step.level < 1215 else "growing") | {"completed_per_s": step.level}
        return closed(step) | {"completed_per_s": 1215 * share, "throughput_ci95": (1214 * share, 1216 * share)}

    names = {each.step.label for each in searched(asked(), fast)[0] if each.step.load == "open"}
    assert names
    assert all(name.removeprefix("open-").isdigit() and len(name) == len("open-1215") for name in names)
    assert [level_label(rate) for rate in (0.5, 5.417, 32, 256, 512, 999.4)] == [
        "0.5",
        "5.42",
        "32",
        "256",
        "512",
        "999",
    ]
    assert [level_label(rate) for rate in (999.7, 1024, 12345.6, 0.00001234)] == ["1000", "1024", "12346", "0.0000123"]
    percents = [level_label(2000.0 * share, share) for share in (0.25, 0.55, 0.125, 10.0)]
    assert percents == ["25-percent", "55-percent", "12.5-percent", "1000-percent"]


def test_the_objective_is_reached_where_latency_reaches_it():
    """P99 is 500 ms at 80 % of the limit."""
    steps, _ = searched(asked(slo="ttft_p99<500ms"))
    limit = measured(steps)
    crossing = crossing_of(steps, limit)
    assert crossing is not None
    assert crossing[0] == pytest.approx(0.8 * LIMIT, rel=0.02)
    tried = sorted(each.step.level for each in steps if each.step.kind == "slo")
    assert len(tried) <= 8
    assert all(above / below > 1.01 for below, above in itertools.pairwise(tried)), "each level tells something new"


def test_a_few_late_requests_are_taken_for_chance():
    """Of short steps most see no long wait and some see many: the load at the objective is right on the mean."""
    errors = []
    for seed in range(20):
        random = np.random.default_rng(seed)

        def late(step: Step, random: np.random.Generator = random) -> dict[str, Any]:
            came = opened(step) if step.load == "open" else closed(step)
            if step.load == "closed":
                return came
            bunches = random.poisson(300 * late_at(step.level / LIMIT) / 6)
            share = min(1.0, 6 * bunches / 300)
            slo = msgspec.structs.replace(came["slo"], met=share < 0.01)
            beyond = Beyond(share=share, allowed=0.01, n=300, tau=6.0 if bunches else 1.0)
            return came | {"slo": slo, "beyond": {"ttft_p99<500ms": beyond}}

        steps, _ = searched(asked(slo="ttft_p99<500ms"), late)
        reached = crossing_of(steps, measured(steps))
        errors.append(reached[0] / (0.8 * LIMIT) - 1 if reached else 0.0)
    assert abs(np.mean(errors)) < 0.05


@pytest.mark.parametrize(
    ("bound_ms", "least", "reason"),
    [
        (50, 0.01, "fail even at the lowest load"),
        (50, 9.4, "fail even at the lowest load"),
        (1e9, 0.01, "hold up to the highest load"),
    ],
    ids=["lowest fails", "lowest that was asked for fails", "highest passes"],
)
def test_an_objective_outside_the_levels_is_said(bound_ms: float, least: float, reason: str):
    """It fails at each level, or holds at each."""
    steps, done = searched(
        asked(slo="ttft_p99<500ms", min=least),
        lambda step: closed(step) if step.load == "closed" else opened(step, bound_ms=bound_ms),
    )
    assert reason in done.reason
    assert len(steps) <= 10


def judged(step: Step, realised: float, share: float, tau: float = 6.0) -> dict[str, Any]:
    """What an open loop gives of which that share of 300 requests is late."""
    came = opened(step)
    slo = msgspec.structs.replace(came["slo"], met=share < 0.01)
    beyond = {"ttft_p99<500ms": Beyond(share=share, allowed=0.01, n=300, tau=tau)}
    return came | {"realised_per_s": realised, "slo": slo, "beyond": beyond}


def test_levels_that_contradict_each_other_lead_below_the_lowest():
    """One level sees no late request by chance: the search goes where the others lead."""

    def server(step: Step) -> dict[str, Any]:
        if step.kind != "slo":
            return usual(step)
        if step.level == 0.8 * LIMIT:
            return judged(step, step.level, 0.0)
        return judged(step, 0.92 * step.level, late_at(0.92 * step.level / LIMIT + 0.07))

    given = msgspec.structs.replace(asked(slo="ttft_p99<500ms"), scale="short")
    steps, _ = searched(given, server)
    tried = [each.outcome.realised_per_s or 0 for each in steps if each.step.kind == "slo"]
    assert min(tried[:-1]) > 0.73 * LIMIT > tried[-1] > 0.8 * min(tried[:-1])
    objective = at_objective(given, steps, measured(steps))
    assert objective.value == pytest.approx(0.73 * LIMIT, rel=0.05)
    assert contradiction(given, steps, measured(steps)).startswith("1 level met it and 1 at lower load did not")


def test_no_rate_is_offered_twice_at_an_objective():
    """Not even where it was another load each time, since requests were shorter than usual by chance."""

    def lighter(step: Step) -> dict[str, Any]:
        return (
            usual(step) if step.kind != "slo" else judged(step, 0.95 * step.level, late_at(0.95 * step.level / LIMIT))
        )

    steps, _ = searched(asked(slo="ttft_p99<500ms"), lighter)
    tried = sorted(each.step.level for each in steps if each.step.kind == "slo")
    assert len(tried) > 3
    assert all(above / below > 1.01 for below, above in itertools.pairwise(tried)), tried


@pytest.mark.parametrize(
    ("shares", "reason", "limit_per_s"),
    [
        (
            (0.05, 0.045, 0.005, 0.004, 0.4),
            (
                "ttft_p99<500ms is reached at about 3.94 requests/s (at most 4.48, 95 %), below the lowest level, "
                "3.96; 2 levels met it and 2 at lower load did not: steps of 60 s have too few requests to judge it, "
                "lengthen them with --duration 300"
            ),
            5.71,
        ),
        ((0.04, 0.03, 0.02, 0.004, 0.01), "ttft_p99<500ms cannot be placed; 1 level met it and 3 at lower load", 5.71),
        ((0.3, 0.35, 0.4, 0.45, 0.5), "ttft_p99<500ms fails even at 3.96 requests/s, the lowest level", 5.71),
        ((0.3, 0.35, 0.4, 0.45, 0.5), "every level judged was above what it serves, 3.86 requests/s; try lower", 3.86),
    ],
    ids=["just below", "falling", "all fail", "all above"],
)
def test_an_objective_that_cannot_be_said_is_bounded(shares: tuple[float, ...], reason: str, limit_per_s: float):
    """By what the levels know of it, with what to do."""
    given = asked(slo="ttft_p99<500ms")
    finished = []
    for number, (load, share) in enumerate(zip((3.96, 4.24, 4.45, 4.61, 5.2), shares, strict=True), 1):
        step = Step(kind="slo", label="open", load="open", level=load, seed=1)
        came = Outcome(status="complete", window=WINDOW, **judged(step, load, share, tau=40.0))
        finished.append(Finished(number=number, run=f"steps/{number:04d}", step=step, outcome=came))
    objective = at_objective(given, finished, Capacity(per_s=limit_per_s))
    assert objective.value is None
    assert reason in objective.missing, objective


def test_no_level_is_above_the_highest_that_was_asked_for():
    """It passes, and more is not tried."""
    steps, done = searched(asked(max=4.0))
    assert [each.step.level for each in steps if each.step.load == "open"] == [4.0]
    assert done.complete


def test_undecided_levels_are_run_longer_once():
    """Three times as long, and no longer."""
    steps, done = searched(
        asked(), lambda step: closed(step) if step.load == "closed" else opened(step, verdict="undecided")
    )
    durations = [each.step.duration for each in steps if each.step.load == "open"]
    assert durations == [60.0, 180.0, 60.0, 180.0]
    assert done.complete


def test_contradicting_verdicts_open_the_bracket_once():
    """A load that is stable above one that grew, as chance realised them: one more level, and it is said."""

    def contradicting(step: Step) -> dict[str, Any]:
        if step.load == "closed":
            return closed(step)
        return {**opened(step), "realised_per_s": 0.9 * LIMIT if step.level > LIMIT else step.level}

    steps, done = searched(asked(), contradicting)
    limit = measured(steps)
    assert bracket([each for each in steps if each.step.load == "open"], limit).contradictions
    assert len(steps) <= 6
    assert done.complete


def test_a_server_that_is_never_full_has_no_capacity():
    """The load generator's own limit ends the search, and other tests ask for a stated capacity."""
    given = asked(concurrency=16)
    steps, done = searched(given)
    assert [each.step.level for each in steps] == [16]
    assert "never filled the server" in done.reason
    refused = capacity(given, steps)
    assert isinstance(refused, Done)
    assert not refused.complete
    assert "--capacity" in refused.reason


def test_without_a_page_a_doubling_that_gains_nothing_is_enough():
    """No queue is seen, but the throughput shows that the server is full."""

    def unseen(step: Step) -> dict[str, Any]:
        return {**usual(step), "queued_ratio": None, "running_mean": None, "limit": "unknown"}

    steps, _ = searched(asked(), unseen)
    assert [each.step.level for each in steps if each.step.load == "closed"] == [64, 128]
    limit = measured(steps)
    assert limit.filled


def test_a_step_shorter_than_a_request_ends_the_search():
    """Nothing ended in it: the cure is named."""
    steps, done = searched(asked(), lambda step: {**usual(step), "completed_per_s": 0.0})
    assert len(steps) == 1
    assert not done.complete
    assert "--duration" in done.reason


def test_a_stated_capacity_needs_no_step():
    """As for the levels of other tests."""
    assert capacity(asked(capacity=3.0), []) == Capacity(per_s=3.0)


def drifting(rates: list[float]) -> Server:
    """Return a server whose closed loops serve these shares of the limit, one after the other, within 2 % each."""
    left = iter(rates)

    def served(step: Step) -> dict[str, Any]:
        if step.load == "open":
            return opened(step) | {"queued_ratio": 0.3}
        tokens = 100 * LIMIT * next(left)
        return closed(step) | {"output_tokens_per_s": tokens, "output_tokens_ci95": (0.98 * tokens, 1.02 * tokens)}

    return served


@pytest.mark.parametrize(
    ("again", "half", "varied"),
    [
        (1.0, 0.02 / math.sqrt(3), False),  # no difference: three steps know it better than one
        (0.92, 0.08, True),  # sd of 1, 1 and 0.92 is 0.046, of which 0.010 is chance
    ],
    ids=["steady", "slower at the end"],
)
def test_the_interval_of_the_limit_holds_what_the_saturated_steps_differ_by(again: float, half: float, varied: bool):
    """The sentinel repeats the saturated step, and counts in the limit; decisions before it do not rest on it."""
    given = asked(sentinel=True)
    steps, server = searched(given, drifting([1.0, 1.0]))[0], drifting([again])
    last = decide(THROUGHPUT, given, steps)
    assert isinstance(last, Step)
    assert (last.kind, last.label, last.load) == ("sentinel", "sentinel-closed-64", "closed")
    assert last.seed not in {each.step.seed for each in steps}
    came = Outcome(status="complete", window=WINDOW, **server(last))
    ended = [*steps, Finished(number=len(steps) + 1, run="steps/last", step=last, outcome=came)]
    assert isinstance(decide(THROUGHPUT, given, ended), Done)
    limit = measured(ended)
    assert limit == capacity_shown(given, ended)  # what `--from` hands on
    assert limit.tokens_per_s == pytest.approx(100 * LIMIT * (2 + again) / 3)
    assert limit.tokens_ci95 is not None
    assert (limit.tokens_ci95[1] - limit.tokens_ci95[0]) / 2 == pytest.approx(100 * LIMIT * half, rel=0.2)
    findings = THROUGHPUT.findings(given, ended, lambda _: pytest.fail("outcomes suffice"))
    said = [each for each in findings.notes if "which differ by more than each by itself explains" in each]
    assert varied == bool(said)
    assert len(findings.tables[2].rows) == len(ended)


def test_a_load_that_piled_up_below_what_closed_loops_served_is_said():
    """The system was not the same all the time; its answer does not say only what it once served."""

    def slower(step: Step) -> dict[str, Any]:
        if step.load == "closed":
            return closed(step)
        return opened(step, "growing" if step.level > 0.85 * LIMIT else "stable") | {"queued_ratio": 0.3}

    for server, says in ((slower, True), (usual, False)):
        steps, _ = searched(asked(), server)
        findings = THROUGHPUT.findings(asked(), steps, lambda _: pytest.fail("outcomes suffice"))
        assert says == any("it was not as fast all the time, so measure again" in each for each in findings.answer)
