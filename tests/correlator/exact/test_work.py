"""What engines computed while requests waited: by spans against the steps of a simulated engine, in virtual time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import recordings

from sidelight.correlator.exact.join import join
from sidelight.correlator.exact.work import ROUNDS, Stays, stays_of, stretches_of, used_by_groups, used_while_waiting
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import take
from sidelight.rundir.stats import Missing
from sidelight.scraper.spans.log import ExportRecord, packed
from sidelight.scraper.spans.requests import engine_spans
from sidelight.simulator.engine.history import EngineRequest
from sidelight.simulator.settings import EngineSettings, SimulatorSettings
from sidelight.simulator.telemetry.spans import export
from sidelight.simulator.telemetry.truth import line, step_line
from sidelight.simulator.virtual import EPOCH_NS, Played, SimulatedLoad, VirtualServer

LIMITS = EngineSettings(max_num_seqs=24, max_num_batched_tokens=1024, max_model_len=16_384, kv_blocks=20_000)
Shares = dict[tuple[str, str], float]


def mixed_load(seed: int, limits: EngineSettings = LIMITS, **changes: Any) -> Played:
    """Play 120 requests, a tenth of them with prompts of many steps."""
    drawn = np.random.default_rng(seed)
    requests = []
    for number in range(120):
        is_batch = drawn.random() < 0.1
        length = int(drawn.integers(3000, 9000) if is_batch else drawn.integers(40, 500))
        requests.append(
            EngineRequest(
                request_id=f"cmpl-{number}",
                traceparent=f"00-{number + 1:032x}-{1:016x}-01",
                prompt_token_ids=tuple(drawn.integers(300, 30_000, length).tolist()),
                max_tokens=int(drawn.integers(1, 80)),
                **changes,
            )
        )
    offsets_ns = np.cumsum(drawn.exponential(1e9 / 8, len(requests))).astype(int).tolist()
    server = VirtualServer(SimulatorSettings(engine_settings=replace(limits, seed=seed)), shown=False)
    return server.play(SimulatedLoad(requests=requests, offsets_ns=offsets_ns), keep_steps=True)


def spans_of(played: Played, limits: EngineSettings = LIMITS) -> ExportRecord:
    records = tuple(each.record for each in played.exchanges if each.record)
    sent = export(records, SimulatorSettings(engine_settings=limits))
    return packed(EPOCH_NS, "grpc", sent.SerializeToString())


def log_of(played: Played) -> RequestLog:
    rows = []
    for each in played.exchanges:
        assert each.record
        known = {
            "status": "ok",
            "http_status": 200,
            "request_id": each.request.request_id,
            "trace_id": each.request.traceparent[3:35],
            "submit_ns": each.submit_ns,
            "end_ns": each.end_ns,
            "input_tokens": each.record.prompt_tokens,
            "cached_tokens": each.record.cached_tokens,
        }
        rows.append(known | dict.fromkeys(("first_output_ns", "first_token_ns"), each.token_ns[0]))
    return recordings.request_log(rows)


def known_stays(log: RequestLog, *exports: ExportRecord) -> Stays:
    spans = engine_spans(exports)
    stays = stays_of(log, join(log, spans), spans)
    assert isinstance(stays, Stays)
    return stays


def truth(played: Played) -> tuple[dict[str, Any], list[Any]]:
    """Return the lines of --truth by the ids of replies, and those of --truth-steps."""
    requests = [json.loads(line(each.record)) for each in played.exchanges if each.record]
    return {each["response_id"]: each for each in requests}, [json.loads(step_line(step)) for step in played.steps]


def by_rule(requests: dict[str, Any], name: str) -> Shares:
    """Divide a wait by the rule, from the truth: plainly, a matrix of prompts and stretches."""
    stamps = {
        each: (of["scheduled_ns"], of["first_token_ns"], of["finished_ns"], of["prompt_tokens"] - of["cached_tokens"])
        for each, of in requests.items()
    }
    bounds = sorted({at for of in stamps.values() for at in of[:3]})
    lasts = np.diff(bounds).astype(float)
    places = {at: place for place, at in enumerate(bounds)}
    laid = np.zeros((len(stamps), len(lasts)))
    decoding = np.zeros_like(laid)
    for row, (begin, first, end, _) in enumerate(stamps.values()):
        laid[row, places[begin] : places[first]] = lasts[places[begin] : places[first]]
        decoding[row, places[first] : places[end]] = 1.0
    prompts = np.array([of[3] for of in stamps.values()], dtype=float)
    busy = laid.any(axis=0)
    for _ in range(ROUNDS):
        laid *= (prompts / laid.sum(axis=1))[:, None]
        laid[:, busy] *= lasts[busy] / lasts[busy].sum() * laid.sum() / laid.sum(axis=0)[busy]
    laid *= (prompts / laid.sum(axis=1))[:, None]
    begin, end = requests[name]["queued_ns"], requests[name]["first_token_ns"]
    waited = np.diff(np.clip(bounds, begin, end)) / (end - begin) / np.maximum((laid + decoding).sum(axis=0), 1e-9)
    used = {"prefill": laid @ waited, "decode": decoding @ waited}
    return {
        (each, phase): float(shares[row])
        for phase, shares in used.items()
        for row, each in enumerate(stamps)
        if shares[row] > 0
    }


def by_steps(requests: dict[str, Any], steps: Sequence[Any], name: str) -> Shares:
    """Divide a wait step by step, by the tokens that each computed."""
    begin_ns, end_ns = requests[name]["queued_ns"], requests[name]["first_token_ns"]
    used: Counter[tuple[str, str]] = Counter()
    for step in steps:
        if begin_ns <= step["begin_ns"] and step["end_ns"] <= end_ns:
            for each, tokens in step["computed"].items():
                phase = "prefill" if step["end_ns"] <= requests[each]["first_token_ns"] else "decode"
                share_ns = (step["end_ns"] - step["begin_ns"]) * tokens / sum(step["computed"].values())
                used[each, phase] += share_ns / (end_ns - begin_ns)
    return dict(used)


def by_spans(stays: Stays, log: RequestLog, at: int) -> Shares:
    wait_s = (stays.first_ns[at] - stays.queued_ns[at]) / 1e9
    stretches = stretches_of(stays)
    assert isinstance(stretches, dict)
    used = used_while_waiting(stays, stretches[stays.engine[at]], at)
    return {
        (log.request_id[stays.row[stay]], phase): float(used_s[stay]) / wait_s
        for phase, used_s in zip(("prefill", "decode"), used, strict=True)
        for stay in np.flatnonzero(used_s)
    }


def largest_difference(left: Shares, right: Shares) -> float:
    return max(abs(left.get(key, 0.0) - right.get(key, 0.0)) for key in {*left, *right})


@pytest.mark.parametrize("seed", range(20))
def test_shares_by_spans_are_those_of_the_truth(seed: int):
    """Exact for the stated rule; by the tokens of each step, which no span tells, no share differs by over 3 %."""
    played = mixed_load(seed)
    log, (requests, steps) = log_of(played), truth(played)
    stays = known_stays(log, spans_of(played))
    assert (1.0, 120, 0) == (stays.covered, stays.requests, stays.uncounted)
    for at in np.argsort(stays.queued_ns - stays.first_ns)[:10].tolist():
        shares, name = by_spans(stays, log, at), log.request_id[stays.row[at]]
        assert largest_difference(shares, by_rule(requests, name)) < 1e-9
        assert largest_difference(shares, by_steps(requests, steps, name)) < 0.03
        assert sum(shares.values()) == pytest.approx(1.0, abs=1e-9)


def test_groups_use_what_their_requests_use():
    """For each wait the sums over the requests of a group, without that which waits."""
    played = mixed_load(3)
    log = log_of(played)
    stays = known_stays(log, spans_of(played))
    groups = np.arange(len(stays)) % 3
    stretches = stretches_of(stays)
    assert isinstance(stretches, dict)
    used_s = used_by_groups(stays, stretches.values(), groups, 3)
    for at in range(len(stays)):
        each = np.stack(used_while_waiting(stays, stretches[stays.engine[at]], at))
        each[:, at] = 0.0
        expected = [each[:, groups == group].sum(axis=1).tolist() for group in range(3)]
        assert used_s[at].tolist() == [pytest.approx(both, abs=1e-9) for both in expected]


def test_what_is_cached_is_not_computed():
    """The second of two equal prompts computes the last block alone, and counts for so much; unstated, for all."""
    prompt = tuple(range(300, 300 + 1600))
    asked = [
        EngineRequest(
            request_id=f"cmpl-{at}", traceparent=f"00-{at + 1:032x}-{1:016x}-01", prompt_token_ids=prompt, max_tokens=5
        )
        for at in range(2)
    ]
    server = VirtualServer(SimulatorSettings(engine_settings=LIMITS), shown=False)
    played = server.play(SimulatedLoad(requests=asked, offsets_ns=[0, 10**9]))
    log = log_of(played)
    assert [1600, 16] == known_stays(log, spans_of(played)).tokens.tolist()
    unstated = known_stays(replace(log, cached_tokens=np.array([-1, -1])), spans_of(played))
    assert ([1600, 1600], 2) == (unstated.tokens.tolist(), unstated.uncounted)


@pytest.mark.parametrize(("without", "is_known"), [(6, True), (7, False)])
def test_too_few_spans_tell_nothing(without: int, is_known: bool):
    played = mixed_load(1)
    log, spans = log_of(played), engine_spans([spans_of(replace(played, exchanges=played.exchanges[without:]))])
    stays = stays_of(log, join(log, spans), spans)
    assert is_known == isinstance(stays, Stays)
    assert is_known != isinstance(stays, Missing)


def test_each_engine_of_a_pair_has_waits_of_its_own():
    """By its own steps and its own clock; a decode engine computes one token of a prompt that it loaded.

    Its reply counts all of the prompt as cached, as vLLM's does; the prefill engine computed it all the same.
    """
    prefill, decode = replace(LIMITS, kv_role="prefill"), replace(LIMITS, kv_role="decode", max_num_seqs=4)
    sent = [each.request for each in mixed_load(5).exchanges][:60]
    offsets_ns = [at * 60_000_000 for at in range(len(sent))]
    first = VirtualServer(SimulatorSettings(engine_settings=prefill), shown=False).play(
        SimulatedLoad(requests=[replace(each, max_tokens=1) for each in sent], offsets_ns=offsets_ns), keep_steps=True
    )
    ended = sorted(first.exchanges, key=lambda each: each.end_ns)
    budgets = {each.request_id: each.max_tokens + 1 for each in sent}
    second = VirtualServer(SimulatorSettings(engine_settings=decode), shown=False).play(
        SimulatedLoad(
            requests=[
                replace(each.request, max_tokens=budgets[each.request.request_id], remote_prefill=True)
                for each in ended
            ],
            offsets_ns=[each.end_ns - EPOCH_NS for each in ended],
        ),
        keep_steps=True,
    )
    answers = {each.request.request_id: each for each in second.exchanges}
    log = log_of(replace(first, exchanges=[answers[each.request_id] for each in sent]))
    log = replace(log, submit_ns=log_of(first).submit_ns, cached_tokens=log.input_tokens)
    stays = known_stays(log, spans_of(first, prefill), spans_of(second, decode))
    assert ["decode"] * 60 + ["prefill"] * 60 == sorted(stays.role.tolist())
    assert 2 == len(set(stays.engine.tolist()))
    for played, role in ((first, "prefill"), (second, "decode")):
        requests, _ = truth(played)
        for of in requests.values():
            of["cached_tokens"] += of.get("loaded_tokens", 0) - (1 if role == "decode" else 0)
        of_engine = np.flatnonzero(stays.role == role)
        for at in of_engine[np.argsort(stays.queued_ns[of_engine] - stays.first_ns[of_engine])][:10].tolist():
            expected = by_rule(requests, log.request_id[stays.row[at]])
            assert largest_difference(by_spans(stays, log, at), expected) < 1e-9


def test_one_request_waits_for_itself():
    played = mixed_load(2)
    log = take(log_of(played), np.arange(1))
    stays = known_stays(log, spans_of(played))
    assert {("cmpl-0", "prefill")} == set(by_spans(stays, log, 0))
