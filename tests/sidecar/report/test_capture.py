"""`sidelight capture`: recorded traffic as a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from played_runs import arrivals, engine, lengths, simulated, write
from processes import Ended
from sent_spans import NOON, export, span
from watch_directories import begin

from sidelight.loadgen.plan.traces import read_trace
from sidelight.scraper.spans.log import ReceiverCounts, SpanLog, StateRecord

Command = Callable[..., Ended]


def test_a_run_is_the_trace_of_its_own_load(sidelight: Command, tmp_path: Path) -> None:
    prompts, outputs = lengths(30, 4)
    at_s = arrivals(30, 3.0, 4)
    write(tmp_path / "run", simulated(engine(), prompts, outputs, at_s=at_s), {"rate": 3.0})
    assert sidelight("capture", tmp_path / "run", "--out", tmp_path / "trace.jsonl").code == 0
    trace = read_trace(tmp_path / "trace.jsonl")
    assert trace.name == "mooncake"
    assert trace.input_tokens.tolist() == prompts.tolist()
    assert trace.output_tokens.tolist() == outputs.tolist()
    assert np.abs(trace.offsets_ns / 1e9 - (at_s - at_s[0])).max() < 1e-6


def test_a_watch_is_the_trace_of_the_requests_whose_tokens_are_known(sidelight: Command, tmp_path: Path) -> None:
    begin(tmp_path / "watch")
    log = SpanLog(tmp_path / "watch/raw/spans-000000.log")
    log.append(StateRecord(at_ns=NOON, state="started", counts=ReceiverCounts()))
    for second in range(10):
        usage = {} if second == 4 else {"gen_ai.usage.input_tokens": 100 + second, "gen_ai.usage.output_tokens": 7}
        about = {"gen_ai.operation.name": "chat", "gen_ai.response.time_to_first_chunk": 0.3, **usage}
        of_trace = (second + 1).to_bytes(16)
        log.append(
            export(
                [span("chat model", "client", attributes=about, trace=of_trace, clock_ms=1e3 * second)], at_s=second + 1
            )
        )
    log.close()
    ended = sidelight("capture", tmp_path / "watch", "--out", tmp_path / "trace.jsonl")
    assert ended.code == 0
    assert "9 requests" in ended.out
    trace = read_trace(tmp_path / "trace.jsonl")
    assert trace.input_tokens.tolist() == [100 + second for second in range(10) if second != 4]
    assert trace.output_tokens.tolist() == [7] * 9
    assert np.diff(trace.offsets_ns).tolist() == [*[10**9] * 3, 2 * 10**9, *[10**9] * 4]


def test_nothing_to_send_again_is_refused(sidelight: Command, tmp_path: Path) -> None:
    begin(tmp_path / "watch")
    ended = sidelight("capture", tmp_path / "watch")
    assert ended.code == 2
    assert not (tmp_path / "trace.jsonl").exists()
