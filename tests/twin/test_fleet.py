"""Runs and watches of several engines: each is fitted to its own requests, and all are predicted together."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from played_runs import arrivals, engine, lengths, simulated, streamed, write
from played_twins import GPU, ended, longer, slowing, spanned, truth
from processes import Ended
from series import scraped

from sidelight.correlator.opening import open_run
from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.columns import concat, same_text, take
from sidelight.rundir.stats import Missing
from sidelight.scraper.series.log import ScrapeLog
from sidelight.sidecar.predict.result import schema
from sidelight.simulator.virtual import VirtualExchange
from sidelight.twin.engine.spans import SpannedRequests, from_origin
from sidelight.twin.headroom import Headroom, RecentTraffic, TrafficSample
from sidelight.twin.model import twin_of, twin_of_engines
from sidelight.twin.scenario import Prediction, Scenario, Twin, predict
from sidelight.twin.traffic import OtherTraffic

Run = Callable[..., Ended]
RATE_PER_S, COUNT = 4.0, 400  # of both engines
SPEEDS = (GPU, longer(1.6))
ENGINES = [engine(speed=speed) for speed in SPEEDS]


@pytest.fixture(scope="module")
def exchanges() -> list[Sequence[VirtualExchange]]:
    """Requests that went to two engines in turn, the second slower, by engine."""
    prompts, outputs = lengths(COUNT, 0)
    at_s = arrivals(COUNT, RATE_PER_S, 0)
    return [
        simulated(settings, prompts[turn::2], outputs[turn::2], at_s=at_s[turn::2])
        for turn, settings in enumerate(ENGINES)
    ]


@pytest.fixture(scope="module")
def twin(exchanges: list[Sequence[VirtualExchange]]) -> Twin:
    fleet = twin_of_engines(
        {name: streamed(each) for name, each in zip("ab", exchanges, strict=True)}, {"max-num-seqs": 16}
    )
    assert isinstance(fleet, Twin)
    return fleet


def test_each_engine_has_steps_of_its_own(twin: Twin) -> None:
    steps = {each.name: each.fitted.speed.step_s for each in twin.engines}
    assert steps == pytest.approx({name: speed.step_s for name, speed in zip("ab", SPEEDS, strict=True)}, rel=0.05)
    assert twin.rate_per_s == pytest.approx(RATE_PER_S, rel=0.1)


@pytest.mark.parametrize("rate_per_s", [3.0, 8.0])
def test_the_interval_holds_what_other_runs_of_both_show(twin: Twin, rate_per_s: float) -> None:
    prediction = predict(twin, Scenario(label="", rate_per_s=rate_per_s))
    assert isinstance(prediction, Prediction)
    shown = truth(twin, ENGINES, rate_per_s)
    assert (prediction.low < shown).all()
    assert (shown < prediction.high).all()
    assert np.abs(np.log(prediction.median / shown))[:, 0].max() < 0.2
    assert prediction.requests_per_s == pytest.approx(rate_per_s, rel=0.15)


def test_a_closed_loop_is_divided(twin: Twin) -> None:
    alone, both = (predict(each, Scenario(label="", concurrency=16)) for each in (replace(twin, beside=()), twin))
    assert isinstance(alone, Prediction)
    assert isinstance(both, Prediction)
    assert 16 >= alone.most_running > both.most_running >= 8
    in_flight = [predict(twin, Scenario(label="", concurrency=count), plays=2) for count in (1, 3)]
    assert isinstance(in_flight[0], Missing)
    assert isinstance(in_flight[1], Prediction)
    assert in_flight[1].most_running == 2  # and 1 of the other: 3 in all


def test_a_limit_that_one_of_many_waits_for_binds(twin: Twin) -> None:
    fast, slow = sorted(twin.engines, key=lambda each: each.fitted.speed.step_s)
    fast, slow = replace(fast, beside=()), replace(slow, beside=())
    pair, many = (
        predict(replace(slow, beside=(fast,) * count), Scenario(label="", rate_per_s=rate_per_s), plays=3)
        for count, rate_per_s in ((1, 10.0), (15, 80.0))
    )
    assert isinstance(pair, Prediction)
    assert isinstance(many, Prediction)
    assert pair.binds == many.binds == "max-num-seqs"


def test_each_engine_is_played_with_all_draws_of_its_fit(twin: Twin) -> None:
    """Two engines whose speed is either of two are both played with both."""
    draws = (GPU, longer(3.0)) * 10
    first, second = (replace(each, fitted=replace(each.fitted, draws=draws), beside=()) for each in twin.engines)
    prediction = predict(replace(first, beside=(second,)), Scenario(label="", rate_per_s=2.0), plays=8)
    assert isinstance(prediction, Prediction)
    assert prediction.high[1, 1] > 3 * prediction.low[1, 1]


def test_replicas_and_traces_are_of_one_engine(twin: Twin, tmp_path: Path) -> None:
    assert isinstance(predict(twin, Scenario(label="", rate_per_s=4.0, replicas=2)), Missing)
    with pytest.raises(ConfigurationError, match="2 engines"):
        OtherTraffic(trace=tmp_path / "t.jsonl").of(twin)
    longer_prompts = OtherTraffic(input_tokens="600").of(twin)
    assert [set(each.traffic.prompt_tokens.tolist()) for each in longer_prompts.engines] == [{600}, {600}]


def test_a_run_that_sent_to_two_engines_is_predicted(
    sidelight: Run, exchanges: list[Sequence[VirtualExchange]], tmp_path: Path
) -> None:
    both = [each for pair in zip(*exchanges, strict=True) for each in pair]
    write(tmp_path / "run", both, {"rate": RATE_PER_S, "arrival": "poisson"}, hosts=("one", "two"))
    asked = ("predict", tmp_path / "run", "--rate", "3", "--known", "max-num-seqs=16", "--slo", "ttft_p99<9s")
    said = sidelight(*asked, "--price", "2.5", "--json")
    assert said.code == 0, said.err
    predicted = json.loads(said.out)
    jsonschema.validate(predicted, schema())
    fits = [predicted["fit"], *predicted["other_fits"]]
    assert {f"http://{name}/v1/chat/completions" for name in ("one", "two")} == {each["engine"] for each in fits}
    assert sum(each["requests"] for each in fits) == COUNT
    assert "replicas" not in predicted["highest_rate"]
    assert predicted["loads"][0]["price_per_h"] == 5.0


def test_of_a_replay_each_engine_gets_its_requests_again(
    exchanges: list[Sequence[VirtualExchange]], tmp_path: Path
) -> None:
    both = [each for pair in zip(*exchanges, strict=True) for each in pair]
    write(tmp_path / "run", both, {"arrival": "replay", "trace": "t"}, hosts=("one", "two"))
    replayed = twin_of(open_run(tmp_path / "run"), 0.0, {"max-num-seqs": 16})
    assert isinstance(replayed, Twin)
    sent = [each.arrival.trace_ns for each in replayed.engines if each.arrival and each.arrival.trace_ns is not None]
    assert [len(each) for each in sent] == [COUNT / 2, COUNT / 2]


def test_models_with_paths_of_their_own_are_of_one_engine(tmp_path: Path) -> None:
    played = simulated(engine(), *lengths(150, 0), at_s=arrivals(150, 3.0, 0))
    write(tmp_path / "run", played, {"rate": 3.0, "url": ["http://h:80", "http://h"]}, hosts=("h/v2/a", "h/v2/b"))
    alone = twin_of(open_run(tmp_path / "run"), 0.0, {"max-num-seqs": 16})
    assert isinstance(alone, Twin)
    assert [len(each.requests) for each in alone.engines] == [150]


@pytest.mark.parametrize(("pages", "code"), [(2, 0), (3, 2)])
def test_where_pages_are_of_more_engines_than_requests_it_is_refused(
    sidelight: Run, exchanges: list[Sequence[VirtualExchange]], tmp_path: Path, pages: int, code: int
) -> None:
    both = [each for pair in zip(*exchanges, strict=True) for each in pair]
    write(tmp_path / "run", both, {"rate": RATE_PER_S, "arrival": "poisson"}, hosts=("one", "two"))
    log = ScrapeLog(tmp_path / "run/raw/scrapes-0.log")
    for number in range(pages):
        for at_ns in (both[0].submit_ns - 1, both[-1].end_ns + 10**11):
            text = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n"
            log.append(scraped(at_ns, text, url=f"http://page{number}/metrics"))
    log.close()
    assert sidelight("predict", tmp_path / "run", "--rate", "3", "--known", "max-num-seqs=16").code == code


def sample_of(requests: SpannedRequests, engines: int) -> TrafficSample:
    requests = take(requests, np.argsort(requests.last_s, kind="stable"))
    traffic, end_ns = RecentTraffic(), round(1e9 * requests.last_s.max())
    traffic.take(ended(requests), end_ns)
    return traffic.sample(end_ns, engines=engines, finished_per_s=None)


def test_a_rate_of_which_nothing_can_be_predicted_has_a_reason(exchanges: list[Sequence[VirtualExchange]]) -> None:
    """Too few requests would come at four times the rate too."""
    sample = replace(sample_of(spanned(streamed(exchanges[0])), 1), rate_per_s=1e-3)
    shown = sample.headroom(parse_slo("ttft_p99<2s").objectives, {"max-num-seqs": 16}, Headroom())
    assert "unknown: 0 requests are sent" in shown.text


@pytest.mark.parametrize(("engines", "named"), [(2, True), (3, False)])
def test_a_watch_of_two_engines_has_a_headroom(
    exchanges: list[Sequence[VirtualExchange]], engines: int, named: bool
) -> None:
    both = concat(
        [
            replace(spanned(streamed(each)), served_by=same_text(name, len(each)))
            for name, each in zip("ab", exchanges, strict=True)
        ]
    )
    sample = sample_of(both, engines)
    shown = sample.headroom(parse_slo("ttft_p99<2s").objectives, {"max-num-seqs": 16}, Headroom())
    assert ("TTFT p99 crosses" in shown.text) is named, shown.text
    assert (shown.ratios != {}) is named
    assert ("3 engines" in shown.text) is not named


def test_an_engine_that_joined_late_is_tested_by_its_own_time(exchanges: list[Sequence[VirtualExchange]]) -> None:
    first, second = (
        replace(spanned(streamed(each)), served_by=same_text(name, len(each)))
        for name, each in zip("ab", exchanges, strict=True)
    )
    both = concat([first, from_origin(second, -4 * float(second.submit_s[-1]))])
    traffic = RecentTraffic()
    traffic.take(ended(both), 10**9)
    sample = traffic.sample(10**9, engines=2, finished_per_s=None)
    assert isinstance(sample.twin({"max-num-seqs": 16}), Twin)


def test_requests_of_engines_without_a_name_are_said(exchanges: list[Sequence[VirtualExchange]]) -> None:
    traffic = RecentTraffic()
    traffic.take(ended(spanned(streamed(exchanges[0]))), 10**9)
    refused = traffic.sample(10**9, engines=2, finished_per_s=None).twin({})
    assert isinstance(refused, Missing)
    assert "an engine that spans name" in refused.reason


def test_chance_refuses_a_lonely_engine_and_not_several() -> None:
    """The last 40 % of the time of equal engines is missed by chance, by each in another direction."""
    fleet = {
        str(seed): slowing(arrivals(800, 4.5, seed), *lengths(800, seed), changed_s=math.inf, slower=1.0, seats=16)
        for seed in (10, 11, 12)
    }
    known = {"max-num-seqs": 16}
    refused = twin_of_engines({"": fleet["11"]}, known)
    assert isinstance(refused, Missing)
    assert "missed by" in refused.reason
    assert isinstance(twin_of_engines(fleet, known), Twin)


def test_of_engines_beyond_number_those_with_most_requests_are_followed(
    exchanges: list[Sequence[VirtualExchange]],
) -> None:
    """Names are whatever senders of spans say."""
    some = spanned(streamed(exchanges[0]))
    names = np.array([f"\x1b[31m{max(0, at - 100)}" for at in range(len(some))], dtype=np.object_)
    traffic = RecentTraffic()
    traffic.take(ended(replace(some, served_by=names)), 10**9)
    sample = traffic.sample(10**9, engines=64, finished_per_s=None)
    assert len(sample.by_engine()) == 64
    assert len(sample.by_engine()["\x1b[31m0"]) == 101
    shown = sample.headroom(parse_slo("ttft_p99<2s").objectives, {}, Headroom()).text
    assert "unknown" in shown
    assert "\x1b" not in shown
