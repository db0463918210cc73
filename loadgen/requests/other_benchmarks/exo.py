"""The rates of exo's bench: prefill and generation speed of a request, and the aggregate of N released at one instant.

Its server measures both rates and reports them (`generation_stats`). Of a server that reports durations instead, the
rates follow by the same formulas; of one that reports nothing they are the client's, whose prefill time is all of TTFT:
queue and network included. Which source served how many requests is told.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import to_builtins

from loadgen.requests.metrics import counts, span_ms
from loadgen.requests.table import RequestLog
from rundir.columns import Floats
from rundir.stats import describe

SOURCES = ("server_rate", "server_duration", "client_clock")


def prefill_tps(log: RequestLog) -> tuple[Floats, Floats]:
    """Prompt tokens per second of each request, float64[n], and its source, by position in SOURCES; NaN if missing."""
    tokens = counts(log.input_tokens)
    return _first_known(
        log.server_prompt_tps,
        _rate(tokens, log.server_prefill_ms),
        _rate(tokens, span_ms(log.submit_ns, log.first_token_ns)),
    )


def generation_tps(log: RequestLog) -> tuple[Floats, Floats]:
    """Tokens per second between the first and the last token: (tokens - 1) / span; none below two tokens."""
    later = np.where(log.output_tokens >= 2, log.output_tokens - 1.0, np.nan)
    return _first_known(
        log.server_generation_tps,
        _rate(later, log.server_decode_ms),
        _rate(later, span_ms(log.first_token_ns, log.last_token_ns)),
    )


def exo(log: RequestLog, *, concurrency: int | None, barrier: bool) -> dict[str, Any]:
    """exo's figures for summary.json; `log` holds every request of the run, in the order it was planned.

    concurrency, barrier   the closed loop's N, None in an open loop, and whether N were released at one instant
    """
    ok = log.status == "ok"
    prefill, prefill_source = prefill_tps(log)
    generation, generation_source = generation_tps(log)
    return {
        "prefill_tps": to_builtins(describe(prefill[ok], "no reply told its prompt's tokens and time")),
        "generation_tps": to_builtins(describe(generation[ok], "no reply told two tokens and the time between them")),
        "sources": {
            "prefill_tps": _count_sources(prefill_source[ok]),
            "generation_tps": _count_sources(generation_source[ok]),
        },
        "aggregate": _aggregate(log, generation, concurrency=concurrency, barrier=barrier),
    }


def _aggregate(log: RequestLog, generation: Floats, *, concurrency: int | None, barrier: bool) -> dict[str, Any]:
    """agg_gen_tps = max(generation_tps of a batch) x N, and its wall time: from the shared start to the last end.

    A batch in which a request did not succeed is told apart, and left out.
    """
    empty = {"concurrency": concurrency, "batches": 0, "incomplete_batches": 0}
    if concurrency is None or (concurrency > 1 and not barrier):
        reason = "needs N requests released at one instant: a closed loop with a barrier"
        missing = to_builtins(describe([], reason))
        return {**empty, "agg_gen_tps": missing, "batch_wall_s": missing}
    batches = len(log) // concurrency
    shape = (batches, concurrency)
    kept = slice(batches * concurrency)
    whole = (log.status[kept] == "ok").reshape(shape).all(axis=1)
    fastest = generation[kept].reshape(shape)[whole].max(axis=1, initial=-np.inf)
    started_ns = log.dispatch_ns[kept].reshape(shape)[whole].min(axis=1, initial=np.iinfo(np.int64).max)
    wall_s = (log.end_ns[kept].reshape(shape)[whole].max(axis=1, initial=-1) - started_ns) / 1e9
    return {
        "concurrency": concurrency,
        "batches": int(whole.sum()),
        "incomplete_batches": batches - int(whole.sum()) + bool(len(log) % concurrency),
        "agg_gen_tps": to_builtins(describe(fastest * concurrency, "no batch has a generation rate of every request")),
        "batch_wall_s": to_builtins(describe(wall_s, "no batch succeeded as a whole")),
    }


def _rate(tokens: Floats, span: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(span > 0, tokens / (span / 1e3), np.nan)


def _first_known(*columns: Floats) -> tuple[Floats, Floats]:
    """The first column that has a value, row by row, and which it was."""
    values = np.full(len(columns[0]), np.nan)
    source = np.full(len(columns[0]), np.nan)
    for place, column in enumerate(columns):
        new = np.isnan(values) & np.isfinite(column)
        values[new], source[new] = column[new], place
    return values, source


def _count_sources(source: Floats) -> dict[str, int]:
    return {name: int((source == place).sum()) for place, name in enumerate(SOURCES)}
