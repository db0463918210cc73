"""The engine in real time, on an event loop whose time is virtual."""

from __future__ import annotations

import asyncio

import pytest

from sidelight.simulator.engine.driver import EngineDriver
from sidelight.simulator.engine.history import EngineRequest, RequestRecord
from sidelight.simulator.engine.scheduler import SimulatedEngine
from sidelight.simulator.settings import EngineSettings, SpeedProfile

STEP_S = 0.01
EVEN = SpeedProfile(step_s=STEP_S, prefill_token_s=0.0, sequence_s=0.0, kv_token_s=0.0, jitter_ratio=0.0)
TOKENS = 200


async def served(*, late_s: float) -> tuple[RequestRecord, list[float]]:
    """Serve a request where each step is followed by such a delay; return its record, and how long steps took, s."""
    loop = asyncio.get_running_loop()
    held_up_s = 0.0
    steps_s: list[float] = []

    def held_up(seconds: float) -> None:
        nonlocal held_up_s
        held_up_s += seconds

    driver = EngineDriver(
        SimulatedEngine(EngineSettings(speed=EVEN)),
        clock=lambda: round((loop.time() + held_up_s) * 1e9),
        on_step=lambda outcome: (steps_s.append((outcome.at_ns - outcome.begin_ns) / 1e9), held_up(late_s))[1],
        on_abort=lambda _: None,
    )
    running = asyncio.create_task(driver.run())
    await asyncio.sleep(1)
    stream = driver.submit(EngineRequest(request_id="a", prompt_token_ids=(256,), max_tokens=TOKENS), 10**9)
    while stream.record is None:
        await stream.take()
    running.cancel()
    return stream.record, steps_s


@pytest.mark.looptime
async def test_what_a_step_was_late_by_is_taken_off_the_next():
    """Held up for 3 ms behind each step of 10 ms, 200 steps take 2 s and not 2.6 s."""
    record, _ = await served(late_s=0.003)
    assert record.e2e_s == pytest.approx(TOKENS * STEP_S, abs=0.02)


@pytest.mark.looptime
async def test_a_long_pause_is_not_caught_up():
    """Held up for 50 ms behind each, a step is shorter by 10 ms at most, so that none is over before it began."""
    record, steps_s = await served(late_s=0.05)
    assert record.e2e_s >= TOKENS * 0.049
    assert min(steps_s) >= 0


@pytest.mark.looptime
async def test_an_idle_engine_saves_no_time_up():
    """The first step after a second of idleness takes as long as any."""
    _, steps_s = await served(late_s=0.0)
    assert steps_s == pytest.approx([STEP_S] * TOKENS, abs=1e-6)
