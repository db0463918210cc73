"""What a higher limit on running requests would have brought to a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from played_runs import arrivals, engine, lengths, simulated, streamed, write

from sidelight.correlator.opening import open_run
from sidelight.recorded.run import Run
from sidelight.simulator.settings import EngineSettings
from sidelight.twin.check import observed_ms, quantiles_of
from sidelight.twin.engine.steps import StreamedRequests
from sidelight.twin.seats import MOST_REQUESTS, more_seats

RATE_PER_S, COUNT = 7.5, 400


def of(settings: EngineSettings, seed: int, rate_per_s: float = RATE_PER_S) -> StreamedRequests:
    """Return a run of the same requests as the fixture's, of seed 1, in another order."""
    prompts, outputs = lengths(COUNT, 1)
    order = np.arange(COUNT) if seed == 1 else np.random.default_rng(seed).permutation(COUNT)
    at_s = arrivals(COUNT, rate_per_s, seed)
    return streamed(simulated(settings, prompts[order], outputs[order], at_s=at_s))


@pytest.fixture(scope="module")
def overloaded(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run of an engine of 16 seats at 1.3 times what it can."""
    path = tmp_path_factory.mktemp("runs") / "overloaded"
    prompts, outputs = lengths(COUNT, 1)
    exchanges = simulated(engine(), prompts, outputs, at_s=arrivals(COUNT, RATE_PER_S, 1))
    write(path, exchanges, {"rate": RATE_PER_S, "arrival": "poisson", "burstiness": 1.0})
    return open_run(path)


def test_the_same_load_on_more_seats_is_within_the_interval(overloaded: Run) -> None:
    """Each of a few runs with twice the seats; the times beside it are those of the run."""
    more = more_seats(overloaded, COUNT)
    assert (more.now, more.then) == (16, 32)
    ttft, tpot = more.ttft_p99_ms, more.tpot_p50_ms
    assert ttft
    assert tpot
    run = of(engine(), 1)
    times = quantiles_of(observed_ms(run))
    assert [ttft.now, tpot.now] == pytest.approx([times[0, 2], times[1, 0]])
    came_per_s = COUNT / float(run.submit_s[-1])  # by chance not that of the process
    others = [of(engine(max_num_seqs=32), seed, came_per_s) for seed in range(2, 7)]
    shown = np.median([quantiles_of(observed_ms(each)) for each in others], axis=0)
    assert ttft.low < shown[0, 2] < ttft.high < ttft.now
    assert tpot.low < shown[1, 0] < tpot.high


def test_a_run_that_shows_no_limit_has_a_reason(tmp_path: Path) -> None:
    prompts, outputs = lengths(150, 4)
    exchanges = simulated(engine(), prompts, outputs, at_s=arrivals(150, 3.0, 4))
    write(tmp_path / "run", exchanges, {"rate": 3.0, "arrival": "poisson"})
    more = more_seats(open_run(tmp_path / "run"), 0.0)
    assert more.missing
    assert not more.ttft_p99_ms


def test_a_long_run_is_left_to_the_command(tmp_path: Path) -> None:
    count = MOST_REQUESTS + 1
    ones = np.ones(count, np.int64)
    write(tmp_path / "run", simulated(engine(), ones, ones, at_s=np.arange(count) / 100), {"rate": 100.0})
    assert "predict" in str(more_seats(open_run(tmp_path / "run"), 0.0).missing)
