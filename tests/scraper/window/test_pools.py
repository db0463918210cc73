"""Pages of prefill and decode engines: each number is of the pool that it is about, and counted once."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import recordings
from series import endpoint_of_columns, scraped
from virtual_pair import poisson_means

from sidelight.correlator.estimate.intervals import Observed, observe
from sidelight.correlator.exact.join import join
from sidelight.correlator.exact.table import by_decode_engines
from sidelight.correlator.statistics.server_times import server_means
from sidelight.scraper.exposition import Series
from sidelight.scraper.series.log import rows
from sidelight.scraper.series.table import EndpointSeries, build
from sidelight.scraper.spans.requests import engine_spans
from sidelight.scraper.targets.scrape import Scrape
from sidelight.scraper.window.pools import roles_of
from sidelight.scraper.window.summary import server_summary
from sidelight.scraper.window.window import Window
from sidelight.simulator.settings import EngineSettings, SimulatorSettings
from sidelight.simulator.telemetry.pages import page_of

FETCHES = ("vllm:num_requests_kv_fetch_by_stage", (("stage", "in_progress"),))
REMOTE = ("vllm:prompt_tokens_cached_by_source_total", (("source", "p2p"),))


def page(ended: int, *, prompts: int = 1000, remote: int = -1, tokens: int = 1) -> EndpointSeries:
    """An engine's page, scraped twice, of one that may load KV caches where it says how many tokens it loaded."""
    counters = [("vllm:request_success_total", (), ended), ("vllm:prompt_tokens_total", (), prompts)]
    counters += [("vllm:generation_tokens_total", (), tokens * ended)]
    counters += [(*FETCHES, 0), (*REMOTE, remote)] if remote >= 0 else []
    series = [
        Series(name=name, labels=labels, family=name, type="gauge" if "num_" in name else "counter", help="")
        for name, labels, _ in counters
    ]
    values = np.array([[0.0] * len(counters), [float(risen) for *_, risen in counters]])
    at_ns = np.array([10**9, 2 * 10**9])
    return endpoint_of_columns(series, values, request_ns=at_ns, response_ns=at_ns)


@pytest.mark.parametrize(
    ("pages", "roles"),
    [
        ([page(80), page(80, remote=1000)], ["prefill", "decode"]),
        ([page(40), page(80, prompts=2000, remote=1990), page(41)], ["prefill", "decode", "prefill"]),
        ([page(80), page(80)], ["", ""]),
        ([page(80, remote=900), page(80, remote=900)], ["", ""]),
        ([page(80), page(80, remote=100)], ["", ""]),
        ([page(80), page(60, remote=1000)], ["", ""]),
        ([page(80, tokens=20), page(80, remote=1000, tokens=20)], ["", ""]),
        ([page(80, remote=1000)], [""]),
        ([page(0), page(0, remote=0)], ["", ""]),
        ([], []),
    ],
    ids=["pair", "pools", "replicas", "all load", "few tokens", "other counts", "offload", "alone", "idle", "no page"],
)
def test_two_pools_are_known_by_loads_of_one_alone_and_equal_counts(pages: list[EndpointSeries], roles: list[str]):
    assert roles == roles_of(pages)


@pytest.mark.parametrize(
    ("types", "roles"),
    [
        (["prefill", "decode", "prefill"], ["prefill", "decode", "prefill"]),
        (["prefill", "decode", "unified"], ["prefill", "decode", ""]),
        (["prefill", "prefill"], ["", ""]),
        (["unified", "unified"], ["", ""]),
    ],
)
def test_sglangs_pools_are_known_by_what_its_pages_state(types: list[str], roles: list[str]):
    """From the first page on, as the simulated engine shows them."""
    pages = []
    for number, name in enumerate(types):
        limits = EngineSettings(kv_role="" if name == "unified" else name)
        settings = SimulatorSettings(engine="sglang", engine_settings=limits)
        body, _ = page_of(settings, lambda: 10**9).page()
        pages += build(rows([scraped(10**9, body.decode(), url=f"http://{number}")]))
    assert roles == roles_of(pages)


@pytest.fixture(scope="module")
def pair() -> tuple[recordings.Recording, list[EndpointSeries]]:
    """Two real pods with 150 ms between them: 83 requests, and the pages of both."""
    path = recordings.SHARED / "pd/recorded/nixl-between150"
    if not path.exists():
        pytest.skip(f"no recording at {path}")
    anchor = json.loads((path / "load_meta.json").read_text())["anchor_start"]
    case = recordings.recorded(
        recordings.lines(path / "requests.jsonl.gz"), recordings.lines(path / "otlp_exports.jsonl.gz"), anchor
    )
    return case, [endpoint for pod in ("prefill", "decode") for endpoint in build(rows(pages_of(path, pod)))]


def pages_of(path: Path, pod: str) -> Iterator[Scrape]:
    with lzma.open(path / f"pages-{pod}.jsonl.xz", "rt") as file:
        anchor, *scrapes = map(json.loads, file)
    offset_ns = anchor["anchor"]["unix_ns"] - anchor["anchor"]["mono_ns"]
    for scrape in scrapes:
        if scrape.get("status") == 200:
            yield Scrape(
                url=f"http://{pod}/metrics",
                tick_ns=scrape["due_ns"] + offset_ns,
                request_ns=scrape["t0_ns"] + offset_ns,
                response_ns=scrape["t1_ns"] + offset_ns,
                status=200,
                content_type=scrape["ctype"],
                body=scrape["body"].encode(),
            )


def whole(endpoints: list[EndpointSeries]) -> Window:
    return Window(start_ns=int(endpoints[0].at_ns[0]), end_ns=int(endpoints[0].at_ns[-1]) + 1)


def test_the_totals_of_a_real_pair_count_each_request_once(
    pair: tuple[recordings.Recording, list[EndpointSeries]],
):
    """Queue and prefill are the prefill pod's, to 0.1 ms those of its spans; what ended and was made is the decode
    pod's; the TTFT of neither is a client's. Each page has its own.
    """
    case, endpoints = pair
    server = server_summary(endpoints, whole(endpoints), 2 * 10**9)
    assert ["prefill", "decode"] == [endpoint.role for endpoint in server.endpoints]
    first, second = (case.spans.role == role for role in ("prefill", ""))
    queue, prefill, decode = (getattr(server, f"{name}_time").stats for name in ("queue", "prefill", "decode"))
    assert (83, 83, 83, 83) == (queue.count, prefill.count, decode.count, server.requests_finished.stats.total)
    assert (queue.sum, prefill.sum, decode.sum) == pytest.approx(
        (case.spans.queue_s[first].sum(), case.spans.prefill_s[first].sum(), case.spans.decode_s[second].sum()),
        abs=1e-4,
    )
    assert int(case.spans.input_tokens[first].sum()) == server.prompt_tokens.stats.total
    assert {"ttft", "e2e_latency", "inference_time"} <= server.missing.keys()
    assert 83 == server.endpoints[0].ttft.stats.count


def test_the_pages_of_a_real_pair_give_the_means_of_both_pools(
    pair: tuple[recordings.Recording, list[EndpointSeries]],
):
    """Without a span: each pool's queue and prefill in the mean, where both ended as many requests as the client."""
    case, endpoints = pair
    prefill, decode = (observed for page in endpoints if isinstance(observed := observe(page), Observed))
    ended_ns, waits_s = case.requests.end_ns, (case.requests.first_token_ns - case.requests.submit_ns) / 1e9
    means = server_means(ended_ns, waits_s, [prefill], whole(endpoints), decoding=[decode])
    assert (83, 83) == (means.client_requests, means.server_requests)
    first, second = (case.spans.role == role for role in ("prefill", ""))
    spans = [times[rows].mean() for rows in (first, second) for times in (case.spans.queue_s, case.spans.prefill_s)]
    stated = [means.queue_s, means.prefill_s, means.decode_queue_s, means.first_step_s]
    assert spans == pytest.approx(stated, abs=1e-4)
    half = server_means(ended_ns[:40], waits_s[:40], [prefill], whole(endpoints), decoding=[decode, decode])
    assert (None, None) == (half.decode_queue_s, half.first_step_s)


def test_the_means_of_two_pools_have_intervals_by_their_pages():
    """Of 12 short runs in virtual time; how often of 200 is in benchmarks/RESULTS.md. All hold the mean of this run."""
    parts = ("queue", "prefill", "decode_queue", "first_step")
    means = [poisson_means((3, number), requests=250, per_s=10.0) for number in range(12)]
    assert {250} == {each.server_requests for each in means}
    held = []
    for part in parts:
        values_s = [getattr(each, f"{part}_s") for each in means]
        low_s, high_s = np.transpose([each.ci90_s[part] for each in means])
        assert ((low_s < values_s) & (values_s < high_s)).all()
        held += [*((low_s <= np.mean(values_s)) & (np.mean(values_s) <= high_s))]
    assert np.mean(held) >= 0.8


def test_the_times_in_replies_are_the_decode_engines():
    """Its queue and first step: what came before is in no reply."""
    stated = {"server_queue_ms": 30.0, "server_prefill_ms": 12.0, "server_decode_ms": 400.0}
    usual = {"status": "ok", "http_status": 200, "submit_ns": 10**9, "end_ns": 3 * 10**9, "first_token_ns": 2 * 10**9}
    joined = by_decode_engines(join(recordings.request_log([{**usual, **stated}]), engine_spans([])))
    assert (["response"], [0.03], [0.012], [0.4]) == (
        joined.source.tolist(), joined.decode_queue_s.tolist(), joined.first_step_s.tolist(), joined.decode_s.tolist(),
    )  # fmt: skip
    assert np.isnan([joined.queue_s, joined.prefill_s]).all()
