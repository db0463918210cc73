"""What engines show while requests wait for them: the evidence for why they wait."""

from __future__ import annotations

from engine_series import SECOND, engine

from sidelight.correlator.statistics.queueing import NEVER_WAITED, WhileWaiting, while_waiting
from sidelight.scraper.window.window import Window

WINDOW = Window(start_ns=0, end_ns=10 * SECOND)


def test_only_scrapes_that_show_a_waiting_request_count():
    """Before the window, and while nothing waits, what runs is not evidence; the most that ran is of the window."""
    shown = engine([-1, 1, 2, 3, 4], waiting=[9, 0, 1, 5, 2], running=[9, 1, 4, 4, 2], kv=[0.99, 0.1, 0.2, 0.4, 0.3])

    assert while_waiting([shown], WINDOW) == WhileWaiting(
        scrapes=3, running_p50=4.0, running_most=4.0, at_most_ratio=2 / 3, kv_cache_p50=0.3, kv_cache_max=0.4
    )


def test_each_engine_is_compared_with_its_own_most():
    """One runs four at most and the other one: both were full."""
    engines = (
        engine([1, 2], "http://a:1/metrics", waiting=[1, 1], running=[4, 4], kv=[0.1, 0.1]),
        engine([1, 2], "http://b:1/metrics", waiting=[1, 0], running=[1, 0], kv=[0.1, 0.1]),
    )

    state = while_waiting(engines, WINDOW)

    assert (3, 4.0, 1.0) == (state.scrapes, state.running_most, state.at_most_ratio)


def test_a_gauge_that_is_one_short_as_a_prefill_begins_shows_a_full_engine():
    """SGLang's, of a few places: 7 of 8 are near the most, 6 are not; of two or three only all are."""
    shown = engine([1, 2, 3, 4], waiting=[3, 3, 3, 3], running=[8, 7, 7, 6], kv=[0.2] * 4)
    three = engine([1, 2, 3, 4], waiting=[3, 3, 3, 3], running=[3, 2, 2, 2], kv=[0.2] * 4)

    assert [3 / 4, 1 / 4] == [while_waiting([each], WINDOW).at_most_ratio for each in (shown, three)]


def test_an_engine_without_a_gauge_of_its_cache_leaves_that_unknown():
    state = while_waiting([engine([1, 2], waiting=[1, 1], running=[1, 1])], WINDOW)

    assert (2, 1.0, None) == (state.scrapes, state.at_most_ratio, state.kv_cache_max)


def test_an_engine_that_does_not_say_what_runs_leaves_that_unknown():
    """Unknown, and not zero, which would say that nothing ran."""
    shown = while_waiting([engine([1, 2], waiting=[1, 1], kv=[0.1, 0.1])], WINDOW)

    assert (2, None, None, None) == (shown.scrapes, shown.running_p50, shown.running_most, shown.at_most_ratio)


def test_where_nothing_waited_there_is_only_a_reason():
    idle = WhileWaiting(missing=NEVER_WAITED)

    assert [idle, idle] == [while_waiting(engines, WINDOW) for engines in ([], [engine([1, 2], waiting=[0, 0])])]
