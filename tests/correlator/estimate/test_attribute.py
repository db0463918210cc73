"""Estimated queue and prefill times of made-up runs, of which every number is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import log_of, scrapes_of
from series import endpoint_of_columns

from sidelight.correlator.attribute import NO_FIRST, NO_INTERVAL, NOT_ENDED, NOT_SCRAPED, attribute
from sidelight.correlator.estimate.intervals import observe
from sidelight.correlator.estimate.table import Attribution
from sidelight.correlator.statistics.server_times import server_percentiles
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.stats import Missing
from sidelight.scraper.exposition import Series
from sidelight.scraper.series.table import EndpointSeries

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Texts = npt.NDArray[np.object_]
Bools = npt.NDArray[np.bool_]

START_NS = 1_700_000_000_000_000_000
GATEWAY = "http://gateway.test/v1"
TIMES = ("vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds")
TOKENS = ("vllm:request_prompt_tokens", "vllm:request_generation_tokens")
TTFT = "vllm:time_to_first_token_seconds"
BOUNDS = (0.3, 0.5, 0.8, 1.0, np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Requests and the truth: seconds from START_NS, and the times in the engine."""

    submit_s: Floats
    queue_s: Floats
    prefill_s: Floats
    rest_s: Floats
    decode_s: Floats
    prompt: Ints
    output: Ints
    network_s: float = 0.002

    @property
    def first_s(self) -> Floats:
        return self.submit_s + self.queue_s + self.prefill_s + self.rest_s + self.network_s

    @property
    def observed_s(self) -> Floats:
        """When the engine ended each request."""
        return self.first_s + self.decode_s - self.network_s / 2


def world(size: int, seed: int, *, per_s: float = 8.0) -> World:
    """Poisson arrivals, a queue that half of them wait in, prefills that grow with the prompt."""
    random = np.random.default_rng(np.random.SeedSequence(seed))
    prompt = random.integers(10, 1000, size)
    return World(
        submit_s=1.0 + np.cumsum(random.exponential(1 / per_s, size)),
        queue_s=random.exponential(0.3, size) * (random.random(size) < 0.5),
        prefill_s=0.01 + 1e-4 * prompt * random.lognormal(0, 0.05, size),
        rest_s=random.uniform(0.002, 0.006, size),
        decode_s=random.uniform(0.1, 0.6, size),
        prompt=prompt,
        output=random.integers(1, 200, size),
    )


def seen(traffic: World, *, url: str = GATEWAY, rows: Sequence[int] | Bools | None = None) -> RequestLog:
    """What a client notes of some of the requests: first output, end, and a chunk each 20 ms between."""
    chosen = np.arange(len(traffic.submit_s))[slice(None) if rows is None else np.asarray(rows)]
    stamps = {
        name: START_NS + np.rint(1e9 * values[chosen]).astype(np.int64)
        for name, values in (
            ("submit", traffic.submit_s),
            ("first", traffic.first_s),
            ("end", traffic.first_s + traffic.decode_s),
        )
    }
    chunks = [np.arange(a, b, 20_000_000) for a, b in zip(stamps["first"], stamps["end"], strict=True)]
    return log_of(
        len(chosen),
        submit_ns=stamps["submit"],
        first_output_ns=stamps["first"],
        first_token_ns=stamps["first"],
        end_ns=stamps["end"],
        input_tokens=traffic.prompt[chosen],
        output_tokens=traffic.output[chosen],
        status="ok",
        finish_reason="stop",
        endpoint_url=url,
        chunk_ns=np.concatenate([np.zeros(0, dtype=np.int64), *chunks]),
        chunk_start=np.concatenate([[0], np.cumsum([len(stamps) for stamps in chunks])]),
    )


def scraped(
    traffic: World,
    interval_s: float,
    *,
    url: str = "http://engine.test/metrics",
    tokens: tuple[str, ...] = TOKENS,
    prefix: str = "vllm:",
    rows: Bools | None = None,
    restart_s: float | None = None,
) -> EndpointSeries:
    """The pages of an engine that served some of the requests, scraped until all had ended.

    At `restart_s` it begins anew: what it had counted is gone.
    """
    included = np.ones(len(traffic.submit_s), dtype=np.bool_) if rows is None else rows
    at_s = np.arange(0.0, traffic.observed_s.max() + 2 * interval_s, interval_s)
    columns: list[tuple[Series, Floats]] = []

    def cumulative(when_s: Floats, weights: Floats) -> Floats:
        before = np.zeros(len(at_s)) if restart_s is None else np.where(at_s >= restart_s, restart_s, 0.0)
        counted = (when_s[:, None] <= at_s) & (when_s[:, None] >= before) & included[:, None]
        return np.asarray((counted * weights[:, None]).sum(axis=0))

    def histogram(family: str, when_s: Floats, values: Floats, bounds: Sequence[float]) -> None:
        labels = (("engine", "0"),)
        for bound in bounds:
            edge = (("engine", "0"), ("le", "+Inf" if np.isinf(bound) else str(bound)))
            series = Series(name=f"{family}_bucket", labels=edge, family=family, type="histogram", help="")
            columns.append((series, cumulative(when_s, (values <= bound).astype(np.float64))))
        for part, weights in (("sum", values), ("count", np.ones(len(values)))):
            series = Series(name=f"{family}_{part}", labels=labels, family=family, type="histogram", help="")
            columns.append((series, cumulative(when_s, weights)))

    for family, values in zip(TIMES, (traffic.queue_s, traffic.prefill_s), strict=True):
        histogram(family.replace("vllm:", prefix), traffic.observed_s, values, BOUNDS)
    for family, values in zip(TOKENS, (traffic.prompt, traffic.output), strict=True):
        if family in tokens:
            histogram(family, traffic.observed_s, values.astype(np.float64), (np.inf,))
    histogram(
        TTFT, traffic.first_s - traffic.network_s / 2, traffic.queue_s + traffic.prefill_s + traffic.rest_s, (np.inf,)
    )
    counter = Series(name="vllm:prompt_tokens_total", labels=(), family="vllm:prompt_tokens", type="counter", help="")
    columns.append((counter, cumulative(traffic.first_s - traffic.network_s / 2, traffic.prompt.astype(np.float64))))
    at_ns = START_NS + np.rint(1e9 * at_s).astype(np.int64)
    return endpoint_of_columns(
        (series for series, _ in columns),
        np.column_stack([values for _, values in columns]),
        request_ns=at_ns - 1_000_000,
        response_ns=at_ns + 1_000_000,
        url=url,
    )


def without(endpoint: EndpointSeries, missed: Sequence[int]) -> EndpointSeries:
    """The scrapes but some that failed."""
    return scrapes_of(endpoint, np.setdiff1d(np.arange(len(endpoint.at_ns)), missed))


def sharing(table: Attribution) -> Ints:
    """How many of our requests ended in the interval of each, 0 of one in none."""
    counts = np.bincount(table.interval[table.interval >= 0])
    return np.where(table.interval >= 0, counts[table.interval], 0)


def off_s(table: Attribution, traffic: World, rows: Bools | None = None) -> tuple[float, float]:
    """The largest error of queue and of prefill over some requests of a table of all."""
    chosen = np.ones(len(table), dtype=np.bool_) if rows is None else rows
    return (
        float(np.abs(table.queue_s - traffic.queue_s)[chosen].max()),
        float(np.abs(table.prefill_s - traffic.prefill_s)[chosen].max()),
    )


def test_a_request_alone_in_its_interval_has_the_engines_own_numbers():
    """Without error, and called exact."""
    traffic = world(60, 1, per_s=2.0)

    table = attribute(seen(traffic), [scraped(traffic, 0.05)])

    alone = sharing(table) == 1
    assert alone.sum() > 40
    assert {"exact"} == set(table.quality[alone])
    assert max(off_s(table, traffic, alone)) < 1e-6
    assert 0 == table.queue_sd_s[alone].max() == table.prefill_sd_s[alone].max()


def test_the_four_parts_add_up_to_the_wait():
    """Network, queue, prefill and rest, to the nanosecond of the client's stamps."""
    traffic = world(100, 2)
    requests = seen(traffic)

    table = attribute(requests, [scraped(traffic, 0.5)])

    parts_s = table.network_s + table.queue_s + table.prefill_s + table.engine_frontend_s
    assert parts_s == pytest.approx((requests.first_output_ns - requests.submit_ns) / 1e9, abs=1e-9)


@pytest.mark.parametrize("interval_s", [0.05, 0.5])
def test_a_part_is_not_below_nothing_where_stamps_are_early(interval_s: float):
    """Queue and prefill by up to 1.5 ms longer than the client waited: they give way, and are not called exact."""
    early_s = np.random.default_rng(3).uniform(-0.0015, 0.001, 100)
    traffic = replace(world(100, 2), rest_s=early_s, network_s=0.0)
    requests = seen(traffic)

    table = attribute(requests, [scraped(traffic, interval_s)])

    parts_s = np.column_stack((np.nan_to_num(table.network_s), table.queue_s, table.prefill_s, table.engine_frontend_s))
    assert parts_s.min() >= -1e-9
    assert parts_s.sum(axis=1) == pytest.approx((requests.first_output_ns - requests.submit_ns) / 1e9, abs=1e-9)
    assert (early_s[table.quality == "exact"] >= 0).all()


@given(st.integers(12, 80), st.integers(0, 2**32), st.sampled_from([0.1, 0.5, 2.0]))
def test_estimates_add_up_to_what_the_sums_moved_by(size: int, seed: int, interval_s: float):
    """In each scrape interval; none is below 0, nor beyond what the request waited."""
    traffic = world(size, seed)

    requests = seen(traffic)
    table = attribute(requests, [scraped(traffic, interval_s)])

    known = table.interval >= 0
    waited_s = (requests.first_output_ns - requests.submit_ns) / 1e9
    for part in ("queue", "prefill"):
        estimate, truth = getattr(table, f"{part}_s"), getattr(traffic, f"{part}_s")
        sums = [np.bincount(table.interval[known], values[known]) for values in (estimate, truth)]
        assert sums[1] == pytest.approx(sums[0], abs=1e-6)
        assert (estimate[known] >= -1e-9).all()
        assert (estimate[known] <= waited_s[known] + 1e-9).all()


@settings(max_examples=50)
@given(st.integers(12, 60), st.integers(0, 2**32), st.randoms())
def test_the_order_of_requests_does_not_matter(size: int, seed: int, random: object):
    """In whichever order the table lists them, each request has the same times."""
    traffic = world(size, seed)
    order = np.arange(size)
    random.shuffle(order)  # type: ignore[attr-defined]

    straight = attribute(seen(traffic), [scraped(traffic, 0.5)])
    mixed = attribute(seen(traffic, rows=order), [scraped(traffic, 0.5)])

    assert straight.queue_s[order] == pytest.approx(mixed.queue_s, abs=1e-7, nan_ok=True)
    assert straight.prefill_s[order] == pytest.approx(mixed.prefill_s, abs=1e-7, nan_ok=True)
    assert straight.quality[order].tolist() == mixed.quality.tolist()


def test_missed_scrapes_make_longer_intervals():
    """Nothing is lost, and no request that shared the longer one is called exact."""
    traffic = world(80, 3, per_s=2.0)
    every, some = scraped(traffic, 0.1), without(scraped(traffic, 0.1), range(100, 140))

    straight, gapped = attribute(seen(traffic), [every]), attribute(seen(traffic), [some])

    inside = (traffic.observed_s > 9.9) & (traffic.observed_s <= 14.0)
    assert 1 == len(set(gapped.interval[inside]))
    assert {"shared"} == set(gapped.quality[inside])
    assert straight.quality[~inside].tolist() == gapped.quality[~inside].tolist()
    assert off_s(straight, traffic, ~inside)[0] == pytest.approx(off_s(gapped, traffic, ~inside)[0], abs=0.005)


def test_requests_that_end_while_the_engine_begins_anew_are_not_observed():
    """Of the others, those that are alone stay exact."""
    traffic = world(80, 4, per_s=2.0)
    # In the middle of the interval in which some request ended after 15 s.
    restart_s = float(np.floor(traffic.observed_s[traffic.observed_s > 15.0].min() * 10) / 10 + 0.05)

    table = attribute(seen(traffic), [scraped(traffic, 0.1, restart_s=restart_s)])

    gap = (traffic.observed_s > restart_s - 0.05) & (traffic.observed_s < restart_s + 0.05)
    early = traffic.observed_s < 14.5
    assert 1 == gap.sum()
    assert ["prior"] == table.quality[gap].tolist()
    assert [NO_INTERVAL] == table.reason[gap].tolist()
    exact = table.quality == "exact"
    assert exact[early].sum() > 20
    assert exact[traffic.observed_s > 15.5].sum() > 20
    assert max(off_s(table, traffic, exact)) < 1e-6


def test_requests_that_no_page_counted_may_have_been_broken_off():
    """As in a watch, where a client's span says nothing of it; they were said to have ended outside the scrapes."""
    traffic = world(60, 5, per_s=4.0)
    served = (np.arange(60) < 20) | (np.arange(60) >= 40)
    table = attribute(seen(traffic), [scraped(traffic, 0.1, rows=served)])
    uncounted = table.reason[table.quality == "prior"]
    assert len(uncounted) > 10
    assert all("broken off" in reason for reason in uncounted)


def test_a_cancelled_request_is_not_in_the_histograms():
    """It has what the model expects of it, and the reason; one without a first token has none."""
    traffic = world(60, 5, per_s=4.0)
    requests = seen(traffic)
    status, first_ns = requests.status.copy(), requests.first_output_ns.copy()
    status[[10, 20]] = "cancelled"
    first_ns[20] = -1
    served = ~np.isin(np.arange(60), [10, 20])

    table = attribute(
        replace(requests, status=status, first_output_ns=first_ns, first_token_ns=first_ns),
        [scraped(traffic, 0.1, rows=served)],
    )

    assert ["prior", "none"] == table.quality[[10, 20]].tolist()
    assert [NOT_ENDED, NO_FIRST] == table.reason[[10, 20]].tolist()
    assert table.queue_s[10] == pytest.approx(traffic.queue_s[10], abs=0.05)
    assert np.isnan(table.queue_s[20])
    assert max(off_s(table, traffic, table.quality == "exact")) < 1e-6


def cancelled(requests: RequestLog, chosen: Bools, prompt: Ints) -> RequestLog:
    """The client gave some up after their first token, before usage came; of their tokens it knows `prompt`."""
    unknown = {name: np.where(chosen, -1, getattr(requests, name)) for name in ("output_tokens", "cached_tokens")}
    status = np.where(chosen, "cancelled", requests.status)
    return replace(requests, status=status, input_tokens=np.where(chosen, prompt, requests.input_tokens), **unknown)


@pytest.mark.parametrize("known", [False, True])
def test_intervals_cover_the_times_of_cancelled_requests(known: bool):
    """A fifth of 4 x 300 requests: 90 % intervals hold the truth of 85 in 100, with and without a count of tokens."""
    inside: dict[str, list[bool]] = {"queue": [], "prefill": []}
    for seed in range(4):
        traffic = world(300, seed)
        gone = np.arange(300) % 5 == 0
        requests = cancelled(seen(traffic), gone, traffic.prompt if known else np.full(300, -1))

        table = attribute(requests, [scraped(traffic, 0.5, rows=~gone)])

        assert {"prior"} == set(table.quality[gone])
        for part, covered in inside.items():
            error_s = np.abs(getattr(table, f"{part}_s") - getattr(traffic, f"{part}_s"))[gone]
            covered.extend((error_s <= 1.645 * getattr(table, f"{part}_sd_s")[gone]).tolist())

    assert min(np.mean(covered) for covered in inside.values()) >= 0.85


def test_an_unknown_number_of_tokens_is_not_none():
    """What is expected of a cancelled request without a count is the mean of the others, and less sure."""
    traffic = world(300, 3)
    gone = np.arange(300) % 5 == 0
    pages = [scraped(traffic, 0.5, rows=~gone)]

    counted, uncounted = (
        attribute(cancelled(seen(traffic), gone, prompt), pages) for prompt in (traffic.prompt, np.full(300, -1))
    )

    assert traffic.prefill_s[gone].mean() == pytest.approx(uncounted.prefill_s[gone].mean(), rel=0.25)
    assert uncounted.prefill_sd_s[gone].mean() > 2 * counted.prefill_sd_s[gone].mean()


def test_the_declared_tokens_of_a_cancelled_request_stand_for_its_count():
    """Chat templates added 30 tokens to each prompt: what is expected is as with the count itself, but for a few whose
    count also narrows down in which interval they began."""
    traffic = world(300, 3)
    gone = np.arange(300) % 5 == 0
    pages = [scraped(traffic, 0.5, rows=~gone)]

    counted = attribute(cancelled(seen(traffic), gone, traffic.prompt), pages)
    sent = replace(seen(traffic), declared_input_tokens=traffic.prompt - 30)
    meant = attribute(cancelled(sent, gone, np.full(300, -1)), pages)

    assert np.mean(np.isclose(counted.prefill_s[gone], meant.prefill_s[gone], rtol=1e-9, atol=0)) > 0.95


def test_unmatched_requests_are_flagged():
    """An interval in which the engine ended more requests than ours is mixed; ours alone in another stays exact."""
    traffic = world(150, 6, per_s=4.0)
    ours = np.arange(150) % 3 != 0

    table = attribute(seen(traffic, rows=ours), [scraped(traffic, 0.25)])

    truth = replace(traffic, queue_s=traffic.queue_s[ours], prefill_s=traffic.prefill_s[ours])
    edges = np.floor(traffic.observed_s / 0.25)
    with_unmatched = np.isin(edges[ours], edges[~ours])
    assert {"mixed_traffic"} == set(table.quality[with_unmatched])
    assert "mixed_traffic" not in set(table.quality[~with_unmatched])
    assert max(off_s(table, truth, table.quality == "exact")) < 1e-6


@pytest.mark.parametrize(
    ("page", "api"),
    [
        ("http://{}.test:8000/metrics", "http://{}.test:8000/v1"),
        ("http://***@{}.test:8000/metrics", "http://{}.test:8000/v1"),
        ("http://***@{}.test:8000/metrics", "http://***@{}.test:8000/v1"),
        ("http://{}.test/metrics", "HTTP://{}.Test:80/v1"),
        ("https://{}.test:443/metrics", "https://***@{}.TEST/v1"),
    ],
)
def test_engines_are_distinguished_by_the_address_that_was_asked(page: str, api: str):
    """Whatever else the URLs differ in: user and password, case, a port that is the scheme's own. By nothing else here:
    without token counts, engines that are taken together give nothing exact.
    """
    traffic = world(160, 7, per_s=4.0)
    left = np.arange(160) % 2 == 0
    both = [
        scraped(traffic, 0.05, url=page.format("left"), rows=left, tokens=()),
        scraped(traffic, 0.05, url=page.format("right"), rows=~left, tokens=()),
    ]
    url = np.where(left, api.format("left"), api.format("right")).astype(np.object_)

    table = attribute(replace(seen(traffic), endpoint_url=url), both)

    assert (table.quality == "exact").sum() > 100
    assert max(off_s(table, traffic, table.quality == "exact")) < 1e-6


def test_token_sums_distinguish_engines_behind_one_address():
    """Where they can; what is called exact is the engine's own number."""
    traffic = world(300, 8, per_s=8.0)
    left = np.random.default_rng(np.random.SeedSequence(9)).random(300) < 0.5
    both = [scraped(traffic, 0.2, url="http://a.test/metrics", rows=left)]
    both.append(scraped(traffic, 0.2, url="http://b.test/metrics", rows=~left))

    table = attribute(seen(traffic), both)

    alone = table.quality == "exact"
    assert 100 < alone.sum()
    assert max(off_s(table, traffic, alone)) < 1e-6
    assert (sharing(table)[alone] == 1).all()


def test_engines_behind_one_address_without_token_counts_give_nothing_exact():
    traffic = world(200, 10, per_s=2.0)
    left = np.arange(200) % 2 == 0
    both = [
        scraped(traffic, 0.1, url=f"http://{name}.test/metrics", rows=rows, tokens=())
        for name, rows in (("a", left), ("b", ~left))
    ]

    table = attribute(seen(traffic), both)

    assert {"tight"} == set(table.quality[sharing(table) == 1])
    assert "exact" not in set(table.quality)


def test_token_counts_of_another_tokenizer_prove_nothing():
    """A client that counts one token more than the engine for each prompt has the same intervals."""
    traffic = world(100, 11, per_s=4.0)
    requests = seen(traffic)

    straight = attribute(requests, [scraped(traffic, 0.2)])
    other = attribute(replace(requests, input_tokens=requests.input_tokens + 1), [scraped(traffic, 0.2)])

    assert straight.interval.tolist() == other.interval.tolist()
    assert straight.queue_s == pytest.approx(other.queue_s, abs=0.01)


@pytest.mark.parametrize(
    ("size", "interval_s", "reason"),
    [
        (4, 0.1, "our requests ended in 4 usable scrape intervals; 5 are needed"),
        (40, 100.0, "our requests ended in 1 usable scrape interval; 5 are needed"),
    ],
)
def test_too_few_intervals_give_nothing(size: int, interval_s: float, reason: str):
    traffic = world(size, 13, per_s=2.0)

    assert {reason} == set(attribute(seen(traffic), [scraped(traffic, interval_s)]).reason)


def test_without_scrapes_there_is_a_reason_and_without_requests_nothing():
    traffic = world(10, 14)

    assert {NOT_SCRAPED} == set(attribute(seen(traffic), []).reason)
    assert 0 == len(attribute(seen(traffic, rows=np.zeros(10, dtype=np.bool_)), [scraped(traffic, 0.1)]))
    nothing = [without(scraped(traffic, 0.1), range(10000))]
    table = attribute(seen(traffic), nothing)
    assert ({"none"}, {"no scrape succeeded"}) == (set(table.quality), set(table.reason))
    assert isinstance(server_percentiles(table, [observe(endpoint) for endpoint in nothing], "queue", [0.5]), Missing)
