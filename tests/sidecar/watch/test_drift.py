"""A watch says since when its engine takes longer at equal batch and length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from played_runs import arrivals, engine, lengths, run, simulated
from played_twins import ended, fitted, longer, slowing, spanned
from processes import Ended
from sent_spans import NOON, S
from watched_traffic import exports_of, watched_directory

from sidelight.loadgen.requests.slo.objectives import parse_slo
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.columns import concat, same_text, take
from sidelight.scraper.spans.log import ExportRecord, ReceiverCounts, SpanLog, StateRecord
from sidelight.sidecar.watch.panel import WatchState, panel_rows
from sidelight.sidecar.watch.view import WatchView
from sidelight.simulator.virtual import VirtualExchange
from sidelight.twin.drift import EngineHistory, LastingChange, begun
from sidelight.twin.engine.spans import SpannedRequests, from_origin
from sidelight.twin.headroom import TrafficSample
from sidelight.twin.watched import WatchedEngines, watched_engines

MINUTE = 60
RATE_PER_S = 0.25


def traffic(begin_s: float, end_s: float, *, slower: float = 1.0) -> list[VirtualExchange]:
    """Return requests of a time on an engine that takes so much longer for all of a step."""
    at_s = begin_s + arrivals(round(1.2 * (end_s - begin_s) * RATE_PER_S), RATE_PER_S, round(begin_s))
    at_s = at_s[at_s < end_s]
    prompts, outputs = lengths(len(at_s), round(begin_s), prompt=200, output=25)
    return simulated(engine(speed=longer(slower)), prompts, outputs, at_s=at_s)


@pytest.fixture(scope="module")
def before() -> list[VirtualExchange]:
    """Eighty minutes of an engine as it was."""
    return traffic(0, 80 * MINUTE)


@pytest.fixture(scope="module")
def slower() -> list[VirtualExchange]:
    """The quarter of an hour behind, of an engine that takes 8 % longer."""
    return traffic(80 * MINUTE, 95 * MINUTE, slower=1.08)


def watch(path: Path, exports: Iterable[ExportRecord], view: WatchView, *, begin: int, end: int) -> list[str]:
    """Look at exports each minute of a time, and return what is said of changes."""
    coming, said = deque(exports), []
    with closing(SpanLog(path / "spans-000000.log")) as spans:
        spans.append(StateRecord(at_ns=NOON + begin * MINUTE * S, state="started", counts=ReceiverCounts()))
        for minute in range(begin + 1, end + 1):
            now_ns = NOON + minute * MINUTE * S
            while coming and coming[0].received_ns <= now_ns:
                spans.append(coming.popleft())
            view.poll(now_ns)
            view.twin_estimation(now_ns)()
            said += view.fresh_changes()
    return said


def test_an_engine_that_takes_longer_is_said_once_and_shown(
    tmp_path: Path, before: list[VirtualExchange], slower: list[VirtualExchange]
) -> None:
    """Since when, by how much, and that it did not restart; on the page with its begin, and in the panel."""
    with WatchView(tmp_path, run_id="r", read_s=inf) as view:
        (said,) = watch(tmp_path, exports_of([*before, *slower]), view, begin=0, end=95)
        page, state = view.snapshot(restarts=0).watch, _state(view, 95)
    assert " 23:33 UTC steps of the same batch take " in said
    assert said.endswith("the engine did not restart.")
    assert page is not None
    assert page.drift["", "step", "low"] < 1.08 < page.drift["", "step", "high"]
    assert page.drift_since_s["", "step"] == pytest.approx(NOON / S + 80 * MINUTE, abs=3 * MINUTE)
    assert " 23:33 UTC steps" in " ".join(str(block) for block in panel_rows(state))


def test_nothing_is_said_of_an_engine_as_it_was(tmp_path: Path, before: list[VirtualExchange]) -> None:
    """The ratio of an engine with a baseline is about one; before, there is none."""
    with WatchView(tmp_path, run_id="r", read_s=inf) as view:
        exports = list(exports_of(before))
        assert watch(tmp_path, exports, view, begin=0, end=79) == []
        page = view.snapshot(restarts=0).watch
    assert page is not None
    assert page.drift["", "step", "low"] < 1.01
    assert page.drift["", "step", "high"] > 0.99
    assert page.drift_since_s == {}


def test_another_watch_is_a_baseline(
    tmp_path: Path, before: list[VirtualExchange], slower: list[VirtualExchange]
) -> None:
    """A change is said from the first minutes on."""
    of_monday = watched_engines(baseline=watched_directory(tmp_path / "monday", before))
    raw = tmp_path / "raw"
    raw.mkdir()
    with WatchView(raw, run_id="r", read_s=inf, twin=of_monday) as view:
        (said,) = watch(raw, exports_of(slower), view, begin=80, end=95)
        page = view.snapshot(restarts=0).watch
    assert "steps of the same batch take" in said
    assert page is not None
    assert page.drift["", "step", "low"] > 1.05


def test_what_says_too_little_is_no_baseline(
    tmp_path: Path, sidelight: Callable[..., Ended], slower: list[VirtualExchange]
) -> None:
    short = watched_directory(tmp_path / "short", slower)
    with pytest.raises(ConfigurationError):
        watched_engines(baseline=short)
    ended = sidelight("watch", "--baseline", short, "--listen", "127.0.0.1:0", "--otlp-listen", "127.0.0.1:0")
    assert ended.code == 2
    assert ended.err.rstrip().endswith("[watch.baseline]")


def test_other_seats_behind_a_restart_are_said_and_replace_stated_ones() -> None:
    """Stated ones are those of the drift's fit too."""
    watched, begin_s, said = watched_engines(known="max-num-seqs=16"), NOON / S, list[str]()
    for seats, restarted_s in ((16, None), (1, begin_s + 16 * MINUTE)):
        at_s = arrivals(480, 0.5, seats)
        some = slowing(at_s, *lengths(480, seats), changed_s=inf, slower=1.0, seats=seats)
        for minute in (1, 17):
            if minute == 17:
                watched.take(ended(from_origin(some, -begin_s)), round((begin_s + minute * MINUTE) * S))
            now_ns = round((begin_s + minute * MINUTE) * S)
            watched.estimation(now_ns, engines=1, finished_per_s=None, restarted_s=restarted_s)()
            said += watched.fresh()
        begin_s += 16 * MINUTE
    assert [text[:46] for text in said if "restarted" in text] == ["The engine restarted at 2023-11-14 22:29 UTC: "]
    assert watched.known == {"max-num-seqs": 1}
    assert watched.histories[""].fitted.seats == 16


def test_of_two_engines_the_slower_is_said() -> None:
    """Each is compared with itself, with the process of its spans in the sentence, the metric and the record.

    A third, of which there is a page, has no requests.
    """
    watched, begin_s = watched_engines(), NOON / S
    both = []
    for name, slower in (("a", 1.0), ("b", 1.08)):
        at_s = arrivals(1500, RATE_PER_S, ord(name))
        some = slowing(
            at_s, *lengths(1500, ord(name), prompt=200, output=25), changed_s=80 * MINUTE, slower=slower, seats=16
        )
        both.append(replace(from_origin(some, -begin_s), served_by=same_text(name, len(some))))
    requests = concat(both)
    requests, since, said = take(requests, np.argsort(requests.last_s, kind="stable")), 0, list[str]()
    for minute in range(1, 97):
        until = int(np.searchsorted(requests.last_s, begin_s + minute * MINUTE))
        now_ns = round((begin_s + minute * MINUTE) * S)
        watched.take(ended(take(requests, np.arange(since, until))), now_ns)
        restarted_s = begin_s + 80 * MINUTE if minute > 80 else None
        watched.estimation(now_ns, engines=3, finished_per_s=None, restarted_s=restarted_s)()
        since, said = until, said + watched.fresh()
    (sentence,) = said
    assert sentence.startswith("b: Since ")
    assert sentence.endswith(": one of the engines restarted then.")
    assert "steps of the same batch take" in sentence
    assert watched.ratios()["b", "step", "low"] < 1.08 < watched.ratios()["b", "step", "high"]
    assert watched.ratios()["a", "step", "estimate"] == pytest.approx(1.0, abs=0.01)
    assert watched.since_s()["b", "step"] == pytest.approx(begin_s + 80 * MINUTE, abs=3 * MINUTE)
    assert [each["process"] for each in watched.estimates()["changes"]] == ["b"]


def test_histories_of_the_engines_that_left_last_are_remembered() -> None:
    shown = fitted(spanned(run(engine(), count=60, rate_per_s=3.0)))
    watched = WatchedEngines(histories={str(at): begun(shown, float(at)) for at in (3, 11, 7, 1, 9, 2, 8, 5, 10, 4, 6)})
    nothing = TrafficSample(requests=None, count=0, engines=2, finished=0.0, lately=0, rate_per_s=0.0)
    watched.follow(nothing, nothing, NOON)
    assert {*watched.histories} == {"4", "5", "6", "7", "8", "9", "10", "11"}


def test_an_engine_that_stays_alone_is_not_fitted_to_the_requests_of_others() -> None:
    shown = spanned(run(engine(), count=60, rate_per_s=3.0))
    watched = WatchedEngines(parse_slo("ttft_p99<2s").objectives, histories={"": begun(fitted(shown), NOON / S)})
    said = []
    for minute, engines in enumerate((1, 2, 2, 1)):
        now_ns = NOON + minute * MINUTE * S
        for name in "ab"[:engines]:
            some = replace(from_origin(shown, -now_ns / S), served_by=same_text(name, len(shown)))
            watched.take(ended(some), now_ns)
        watched.estimation(now_ns, engines=engines, finished_per_s=None, restarted_s=None)()
        said.append("no request has ended" in watched.headroom.text)
    assert said == [False, True, False, True]
    assert watched.histories == {}


def test_minutes_of_several_busy_engines_are_compared() -> None:
    """Eight engines with 100 requests/s each, which last ten seconds."""
    shown = fitted(spanned(run(engine(), count=60, rate_per_s=3.0)))
    watched = WatchedEngines(histories={name: begun(shown, NOON / S) for name in "abcdefgh"})
    at_s = np.arange(0.0, 60.0, 1 / 800)
    requests = SpannedRequests(
        submit_s=NOON / S + at_s,
        prompt_tokens=np.full(len(at_s), 100),
        cached_tokens=np.zeros(len(at_s), np.int64),
        output_tokens=np.full(len(at_s), 100),
        first_s=NOON / S + at_s + 0.1,
        last_s=NOON / S + at_s + 10.0,
        served_by=np.array(list("abcdefgh") * (len(at_s) // 8), np.object_),
    )
    watched.estimation(NOON, engines=8, finished_per_s=None, restarted_s=None)()
    for second in range(10, 71):
        now_ns = NOON + second * S
        some = (requests.last_s > NOON / S + second - 1) & (requests.last_s <= NOON / S + second)
        watched.take(ended(take(requests, np.flatnonzero(some))), now_ns)
    watched.estimation(now_ns, engines=8, finished_per_s=None, restarted_s=None)()
    assert [each.until_s for each in watched.histories.values()] == [pytest.approx(NOON / S + 60, abs=0.1)] * 8


def test_the_page_is_read_while_an_engine_comes() -> None:
    """Estimations run beside the page."""
    requests = spanned(run(engine(), count=60, rate_per_s=3.0))
    of_b = replace(from_origin(requests, -NOON / S), served_by=same_text("b", len(requests)))
    sample = TrafficSample(requests=of_b, count=60, engines=2, finished=0.0, lately=60, rate_per_s=3.0)
    watched = WatchedEngines(baseline=begun(fitted(requests), NOON / S))

    def come() -> dict[str, LastingChange]:
        watched.follow(sample, sample, NOON + MINUTE * S)
        return {}

    watched.histories["a"] = cast("EngineHistory", SimpleNamespace(ratios=come, until_s=0.0))
    assert watched.ratios() == {}
    assert {"a", "b"} == watched.histories.keys()


def _state(view: WatchView, minute: int) -> WatchState:
    return view.state(NOON + minute * MINUTE * S, elapsed_s=1.0, stale_s=9.0, restarts=0, receiver_down="")
