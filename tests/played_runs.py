"""Runs of an engine whose speed is known, played in virtual time: as tables, and as run directories."""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from sidelight.loadgen.records import PlannedRequest, RequestPart, append_record, plan_end
from sidelight.recorded.directory import create, write_json
from sidelight.recorded.events import PHASE_END, PHASE_START, Event
from sidelight.rundir.columns import Floats, Ints
from sidelight.rundir.frames import FrameLog
from sidelight.simulator.engine.history import EngineRequest
from sidelight.simulator.settings import EngineSettings, SimulatorSettings
from sidelight.simulator.virtual import SimulatedLoad, VirtualExchange, VirtualServer
from sidelight.twin.engine.steps import StreamedRequests

NETWORK_S = 0.004
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


def engine(**settings: object) -> EngineSettings:
    """Return an engine without ends of replies of their own and without cached prefixes."""
    known: dict[str, object] = {"kv_blocks": 100_000, "eos_chance": 0.0, "prefix_caching": False, **settings}
    return EngineSettings(**known)  # type: ignore[arg-type]


def lengths(count: int, seed: int, *, prompt: int = 300, output: int = 120) -> tuple[Ints, Ints]:
    """Return prompt and output tokens of requests."""
    random = np.random.default_rng(seed)
    return (
        np.maximum(1, random.lognormal(np.log(prompt), 0.6, count)).astype(np.int64),
        np.maximum(2, random.lognormal(np.log(output), 0.5, count)).astype(np.int64),
    )


def arrivals(count: int, rate_per_s: float, seed: int) -> Floats:
    """Return Poisson arrivals in seconds."""
    at_s: Floats = np.cumsum(np.random.default_rng([seed, 1]).exponential(1 / rate_per_s, count))
    return at_s


def simulated(
    settings: EngineSettings,
    prompts: Ints,
    outputs: Ints,
    *,
    at_s: Floats | None = None,
    concurrency: int = 1,
    network_s: float = NETWORK_S,
) -> list[VirtualExchange]:
    """Return the requests of a load on the simulated engine."""
    server = VirtualServer(SimulatorSettings(engine_settings=settings), network_s=network_s, shown=False)
    requests = [
        EngineRequest(request_id=str(number), prompt_token_ids=(number + 5,) * prompt, max_tokens=output)
        for number, (prompt, output) in enumerate(zip(prompts.tolist(), outputs.tolist(), strict=True))
    ]
    offsets_ns = None if at_s is None else np.rint(at_s * 1e9).astype(np.int64).tolist()
    load = SimulatedLoad(requests=requests, offsets_ns=offsets_ns, concurrency=concurrency)
    return server.play(load).exchanges


def streamed(exchanges: Sequence[VirtualExchange]) -> StreamedRequests:
    """Return requests as their client saw them."""
    origin_ns = exchanges[0].submit_ns
    tokens = [np.array(each.token_ns, np.int64) for each in exchanges]
    return StreamedRequests(
        submit_s=np.array([each.submit_ns - origin_ns for each in exchanges]) / 1e9,
        prompt_tokens=np.array([len(each.request.prompt_token_ids) for each in exchanges]),
        cached_tokens=np.zeros(len(exchanges), np.int64),
        output_tokens=np.array([len(each) for each in tokens]),
        token_s=(np.concatenate(tokens) - origin_ns) / 1e9,
        start=np.cumsum([0, *map(len, tokens)]),
    )


def run(settings: EngineSettings, *, count: int, rate_per_s: float, seed: int = 0) -> StreamedRequests:
    """Return a run at an open rate as its client saw it."""
    prompts, outputs = lengths(count, seed)
    return streamed(simulated(settings, prompts, outputs, at_s=arrivals(count, rate_per_s, seed)))


def write(
    path: Path, exchanges: Sequence[VirtualExchange], config: dict[str, object], *, hosts: Sequence[str] = ("h",)
) -> None:
    """Write the directory of a run with the writers that a run uses; requests went to the hosts in turn."""
    create(path)
    write_json(path / "manifest.json", {"run_id": "20260101-000000-abcdef", "status": "complete", "config": config})
    first_ns, last_ns = exchanges[0].submit_ns, max(each.end_ns for each in exchanges)
    with FrameLog(path / "raw/plan-measure.log") as plan, FrameLog(path / "raw/requests-0.log") as requests:
        for index, each in enumerate(exchanges):
            append_record(plan, _planned(index, each, first_ns))
            append_record(requests, _part(index, each, hosts[index % len(hosts)]))
        append_record(plan, plan_end("measure"))
    with FrameLog(path / "raw/events.log") as events:
        for name, at_ns in ((PHASE_START, first_ns), (PHASE_END, last_ns)):
            events.append(msgspec.msgpack.encode(Event(at_ns=at_ns, name=name, data={"phase": "measure"})))


def _planned(index: int, exchange: VirtualExchange, start_ns: int) -> PlannedRequest:
    return PlannedRequest(
        index=index,
        phase="measure",
        workload_class="synthetic-uniform",
        path="/v1/chat/completions",
        body=b"{}",
        input_tokens=len(exchange.request.prompt_token_ids),
        max_tokens=exchange.request.max_tokens,
        offset_ns=exchange.submit_ns - start_ns,
    )


def _part(index: int, exchange: VirtualExchange, host: str) -> RequestPart:
    tokens = len(exchange.token_ns)
    replies = [{"choices": [{"index": 0, "delta": {"content": f" w{number}"}}]} for number in range(tokens)]
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    usage = {"prompt_tokens": len(exchange.request.prompt_token_ids), "completion_tokens": tokens}
    events = [*replies, end, {"choices": [], "usage": usage}]
    pieces = [*(f"data: {json.dumps(each)}\n\n".encode() for each in events), b"data: [DONE]\n\n"]
    reads_ns = [*exchange.token_ns, *[exchange.end_ns] * (len(pieces) - tokens)]
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    return RequestPart(
        index=index,
        seq=0,
        last=True,
        worker=0,
        url=f"http://{host}/v1/chat/completions",
        scheduled_ns=exchange.submit_ns,
        dispatch_ns=exchange.submit_ns,
        connected_ns=exchange.submit_ns,
        submit_ns=exchange.submit_ns,
        reused=True,
        status=200,
        head=HEAD,
        reads_ns=array("q", reads_ns).tobytes(),
        read_ends=array("q", ends).tobytes(),
        body=zlib.compress(b"".join(pieces), 1),
        end_ns=exchange.end_ns,
        error="",
    )
