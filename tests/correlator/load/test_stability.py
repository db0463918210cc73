"""Whether a load was sustained: queues in virtual time below, at and above their capacity, and what is not evidence."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from queues import Served, loaded, served, took
from recordings import log_of
from series import endpoint_of_columns
from virtual_study import run_step

from sidelight.correlator.load.stability import Stability, verdict
from sidelight.correlator.load.sustained import stability_of
from sidelight.methodology.study.model import Step
from sidelight.scraper.exposition import Series
from sidelight.simulator.settings import EngineSettings, SimulatorSettings
from sidelight.simulator.virtual import VirtualServer

SEEDS = range(20)


def judged(queue: Served, *, page: bool = False) -> Stability:
    """The verdict by the client alone, or with a page scraped once a second."""
    at_s, waiting = queue.waiting(every_s=1.0) if page else (np.empty(0), np.empty(0))
    return verdict(at_s, waiting, queue.arrived_s, queue.ended_s)


def verdicts(load: float, *, seconds: float, page: bool, per_s: float = 6.0) -> Counter[str | None]:
    """How often each verdict was given, over the seeds."""
    return Counter(judged(loaded(load, seconds=seconds, per_s=per_s, seed=n), page=page).verdict for n in SEEDS)


@pytest.mark.parametrize("page", [False, True])
@pytest.mark.parametrize("seconds", [20, 60, 180])
@pytest.mark.parametrize("load", [0.3, 0.6, 0.7])
def test_a_load_below_capacity_is_never_called_growing(load: float, seconds: float, page: bool):
    """However short the run."""
    assert 0 == verdicts(load, seconds=seconds, page=page)["growing"]


@pytest.mark.parametrize("page", [False, True])
def test_a_load_well_below_capacity_is_mostly_called_stable(page: bool):
    """A minute of 3.6 requests/s is enough."""
    assert verdicts(0.6, seconds=60, page=page)["stable"] >= 14


@pytest.mark.parametrize("page", [False, True])
def test_a_load_a_tenth_above_capacity_is_growing(page: bool):
    """With 1,200 requests nearly always; it is never called stable."""
    given = verdicts(1.1, seconds=60, per_s=18.0, page=page)
    assert given["growing"] >= 18
    assert given["stable"] == 0


@pytest.mark.parametrize("load", [1.5, 3.0])
def test_a_load_far_above_capacity_is_growing_within_a_minute(load: float):
    """By the client alone, with what was left over and what the system can serve."""
    for seed in SEEDS:
        judgement = judged(loaded(load, seconds=60, seed=seed))
        assert judgement.verdict == "growing"
        assert judgement.ci95 is not None
        assert judgement.growth == pytest.approx(1 - 1 / load, abs=0.15)
        assert judgement.capacity_per_s == pytest.approx(6.0, rel=0.15)


@pytest.mark.parametrize(
    ("per_s", "offered_per_s", "servers", "seconds"), [(0.7, 4.8, 8, 10.0), (2.2, 8.5, 2, 10.0), (4.2, 7.8, 16, 20.0)]
)
def test_a_short_run_of_several_times_the_capacity_is_growing(
    per_s: float, offered_per_s: float, servers: int, seconds: float
):
    """Even where not one request ended while the load lasted: the later ones took several times as long."""
    given = Counter(
        judged(loaded(offered_per_s / per_s, seconds=seconds, per_s=per_s, servers=servers, seed=seed)).verdict
        for seed in SEEDS
    )
    assert given["growing"] >= 19


@pytest.mark.parametrize("variation", [0.3, 1.0])
@pytest.mark.parametrize("mean_s", [5.0, 10.0, 20.0, 60.0])
def test_long_requests_alone_are_no_overload(mean_s: float, variation: float):
    """Without any queue, requests in flight grow from none for as long as the first take: that is the ramp."""
    for seed in SEEDS:
        random = np.random.default_rng(seed)
        arrived_s = np.sort(random.uniform(0, 20, 100))
        ended_s = arrived_s + took(random, 100, mean_s, variation)
        assert verdict([], [], arrived_s, ended_s).verdict in {"stable", "undecided"}


def test_a_run_too_short_to_tell_says_how_long_it_must_be():
    """In times of what its first requests took."""
    judgement = verdict([], [], np.arange(0.0, 20.0, 0.2), np.arange(0.0, 20.0, 0.2) + 15.0)
    assert judgement.verdict == "undecided"
    assert judgement.reason == (
        "the load lasted 19.8 s and its first requests took 15.0 s; to tell, it must last 4 times what they took"
    )


def test_the_page_shows_an_overload_that_was_cut_off():
    """Replies were not waited for; the engine's queue grew with nearly every request."""
    queue = loaded(4.8 / 0.7, seconds=10, per_s=0.7, servers=8)
    at_s, waiting = queue.waiting(every_s=0.5)
    cut_s = np.where(queue.ended_s > 10, np.nan, queue.ended_s)
    assert verdict([], [], queue.arrived_s, cut_s).verdict == "undecided"
    judgement = verdict(at_s, waiting, queue.arrived_s, cut_s)
    assert (judgement.verdict, judgement.queued_ratio) == ("growing", 1.0)
    assert "waiting in the engine rose by" in judgement.reason


def test_a_load_at_the_limit_is_not_called_stable():
    """Seats always taken and a queue that never empties, but does not grow: the next request more would be too much."""
    arrived_s = np.arange(0.0, 60.0, 0.1)
    judgement = verdict(np.arange(60.0), np.full(60, 3.0), arrived_s, arrived_s + 2.0)
    assert judgement.verdict == "undecided"
    assert "about what the system can serve" in judgement.reason


def test_requests_that_were_given_up_count_as_in_flight():
    """An overloaded system whose clients leave after 15 s has a steady number in flight; it serves no more for that."""
    queue = loaded(2.0, seconds=60)
    ended_s = np.where(queue.ended_s - queue.arrived_s > 15, np.nan, queue.ended_s)
    assert verdict([], [], queue.arrived_s, ended_s).verdict == "growing"


def test_refusals_leave_at_once():
    """All in flight for 10 ms: whatever is wrong, nothing piles up."""
    arrived_s = np.sort(np.random.default_rng(1).uniform(0, 30, 150))
    assert verdict([], [], arrived_s, arrived_s + 0.01).verdict == "stable"


def test_one_burst_is_no_load_that_lasts():
    """Of fifty at one moment the last wait longest; that says nothing of a second fifty."""
    assert verdict([], [], np.zeros(50), 1 + np.arange(50) / 5).verdict == "undecided"


@pytest.mark.parametrize(("load", "expected"), [(0.5, "stable"), (1.5, "growing")])
def test_ends_may_be_of_unknown_requests_in_any_order(load: float, expected: str):
    """Fewer than arrivals, sorted apart from them: their number at each moment is known all the same."""
    queue = loaded(load, seconds=120)
    assert verdict([], [], queue.arrived_s[::-1], np.sort(queue.ended_s)[:-3]).verdict == expected


SENT = {0: "0 requests were", 1: "1 request was", 19: "19 requests were"}


@pytest.mark.parametrize("count", [0, 1, 19])
def test_few_requests_are_undecided(count: int):
    """With the number that would be enough."""
    judgement = verdict([], [], np.arange(count), np.arange(count) + 1.0)
    assert (judgement.verdict, judgement.reason) == ("undecided", f"{SENT[count]} sent, at least 20 are needed")


def test_unknown_moments_are_left_out():
    """NaN and infinities of any column; and it is deterministic."""
    queue = loaded(0.5, seconds=60)
    at_s, waiting = queue.waiting(every_s=1.0)
    waiting[::3] = np.nan
    arrived_s, ended_s = np.append(queue.arrived_s, [np.nan, np.inf]), np.append(queue.ended_s, [3.0, np.nan])
    assert verdict(at_s, waiting, arrived_s, ended_s) == verdict(at_s, waiting, arrived_s, ended_s)
    assert verdict(at_s, waiting, arrived_s, ended_s).verdict == "stable"


def test_a_batch_that_fills_while_none_waits_is_no_overload():
    """Eight seconds of a healthy engine, as recorded: arrivals came closer together, and its batch grew with them."""
    arrived_s = [
        0.0, 0.3, 0.4, 0.4, 1.0, 1.0, 1.0, 1.0, 1.8, 1.8, 1.8, 3.2, 3.2, 3.3, 3.3, 3.6, 3.9, 3.9, 4.0, 4.3, 4.6,
        4.6, 4.7, 4.7, 5.1, 5.1, 5.1, 5.3, 5.4, 5.4, 5.5, 5.7, 5.9, 5.9, 6.2, 6.4, 6.4, 6.4, 6.6, 6.7, 6.7, 7.2,
        7.4, 7.4, 7.5, 7.5, 7.6, 7.7, 7.8, 7.8,
    ]  # fmt: skip
    took_s = [
        1.1, 1.5, 1.5, 0.9, 1.1, 1.6, 2.4, 1.8, 1.5, 1.8, 1.6, 1.3, 2.7, 1.2, 1.6, 1.1, 1.7, 1.6, 2.0, 1.9, 3.5,
        3.5, 1.4, 3.7, 2.8, 2.4, 2.6, 2.6, 3.5, 2.9, 2.8, 2.7, 1.3, 3.5, 3.2, 1.9, 3.2, 1.9, 3.1, 1.5, 2.3, 1.2,
        3.3, 1.0, 1.7, 2.9, 3.0, 1.4, 1.3, 1.4,
    ]  # fmt: skip
    ended_s = np.add(arrived_s, took_s)
    at_s = np.arange(0.0, 7.8, 0.25)
    assert verdict(at_s, np.zeros_like(at_s), arrived_s, ended_s).verdict == "undecided"


def test_a_batch_that_grows_a_little_by_chance_is_no_overload():
    """An engine of 64 seats at 89 % load, of whose requests none waited: its batch rose by 5 % of the arrivals."""
    step = Step(kind="level", label="open", load="open", level=7.75, duration=60.0, seed=6)
    engine = SimulatorSettings(engine_settings=EngineSettings(max_num_seqs=64))
    data = run_step(step, VirtualServer(engine, network_s=0.002), scrape_s=1.0, parts="none")
    judgement = stability_of(data.requests, data.endpoints, closed_loop=False)
    assert (judgement.queued_ratio, judgement.verdict) == (0, "undecided")


def test_an_overload_is_seen_although_none_waits_in_the_engine():
    """What queues may do so elsewhere, as in a gateway; the page shows nothing of it."""
    queue = loaded(1.5, seconds=60)
    assert verdict(np.arange(60.0), np.zeros(60), queue.arrived_s, queue.ended_s).verdict == "growing"


def burst() -> Served:
    """Requests of 1.8 s at seats enough for all, each 1 % longer for each beside it: 28 in 8.5 s, then 55 in 5.5 s."""
    arrived_s = np.concatenate([np.linspace(0.0, 8.4, 28), np.linspace(8.5, 14.0, 55)])
    beside = np.array([((arrived_s < at) & (arrived_s > at - 1.8)).sum() for at in arrived_s])
    return served(arrived_s, 1.8 * (1 + 0.01 * beside), servers=100)


def test_a_burst_of_arrivals_at_the_end_is_no_overload():
    """More are in flight for that, and each takes hardly longer: no queue is behind it."""
    queue = burst()
    for waiting in (np.empty(0), np.zeros(56), np.array([0.0] * 51 + [1.0] * 5)):
        judgement = verdict(np.arange(len(waiting)) / 4, waiting, queue.arrived_s, queue.ended_s)
        assert judgement.verdict == "undecided"
        assert (judgement.growth or 0.0) > 0.2


def test_requests_whose_caches_are_loaded_wait_for_no_place():
    """The engine's gauge counts them as waiting."""
    queue, names = burst(), ("vllm:num_requests_waiting", "vllm:num_requests_kv_fetch_by_stage")
    series = [
        Series(name=name, labels=labels, family=name, type="gauge", help="")
        for name, labels in zip(names, ((), (("stage", "in_progress"),)), strict=True)
    ]
    at_ns = np.arange(28, dtype=np.int64) * 250_000_000
    page = endpoint_of_columns(series, np.full((28, 2), 2.0), request_ns=at_ns, response_ns=at_ns + 1000)
    stamps = (queue.arrived_s * 1e9).astype(np.int64), (queue.ended_s * 1e9).astype(np.int64)
    log = log_of(len(queue.ended_s), dispatch_ns=stamps[0], end_ns=stamps[1], status=["ok"] * len(queue.ended_s))
    assert stability_of(log, [page], closed_loop=False).queued_ratio == 0
