"""Spans of a request as protobuf messages, with reproducible ids."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from sidelight.simulator.engine.history import RequestRecord

Value = str | int | float


def span(record: RequestRecord, name: str, trace_id: bytes, parent_id: bytes, attributes: Mapping[str, Value]) -> Span:
    """Return a SERVER span from the request's arrival to its end."""
    result = Span(
        name=name,
        trace_id=trace_id,
        span_id=identity(record, name, 8),
        parent_span_id=parent_id,
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=record.arrival_ns,
        end_time_unix_nano=record.finished_ns,
    )
    describe(result, attributes)
    return result


def describe(described: Any, attributes: Mapping[str, Value]) -> None:
    """Add attributes to a span or a resource."""
    for key, value in attributes.items():
        kind = {str: "string_value", int: "int_value", float: "double_value"}[type(value)]
        setattr(described.attributes.add(key=key).value, kind, value)


def latencies(record: RequestRecord) -> dict[str, Value]:
    """Return the attributes that every engine's span of a request has."""
    return {
        "gen_ai.latency.time_to_first_token": record.ttft_s,
        "gen_ai.latency.e2e": record.e2e_s,
        "gen_ai.usage.prompt_tokens": record.prompt_tokens,
        "gen_ai.usage.completion_tokens": record.output_tokens,
    }


def identity(record: RequestRecord, what: str, size: int) -> bytes:
    """Return `size` reproducible bytes as an identity for a part of a request."""
    text = f"{record.request_id}/{record.arrival_ns}/{what}"
    return blake2b(text.encode(), digest_size=size).digest()
