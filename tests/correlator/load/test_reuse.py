"""Reuse of prompts' beginnings: two simulated engines in virtual time, against their own tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace as replace_columns
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recordings
import summaries
from msgspec.structs import replace

from sidelight.correlator.exact.table import unjoined
from sidelight.correlator.load.reuse import RunReuse, prefix_reuse, request_reuse, reuse_by_request
from sidelight.exporter.tables import requests_table
from sidelight.loadgen.records import PlannedRequest, append_record, hidden_request, plan_end
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.gateway_spans import RouterChoice
from sidelight.recorded.run import Run
from sidelight.rundir.columns import take
from sidelight.rundir.fields import UNSET
from sidelight.rundir.frames import FrameLog
from sidelight.rundir.stats import Missing
from sidelight.scraper.spans.requests import engine_spans
from sidelight.simulator.engine.history import EngineRequest
from sidelight.simulator.engine.tokenizer import encode
from sidelight.simulator.settings import EngineSettings, SimulatorSettings
from sidelight.simulator.virtual import SimulatedLoad, VirtualExchange, VirtualServer

BLOCK = 16


def texts(seed: int, count: int = 60) -> list[str]:
    """Prompts of 8 documents of 200 tokens each, and a question of 40; four bytes are a token."""
    drawn = np.random.default_rng(seed)
    documents = [bytes(drawn.integers(97, 123, 800, dtype=np.uint8)).decode() for _ in range(8)]
    return [
        documents[int(drawn.integers(8))] + bytes(drawn.integers(97, 123, 160, dtype=np.uint8)).decode()
        for _ in range(count)
    ]


def play(prompts: list[str], where: list[int], kv_blocks: int) -> list[VirtualExchange]:
    """Send each prompt to its engine, 100 ms apart, and return the exchanges in that order."""
    limits = EngineSettings(kv_blocks=kv_blocks, max_model_len=512)
    exchanges: list[VirtualExchange] = []
    for engine in sorted(set(where)):
        rows = [row for row, at in enumerate(where) if at == engine]
        requests = [
            EngineRequest(request_id=f"cmpl-{row}", prompt_token_ids=tuple(encode(prompts[row])), max_tokens=4)
            for row in rows
        ]
        server = VirtualServer(SimulatorSettings(engine_settings=limits), shown=False)
        load = SimulatedLoad(requests=requests, offsets_ns=[row * 100_000_000 for row in rows])
        exchanges += server.play(load).exchanges
    return sorted(exchanges, key=lambda each: each.submit_ns)


def log_of(exchanges: list[VirtualExchange], where: list[int]) -> RequestLog:
    rows = []
    for row, each in enumerate(exchanges):
        assert each.record
        rows.append(
            {
                "index": row,
                "trace_id": f"{row:032x}",
                "status": "ok",
                "phase": "measure",
                "endpoint_url": f"http://engine-{where[row]}",
                "submit_ns": each.submit_ns,
                "first_token_ns": each.token_ns[0],
                "input_tokens": each.record.prompt_tokens,
                "cached_tokens": each.record.cached_tokens,
            }
        )
    return recordings.request_log(rows)


def plans(prompts: list[str]) -> Iterator[PlannedRequest]:
    for row, prompt in enumerate(prompts):
        yield PlannedRequest(index=row, body=json.dumps({"model": "m", "prompt": prompt}).encode())


def reuse_of(
    folder: Path,
    log: RequestLog,
    planned: Sequence[PlannedRequest],
    choices: Sequence[RouterChoice] = (),
    *,
    pools: bool = False,
    **joined: Any,
) -> RunReuse:
    """Return the reuse of a run with these requests, plans, and choices of its router."""
    (folder / "raw").mkdir(exist_ok=True)
    with FrameLog(folder / "raw/plan-measure.log") as plan:
        for each in planned:
            append_record(plan, each)
        append_record(plan, plan_end("measure"))
    traces = dict(zip(log.trace_id.tolist(), choices, strict=False))
    run = Run(
        path=folder, manifest={}, requests=log, worker_stats=(), endpoints=(), spans=engine_spans([]), events=(),
        choices=traces,
    )  # fmt: skip
    return request_reuse(run, replace_columns(unjoined(len(log)), **joined), pools=pools)


def truth(prompts: list[str], exchanges: list[VirtualExchange], where: list[int]) -> list[dict[str, int]]:
    """Compare the tokens of each prompt with those of all that were answered before it was sent."""
    ids = [encode(prompt) for prompt in prompts]
    rows = []
    for row, each in enumerate(exchanges):
        best = {True: 0, False: 0}  # here or elsewhere
        for other, before in enumerate(exchanges):
            if before.token_ns[0] <= each.submit_ns:
                pairs = zip(ids[row], ids[other], strict=False)
                alike = next((at for at, (left, right) in enumerate(pairs) if left != right), len(ids[row]))
                shared = min(alike, len(ids[row]) - 1) // BLOCK * BLOCK
                best[where[other] == where[row]] = max(best[where[other] == where[row]], shared)
        assert each.record
        here = max(best[True], each.record.cached_tokens)
        rows.append({
            "elsewhere_tokens": max(best[False] - here, 0),
            "evicted_tokens": here - each.record.cached_tokens,
            "cached_tokens": each.record.cached_tokens,
        })  # fmt: skip
    return rows


@pytest.mark.parametrize("kv_blocks", [4000, 40])
@pytest.mark.parametrize("seed", range(10))
def test_each_miss_has_the_cause_of_the_engines_tokens(seed: int, kv_blocks: int, tmp_path: Path):
    """Requests by cause are those of the truth; tokens to 48: what a piece of text, and a block, may leave."""
    prompts = texts(seed)
    where = np.random.default_rng(seed + 100).integers(0, 2, len(prompts)).tolist()
    exchanges = play(prompts, where, kv_blocks)
    log = log_of(exchanges, where)
    columns = reuse_by_request(log, plans(prompts), log.endpoint_url)
    assert isinstance(columns, dict)
    expected = truth(prompts, exchanges, where)
    for cause in ("elsewhere_tokens", "evicted_tokens"):
        true = np.array([each[cause] for each in expected])
        assert (true > 0).tolist() == (columns[cause] > 0).tolist()
        assert np.abs(columns[cause] - true).max() <= 48
    assert any(each["elsewhere_tokens"] for each in expected)
    assert (kv_blocks == 40) == any(each["evicted_tokens"] for each in expected)
    choices = [RouterChoice(expected_ratio=ratio) for ratio in np.linspace(0.0, 1.0, len(log))]
    reuse = reuse_of(tmp_path, log, [*plans(prompts)], choices)
    assert all(getattr(reuse.requests, name).tolist() == column.tolist() for name, column in columns.items())
    summed = prefix_reuse(reuse, log.phase == "measure")
    assert summed.total
    assert summed.expected
    assert (60, 60 * 240 // 2) == (summed.expected.requests, summed.expected.expected_tokens)
    assert {"http://engine-0", "http://engine-1"} == set(summed.endpoints)
    parts = (summed.total.cached_tokens, summed.total.new_tokens)
    assert summed.total.prompt_tokens == sum(parts) + summed.total.elsewhere_tokens + summed.total.evicted_tokens


def test_a_turn_goes_on_with_its_conversation():
    """What a session's earlier turn had, its next could find; the reply's and its own tokens are new."""
    first = PlannedRequest(index=0, session=5, body=json.dumps({"prompt": "a" * 1600}).encode())
    later = PlannedRequest(index=1, session=5, turn=1, body=b"{}")
    row = {"status": "ok", "phase": "measure", "endpoint_url": "http://a"}
    log = recordings.request_log([
        {**row, "index": 0, "submit_ns": 0, "first_token_ns": 5, "input_tokens": 400, "cached_tokens": 0},
        {**row, "index": 1, "submit_ns": 9, "first_token_ns": 12, "input_tokens": 560, "cached_tokens": 16},
    ])  # fmt: skip
    columns = reuse_by_request(log, [replace(first, turns=(later,))], log.endpoint_url)
    assert isinstance(columns, dict)
    assert ([0, 384], [400, 160]) == (columns["evicted_tokens"].tolist(), columns["new_tokens"].tolist())


@pytest.mark.parametrize("missing", ["cached", "cache", "text", "endpoint"])
def test_without_counts_hits_texts_or_endpoints_nothing_is_known(missing: str, tmp_path: Path):
    row = {"index": 0, "status": "ok", "phase": "measure", "submit_ns": 0, "first_token_ns": 5, "input_tokens": 400}
    log = recordings.request_log(
        [row | {"endpoint_url": "http://a", "cached_tokens": {"cached": -1, "cache": 0}.get(missing, 16)}]
    )
    planned = PlannedRequest(index=0, body=json.dumps({"prompt": "a" * 1600}).encode())
    plan = [hidden_request(planned) if missing == "text" else planned]
    if missing == "endpoint":
        log = replace_columns(log, endpoint_url=np.array([""], dtype=object))
    assert isinstance(reuse_by_request(log, plan, log.endpoint_url), Missing)
    assert UNSET is prefix_reuse(reuse_of(tmp_path, log, plan), log.phase == "measure").total


def pair_of_requests() -> tuple[RequestLog, list[PlannedRequest]]:
    """Two requests of one prompt at one URL: of the second 16 tokens were cached."""
    row = {"status": "ok", "phase": "measure", "endpoint_url": "http://a", "input_tokens": 400}
    log = recordings.request_log([
        {**row, "index": 0, "trace_id": "0", "submit_ns": 0, "first_token_ns": 5, "cached_tokens": 0},
        {**row, "index": 1, "trace_id": "1", "submit_ns": 9, "first_token_ns": 12, "cached_tokens": 16},
    ])  # fmt: skip
    return log, [*plans(["a" * 1600] * 2)]


@pytest.mark.parametrize("named_by", ["spans", "router", "nothing"])
def test_an_engine_is_named_by_its_spans_else_by_its_router(named_by: str, tmp_path: Path):
    """Two engines behind one URL: what the first had computed, the second had to compute again."""
    log, planned = pair_of_requests()
    choices = [RouterChoice(endpoint=name, expected_ratio=0.5) for name in ("x", "y")]
    engines = {"clock": np.array(["p", "q"] if named_by == "spans" else ["", ""], dtype=object)}
    reuse = reuse_of(tmp_path, log, planned, [] if named_by == "nothing" else choices, **engines)
    names = {"spans": ["p", "q"], "router": ["x", "y"], "nothing": ["", ""]}[named_by]
    assert names == reuse.requests.served_by.tolist()
    assert ([np.nan] * 2 if named_by == "nothing" else [200, 200]) == pytest.approx(
        reuse.requests.expected_cached_tokens.tolist(), nan_ok=True
    )
    elsewhere, evicted = ([0, 0], [0, 368]) if named_by == "nothing" else ([0, 368], [0, 0])
    assert (elsewhere, evicted) == (reuse.requests.elsewhere_tokens.tolist(), reuse.requests.evicted_tokens.tolist())
    row = requests_table(log, take(summaries.parts(), slice(0, 2)), reuse.requests).to_pylist()[1]
    assert (names[1] or None, elsewhere[1], 16) == (row["served_by"], row["elsewhere_tokens"], row["new_tokens"])
    assert (None if named_by == "nothing" else 200) == row["expected_cached_tokens"]


@pytest.mark.parametrize("known_by", ["spans", "pages"])
def test_a_decode_engines_counts_say_nothing_about_caches(known_by: str, tmp_path: Path):
    """It counts what its prefill engine computed as cached; what a router expected is known all the same."""
    log, planned = pair_of_requests()
    shared = {"next_place": np.array([1, -1])} if known_by == "spans" else {}
    reuse = reuse_of(tmp_path, log, planned, [RouterChoice("x", 0.5)] * 2, pools=known_by == "pages", **shared)
    assert UNSET is prefix_reuse(reuse, log.phase == "measure").total
    row = requests_table(log, take(summaries.parts(), slice(0, 2)), reuse.requests).to_pylist()[1]
    assert ("x", 200, None) == (row["served_by"], row["expected_cached_tokens"], row["new_tokens"])


def test_a_cache_of_longer_blocks_loses_nothing():
    """As of vLLM on a CPU: 128 tokens a block, of which a beginning of 100 has none."""
    prompts = ["a" * 400 + "b" * 400, "a" * 400 + "c" * 400, "d" * 800, "d" * 800]
    cached = [0, 0, 0, 128]
    log = recordings.request_log([
        {"index": at, "status": "ok", "phase": "measure", "endpoint_url": "http://a", "submit_ns": 10 * at,
         "first_token_ns": 10 * at + 5, "input_tokens": 200, "cached_tokens": cached[at]}
        for at in range(4)
    ])  # fmt: skip
    long, short = (reuse_by_request(log, plans(prompts), log.endpoint_url, block) for block in (128, 16))
    assert isinstance(long, dict)
    assert isinstance(short, dict)
    assert [0, 0, 0, 0] == long["evicted_tokens"].tolist()
    assert short["evicted_tokens"][1] > 0
