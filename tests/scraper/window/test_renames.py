"""Windows in which series count on under another label: what they counted across the change is not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from series import END, QUEUE, counter, endpoint_of, gauge, histogram

from sidelight.scraper.series.resets import START_TIME
from sidelight.scraper.window.summary import server_summary
from sidelight.scraper.window.window import Window

S = 10**9
TOKENS, REQUESTS = "vllm:generation_tokens_total", "vllm:request_success_total"
RENAMED = 'label model_name changed from "a" to "b" while it counted on, so its increase is not known'
BACK = RENAMED.replace('"a" to "b"', '"b" to "a"')
NO_SCRAPE = "no scrape fell into the slice"

Counts = dict[str, int]


def shown(pages: Sequence[Counts | None], start_s: float = 1.5, *, others: Sequence[str] = ()) -> dict[str, Any]:
    """Return the summary of pages a second apart, on each the requests by model, until their end.

    None is a scrape that failed; on each page is one of the `others`, or nothing, besides.
    """
    texts = [
        None if page is None else other + "".join(_model(name, count) for name, count in page.items()) + END
        for page, other in zip(pages, others or [gauge("up", 1)] * len(pages), strict=True)
    ]
    window = Window(start_ns=round(start_s * S), end_ns=round((len(pages) + 0.5) * S))
    written: dict[str, Any] = msgspec.to_builtins(server_summary([endpoint_of(texts)], window, S))
    return written


def _model(name: str, count: int) -> str:
    label = f'model_name="{name}"'
    return counter(REQUESTS, count, labels=[label]) + histogram(QUEUE, count, count * 0.5, labels=label)


def totals(pages: Sequence[Counts | None], start_s: float = 1.5, **besides: Any) -> list[int | str]:
    """Return the requests counted in all and by slice, or why they are not known."""
    requests = shown(pages, start_s, **besides)["requests_finished"]
    parts = [part.get("total", part.get("missing")) for part in requests["timeslices"]]
    return [requests["stats"].get("total", requests.get("missing", {}).get("stats")), *parts]


A, B = ([{name: 5000 + 10 * at} for at in range(9)] for name in "ab")


def test_a_series_that_counts_on_under_another_label_has_no_increase_across_it():
    """Counted from zero it would be all that the engine had counted before; slices without the change are known."""
    assert totals(A[:3] + B[3:5]) == [RENAMED, 10, 10, RENAMED, 10]
    pages = [A[0], A[1], A[2], None, A[4], B[5], B[6], B[7]]
    assert totals(pages) == [RENAMED, 10, 10, NO_SCRAPE, 20, RENAMED, 10, 10]
    assert shown(A[:3] + B[3:5])["requests_finished"]["resets"] == 0


def test_a_histogram_that_counts_on_under_another_label_has_slices_without_the_change():
    """The slice with it has neither a count nor percentiles."""
    queue = shown([*A[:3], *B[3:6]])["queue_time"]
    assert (queue["stats"], queue["missing"], queue["resets"]) == ({}, {"stats": RENAMED}, 0)
    assert [part.get("count") for part in queue["timeslices"]] == [10, 10, None, 10, 10]
    assert [part.get("sum") for part in queue["timeslices"]] == [5, 5, None, 5, 5]
    assert ["p50" in part for part in queue["timeslices"]] == [True, True, False, True, True]


def test_a_window_after_the_change_is_known():
    assert totals(A[:3] + B[3:6], 4.5) == [20, 10, 10]


def test_a_page_without_the_series_hides_no_change():
    """Whether it shows nothing of the metric, or only another model."""
    assert totals([A[0], A[1], {}, B[3], B[4]]) == [RENAMED, 10, 0, RENAMED, 10]
    other = [{"c": 900 + at} for at in range(5)]
    pages = [A[0] | other[0], A[1] | other[1], other[2], B[3] | other[3], B[4] | other[4]]
    assert totals(pages) == [RENAMED, 11, 1, RENAMED, 11]


def test_a_label_that_changes_back_counts_nothing_twice():
    both = shown(A[:2] + B[2:4] + A[4:6])["requests_finished"]
    assert both["missing"]["stats"] in (RENAMED, BACK)
    assert [part.get("total") for part in both["timeslices"]] == [10, None, 10, None, 10]
    assert totals(A[:2] + B[2:4] + A[4:6], 4.5) == [BACK, BACK, 10]
    assert totals(A[:2] + B[2:4] + A[4:6], 5.5) == [10, 10]


@pytest.mark.parametrize(
    ("pages", "total"),
    [
        ([{"a": 5000}, {"a": 5010}, {"b": 7}, {"b": 17}], 27),  # less than the one before
        ([{"a": 3}, {"a": 3}, {"b": 5}, {"b": 6}], 6),  # few
        ([{"a": 0}, {"a": 60}, {"b": 70}], 130),  # no more than the one before had in one interval
        ([{"a": 5000}, {"a": 5010}, {"a": 5020, "b": 6000}, {"a": 5030, "b": 6010}], 6040),  # beside the one before
        ([{"a": 5000, "b": 10}, {"a": 5010, "b": 20}, {"a": 5020}, {"a": 5030, "b": 30}], 50),  # back again
    ],
)
def test_a_model_that_begins_anew_counts_from_zero(pages: list[Counts], total: int):
    """Where its first page is what a new one may show, or it comes beside the others."""
    assert totals(pages)[0] == total


def test_a_model_of_which_one_metric_counts_less_begins_anew():
    others = [
        counter(TOKENS, tokens, labels=[f'model_name="{name}"'])
        for name, tokens in zip("aab", (90, 95, 9), strict=True)
    ]
    assert totals([A[0], A[1], B[2]], others=others)[0] == 10 + 5020


def test_a_counter_that_hardly_counted_changes_its_label_with_the_others():
    others = [
        counter(TOKENS, tokens, labels=[f'model_name="{name}"']) for name, tokens in zip("aab", (1, 1, 2), strict=True)
    ]
    assert shown(A[:2] + B[2:3], others=others)["generation_tokens"]["missing"]["stats"] == RENAMED


def test_a_restart_under_another_label_is_a_restart():
    """By the start time that the page states, however far it has counted."""
    others = [gauge(START_TIME, start) for start in (7, 7, 9, 9)]
    assert totals(A[:2] + B[2:4], others=others)[0] == 10 + 5030
    assert shown(A[:2] + B[2:4], others=others)["requests_finished"]["resets"] == 1
