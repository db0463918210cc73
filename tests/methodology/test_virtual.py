"""The virtual bench: steps of studies as the tables of a run, from the simulated engine in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace as replace_speed
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from virtual_runs import PartsSource
from virtual_study import play, run_step

from sidelight.correlator.statistics.server_load import gauge_samples
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.methodology.study.findings import ResultQuantity, StudyFindings
from sidelight.methodology.study.model import (
    Done,
    Finished,
    Parameters,
    Procedure,
    Reader,
    Step,
    StepData,
    StudySettings,
)
from sidelight.simulator.settings import ENGINES, EngineSettings, SimulatorSettings
from sidelight.simulator.virtual import VirtualExchange, VirtualServer


def ran(
    *, load: Any = "open", level: float = 4, parts: PartsSource = "truth", engine: str = "vllm", **fields: Any
) -> StepData:
    """Play a step of 20 s, or of what is stated, against the demo profile."""
    step = Step(kind="level", label="x", load=load, level=level, **{"seed": 7, "duration": 20.0, **fields})
    return run_step(step, VirtualServer(SimulatorSettings(engine=engine), network_s=0.004), parts=parts)


def truth_of(data: StepData) -> list[VirtualExchange]:
    exchanges: list[VirtualExchange] = list(data.about["truth"])
    return exchanges


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_has_the_tables_of_a_run(engine: str) -> None:
    """Each request has its lengths, its stamps and a chunk a token; the page is of an engine that is known."""
    data = ran(engine=engine)
    log = data.requests
    assert (log.status == "ok").all()
    assert (np.diff(log.chunk_start) == log.output_tokens).all()
    assert (log.output_tokens == log.max_tokens).all()
    assert (log.input_tokens >= 128).all()
    assert (log.input_tokens <= 512).all()
    assert (log.first_token_ns == log.chunk_ns[log.chunk_start[:-1]]).all()
    assert data.end_ns - data.start_ns == 20 * 10**9
    (endpoint,) = data.endpoints
    assert len(endpoint.at_ns) >= 80
    assert np.nanmax(gauge_samples(data.endpoints, "requests_running").amount) >= 2


def test_parts_by_truth_are_what_the_engine_did() -> None:
    """Network, queue and prefill sum to the client's TTFT, each as it was."""
    data = ran(level=6)
    queue_s = [each.record.wait_s for each in truth_of(data) if each.record]
    prefill_s = [each.record.prefill_s for each in truth_of(data) if each.record]
    assert np.allclose(data.parts.prefill_s, prefill_s)
    assert np.allclose(data.parts.queue_s + np.nan_to_num(data.parts.engine_frontend_s), queue_s)
    assert np.allclose(data.parts.network_s, 0.004)
    assert max(queue_s) > 0.05


def test_parts_by_scrapes_are_estimates_near_the_truth() -> None:
    """The correlator works on virtual pages as on real ones."""
    data = ran(parts="scrapes", level=5, duration=40.0)
    assert set(data.parts.source) == {"histogram"}
    truth_s = np.array([each.record.prefill_s for each in truth_of(data) if each.record])
    assert abs(np.nanmean(data.parts.prefill_s) - truth_s.mean()) < 0.2 * truth_s.mean()


def test_options_of_run_state_the_workload() -> None:
    """Lengths, and a mapping as in a workload file with its classes and shared prefixes."""
    fixed = ran(options={"input-tokens": "100", "output-tokens": 7}).requests
    assert set(fixed.input_tokens) == {100}
    assert set(fixed.output_tokens) == {7}
    short = {"name": "short", "weight": 3, "input": 64, "output": 8}
    shared = {"name": "shared", "weight": 1, "input": 64, "output": 8, "prefixes": {"count": 1, "tokens": 160}}
    mapping = {"name": "two", "classes": [short, shared]}
    data = ran(options={"workload": mapping})
    assert set(data.requests.workload_class) == {"short", "shared"}
    cached = np.array([each.record.cached_tokens for each in truth_of(data) if each.record])
    assert set(data.requests.workload_class[cached >= 160]) == {"shared"}
    assert set(cached[data.requests.workload_class == "short"]) == {0}


def test_equal_seeds_send_the_same_requests_and_a_step_may_forget_what_was_cached() -> None:
    """The repeat finds its prompts in the cache, unless the step begins with an empty one."""
    server = VirtualServer(SimulatorSettings())
    step = Step(kind="level", label="x", load="closed", level=4, requests=20, seed=7)
    cold, warm = run_step(step, server), run_step(step, server)
    again = run_step(replace(step, reset_cache=True), server)
    hits = [sum(each.record.cached_tokens for each in truth_of(data) if each.record) for data in (cold, warm, again)]
    assert hits[0] == hits[2] == 0
    assert hits[1] > 1000
    assert (cold.requests.input_tokens == warm.requests.input_tokens).all()
    assert np.mean(request_metrics(warm.requests).ttft_ms) < np.mean(request_metrics(cold.requests).ttft_ms)


def two_levels(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    """Decide on a level of 2, then of 4 requests/s, of each variant."""
    names = asked.variants or ("",)
    if len(finished) == 2 * len(names):
        return Done(reason="both levels were run")
    level = 2.0 + 2 * (len(finished) // len(names))
    variant = names[len(finished) % len(names)]
    return Step(kind="level", label=f"open-{level:g}", load="open", level=level, duration=20, seed=5, variant=variant)


def sent_tokens(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    """Find how many tokens were sent in all."""
    sent = sum(int(read(each).requests.input_tokens.sum()) for each in finished)
    return StudyFindings(answer=(asked.test,), results={"input_tokens": ResultQuantity(value=sent, unit="tokens")})


TWO_LEVELS = Procedure(
    name="two-levels",
    objective="None",
    workload="synthetic-uniform",
    presets={"short": Parameters()},
    next_step=two_levels,
    findings=sent_tokens,
)


def test_a_study_is_played_until_its_test_has_no_further_step() -> None:
    """Each step has its outcome, the sentinel comes last, and findings read the tables of all of them."""
    asked = StudySettings(test="two-levels", scale="short", parameters=Parameters(sentinel=True), seed=1)
    finished, findings = play(TWO_LEVELS, asked, EngineSettings())
    assert [each.step.label for each in finished] == ["open-2", "open-4", "sentinel-open-2"]
    assert [each.outcome.void for each in finished] == ["", "", ""]
    assert [each.outcome.ok for each in finished] == [each.outcome.sent for each in finished]
    sent = sum(each.outcome.sent for each in finished)
    assert 128 * sent < (findings.results["input_tokens"].value or 0) < 512 * sent


def test_variants_are_servers_of_their_own_on_one_clock() -> None:
    """The slower variant is slower on the same requests, and its steps come after those of the other."""
    speed = EngineSettings().speed
    slow = EngineSettings(speed=replace_speed(speed, step_s=3 * speed.step_s))
    asked = StudySettings(test="two-levels", scale="short", parameters=Parameters(), seed=1, variants=("a", "b"))
    finished, _ = play(TWO_LEVELS, asked, EngineSettings(), variants={"a": EngineSettings(), "b": slow})
    windows = [each.outcome.window for each in finished]
    assert [window.start_ns for window in windows if window] == sorted(window.start_ns for window in windows if window)
    tpot = [each.outcome.percentiles["tpot_ms"]["p50"].estimate for each in finished]
    assert [each.outcome.sent for each in finished[::2]] == [each.outcome.sent for each in finished[1::2]]
    assert tpot[1] > 2 * tpot[0]
