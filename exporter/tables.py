"""Tables for notebooks: one row a request, one row a slice and series. Column names stay as they are: scripts and
dashboards rely on them (docs/reference/run-directory.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import asdict

from sidelight.correlator.breakdown import Parts
from sidelight.correlator.gateways import GatewayPart
from sidelight.correlator.load.reuse import REUSED, RequestReuse
from sidelight.correlator.parts import DECODE, GATEWAY_AT_MOST, INNER_PARTS, SEND, TTFT_PARTS
from sidelight.exporter.summary.correlation import Correlation
from sidelight.exporter.summary.result import Summary
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.recorded.nodes import NodeTime, clock_errors_ns
from sidelight.rundir.columns import take
from sidelight.scraper.window.quantities import GatewayPage, quantities_of
from sidelight.scraper.window.summary import Endpoint, Server

SERVER_TIMINGS = (
    "server_queue_ms",
    "server_prefill_ms",
    "server_decode_ms",
    "server_ttft_ms",
    "server_e2e_ms",
    "server_scheduler_intake_ms",
    "server_load_ms",
    "server_prompt_tps",
    "server_generation_tps",
)
COUNTS = (
    "input_tokens", "output_tokens", "reasoning_tokens", "cached_tokens", "choices", "usage_input_tokens",
    "usage_output_tokens", "usage_cached_tokens", "drafts", "draft_tokens", "draft_tokens_accepted",
)  # fmt: skip
_PARTS = (*TTFT_PARTS[:-1], DECODE, TTFT_PARTS[-1], SEND, *INNER_PARTS, GATEWAY_AT_MOST)
PARTS = {f"{part.name}_ms": part for part in _PARTS}

# A gateway of a request; the column has them outermost first.
GATEWAY = pa.struct(
    [
        pa.field("service", pa.string()),
        *(pa.field(name, pa.float64()) for name in ("part_ms", "request_ms", "at_most_ms")),
        pa.field("first_output", pa.string()),
    ]
)

# `source` is server (the engine's quantities), correlation (the breakdown of TTFT), endpoint or gateway (one page's).
SLICE_COLUMNS: dict[str, pa.DataType] = {
    **dict.fromkeys(("source", "quantity", "statistic", "unit"), pa.string()),
    **dict.fromkeys(("slice", "start_ns", "end_ns"), pa.int64()),
    "value": pa.float64(),
    "endpoint": pa.string(),
}
_BATCH = 10_000
_ROW_GROUP = 1 << 17


def requests_table(log: RequestLog, parts: Parts, reuse: RequestReuse, nodes: Sequence[NodeTime] = ()) -> pa.Table:
    """Return one row a request of a log, its parts and reuse: stamps in int64 ns, durations in float64 ms, else null.

    Columns from `network_ms` on are those of `correlator.breakdown.Parts`, which has them in seconds, then those of
    `RequestReuse`. With `nodes`, the last is the bound on their clocks' errors.
    """
    metrics = request_metrics(log)
    columns: dict[str, pa.Array[Any]] = {
        "request_id": _texts(log.request_id),
        "trace_id": pa.array(log.trace_id, pa.string()),
        "phase": pa.array(log.phase, pa.string()),
        "workload_class": pa.array(log.workload_class, pa.string()),
        "model": _texts(log.model),
        "endpoint_url": pa.array(log.endpoint_url, pa.string()),
        **{
            name: _whole(getattr(log, name))
            for name in (
                "scheduled_ns",
                "dispatch_ns",
                "connected_ns",
                "submit_ns",
                "first_output_ns",
                "last_output_ns",
                "first_token_ns",
                "last_token_ns",
                "end_ns",
            )
        },
        "output_tokens_source": _texts(log.output_tokens_source),
        **{name: _whole(getattr(log, name)) for name in COUNTS},
        "usage_contradiction": _texts(log.usage_contradiction),
        "status": pa.array(log.status, pa.string()),
        "http_status": _whole(np.where(np.asarray(log.http_status) > 0, log.http_status, -1)),
        "error": _texts(log.error),
        "finish_reason": _texts(log.finish_reason),
        "session": _whole(log.session),
        "turn": _whole(log.turn),
        "first_kind": _texts(log.first_kind),
        "response_id": _texts(log.response_id),
        "timings_source": _texts(log.timings_source),
        **{name: _real(getattr(log, name)) for name in SERVER_TIMINGS},
        "ttft_ms": _real(metrics.ttft_ms),
        "first_visible_token_ms": _real(metrics.first_visible_token_ms),
        "tpot_ms": _real(metrics.tpot_ms),
        "e2e_ms": _real(metrics.e2e_ms),
        **{name: _real(1e3 * parts.seconds(part)) for name, part in PARTS.items()},
        "gateways": pa.array([[_gateway(part) for part in row] for row in parts.gateways], pa.list_(GATEWAY)),
        "breakdown_source": pa.array(parts.source, pa.string()),
        "decode_source": pa.array(parts.decode_source, pa.string()),
        "breakdown_error_ms": _real(1e3 * parts.error_s),
        "breakdown_quality": pa.array(parts.quality, pa.string()),
        "breakdown_merged": _texts(parts.merged),
        "breakdown_reason": _texts(parts.reason),
        "engine_span_id": _texts(parts.engine_span_id),
        "engine_arrival_ns": _whole(parts.arrival_ns),
        "engine_first_token_ns": _whole(parts.engine_first_token_ns),
        **_reuse_columns(reuse),
    }
    bound = {"clock_error_ms": _real(clock_errors_ns(log, nodes) / 1e6)} if nodes else {}
    return pa.table({**columns, **bound})


def _reuse_columns(reuse: RequestReuse) -> dict[str, pa.Array[Any]]:
    tokens = {name: _rounded(getattr(reuse, name)) for name in REUSED}
    return {"served_by": _texts(reuse.served_by), **tokens}


def write_requests(
    log: RequestLog, parts: Parts, reuse: RequestReuse, nodes: Sequence[NodeTime], file: IO[bytes]
) -> None:
    """Write `requests_table` compressed, in row groups of up to 131,072 requests."""
    begins = range(0, max(len(log), 1), _ROW_GROUP)
    stretches = (slice(begin, min(begin + _ROW_GROUP, len(log))) for begin in begins)
    groups = (
        requests_table(take(log, rows), take(parts, rows), RequestReuse._make(column[rows] for column in reuse), nodes)
        for rows in stretches
    )
    first = next(groups)
    with pq.ParquetWriter(file, first.schema, compression="zstd") as writer:
        for group in chain([first], groups):
            writer.write_table(group)


def timeslices_table(summary: Summary) -> pa.Table:
    """Return one row a slice, quantity and statistic of a summary: the engine's quantities and the breakdown of TTFT.

    `slice` counts from 0. The engine's statistics are of what it counted in the slice, the breakdown is of the requests
    submitted in it. Of several pages, and of gateways, each has rows of its own, with its URL as `endpoint`.
    """
    server, schema = summary.server, pa.schema(SLICE_COLUMNS)
    endpoints = server.endpoints if len(server.endpoints) > 1 else []
    rows = chain(
        _page_rows("server", None, server),
        _breakdown_rows(summary.correlation),
        *(_page_rows("endpoint", page.url, page) for page in endpoints),
        *(_page_rows("gateway", page.url, page) for page in server.gateways or ()),
    )
    # In batches: as dicts, the rows of an hour would take a gigabyte.
    batches = iter(lambda: list(islice(rows, _BATCH)), [])
    return pa.concat_tables([schema.empty_table(), *(pa.Table.from_pylist(batch, schema=schema) for batch in batches)])


def write_parquet(table: pa.Table, file: IO[bytes]) -> None:
    """Write a table compressed; the same table gives the same bytes."""
    pq.write_table(table, file, compression="zstd")


def _page_rows(source: str, url: str | None, page: Server | Endpoint | GatewayPage) -> Iterator[dict[str, Any]]:
    for name, quantity in quantities_of(page):
        about = {"source": source, "quantity": name, "endpoint": url}
        units = {"count": "observations", "rate_per_s": f"{quantity.unit}/s"}
        for number, piece in enumerate(map(asdict, quantity.timeslices)):
            yield from _slice_rows(about, number, piece, {**dict.fromkeys(piece, quantity.unit), **units})


def _breakdown_rows(correlation: Correlation) -> Iterator[dict[str, Any]]:
    about = {"source": "correlation", "quantity": "ttft_breakdown"}
    for number, piece in enumerate(correlation.timeslices):
        flags = {
            f"{kind}_{name}": n for kind in ("coverage", "quality") for name, n in asdict(getattr(piece, kind)).items()
        }
        numbers = asdict(piece) | flags
        units = {name: "milliseconds" if name.endswith("_ms") else "requests" for name in numbers}
        units |= {name: "ratio" for name in flags if name.startswith("coverage")}
        yield from _slice_rows(about, number, numbers, units)


def _slice_rows(
    about: Mapping[str, Any], number: int, piece: Mapping[str, Any], units: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    for statistic, value in piece.items():
        if statistic not in {"start_ns", "end_ns"} and isinstance(value, int | float) and not isinstance(value, bool):
            yield {
                **about,
                "statistic": statistic,
                "unit": units[statistic],
                "slice": number,
                "start_ns": piece["start_ns"],
                "end_ns": piece["end_ns"],
                "value": float(value),  # counts of servers may be larger than 64 bits hold
            }


def _gateway(part: GatewayPart) -> dict[str, str | float | None]:
    times_s = {"part_ms": part.part_s, "request_ms": part.request_s, "at_most_ms": part.at_most_s}
    times_ms = {name: 1e3 * time_s if math.isfinite(time_s) else None for name, time_s in times_s.items()}
    return {"service": part.service, **times_ms, "first_output": part.first_by or "unknown"}


def _whole(values: npt.NDArray[np.int64]) -> pa.Array[Any]:
    column = np.asarray(values, dtype=np.int64)
    return pa.array(column, pa.int64(), mask=column < 0)


def _rounded(values: npt.NDArray[np.float64]) -> pa.Array[Any]:
    return _whole(np.where(np.isfinite(values), np.rint(values), -1).astype(np.int64))


def _real(values: npt.NDArray[np.float64]) -> pa.Array[Any]:
    return pa.array(values, pa.float64(), mask=~np.isfinite(values))


def _texts(values: Iterable[str]) -> pa.Array[Any]:
    return pa.array([text or None for text in values], pa.string())
