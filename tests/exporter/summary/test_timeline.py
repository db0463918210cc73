"""A run in columns: the most of each within a column, and nothing where nothing is known."""

from __future__ import annotations

import numpy as np
from engine_series import engine

from sidelight.exporter.summary.timeline import COLUMNS, timeline
from sidelight.scraper.window.window import Window

S = 10**9


def test_a_column_has_the_most_of_what_was_in_it():
    """A TTFT counts when its request was sent, a gauge until the next scrape."""
    submit_ns = np.array([0, 0.01, 0.02, 47.9, 49]) * S
    ttft_s = np.array([0.3, 0.49, np.nan, 0.04, 9.0])
    drawn = timeline(
        submit_ns.astype(np.int64),
        ttft_s,
        [engine([0, 1.5, 4], waiting=[0, 7, 2])],
        Window(start_ns=0, end_ns=COLUMNS * S),
    )
    assert 1.0 == drawn.column_s
    assert [490.0, *[None] * (COLUMNS - 2), 40.0] == drawn.ttft_ms
    assert [0.0, 7.0, 7.0, 7.0, 2.0, *[None] * (COLUMNS - 5)] == drawn.requests_waiting
    assert {None} == set(drawn.requests_running)


def test_without_a_page_and_a_first_token_nothing_is_drawn():
    drawn = timeline(np.empty(0, np.int64), np.empty(0), [], Window(start_ns=0, end_ns=S))
    assert {None} == {*drawn.ttft_ms, *drawn.requests_waiting, *drawn.requests_running}
    assert np.isclose(1 / COLUMNS, drawn.column_s)
