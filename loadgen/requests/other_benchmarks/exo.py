"""The rates of exo's bench: prefill and generation speed of a request, and the aggregate of N released at one instant.

Its server measures both rates and reports them (`generation_stats`). Of a server that reports durations instead, the
rates follow by the same formulas; of one that reports nothing they are the client's, whose prefill time is all of TTFT:
queue and network included. `sources` counts the requests of each.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from sidelight.loadgen.requests.metrics import counts, span_ms, with_possible_times
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import NO_UNIT, Count, doc
from sidelight.rundir.stats import Statistics, describe


class RateSources(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by the source of a rate."""

    server_rate: Annotated[Count, doc("The rate that the server reported.", "requests")]
    server_duration: Annotated[Count, doc("Tokens over the duration that the server reported.", "requests")]
    client_clock: Annotated[Count, doc("Tokens over the time by the client's clock.", "requests")]


class ExoSources(msgspec.Struct, frozen=True, kw_only=True):
    """The sources of the rates."""

    prefill_tps: Annotated[RateSources, doc("of `prefill_tps`", "requests")]
    generation_tps: Annotated[RateSources, doc("of `generation_tps`", "requests")]


class ExoAggregate(msgspec.Struct, frozen=True, kw_only=True):
    """Batches of N requests that were released at one instant."""

    concurrency: Annotated[int | None, doc("N; null in an open loop", NO_UNIT)]
    batches: Annotated[Count, doc("batches of which every request ended ok", "batches")]
    incomplete_batches: Annotated[Count, doc("the other batches, which are left out", "batches")]
    agg_gen_tps: Annotated[
        Statistics, doc("the fastest `generation_tps` of N requests released at one instant, times N", "tokens/s")
    ]
    batch_wall_s: Annotated[Statistics, doc("from their shared start to the last end", "s")]


class Exo(msgspec.Struct, frozen=True, kw_only=True):
    """The rates of exo's bench."""

    prefill_tps: Annotated[
        Statistics,
        doc(
            "the server's rate, else input tokens / its prefill time, else input tokens / TTFT, queue and network "
            "included",
            "tokens/s",
        ),
    ]
    generation_tps: Annotated[
        Statistics,
        doc(
            "the server's rate, else (output tokens - 1) / its decode time, else (output tokens - 1) / "
            "(last token - first token)",
            "tokens/s",
        ),
    ]
    sources: Annotated[ExoSources, doc("requests by `server_rate`, `server_duration` and `client_clock`", "requests")]
    aggregate: Annotated[ExoAggregate, doc("batches of N requests released at one instant")]


def prefill_tps(log: RequestLog) -> tuple[Floats, Floats]:
    """Return prompt tokens per second of each request, float64[n], and its source.

    The source is a position in RateSources; NaN if missing.
    """
    tokens, log = counts(log.input_tokens), with_possible_times(log)
    return _first_known(
        log.server_prompt_tps,
        _rate(tokens, log.server_prefill_ms),
        _rate(tokens, span_ms(log.submit_ns, log.first_token_ns)),
    )


def generation_tps(log: RequestLog) -> tuple[Floats, Floats]:
    """Return tokens per second between the first and the last token: (tokens - 1) / span; none below two tokens."""
    later, log = np.where(log.output_tokens >= 2, log.output_tokens - 1.0, np.nan), with_possible_times(log)
    return _first_known(
        log.server_generation_tps,
        _rate(later, log.server_decode_ms),
        _rate(later, span_ms(log.first_token_ns, log.last_token_ns)),
    )


def exo(log: RequestLog, *, concurrency: int | None) -> Exo:
    """Return exo's figures; `log` holds every request of the run, `concurrency` is a closed loop's N."""
    ok = log.status == "ok"
    prefill, prefill_source = prefill_tps(log)
    generation, generation_source = generation_tps(log)
    return Exo(
        prefill_tps=describe(prefill[ok], "no reply has its prompt's token count and a prefill time"),
        generation_tps=describe(generation[ok], "no reply has two tokens and the time between them"),
        sources=ExoSources(
            prefill_tps=_count_sources(prefill_source[ok]), generation_tps=_count_sources(generation_source[ok])
        ),
        aggregate=_aggregate(log, generation, concurrency=concurrency),
    )


def _aggregate(log: RequestLog, generation: Floats, *, concurrency: int | None) -> ExoAggregate:
    """Return exo's aggregate: with one request in flight each is a batch, from its start to its end. More in flight are
    not released at one instant.
    """
    if concurrency != 1:
        nothing = describe([], "needs N requests released at one instant: a closed loop with a barrier")
        return ExoAggregate(
            concurrency=concurrency, batches=0, incomplete_batches=0, agg_gen_tps=nothing, batch_wall_s=nothing
        )
    ok = log.status == "ok"
    return ExoAggregate(
        concurrency=1,
        batches=int(ok.sum()),
        incomplete_batches=len(log) - int(ok.sum()),
        agg_gen_tps=describe(generation[ok], "no batch has a generation rate of every request"),
        batch_wall_s=describe((log.end_ns[ok] - log.dispatch_ns[ok]) / 1e9, "no batch succeeded as a whole"),
    )


def _rate(tokens: Floats, span: Floats) -> Floats:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return np.where(span > 0, tokens / (span / 1e3), np.nan)


def _first_known(*columns: Floats) -> tuple[Floats, Floats]:
    """Return the first column that has a value, row by row, and which it was."""
    values = np.full(len(columns[0]), np.nan)
    source = np.full(len(columns[0]), np.nan)
    for place, column in enumerate(columns):
        new = np.isnan(values) & np.isfinite(column)
        values[new], source[new] = column[new], place
    return values, source


def _count_sources(source: Floats) -> RateSources:
    names = enumerate(RateSources.__struct_fields__)
    return RateSources(**{name: int((source == place).sum()) for place, name in names})
