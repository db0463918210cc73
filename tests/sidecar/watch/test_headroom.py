"""Headroom of a watch, against what the true engine serves within the objectives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from played_runs import NETWORK_S, arrivals, engine, lengths, run, simulated
from played_twins import GPU, ended, spanned
from watched_traffic import watching

from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.sidecar.watch import page
from sidelight.sidecar.watch.processes import Watch
from sidelight.sidecar.watch.view import WatchView
from sidelight.simulator.settings import PROFILES, EngineSettings, SpeedProfile
from sidelight.twin.check import PLACES, latencies_ms, quantiles_of
from sidelight.twin.engine.play import EngineLoad, play
from sidelight.twin.headroom import Headroom, RecentTraffic, TrafficSample
from sidelight.twin.watched import watched_engines

COUNT = 400


def watched(
    path: Path, settings: EngineSettings, rate_per_s: float, slo: str, *, known: str = "", clients: bool = True
) -> WatchView:
    """Return a view that has seen traffic and estimated its headroom."""
    prompts, outputs = lengths(COUNT, 0)
    exchanges = simulated(settings, prompts, outputs, at_s=arrivals(COUNT, rate_per_s, 0))
    with WatchView(path, run_id="r", read_s=inf, twin=watched_engines(parse_slo(slo).objectives, known)) as view:
        view.twin_estimation(watching(path, exchanges, view, clients=clients))()
    return view


def ratios(view: WatchView) -> dict[str, float]:
    watch = view.snapshot(restarts=0).watch
    assert watch is not None
    return dict(watch.headroom)


def truth_ms(settings: EngineSettings, rate_per_s: float, metric: str, quantile: float | None) -> float:
    """Return the median over fresh runs of such traffic at another rate."""
    runs = []
    for seed in range(7):
        prompts, outputs = lengths(COUNT, 100 + seed)
        at_s = arrivals(COUNT, rate_per_s, seed) + NETWORK_S
        load = EngineLoad(
            prompt_tokens=prompts, cached_tokens=np.zeros_like(prompts), output_tokens=outputs, arrival_s=at_s
        )
        latencies = latencies_ms(load, play(load, settings, seed=seed), np.full(COUNT, NETWORK_S))
        runs.append(quantiles_of(latencies)[PLACES[metric, quantile]])
    return float(np.median(runs))


@pytest.mark.parametrize(
    ("speed", "seats", "rate_per_s", "slo"),
    [
        (PROFILES["demo"], 16, 3.0, "ttft_p99<2s"),
        (GPU, 16, 4.0, "e2e_p90<4s"),
        (PROFILES["fast"], 32, 60.0, "ttft_p99<100ms"),
    ],
)
def test_the_headroom_holds_the_rate_at_which_the_true_engine_misses(
    tmp_path: Path, speed: SpeedProfile, seats: int, rate_per_s: float, slo: str
) -> None:
    settings = engine(speed=speed, max_num_seqs=seats)
    view = watched(tmp_path, settings, rate_per_s, slo, known=f"max-num-seqs={seats}")
    shown = ratios(view)
    assert shown["low"] < shown["estimate"] < shown["high"]
    (objective,) = parse_slo(slo).objectives
    below, above = (
        truth_ms(settings, by * rate_per_s, objective.metric, objective.quantile)
        for by in (0.9 * shown["low"], 1.1 * shown["high"])
    )
    assert below < objective.bound < above
    assert f"{objective.metric.upper()} {objective.statistic} crosses" in view.headroom


def test_seats_that_did_not_show_leave_a_least_headroom(tmp_path: Path) -> None:
    light = watched(tmp_path, engine(max_num_seqs=64), 2.0, "ttft_p99<2s")
    assert "at least" in light.headroom
    assert "--known max-num-seqs" in light.headroom
    assert ratios(light) == {}


def test_more_than_four_times_is_a_least_headroom(tmp_path: Path) -> None:
    light = watched(tmp_path, engine(max_num_seqs=64), 1.0, "ttft_p99<9s", known="max-num-seqs=64")
    assert "at least 4.00 times" in light.headroom


def test_engines_spans_alone_will_do(tmp_path: Path) -> None:
    view = watched(tmp_path, engine(), 4.5, "ttft_p99<2s", known="max-num-seqs=16", clients=False)
    assert "TTFT p99 crosses" in view.headroom  # of a traffic that has paused since then
    assert 1.0 < ratios(view)["estimate"] < 2.5


def test_pages_and_spans_are_counted_over_the_same_time() -> None:
    """Ten requests a second, looked at each second: no moment has more on the page than in spans."""
    some = spanned(run(engine(), count=10, rate_per_s=10.0))
    traffic, samples = RecentTraffic(), []
    for second in range(1, 180):
        traffic.take(ended(some), second * 10**9)
        samples.append(traffic.sample(second * 10**9, engines=1, finished_per_s=10.0))
    assert max(abs(each.finished - each.lately) for each in samples) == pytest.approx(10.0)


@pytest.mark.parametrize(("changes", "reason"), [({"finished": 90.0}, "spans speak of 9"), ({}, "no request")])
def test_where_nothing_can_be_predicted_the_reason_is_given(changes: dict[str, object], reason: str) -> None:
    nothing = TrafficSample(requests=None, count=0, engines=1, finished=9.0, lately=9, rate_per_s=0.0)
    sample = replace(nothing, **changes)
    assert reason in sample.headroom(parse_slo("ttft_p99<2s").objectives, {}, Headroom()).text
    assert "no objective" in sample.headroom(parse_slo("error_rate<1%").objectives, {}, Headroom()).text


def test_a_watch_without_objectives_has_none(tmp_path: Path) -> None:
    with WatchView(tmp_path, run_id="r", read_s=inf) as view:
        view.poll(10**18)
        view.twin_estimation(10**18)()
    assert view.headroom == ""


async def test_it_is_estimated_beside_all_else_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while the view is read, and in no thread of the loop."""
    monkeypatch.setattr(page, "EVERY_S", 0.0)
    threads: list[int] = []

    def twin_estimation(now_ns: int) -> Callable[[], float]:
        assert shared.looking.locked()
        assert now_ns == 7

        def estimate() -> float:
            threads.append(get_ident())
            return 0.0

        return estimate

    shared = SimpleNamespace(
        options=SimpleNamespace(slo="ttft_p99<2s"),
        looking=asyncio.Lock(),
        clock=SimpleNamespace(now_ns=lambda: 7),
        view=SimpleNamespace(twin_estimation=twin_estimation),
    )
    task = asyncio.create_task(page.estimate_twin_on(cast("Watch", shared)))
    while len(threads) < 2:  # noqa: ASYNC110  a thread
        await asyncio.sleep(0)
    task.cancel()
    assert get_ident() not in threads
