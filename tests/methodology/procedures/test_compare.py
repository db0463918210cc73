"""Comparison of systems as a test: order, verdicts, the part that makes the difference, and the checklist."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import Any

import pytest
from msgspec.structs import replace
from virtual_study import play

from sidelight.exporter.summary.verdict import StudyVerdict
from sidelight.methodology.procedures.compare import COMPARE
from sidelight.methodology.study.findings import StudyFindings
from sidelight.methodology.study.model import Done, Finished, Outcome, Parameters, Reader, Step, StudySettings
from sidelight.methodology.study.planning import decide
from sidelight.methodology.study.samples import FAMILY, RunSample, against
from sidelight.simulator.settings import EngineSettings

ENGINE = EngineSettings()


def asked(*, variants: tuple[str, ...] = ("a", "b"), **numbers: Any) -> StudySettings:
    parameters = Parameters(**{"duration": 20.0, "pairs": 3, "margin": 0.05, "rate": 4.0, **numbers})
    return StudySettings(
        test="compare",
        scale="short",
        parameters=parameters,
        seed=3,
        variants=variants,
    )


@pytest.fixture(scope="module")
def slower() -> tuple[list[Finished], StudyFindings]:
    """Three pairs: b has a quarter of the seats, so that its requests queue."""
    variants = {"a": ENGINE, "b": replaced(ENGINE, max_num_seqs=4)}
    return play(COMPARE, asked(), ENGINE, variants=variants)


def test_each_pair_has_the_same_requests_in_an_order_by_the_seed(slower: tuple[list[Finished], StudyFindings]) -> None:
    """Seeds are equal within a pair and differ between pairs; who goes first is not always the same."""
    finished, _ = slower
    pairs = [finished[at : at + 2] for at in range(0, len(finished), 2)]
    assert len(pairs) == 3
    assert all(first.step.seed == second.step.seed for first, second in pairs)
    assert all({first.step.variant, second.step.variant} == {"a", "b"} for first, second in pairs)
    assert len({first.step.seed for first, _ in pairs}) == 3


def test_an_overloaded_configuration_is_named_in_the_answer(slower: tuple[list[Finished], StudyFindings]) -> None:
    """How long its requests wait depends on how long the load lasts."""
    said = "How far latencies differ depends on how long the load lasted: b was overloaded."
    assert said in slower[1].answer


def test_pairs_too_few_for_a_claim_promise_no_decision() -> None:
    """What two pairs lack is the least that a claim needs; their spread cannot say how many would decide."""
    given = asked()
    given = replace(given, parameters=replace(given.parameters, pairs=2))
    _, findings = play(COMPARE, given, ENGINE, variants={"a": ENGINE, "b": ENGINE})
    assert any(sentence.startswith("At least 1 more pair must be") for sentence in findings.answer)


def test_who_goes_first_changes_with_the_seed() -> None:
    """Over many seeds either configuration begins about as often."""
    firsts = [decide(COMPARE, replace(asked(), seed=seed), []) for seed in range(40)]
    count = sum(isinstance(step, Step) and step.variant == "a" for step in firsts)
    assert 10 < count < 30


def test_a_queue_is_named_as_what_makes_the_difference(slower: tuple[list[Finished], StudyFindings]) -> None:
    """With a quarter of the seats b is worse, and most of the change of the TTFT is in the queue."""
    _, findings = slower
    assert findings.passed is None
    assert "worse on" in findings.answer[0]
    assert findings.verdict is not None
    assert findings.verdict.cause == "queue"
    parts = next(table for table in findings.tables if table.name == "ttft-parts-b")
    shares = {row[0]: row[-1] for row in parts.rows}
    assert isinstance(shares["queue"], float)
    assert shares["queue"] > 0.8


def both_ways(**variants: EngineSettings) -> tuple[StudyVerdict, StudyVerdict]:
    """The verdict on two configurations, and that on the same runs with the sides exchanged."""
    played: list[Any] = []

    def findings(given: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
        played.extend((finished, read))
        return COMPARE.findings(given, finished, read)

    settings = asked(rate=1.0, variants=tuple(variants))
    _, forth = play(replaced(COMPARE, findings=findings), settings, ENGINE, variants=variants)
    back = COMPARE.findings(replace(settings, variants=settings.variants[::-1]), *played)
    assert forth.verdict is not None
    assert back.verdict is not None
    return forth.verdict, back.verdict


def test_exchanged_sides_exchange_the_sentence() -> None:
    """Of a sure difference: names, slower and faster, the bars, and each ratio."""
    forth, back = both_ways(a=ENGINE, b=replaced(ENGINE, slow=2.5))
    assert ("slower", "faster", "prefill") == (forth.state, back.state, forth.cause)
    assert re.fullmatch(r"b is [\d.]+ times slower than a at TTFT P99; sure at 95 %.", forth.headline)
    exchanged = {"a": "b", "b": "a", "slower": "faster"}
    assert back.headline == " ".join(exchanged.get(word, word) for word in forth.headline.split(" "))
    assert forth.bars == back.bars[::-1]
    assert forth.do == back.do
    for there, here in zip(forth.figures, back.figures, strict=True):
        assert (there.value, there.base) == (here.base, here.value)
        assert there.ratio is None or there.ratio * (here.ratio or 0.0) == pytest.approx(1.0)


def test_equals_are_equal_either_way() -> None:
    """Within the margin, whichever is named first."""
    assert {"equal"} == {verdict.state for verdict in both_ways(a=ENGINE, b=ENGINE)}


def test_the_same_system_beside_itself_is_not_worse() -> None:
    """Equal requests at equal systems take the same time but for the jitter of steps."""
    variants = {"a": ENGINE, "b": replaced(ENGINE, seed=9)}
    _, findings = play(COMPARE, asked(), ENGINE, variants=variants)
    assert findings.passed is None
    ratio = findings.results["b_over_a_tpot_p50_ratio"]
    assert ratio.value == pytest.approx(1, abs=0.02)


def test_the_load_is_a_share_of_the_first_ones_capacity_where_no_rate_is_stated() -> None:
    """Without a rate, a saturated step of the first configuration comes before the pairs."""
    step = decide(COMPARE, asked(rate=None), [])
    assert isinstance(step, Step)
    assert (step.kind, step.variant) == ("saturate", "a")


def test_what_saturated_the_first_one_is_no_run_of_a_pair() -> None:
    """Each pair is whole behind it, of other requests than it sent."""
    alike = {"a": ENGINE, "b": ENGINE}
    finished, _ = play(COMPARE, asked(rate=None, load=0.7, duration=10.0), ENGINE, variants=alike)
    saturated = [each.step for each in finished if each.step.kind == "saturate"]
    pairs = Counter(each.step.seed for each in finished if each.step.kind == "pair")
    assert [2, 2, 2] == list(pairs.values())
    assert not {step.seed for step in saturated} & pairs.keys()


def test_a_run_without_its_like_is_left_out_of_the_pairs() -> None:
    """A study that was stopped leaves one, and what whole pairs say is not thrown away for it."""
    runs = samples("a", [10, 11, 12], seeds=[1, 2, 3]) + samples("b", [10.5, 11.6, 12.7, 90], seeds=[1, 2, 3, 4])
    comparison = against(runs, "a", "b", 0.01)
    assert comparison.is_paired
    assert comparison.concluded["ttft_p50_ms"].pairs == 3


def decided(void: set[str], finished: list[Finished]) -> tuple[list[Finished], Done]:
    """Go on with a comparison of five pairs whose steps of these labels are void, until it ends."""
    finished = list(finished)
    while isinstance(step := decide(COMPARE, asked(pairs=5), finished), Step):
        came = Outcome(status="complete", void="held up" if step.label in void else "", sent=10, ok=10)
        finished.append(Finished(number=len(finished) + 1, run=step.label, step=step, outcome=came))
        assert len(finished) < 30
    return finished, step


def test_a_void_pair_costs_itself_and_no_other() -> None:
    """All others are measured, none of it once it has no like; the end names it, and who goes on tries it again."""
    finished, end = decided({"pair-2-b"}, [])
    assert not end.complete
    assert "(pair-2-b) was void twice: held up. --resume tries it again" in end.reason
    whole = Counter(each.step.seed for each in finished if not each.outcome.void)
    assert [2, 2, 2, 2] == sorted(whole.values())[-4:]
    resumed = [replace(each, again=bool(each.outcome.void and each.step.repeat)) for each in finished]
    finished, end = decided(set(), resumed)
    assert end.complete
    assert {2} == set(Counter(each.step.seed for each in finished if not each.outcome.void).values())


def test_where_the_first_is_void_its_pair_is_left() -> None:
    """What stands beside it would be compared with nothing."""
    finished, _ = decided({f"pair-{number}-a" for number in range(1, 6)}, [])
    alone = [each.step.label for each in finished if each.step.variant == "b"]
    assert len(alone) < 5
    assert 10 == sum(each.step.variant == "a" for each in finished)


def test_whole_pairs_stay_pairs_however_few_they_are() -> None:
    """Measured in turn, two pairs of three are two pairs, not runs that are not paired."""
    runs = samples("a", [10, 11, 12], seeds=[1, 2, 3]) + samples("b", [20, 22], seeds=[1, 2])
    comparison = against(runs, "a", "b", 0.05, in_turn=True)
    assert comparison.is_paired
    assert comparison.concluded["ttft_p50_ms"].pairs == 2


@pytest.mark.parametrize(
    ("seeds", "said"), [([], "no run of b counts"), ([4], "no pair has a run of both that counts")]
)
def test_no_success_rate_is_stated_of_no_run(seeds: list[int], said: str) -> None:
    """Void runs are missing: none of their requests failed."""
    runs = samples("a", [10, 11, 12], seeds=[1, 2, 3]) + samples("b", [9.0] * len(seeds), seeds=seeds)
    concluded = against(runs, "a", "b", 0.05, in_turn=bool(seeds)).concluded
    assert {said} == {of.reason for of in concluded.values()}


@pytest.mark.parametrize(("error_ms", "verdict"), [(10.0, "better"), (200.0, None)])
def test_an_error_hides_a_difference_that_is_not_ten_times_as_large(error_ms: float, verdict: str | None) -> None:
    """10 ms beside medians of 1,045 and 73 ms hide nothing; where it does, the reason is the load generator."""
    runs = samples("a", [1045, 1050, 1040], seeds=[1, 2, 3]) + samples("b", [73, 74, 72], seeds=[1, 2, 3])
    late = [replaced(each, error_ms={"ttft": error_ms}) for each in runs]
    concluded = against(late, "a", "b", 0.05).concluded
    assert verdict == concluded["ttft_p50_ms"].verdict
    assert (verdict is None) == ("the load generator was held up" in concluded["ttft_p50_ms"].reason)
    assert "better" == concluded["e2e_p50_ms"].verdict


def test_one_configuration_cannot_be_compared() -> None:
    """It takes two."""
    done = decide(COMPARE, asked(variants=("a",)), [])
    assert isinstance(done, Done)
    assert not done.complete


def samples(variant: str, values: list[float], *, seeds: list[int], success: float = 1.0) -> list[RunSample]:
    return [
        RunSample(
            finished=Finished(
                number=1,
                run="r",
                step=Step(kind="pair", label="p", load="open", level=1, seed=seed, variant=variant),
                outcome=Outcome(status="complete"),
            ),
            metrics={metric.name: value for metric in FAMILY},
            parts_ms={},
            success=success,
        )
        for value, seed in zip(values, seeds, strict=True)
    ]


def test_latencies_have_no_verdict_where_success_rates_differ() -> None:
    """A system that refuses its slow requests is not faster; the rate of completed requests still decides."""
    runs = samples("a", [10, 11, 12], seeds=[1, 2, 3]) + samples("b", [5, 5.4, 6.1], seeds=[1, 2, 3], success=0.9)
    concluded = against(runs, "a", "b", 0.05).concluded
    assert concluded["ttft_p50_ms"].verdict is None
    assert "success rates differ (100.0 % and 90.0 %)" in concluded["ttft_p50_ms"].reason
    assert concluded["completed_requests_per_s"].verdict == "worse"


def test_runs_of_other_requests_are_not_taken_for_pairs() -> None:
    """Unequal seeds or sizes: Welch's test over runs."""
    runs = samples("a", [10, 11, 12], seeds=[1, 2, 3]) + samples("b", [10.5, 11, 12, 11], seeds=[4, 5, 6, 7])
    comparison = against(runs, "a", "b", 0.05)
    assert not comparison.is_paired
    assert comparison.concluded["ttft_p50_ms"].pairs == 3


def test_two_runs_claim_nothing() -> None:
    """The draft asks for three independent runs."""
    runs = samples("a", [10, 11], seeds=[1, 2]) + samples("b", [20, 22], seeds=[1, 2])
    concluded = against(runs, "a", "b", 0.05).concluded["ttft_p50_ms"]
    assert concluded.verdict == "inconclusive"
    assert "at least 3" in concluded.reason


def test_a_percentile_that_falls_on_a_failure_is_no_time() -> None:
    """A request that failed took for ever."""
    runs = samples("a", [10, 11, 12], seeds=[1, 2, 3]) + samples("b", [10, float("inf"), 12], seeds=[1, 2, 3])
    assert against(runs, "a", "b", 0.05).concluded["ttft_p99_ms"].verdict is None


def test_the_checklist_says_what_was_checked_and_what_was_not_declared(
    slower: tuple[list[Finished], StudyFindings],
) -> None:
    """Turns are seen in the runs; a boundary that was not declared is not assumed."""
    _, findings = slower
    states = {row[0]: row[1] for row in findings.tables[-1].rows}
    assert states["Tested at the same time: configurations in turn"] == "checked"
    assert states["Equivalent SUT boundary"] == "not met"
