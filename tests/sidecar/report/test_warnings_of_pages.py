"""Warnings of what the pages of metrics state."""

from __future__ import annotations

from series import END, PREFILL, QUEUE, counter, endpoint_of, gauge, histogram
from warned import PROBED, said


def test_numbers_that_cannot_be_are_named():
    """Gauges, counts and sums by their metric, a start time by its steps, times by what they cannot be parts of."""
    page = gauge("vllm:kv_cache_usage_perc", 17) + gauge("vllm:num_requests_waiting", 4)
    page += counter("vllm:num_preemptions_total", -5)
    held = [("0.05", 0)]
    shown = endpoint_of(
        [
            page
            + gauge("process_start_time_seconds", 1e9 + n)
            + histogram(QUEUE, 2 * n + 1, 9 - n)
            + histogram(PREFILL, 2 * n + 1, 7, buckets=held)
            + END
            for n in range(4)
        ]
    )
    usage, preempted, falls, frozen, started, times = said(
        {"correlation.missing": "a queue of 10 s"}, endpoints=[shown]
    )
    assert f"{QUEUE} that falls" in falls
    assert f"{PREFILL} that lies" in frozen
    assert "vllm:num_preemptions_total -5, which cannot be" in preempted
    assert "3 x" in started
    assert "vllm:kv_cache_usage_perc 17, which cannot be" in usage
    assert "(4)" in usage
    assert times == "no breakdown: a queue of 10 s"


def test_series_that_a_page_states_twice_are_named_once():
    """By their family, where the values differ; the same line again changes nothing."""
    same = 2 * gauge("a", 1) + 2 * histogram(QUEUE, 4, 0.5)
    (warning,) = said(
        {}, endpoints=[endpoint_of([same + 2 * END, same + gauge("a", 2) + histogram(QUEUE, 5, 1) + END])]
    )
    assert warning.startswith(f"pages at http://127.0.0.1:8000/metrics state series of a, {QUEUE} more than once")
    assert [] == said({}, endpoints=[endpoint_of([same + END] * 3)])


def test_a_label_that_changes_while_series_count_on_is_named_once():
    """With its values before and after, for all of its series; and it is said to be no other model."""
    names = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
    pages = [
        "".join(counter(name, 5000 + at, labels=[f'model_name="{model}"']) for name in names) + END
        for at, model in enumerate("aabb")
    ]
    (renamed,) = said({}, endpoints=[endpoint_of(pages)])
    assert renamed.startswith('label model_name changed from "a" to "b" on the page of http://127.0.0.1:8000/metrics')
    assert "2.0 s after its first scrape" in renamed


def test_an_engine_that_came_back_as_another_model_is_the_first_thing_said():
    """With both names, and since when; and once more where the first came back."""
    was, is_now = (gauge("vllm:num_requests_waiting", 1, labels=[f'model_name="{name}"']) + END for name in "ab")
    warned = said({"correlation.spans": PROBED}, endpoints=[endpoint_of([was, was, END, is_now, is_now, was])])
    assert ["a, before it b" in text or "b, before it a" in text for text in warned] == [True, True, False]
    assert "since second 3.0: b, before it a" in warned[0]


def test_a_model_that_a_page_names_beside_another_replaces_none():
    """As a gateway's pages do once a model was first asked for."""
    first = gauge("vllm:num_requests_waiting", 1, labels=['model_name="a"']) + END
    both = gauge("vllm:num_requests_waiting", 1, 1, labels=['model_name="a"', 'model_name="b"']) + END
    assert said({}, endpoints=[endpoint_of([first, both, first])]) == []
