"""Every protocol from end to end: planned, sent by a load worker to the simulated engine, held against the truth."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import socket
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from children import piped
from waiting import BOUND_S, movable_time

from sidelight.loadgen import records
from sidelight.loadgen.protocols.reading.reply import Reply, unpack
from sidelight.loadgen.protocols.request import Prompt, RequestTarget
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.loadgen.requests.table.fold import assemble
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.loadgen.transports import open_transport
from sidelight.loadgen.transports.transport import Exchange, Transport, WorkerSpec
from sidelight.rundir import frames
from sidelight.rundir.clock import AnchoredClock
from sidelight.simulator.engine.history import RequestRecord
from sidelight.simulator.server import running
from sidelight.simulator.settings import PROFILES, EngineSettings, SimulatorSettings
from sidelight.simulator.telemetry.truth import TruthLog

MS = 1_000_000
MODEL = "sim-llama"
TOKENS = 7
REQUESTS = 4
FAST = EngineSettings(speed=PROFILES["fast"], max_model_len=512, seed=5, eos_chance=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulator:
    http_url: str
    grpc_url: str
    truth: TruthLog

    def url(self, protocol: str) -> str:
        return self.grpc_url if protocol == "grpc" else self.http_url

    def records(self) -> dict[str, RequestRecord]:
        return {record.request_id: record for record in self.truth.records}


@contextlib.asynccontextmanager
async def simulated(limits: EngineSettings = FAST) -> AsyncIterator[Simulator]:
    grpc_urls: list[str] = []
    settings = SimulatorSettings(engine_settings=limits, grpc_port=0, per_request_metrics=True)
    truth = TruthLog(None)
    async with running(settings, truth=truth, on_grpc=grpc_urls.append) as url:
        yield Simulator(http_url=url, grpc_url=grpc_urls[0], truth=truth)


def planned(
    protocol: str, index: int, *, tokens: int = TOKENS, text: str = "", **target: object
) -> records.PlannedRequest:
    """A request of a plan, due 5 ms after the one before it."""
    asked = RequestTarget(**{"model": MODEL, "endpoint": protocol} | target)
    prompt = Prompt(text=text or f"question number {index}, which is long enough", system="Be brief.")
    path, body = PROTOCOLS[protocol].encode(asked, prompt, tokens, 0.0)
    return records.PlannedRequest(
        index=index, phase="measure", workload_class="c", path=path, body=body, input_tokens=-1, max_tokens=tokens,
        offset_ns=index * 5 * MS,
    )  # fmt: skip


async def worked(
    directory: Path, url: str, protocol: str, plan: list[records.PlannedRequest], **changes: object
) -> RequestLog:
    """Drive a plan by a load worker in a process of its own, to the end, and assemble its log."""
    frame_log = frames.FrameLog(directory / "plan")
    for record in (*plan, records.plan_end("measure")):
        records.append_record(frame_log, record)
    frame_log.close()
    offset_ns = time.time_ns() - time.monotonic_ns()
    spec = {
        "worker": 0, "workers": 1, "run_id": "run", "clock_offset_ns": offset_ns, "urls": [url], "headers": {},
        "out": str(directory / "requests.log"), "request_timeout_s": BOUND_S, "protocol": protocol,
        "transport": PROTOCOLS[protocol].transport,
    } | changes  # fmt: skip
    start_ns = time.monotonic_ns() + offset_ns
    run = {"cmd": "run", "plan": str(directory / "plan"), "start_ns": start_ns}
    async with piped("-m", "sidelight.loadgen.worker") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"".join(json.dumps(line).encode() + b"\n" for line in (spec, run)))
        async with asyncio.timeout(BOUND_S):
            while json.loads(line := await process.stdout.readline() or b"null")["event"] != "drained":
                assert b"error" not in line, line
        process.stdin.close()
        await asyncio.wait_for(process.wait(), BOUND_S)
    logged = records.read_log(directory / "requests.log")
    parts = [record for record in logged if isinstance(record, records.RequestPart)]
    return assemble(records.read_plan(directory / "plan"), parts, run_id="run", protocol=protocol)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A run of a load worker: its log, the engine's records by their id, and the rows of the requests of each kind."""

    log: RequestLog
    truth: dict[str, RequestRecord]
    plain: list[int]
    unknown_model: int | None
    too_long: int
    turns: list[int]

    def records(self, protocol: str, rows: list[int]) -> list[RequestRecord]:
        """Return the engine's records of these requests; some protocols give their replies no id."""
        prefix = {"tgi": "tgi-", "ollama": "ollama-"}.get(protocol)
        ids = self.log.response_id if prefix is None else prefix + self.log.request_id
        return [self.truth[response_id] for response_id in ids[rows]]


async def finished(directory: Path, protocol: str) -> Finished:
    """Send plain requests, after the second one for an unknown model and one that is too long; then a session."""
    unknown = [] if protocol in {"sglang", "tgi"} else [{"model": "other"}]  # which look at no model
    changes: list[dict[str, object]] = [{}, {}, *unknown, {"text": "long " * 1000}, {}, {}]
    plan = [planned(protocol, index, **change) for index, change in enumerate(changes)]
    turns = [len(plan), len(plan) + 1]
    first, second = (planned(protocol, index, text=text) for index, text in zip(turns, ("", "and then?"), strict=True))
    second = msgspec.structs.replace(second, session=0, turn=1, think_ns=0, offset_ns=-1)
    plan.append(msgspec.structs.replace(first, session=0, turns=(second,)))
    async with simulated() as simulator:
        got = await worked(directory, simulator.url(protocol), protocol, plan, sessions=True)
        return Finished(
            log=got,
            truth=simulator.records(),
            plain=[index for index, change in enumerate(changes) if not change],
            unknown_model=2 if unknown else None,
            too_long=2 + len(unknown),
            turns=turns,
        )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Finished]:
    """Return the finished run of a protocol, which all tests that only read it share."""
    return functools.cache(lambda protocol: asyncio.run(finished(tmp_path_factory.mktemp(protocol), protocol)))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_protocols_log_is_the_truth(run: Callable[[str], Finished], protocol: str):
    """Tokens, prompt tokens and ids are the engine's; a first token is not seen before it was made."""
    done = run(protocol)
    got, plain, records = done.log, done.plain, done.records(protocol, done.plain)
    assert ["ok"] * REQUESTS == got.status[plain].tolist(), got.error.tolist()
    assert [""] * REQUESTS == got.error[plain].tolist()
    assert [record.request_id.partition("-")[2] for record in records] == got.request_id[plain].tolist()
    assert [record.output_tokens for record in records] == got.output_tokens[plain].tolist() == [TOKENS] * REQUESTS
    assert [record.prompt_tokens for record in records] == got.input_tokens[plain].tolist()
    assert ["" if protocol == "grpc" else "length"] * REQUESTS == got.finish_reason[plain].tolist()
    # Two clocks, anchored apart.
    assert all(got.dispatch_ns[plain] <= [record.arrival_ns + MS for record in records])
    assert all(got.end_ns[plain] >= [record.finished_ns - MS for record in records])
    if not PROTOCOLS[protocol].streams:
        assert [-1] * REQUESTS == got.first_token_ns[plain].tolist()
        return
    assert all(got.first_token_ns[plain] >= [record.first_token_ns - MS for record in records])
    assert all(got.last_token_ns[plain] >= [record.finished_ns - MS for record in records])
    assert [TOKENS] * REQUESTS == np.diff(got.chunk_start)[plain].tolist()
    assert ["content"] * REQUESTS == got.first_kind[plain].tolist()
    assert [4] * TOKENS * (REQUESTS + 2) == got.chunk_chars.tolist()


UNKNOWN_MODEL = {
    "ollama": "http_404: model 'other' not found",
    "grpc": "server: Request for unknown model: 'other' is not found",
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_refused_request_says_why(run: Callable[[str], Finished], protocol: str):
    """In the server's words, without harm to the requests behind it; under gRPC's status OK it is a failure."""
    done = run(protocol)
    refusal = "failed" if protocol == "grpc" else "refused"
    assert "This model's maximum context length is 512 tokens" in done.log.error[done.too_long]
    assert done.log.status[done.too_long] == refusal
    if done.unknown_model is not None:
        standard = "http_404: The model `other` does not exist. Valid aliases: sim-llama."
        assert UNKNOWN_MODEL.get(protocol, standard) == done.log.error[done.unknown_model]
        assert done.log.status[done.unknown_model] == refusal
    assert {"ok"} == set(done.log.status[done.plain])


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_session_carries_its_history(run: Callable[[str], Finished], protocol: str):
    """The second turn's prompt is the first one's, its reply and what the turn adds, as the engine counts them."""
    got, turns = run(protocol).log, run(protocol).turns
    first, second = run(protocol).records(protocol, turns)
    assert (["ok", "ok"], [0, 0], [0, 1]) == (
        got.status[turns].tolist(), got.session[turns].tolist(), got.turn[turns].tolist(),
    )  # fmt: skip
    assert [first.prompt_tokens, second.prompt_tokens] == got.input_tokens[turns].tolist()
    # The system prompt stands in each turn's own request, as the workload wrote it.
    assert second.prompt_tokens >= first.prompt_tokens + TOKENS + 3
    assert first.finished_ns <= second.arrival_ns + MS


SAID = {
    "chat": ("vllm", {"queue", "prefill", "decode"}),
    "completions": ("vllm", {"queue", "prefill", "decode"}),
    "sglang": ("sglang", {"queue", "prefill", "decode", "ttft", "e2e"}),
    "ollama": ("ollama", {"prefill", "decode", "e2e"}),
    "exo": ("exo", {"prefill", "decode"}),
    "websocket": ("websocket", {"queue", "prefill", "decode", "ttft", "e2e"}),
}


@pytest.mark.parametrize("protocol", SAID)
def test_the_servers_own_times_are_the_truths(run: Callable[[str], Finished], protocol: str):
    """What a reply says of queue, prefill and decode is what the engine did; what it does not say is missing."""
    source, said = SAID[protocol]
    got = run(protocol).log
    record = run(protocol).records(protocol, [0])[0]
    assert (source, record.cached_tokens if protocol not in {"exo", "ollama"} else -1) == (
        got.timings_source[0],
        got.cached_tokens[0],
    )
    # vLLM's and SGLang's queue begins when the engine takes a request in, the others' when it arrives.
    begin_ns = record.queued_ns if source in {"vllm", "sglang"} else record.arrival_ns
    true = {
        "queue": record.scheduled_ns - begin_ns,
        "prefill": record.first_token_ns - record.scheduled_ns,
        "decode": record.finished_ns - record.first_token_ns,
        "ttft": record.first_token_ns - record.arrival_ns,
        "e2e": record.finished_ns - record.arrival_ns,
    }
    for name, true_ns in true.items():
        reported_ms = float(getattr(got, f"server_{name}_ms")[0])
        # SGLang's moments are Unix seconds, which a double holds to a quarter of a microsecond.
        expected = pytest.approx(true_ns / 1e6, abs=1e-3) if name in said else pytest.approx(math.nan, nan_ok=True)
        assert expected == reported_ms, name


def linked(url: str, protocol: str, **changes: object) -> Transport:
    """The link that a worker would choose."""
    fields = {
        "worker": 0, "workers": 1, "run_id": "run", "clock_offset_ns": time.time_ns() - time.monotonic_ns(),
        "urls": [url], "headers": {}, "out": "", "request_timeout_s": BOUND_S, "protocol": protocol,
        "transport": PROTOCOLS[protocol].transport,
    } | changes  # fmt: skip
    spec = WorkerSpec(**fields)
    clock = AnchoredClock(offset_ns=spec.clock_offset_ns)
    return open_transport(spec, clock)


@contextlib.asynccontextmanager
async def under_way(url: str, protocol: str) -> AsyncIterator[tuple[Exchange, asyncio.Task[None]]]:
    """A request for very many tokens, of which the first have come."""
    exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
    async with linked(url, protocol) as link:
        sending = asyncio.create_task(link.perform(exchange, planned(protocol, 0, tokens=100_000), timeout_s=BOUND_S))
        await until(lambda: _caught_up(exchange) > 3000)
        yield exchange, sending
        await asyncio.wait_for(asyncio.wait([sending]), BOUND_S)


def _caught_up(exchange: Exchange) -> int:
    """Take in what has come, as the recorder does before it looks; the bytes of the body so far."""
    exchange.catch_up()
    return len(exchange.body)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110  # what happens elsewhere sets no event
            await asyncio.sleep(0.01)


def reply_of(protocol: str, exchange: Exchange) -> Reply:
    stamps = (np.array(exchange.reads_ns, np.int64), np.array(exchange.read_ends, np.int64))
    return PROTOCOLS[protocol].read_reply(exchange.status, exchange.head, bytes(exchange.body), *stamps)


ENDLESS = replace(FAST, max_model_len=200_000, kv_blocks=20_000, max_num_batched_tokens=2048)
STREAMED = [name for name, protocol in PROTOCOLS.items() if protocol.streams]


@pytest.mark.parametrize("protocol", STREAMED)
async def test_an_engine_that_dies_in_the_middle_of_a_stream_is_an_error(protocol: str):
    """Under the status 200, in the server's words; what had come before stays."""
    async with contextlib.AsyncExitStack() as stack:
        simulator = await stack.enter_async_context(simulated(ENDLESS))
        async with under_way(simulator.url(protocol), protocol) as (exchange, sending):
            closing = asyncio.create_task(stack.aclose())
            await asyncio.wait([sending])
            await closing
    reply = reply_of(protocol, exchange)
    assert (200, "", False) == (exchange.status, exchange.error, reply.complete)
    assert "the engine has stopped" in reply.error
    assert reply.error.startswith("server: ")
    assert 0 < reply.first_token_ns <= reply.last_token_ns <= exchange.end_ns


async def test_a_server_that_is_killed_is_an_error():
    """In every protocol as a connection that broke, with what had come."""
    options = "--port 0 --grpc-port 0 --speed-profile fast --kv-blocks 50000 --max-model-len 200000 --seed 1"
    async with piped("-m", "sidelight.simulator", *options.split()) as process:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), BOUND_S))
        async with contextlib.AsyncExitStack() as stack:
            sent = {}
            for protocol in set(STREAMED) - {"messages", "tgi", "ollama"}:  # whose replies end when the model wants
                url = ready["grpc_url" if protocol == "grpc" else "url"]
                sent[protocol], _ = await stack.enter_async_context(under_way(url, protocol))
            process.kill()
    for protocol, exchange in sent.items():
        reply = reply_of(protocol, exchange)
        assert exchange.error.startswith("reset: "), (protocol, exchange.error)
        assert (200, "", False) == (exchange.status, reply.error, reply.complete), protocol
        assert 0 < reply.first_token_ns <= exchange.end_ns, protocol


async def test_where_nothing_listens_is_an_error():
    """In every transport as a connection that could not be made."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        for protocol in ("chat", "websocket", "grpc"):
            async with linked(url, protocol) as link:
                exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
                await link.perform(exchange, planned(protocol, 0), timeout_s=BOUND_S)
            assert "connect: Connection refused" == exchange.error, protocol
            assert (0, -1) == (exchange.status, exchange.submit_ns)
            assert exchange.end_ns > 0


@pytest.mark.parametrize("transport", ["chat", "websocket", "grpc"])
async def test_a_server_that_accepts_and_says_nothing_times_out(transport: str, monkeypatch: pytest.MonkeyPatch):
    """With what was waited for."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        asked.set()
        await hold.wait()
        writer.close()

    asked, hold = asyncio.Event(), asyncio.Event()
    move = movable_time(monkeypatch)
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    exchange = Exchange(index=0, scheduled_ns=0, dispatch_ns=0)
    async with linked(url, transport) as link:
        performing = asyncio.create_task(link.perform(exchange, planned(transport, 0), timeout_s=BOUND_S))
        await asyncio.wait_for(asked.wait(), BOUND_S)
        move(BOUND_S)
        await performing
    hold.set()
    server.close()
    await server.wait_closed()
    missing = "response" if transport == "chat" else "connection"
    assert f"timeout: no {missing} within {BOUND_S:g} s" == exchange.error


@pytest.mark.parametrize("protocol", STREAMED)
async def test_a_cancelled_stream_is_abandoned_by_the_server(protocol: str):
    """Cancelling ends the request at once, and the engine stops working on it."""
    async with simulated(ENDLESS) as simulator:
        async with under_way(simulator.url(protocol), protocol) as (exchange, sending):
            sending.cancel()
        assert sending.cancelled()
        assert exchange.end_ns > 0
        await until(lambda: len(simulator.truth.records) > 0)
        assert "abort" == simulator.truth.records[0].finish_reason
    reply = reply_of(protocol, exchange)
    assert ("", False, "") == (reply.error, reply.complete, reply.finish_reason)


@pytest.mark.parametrize("protocol", STREAMED)
async def test_a_reply_without_its_texts_is_counted_as_before(protocol: str, tmp_path: Path):
    """The log has its tokens and their times, lengths of its reads, its hash, and none of its bytes."""
    async with simulated() as simulator:
        plan = [planned(protocol, 0)]
        got = await worked(tmp_path, simulator.url(protocol), protocol, plan, redact_bodies=True)
    assert (["ok"], [TOKENS]) == (got.status.tolist(), got.output_tokens.tolist())
    assert got.chunk_chars.all()
    logged = records.read_log(tmp_path / "requests.log")
    part = next(part for part in logged if isinstance(part, records.RequestPart) and part.last)
    assert (64, b"") == (len(part.sha256), unpack(part).body)
    assert got.received_bytes.tolist() == [unpack(part).ends[-1]]
