"""Memory Pressure Behavior against engines of which each preemption is known."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from watched_study import records, study

from sidelight.methodology.measures.preemption import several
from sidelight.methodology.procedures.memory_pressure import MEMORY_PRESSURE
from sidelight.methodology.study.model import Done, Parameters, StudySettings
from sidelight.simulator.settings import EngineSettings, SimulatorSettings

WORKLOAD = {"input": {"uniform": {"min": 300, "max": 900}}, "output": 128}
# A quarter of the memory that its seats could use.
TIGHT = EngineSettings(kv_blocks=512, max_num_seqs=32)
BOUNDS = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, np.inf])


def asked(*, isolated: bool = True, **parameters: Any) -> StudySettings:
    chosen = Parameters(**({"levels": (1.0, 1.5), "duration": 12.0, "concurrency": 16} | parameters))
    options = {"workload": WORKLOAD}
    return StudySettings(
        test="memory-pressure", scale="short", parameters=chosen, seed=5, options=options, isolated=isolated
    )


def test_preempted_requests_are_counted_exactly_by_the_histogram() -> None:
    """The first bucket holds 0 and 1: the sum says how many of it were preempted."""
    studied = study(MEMORY_PRESSURE, asked(), TIGHT)
    for each, data in studied.of_kind("level"):
        share = round(100 * (each.step.share or 0))
        served = records(data)
        preempted = sum(record.preemptions > 0 for record in served)
        assert preempted > 0
        assert studied.value(f"preempted_ratio_{share}") == pytest.approx(preempted / len(served))
        assert studied.value(f"preemptions_{share}") == sum(record.preemptions for record in served)
        assert studied.value(f"recovered_ratio_{share}") == 1.0
    assert studied.findings.answer[2].startswith("Memory was under pressure: the KV cache was")
    (level, _) = studied.of_kind("level")[-1]
    for metric in ("ttft", "tpot"):
        of_minimum = studied.findings.results[f"{metric}_p50_ms"]
        assert of_minimum.value == level.outcome.percentiles[f"{metric}_ms"]["p50"].estimate
        assert of_minimum.at == f"24 requests in flight, 150 % of the capacity, step {level.number}"


def test_two_levels_that_round_to_one_percentage_have_results_of_their_own() -> None:
    """62.5 and 62 % are two levels."""
    studied = study(MEMORY_PRESSURE, asked(levels=(0.62, 0.625), duration=3.0), EngineSettings())
    assert [studied.value(f"in_flight_{percents}") for percents in ("62", "62.5")] == [10.0, 10.0]
    assert [row[0] for row in studied.findings.tables[0].rows] == ["62 %", "62.5 %"]


def test_without_the_histogram_there_are_bounds() -> None:
    """SGLang's page has counters alone: what is true lies within what they leave open."""
    studied = study(MEMORY_PRESSURE, asked(levels=(1.5,)), SimulatorSettings(engine="sglang", engine_settings=TIGHT))
    served = records(studied.of_kind("level")[0][1])
    preemptions = sum(record.preemptions for record in served)
    low, high = studied.ends("preempted_ratio_150")
    assert low < sum(record.preemptions > 0 for record in served) / len(served) <= high
    low, high = studied.ends("lost_tokens_per_preemption_150")
    assert low <= sum(record.lost_tokens for record in served) / preemptions <= high


def test_seats_that_queue_are_no_memory_pressure() -> None:
    """An engine with room in its KV cache only makes requests wait."""
    studied = study(MEMORY_PRESSURE, asked(concurrency=4, levels=(1.5,)), EngineSettings(max_num_seqs=4))
    assert studied.value("preempted_ratio_150") == 0.0
    assert "memory was not under pressure" in studied.findings.answer[-1]


def test_running_out_of_memory_is_said() -> None:
    """Requests that fail for want of memory are counted by what the server says of them."""
    settings = EngineSettings(max_num_seqs=32, oom_at=20)
    studied = study(MEMORY_PRESSURE, asked(duration=5.0), settings)
    assert studied.value("out_of_memory_100") == 0.0
    assert studied.value("out_of_memory_150") > 0.0
    assert studied.value("completion_ratio_150") < 0.5
    assert studied.findings.answer[-1].startswith("Memory ran out from 150 % on")


def test_a_shared_system_is_refused() -> None:
    """It would harm others: nothing is sent."""
    decided = MEMORY_PRESSURE.next_step(asked(isolated=False), [])
    assert isinstance(decided, Done)
    assert "--isolated" in decided.reason


@pytest.mark.parametrize("most", [1, 3, 5])
def test_up_to_five_preemptions_a_request_are_exact(most: int) -> None:
    """Each further count has a bucket of its own."""
    counts = np.random.default_rng(most).integers(0, most + 1, 200)
    assert several(BOUNDS, np.histogram(counts, [-1, *(BOUNDS[:-1] + 0.5), 1e9])[0], counts.sum()) == pytest.approx(
        [(counts > 0).sum()] * 2
    )


def test_more_preemptions_than_buckets_leave_bounds() -> None:
    """What is in a bucket of several counts may be any of them."""
    counts = np.array([0, 0, 1, 1, 2, 7, 30])
    low, high = several(BOUNDS, np.histogram(counts, [-1, *(BOUNDS[:-1] + 0.5), 1e9])[0], counts.sum())
    assert low <= 5 <= high


def test_the_capacity_is_what_the_full_engine_ran_or_what_meets_objectives() -> None:
    """Without a number the engine's seats are 100 %; with objectives the capacity test is played first."""
    engine = EngineSettings(max_num_seqs=6)
    studied = study(MEMORY_PRESSURE, asked(concurrency=None, levels=(1.0,), duration=5.0), engine)
    assert [(each.step.kind, each.step.level) for each in studied.finished] == [("saturate", 64), ("level", 6)]
    searched = asked(concurrency=None, levels=(1.5,), duration=3.0, slo="ttft_p99<400ms", min=4, max=16, per_slot=2)
    studied = study(MEMORY_PRESSURE, searched, engine)
    assert studied.kinds[:-1] == ["capacity"] * (len(studied.kinds) - 1)
    assert 1.5 * 4 <= studied.finished[-1].step.level <= 1.5 * 8


def test_a_level_that_was_void_twice_is_reported_as_such() -> None:
    """An engine that dies under pressure is a result: the level stands in the table, and the notes say why."""
    studied = study(MEMORY_PRESSURE, asked(concurrency=4, levels=(1.0,), duration=3.0), EngineSettings())
    (each, data) = studied.of_kind("level")[0]
    failed = msgspec.structs.replace(each, outcome=msgspec.structs.replace(each.outcome, void="the engine restarted"))
    findings = MEMORY_PRESSURE.findings(asked(concurrency=4, levels=(1.0,)), [failed, failed], lambda _: data)
    assert [row[0] for row in findings.tables[0].rows] == ["100 % (base)"]
    assert any("void: the engine restarted" in note for note in findings.notes)
