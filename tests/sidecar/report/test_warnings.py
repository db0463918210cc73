from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import summaries
from logs import request_log
from warned import BLANK, PROBED, REPLY, said

from sidelight.loadgen.requests.summary import client_summary


def test_a_run_in_which_nothing_was_wrong_has_no_warning():
    assert [] == said({})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"correlation.spans": PROBED}, ["5 health probes were served like requests; their spans are left out"]),
        ({"server.queue_time.stats.count": 105}, ["the engine queued 105 requests and ended 100: the others may be"]),
        ({"server.queue_time.stats.count": 100}, []),
    ],
)
def test_health_probes_that_cost_a_request_are_named(change: dict[str, Any], expected: list[str]):
    """By their spans, else by the page: SGLang counts a probe's queue time, and no end of it."""
    warned = said({"server.engine.name": "sglang", **change})
    assert expected == [text[: len(begin)] for text, begin in zip(warned, expected, strict=True)]
    assert all(text.endswith("; probe /model_info instead, which generates nothing") for text in warned)


@pytest.mark.parametrize(
    ("ended", "whose"),
    [
        (80, "the clients' times are of those, the engine's numbers of all"),
        (40, "the others are on no page that was read, or ended before its first scrape or after its last"),
    ],
)
def test_a_watch_says_whose_times_it_has(ended: int, whose: str):
    """Requests without a client's span are no other traffic: all that a watch sees is of others."""
    watched = SimpleNamespace(broken={}, whole=50, misrouted="", traces=0, split=0)
    (warning,) = said({"correlation.comparable": False, "correlation.server_requests": ended}, watched=watched)
    assert warning.startswith(f"the engine finished {ended} requests here, and clients' spans came for 50: {whose}")


SENT = {**REPLY, "phase": "measure", "input": 10}


def test_a_page_that_counted_nothing_of_what_the_client_got_is_named():
    """Whether it counted any request or not; one that counted some tokens, or replies without any, are as they were."""
    uncounted = {"server.generation_tokens": msgspec.to_builtins(summaries.counter(0.0, 0.0))}
    for ended in (0, 50):
        (warning,) = said({**uncounted, "correlation.server_requests": ended}, sent=[SENT] * 20)
        assert warning.startswith("the page counted none of the client's 60 output tokens")
    counted = {"server.generation_tokens": msgspec.to_builtins(summaries.counter(60.0, 6.0))}
    assert [] == said(counted, sent=[SENT] * 20)
    assert [] == said(uncounted, sent=[{**SENT, "output": 0}] * 20)


def test_a_counter_that_fell_alone_is_no_restart():
    """A restart resets all counters of a page."""
    fell = msgspec.to_builtins(msgspec.structs.replace(summaries.counter(60.0, 6.0), resets=3))
    restarted, alone = said({
        "server.endpoints.0.generation_tokens": fell,
        "server.endpoints.0.requests_finished.resets": 1,
    })  # fmt: skip
    assert restarted.startswith("the engine at http://e/metrics restarted (1 x)")
    assert "did not restart: generation_tokens (2 x)" in alone


@pytest.mark.parametrize(("counted", "warned"), [(420.0, True), (140.0, True), (80.0, False), (5.0, True)])
def test_a_page_that_counts_other_tokens_for_the_same_requests_is_named(counted: float, warned: bool):
    """A token or two of a request may be counted by one side alone."""
    total = {"server.generation_tokens": msgspec.to_builtins(summaries.counter(counted, counted / 10))}
    warnings = said(total, sent=[SENT] * 20)
    assert [text.startswith(f"the page counted {counted:,.0f} output tokens") for text in warnings] == [True] * warned


@pytest.mark.parametrize(
    ("ended", "choices", "other"),
    [(40, 2, False), (60, 2, False), (50, 2, True), (80, 1, True)],
)
def test_choices_are_no_other_traffic(ended: int, choices: int, other: bool):
    """Engines count each choice (vLLM), or one more (SGLang)."""
    change = {"correlation.comparable": False, "correlation.server_requests": ended}
    (warning,) = said(change, sent=[{**SENT, "choices": choices}] * 20)
    assert other == ("other traffic" in warning)


@pytest.mark.parametrize(("choices", "warnings"), [(3, 1), (1, 0)])
def test_choices_are_said_where_the_histograms_are_refused(choices: int, warnings: int):
    """As of SGLang, which serves four requests for three choices: its prompt tokens stood fourfold, without a word."""
    finished = msgspec.to_builtins(summaries.counter(80.0, 8.0))
    change = {"correlation.comparable": False, "correlation.server_requests": 0, "server.requests_finished": finished}
    texts = said(change, sent=[{**SENT, "choices": choices}] * 20)
    assert warnings == len(texts) == sum("each choice" in text for text in texts)


@pytest.mark.parametrize(("hits", "choices", "warned"), [(400, 2, False), (900, 2, True), (400, 1, True)])
def test_choices_that_share_a_prompt_are_no_repeats(hits: float, choices: int, warned: bool):
    change = {
        "server.prefix_cache_hits": msgspec.to_builtins(summaries.counter(hits, hits)),
        "server.prefix_cache_queries": msgspec.to_builtins(summaries.counter(1000.0, 1000.0)),
    }
    texts = said(change, sent=[{**SENT, "choices": choices}] * 20)
    assert warned == any("prefix cache" in text for text in texts)


CAUSE = {"kind": "machine", "text": "others took the processor", "cure": "Take another machine."}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"prompts": "p.jsonl"}, "prompts of the file begin alike, or were sent before"),
        ({"dataset": "s.json"}, "were the same requests sent before?"),
        ({"replay_requests": "runs/r"}, "were the same requests sent before?"),
    ],
)
def test_another_seed_changes_nothing_in_a_file(config: dict[str, Any], expected: str):
    """So it is not proposed where the prefix cache answered a file's requests."""
    (warning,) = said({"server.prefix_cache_hits.stats.total": 760.0}, config=config)
    assert f"76 % of the prompt tokens came from the engine's prefix cache: {expected}" == warning


def test_no_seed_is_proposed_for_prompts_of_one_word():
    """They begin alike with each of them."""
    manifest = {"workload": {"classes": [{"content": "repeat"}]}}
    (warning,) = said({"server.prefix_cache_hits.stats.total": 760.0}, **manifest)
    assert "whatever the seed" in warning
    assert "--seed" not in warning


def test_the_most_frequent_error_is_shown_in_its_own_words():
    """Of the measured requests; at most a line of it."""
    errors = ("reset: by peer", "server: engine\ndied " + 200 * "x", "server: other")
    sent = [{"status": "failed", "error": error, "phase": "measure"} for error in errors]
    (warning,) = said({"client.requests.failed": 3, "client.errors": {"server": 2, "reset": 1}}, sent=sent)
    assert "engine died xxx" in warning
    assert "other" not in warning
    assert len(warning) < 250


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"client.requests.failed": 3, "client.errors": {"http_500": 2, "reset": 1}},
            "3 of 50 requests did not succeed: http_500 (2), reset (1)",
        ),
        ({"client.requests.refused": 2}, "2 of 50 requests did not succeed: no reply says why"),
        (
            {"client.retried": 38},
            (
                "38 of 50 requests were sent a second time, on a new connection: the server closed the one it had kept "
                "before a reply began. Their times are those of the second sending; with --no-reuse each request has a "
                "connection of its own"
            ),
        ),
        (
            {"client.requests.cancelled": 15, "client.requests.ok": 35, "client.ttft_ms.count": 35},
            "15 of 50 requests did not end: latencies are those of the 35 that did, which waited least",
        ),
        (
            {"server.endpoints.0.scrapes": {"ok": 60, "failed": 20, "failures": {"HTTP 503": 20}}},
            "20 of 80 scrapes of http://e/metrics failed: HTTP 503 (20)",
        ),
        (
            {"server.endpoints.0.requests_finished.resets": 1},
            "the engine at http://e/metrics restarted (1 x): its counts from just before that are lost",
        ),
        (
            {"server.prefix_cache_hits.stats.total": 760.0},
            (
                "76 % of the prompt tokens came from the engine's prefix cache: were the same requests sent before? "
                "Another --seed sends others"
            ),
        ),
        (
            {f"{BLANK}.mean": 33.0, f"{BLANK}.share_of_ttft": 0.3},
            "33.0 ms of the mean TTFT is blank output: tokens that were generated and show no text",
        ),
        ({"client.ttft_ms.count": 47}, "3 of 50 replies held nothing but blanks, and so have no TTFT"),
        (
            {"correlation.comparable": False, "correlation.server_requests": 80},
            (
                "the engine finished 80 requests here and the client 50: other traffic used it too, or scrapes are "
                "missing; the engine's numbers cover all of it"
            ),
        ),
        (
            {"check.arrivals.distorted": True, "check.arrivals.sentence": "They left late.", "check.cause": CAUSE},
            "They left late. The reason: others took the processor. Take another machine.",
        ),
        (
            {
                "check.arrivals.distorted": True,
                "check.arrivals.sentence": "They left late.",
                "check.reasons": ["TTFT may be wrong"],
                "check.cause": CAUSE,
            },
            "They left late.",
        ),
    ],
)
def test_what_changes_the_reading_is_said(change: dict[str, Any], expected: str):
    assert [expected] == said(change)


def test_a_watch_sends_nothing_that_a_cache_could_know():
    """Others' requests come from the cache as they do on any day: no seed changes that."""
    watched = SimpleNamespace(broken={}, whole=50, misrouted="", traces=0, split=0)
    assert [] == said({"server.prefix_cache_hits.stats.total": 960.0}, watched=watched)


def test_warm_up_requests_that_fail_are_said():
    """By the kinds of their errors; those that the end of the run cancelled are no failures."""
    warm_up = {**REPLY, "phase": "warmup"}
    reset, cancelled = {"status": "failed", "error": "reset: gone"}, {"status": "cancelled", "error": "cancelled: x"}
    sent = [warm_up, {**warm_up, **reset}, {**warm_up, **reset}, {**warm_up, **cancelled}]
    assert ["2 of 4 warm-up requests did not succeed: reset (2)"] == said({}, sent=sent)


def test_how_a_run_ended_comes_first():
    first, *_ = said({"client.requests.failed": 1}, status=None, reason="a load worker died")
    assert "this run was cut short (a load worker died); numbers cover what was recorded up to then" == first


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ((), "this run was interrupted while requests were being prepared: nothing was sent"),
        (("warmup",), "this run was interrupted during the warm-up: nothing was measured"),
        (("warmup", "measure"), "this run was interrupted; numbers cover what was recorded up to then"),
    ],
)
def test_an_interrupted_run_says_how_far_it_came(sent: tuple[str, ...], expected: str):
    rows = [{"phase": phase, "submit": 1} for phase in sent]
    assert expected == said({}, sent=rows, status="interrupted", config={"url": ["http://e"]})[0]


NO_PAGE = "http://e/metrics: HTTP 404"


@pytest.mark.parametrize(("phase", "expected"), [("measure", []), ("warmup", [f"no server metrics: {NO_PAGE}"])])
def test_a_missing_metrics_page_is_left_to_the_conclusion(phase: str, expected: list[str]):
    """Which says it once, and what to give; where nothing was measured, there is no conclusion."""
    pages = [{"configured": "http://e", "reason": NO_PAGE}]
    rows = [{**REPLY, "phase": phase, "output_tokens_source": "usage"}]
    notes = [f"no server metrics: {NO_PAGE}"]
    manifest = {"metrics_targets": pages, "server_missing": NO_PAGE, "notes": notes}
    assert expected == said({}, sent=rows, **manifest)


@pytest.mark.parametrize(
    ("estimated", "whose"), [(2, "the server"), (1, "the server, in 1 of 2 replies,")], ids=["all", "some"]
)
def test_a_server_without_usage_is_said_once(estimated: int, whose: str):
    sources = ["estimate"] * estimated + ["usage"] * (2 - estimated)
    rows = [{**REPLY, "phase": "measure", "output_tokens_source": source} for source in sources]
    expected = f"{whose} returned no `usage`: output tokens are estimated as a quarter of the text's characters"
    assert expected in said({}, sent=rows)


def test_a_usage_that_replies_contradict_is_said_behind_failures():
    """With what contradicts it, in how many replies, the first one's numbers, and how much came by chunks."""
    kind = "more output tokens than max_tokens allows"
    lied = {
        **REPLY,
        "output": -1,
        "output_tokens_source": "contradicted",
        "usage_contradiction": f"{kind}: 1,000 for 20",
    }
    client = msgspec.to_builtins(client_summary(request_log(*[REPLY] * 30, *[lied] * 20)))
    failed, doubted, *others = said({"client": client, "client.requests.failed": 1})
    assert "did not succeed" in failed
    for part in ("20 of 50", f"{kind} in 20, such as 1,000 for 20", "TPOT", "3 a reply"):
        assert part in doubted
    assert not others
    assert client["throughput"]["missing"]["output_tokens_per_s"].startswith("20 of 50")


def test_replies_longer_than_asked_are_said():
    """Of several choices, each may be so long; and long words make an estimate too large."""
    long = {**REPLY, "phase": "measure", "output": 9, "max_tokens": 5}
    rows = [{**long, "choices": 1}, {**long, "choices": 2}]
    estimated = {**long, "choices": 1, "output_tokens_source": "estimate"}
    assert not [line for line in said({}, sent=[estimated]) if "longer than max_tokens" in line]
    assert ["1 of 2 replies is longer than max_tokens allows"] == [
        line.partition(",")[0] for line in said({}, sent=rows)
    ]


def test_clipped_lengths_are_said():
    planned = {"phase": "measure", "count": 50, "clipped_inputs": 4, "clipped_outputs": 1}
    assert ["4 inputs and 1 output of 50 requests were clipped to the model's length of 512 tokens"] == said(
        {}, planned=planned, target={"max_model_len": 512}
    )


def test_what_became_of_records_of_requests():
    """One line of what is lost of them, and none where each request has its own."""
    counts = {
        "records": 60,
        "matched": 50,
        "unmatched_records": 10,
        "ambiguous_requests": 0,
        "unmatched_requests": 0,
        "refused": {},
        "failed_readings": {},
        "clock_error_ms": 0.1,
        "clock_missing": None,
    }
    at = "correlation.perf_metrics"
    assert [] == said({at: counts})
    odd = {"refused": {"odd": 2}, "failed_readings": {"HTTP 500": 3}, "ambiguous_requests": 4, "unmatched_requests": 5}
    (line,) = said({at: counts | odd})
    assert line == (
        "records of /perf_metrics that match requests of this run: 50 of 60; 3 readings failed (HTTP 500); 2 records "
        "refused (odd); 4 requests without one, because several records fit the times; 5 requests without one, because "
        "no record fits the times"
    )
    assert ["records of /perf_metrics that match requests of this run: 0 of 0"] == said(
        {at: counts | {"records": 0, "matched": 0}}
    )


AT_ONCE = {"submit": 0, "first": 400, "last": 400, "end": 401, "output": 20, "phase": "measure"}
HELD = {"submit": 0, "first": 250, "last": 385, "end": 386, "output": 20, "phase": "measure"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            AT_ONCE | {"chunks": (400,) * 20},
            "2 of 2 replies came in one read each, 20 pieces (median): something between",
        ),
        (AT_ONCE | {"chunks": (400,)}, "1 pieces (median): they are not streamed token by token"),
        (HELD | {"chunks": (250,) * 11 + (385,) * 9}, "TTFT is about 150 ms too long"),
        (AT_ONCE | {"chunks": (400,) * 4, "output": 4}, ""),
        (AT_ONCE | {"chunks": (20,) * 20, "first": 20, "last": 20}, ""),
        (HELD | {"chunks": (250, *range(258, 401, 8))}, ""),
        (HELD | {"chunks": (250,) * 4 + (300,) * 4 + (350,) * 4 + (385,) * 4}, ""),
    ],
    ids=["whole", "one event", "half", "few tokens", "fast", "streamed", "speculated"],
)
def test_replies_that_were_held_back_on_their_way(row: dict[str, object], words: str):
    """Most of them, long ones, and later than an engine that made all at once; nothing of replies that came as made."""
    lines = [line for line in said({}, sent=[row] * 2) if "read" in line]
    assert (1 if words else 0) == len(lines)
    assert all(words in line for line in lines)


@pytest.mark.parametrize(("held", "is_said"), [(5, True), (2, True), (1, False)])
def test_replies_of_which_one_proxy_of_several_holds_back_its_own(held: int, is_said: bool):
    """More than a tenth of the replies are warned of, also where others came as made; one in ten may be chance."""
    streamed = HELD | {"chunks": (250, *range(258, 401, 8))}
    for row, words in (
        (AT_ONCE | {"chunks": (400,) * 20}, f"{held} of 10 replies came in one read each"),
        (HELD | {"chunks": (250,) * 11 + (385,) * 9}, f"the first 11 pieces (median) of {held} of 10 replies"),
    ):
        lines = said({}, sent=[row] * held + [streamed] * (10 - held))
        assert is_said == any(words in line for line in lines)


def test_replies_that_came_together_because_the_load_generator_was_late():
    """Where it did not look for as long as that, nothing between is to blame."""
    late = {"check.error_ms.ttft.p99": 300.0}
    assert [] == [line for line in said(late, sent=[AT_ONCE | {"chunks": (400,) * 20}] * 2) if "read" in line]


@pytest.mark.parametrize(
    ("outputs", "config", "is_said"),
    [
        ((20, 1), {"ignore_eos": True}, True),
        ((20, 20), {"ignore_eos": True}, False),
        ((1, 2), {"ignore_eos": True}, False),
        ((20, 1), {"ignore_eos": False}, False),
        ((20, 1), {"ignore_eos": True, "endpoint": "chat"}, True),
        ((20, 1), {"ignore_eos": True, "endpoint": "messages"}, False),
    ],
)
def test_replies_that_are_shorter_than_asked(outputs: tuple[int, ...], config: dict[str, object], is_said: bool):
    """Where the end of a sequence was to be ignored, and was in others; not where no request can ask for that."""
    sent = [REPLY | {"output": count, "max_tokens": 20, "chunks": (120,), "phase": "measure"} for count in outputs]
    lines = [line for line in said({}, sent=sent, config=config) if "shorter than asked (1 token for 20" in line]
    assert is_said == bool(lines)
    refused = said({}, sent=sent, config=config, target={"refused_fields": ["ignore_eos"]})
    assert not any("shorter than asked" in line for line in refused)
