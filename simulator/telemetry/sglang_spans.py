"""A request's spans as sent by SGLang 0.5.23 at its default trace level.

They were recorded from a real one.

Its span from arrival to end bears the attributes. Under it stand the threads that worked for it, of two processes with
a service.instance.id each, and under these the stages:

    Req 75f9f6aa
      Tokenizer(host:... | pid:...)                       tokenize, api_server_dispatch
      Scheduler [TP 0]  [PP 0] (host:... | pid:...)       request_process, prefill_waiting, prefill_forward,
                                                          decode_waiting, decode_forward
        prefill_forward of several chunks                 chunked_prefill of each
        decode_forward                                    decode_loop of each token after the first; after a retraction
                                                          chunked_prefill, decode_waiting, decode_forward in it

Of engines that share requests, by its source (never run): the root's name begins with the role, its attributes have the
room, and the scheduler's stages are

    prefill   prefill_prepare, prefill_bootstrap, prefill_waiting, prefill_forward, prefill_transfer_kv_cache
    decode    decode_prepare, decode_bootstrap, decode_transferred, decode_waiting, decode_forward, in which fake_output

The prefill engine has its first token out once the KV cache is sent, which is here as planned.

The waits between api_server_dispatch and request_process, and those behind a retraction, have no span. The prefix that
several samples share gives two requests' spans: its attributes under the one, its stages under the other.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from sidelight.simulator.engine.history import RequestRecord, StepTimes
from sidelight.simulator.telemetry.otlp import Value, describe, identity, latencies

SCOPE = "sglang server"
_HOST = uuid.uuid5(uuid.NAMESPACE_OID, "simulated host").hex
_THREADS = {"Tokenizer": "Tokenizer", "Scheduler": "Scheduler [TP 0]  [PP 0] "}


@dataclass(slots=True, kw_only=True)
class _Tree:
    """The spans of one request so far, each with the thread that sent it."""

    record: RequestRecord
    trace_id: bytes
    kv_role: str
    spans: list[tuple[str, Span]] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def add(
        self, name: str, parent_id: bytes, times: tuple[int, int], attributes: Mapping[str, Value], thread: str
    ) -> bytes:
        """Add a span and return its id."""
        result = Span(
            name=name,
            trace_id=self.trace_id,
            span_id=identity(self.record, f"span {next(self._numbers)}", 8),
            parent_span_id=parent_id,
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=times[0],
            end_time_unix_nano=times[1],
        )
        describe(result, attributes)
        self.spans.append((instance_of(thread, self.kv_role), result))
        return result.span_id

    def root(self, name: str, parent_id: bytes, attributes: Mapping[str, Value]) -> bytes:
        """Add a request's span."""
        both: dict[str, Value] = {"rid": name, "module": "sglang::request"}
        if (meeting := self.record.meeting) is not None:
            both["bootstrap_room"] = hex(meeting.number)
        times = (self.record.arrival_ns, _ended_ns(self.record))
        return self.add(f"{self.kv_role} Req {name[:8]}", parent_id, times, both | dict(attributes), "Tokenizer")

    def thread(self, name: str, parent_id: bytes, times: tuple[int, int], ranks: Mapping[str, Value]) -> bytes:
        """Add the span of a thread."""
        process: dict[str, Value] = {"host_id": _HOST, "pid": os.getpid(), "thread_label": name}
        full = f"{_THREADS[name]}(host:{_HOST[:8]} | pid:{os.getpid()})"
        return self.add(full, parent_id, times, dict(ranks) | process, name)

    def stage(self, name: str, parent_id: bytes, start_ns: int, end_ns: int, **attributes: int) -> bytes:
        """Add a stage of the scheduler."""
        return self.add(name, parent_id, (start_ns, end_ns), attributes, "Scheduler")


@cache
def instance_of(thread: str, kv_role: str = "") -> str:
    """Return the service.instance.id of the process with that thread."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, f"{thread} {kv_role}{os.getpid()}"))


def spans_of(
    record: RequestRecord, trace_id: bytes, parent_id: bytes, model: str, kv_role: str
) -> Iterator[tuple[str, Span]]:
    """Yield the spans of a finished request, each with its process's service.instance.id."""
    tree = _Tree(record=record, trace_id=trace_id, kv_role=kv_role)
    root_id = tree.root(record.request_id, parent_id, _attributes(record, model))
    _tokenizer(tree, root_id)
    if record.role == "prefix":
        name = uuid.UUID(bytes=identity(record, "prefix", 16)).hex
        inference_s = (record.finished_ns - record.dispatched_ns) / 1e9
        latency = {"gen_ai.latency.e2e": record.e2e_s, "gen_ai.latency.time_in_model_inference": inference_s}
        root_id = tree.root(name, parent_id, latency)
        _tokenizer(tree, root_id)
    _scheduler(tree, root_id)
    yield from tree.spans


def _attributes(record: RequestRecord, model: str) -> dict[str, Value]:
    """Return the attributes of the request's span; its prefill runs from the dispatch, so all waits are in it."""
    attributes = {
        **latencies(record),
        "gen_ai.usage.cached_tokens": record.cached_tokens,
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.request.n": record.samples,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": f'["{record.finish_reason}"]',
        "gen_ai.latency.time_in_model_decode": record.decode_s,
    }
    if record.role == "prefix":
        return attributes | {"gen_ai.usage.completion_tokens": 0}
    dispatched_ns, first_ns, ended_ns = _dispatched_ns(record), record.first_token_ns, _ended_ns(record)
    if record.meeting is not None and record.meeting.send_ns:
        first_ns = ended_ns
    return attributes | {
        "gen_ai.latency.time_to_first_token": (first_ns - record.arrival_ns) / 1e9,
        "gen_ai.latency.e2e": (ended_ns - record.arrival_ns) / 1e9,
        "gen_ai.latency.time_in_model_prefill": (first_ns - dispatched_ns) / 1e9,
        "gen_ai.latency.time_in_model_inference": (ended_ns - dispatched_ns) / 1e9,
    }


def _dispatched_ns(record: RequestRecord) -> int:
    """Return the time at which the scheduler had a request: of two engines that meet, before they do."""
    return record.dispatched_ns if record.meeting is None else record.meeting.begun_ns


def _ended_ns(record: RequestRecord) -> int:
    return record.finished_ns + (record.meeting.send_ns if record.meeting is not None else 0)


def _tokenizer(tree: _Tree, root_id: bytes) -> None:
    arrival_ns, dispatched_ns = tree.record.arrival_ns, _dispatched_ns(tree.record)
    thread_id = tree.thread("Tokenizer", root_id, (arrival_ns, dispatched_ns), {})
    for name, start_ns in (("tokenize", arrival_ns), ("api_server_dispatch", dispatched_ns)):
        tree.add(name, thread_id, (start_ns, dispatched_ns), {}, "Tokenizer")


def _scheduler(tree: _Tree, root_id: bytes) -> None:
    record, meeting = tree.record, tree.record.meeting
    ranks = {"tp_rank": 0, "pp_rank": 0}
    begun_ns = record.queued_ns if meeting is None else meeting.begun_ns
    thread_id = tree.thread("Scheduler", root_id, (begun_ns, _ended_ns(record)), ranks)
    if meeting is None:
        tree.stage("request_process", thread_id, begun_ns, begun_ns)
    else:
        tree.stage(f"{tree.kv_role}_prepare", thread_id, begun_ns, begun_ns)
        opened_ns = meeting.opened_ns if tree.kv_role == "decode" else record.queued_ns
        tree.stage(f"{tree.kv_role}_bootstrap", thread_id, begun_ns, opened_ns)
        if tree.kv_role == "decode":
            _decoded(tree, thread_id, opened_ns)
            return
    tree.stage("prefill_waiting", thread_id, record.queued_ns, record.scheduled_ns)
    forward_id = tree.stage("prefill_forward", thread_id, record.scheduled_ns, record.first_token_ns)
    chunks = [step for step in record.steps if step.end_ns <= record.first_token_ns]
    if len(chunks) > 1:
        _chunks(tree, forward_id, chunks, record.scheduled_ns)
    decodes = record.steps[len(chunks) :]
    if meeting is not None:
        tree.stage("prefill_transfer_kv_cache", thread_id, record.first_token_ns, _ended_ns(record))
    elif decodes:
        tree.stage("decode_waiting", thread_id, record.first_token_ns, decodes[0].begin_ns)
        forward_id = tree.stage("decode_forward", thread_id, decodes[0].begin_ns, record.finished_ns)
        _decodes(tree, forward_id, decodes)


def _decoded(tree: _Tree, thread_id: bytes, opened_ns: int) -> None:
    """Add the stages of a decode engine behind its handshake; the first step gives the prefill engine's token."""
    record = tree.record
    tree.stage("decode_transferred", thread_id, opened_ns, record.queued_ns)
    tree.stage("decode_waiting", thread_id, record.queued_ns, record.scheduled_ns)
    forward_id = tree.stage("decode_forward", thread_id, record.scheduled_ns, record.finished_ns)
    tree.stage("fake_output", forward_id, record.scheduled_ns, record.first_token_ns)
    if steps := record.steps[1:]:
        _decodes(tree, forward_id, steps)


def _chunks(tree: _Tree, parent_id: bytes, chunks: Sequence[StepTimes], start_ns: int) -> None:
    for chunk in chunks:
        tree.stage("chunked_prefill", parent_id, start_ns, chunk.end_ns)
        start_ns = chunk.end_ns


def _decodes(tree: _Tree, forward_id: bytes, steps: Sequence[StepTimes]) -> None:
    """Add the tokens after the first; a prefill among them follows a retraction, and what comes then is nested."""
    start_ns = steps[0].begin_ns
    was_prefill = False
    decoded = count()
    for step in steps:
        if step.is_prefill:
            start_ns = start_ns if was_prefill else step.begin_ns
            tree.stage("chunked_prefill", forward_id, start_ns, step.end_ns)
        else:
            if was_prefill:
                tree.stage("decode_waiting", forward_id, start_ns, step.begin_ns)
                forward_id = tree.stage("decode_forward", forward_id, step.begin_ns, tree.record.finished_ns)
                start_ns = step.begin_ns
            tree.stage("decode_loop", forward_id, start_ns, step.end_ns, decode_ct=next(decoded))
        start_ns, was_prefill = step.end_ns, step.is_prefill
