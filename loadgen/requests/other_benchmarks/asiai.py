"""M1 to M8 of asiai's Benchmark Metrics Specification 0.4.0, with its invariants and stability classes.

Its table knows two sources a metric: Ollama's own durations, and the client's clock for OpenAI-compatible servers,
which starts before the request is made. M8 is how much the speed of equal prompts varies from run to run, so that one
run has none. Where it writes a speed of 0.0, for a generation below 10 ms, there is none here, and such replies are
counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np

from sidelight.loadgen.requests.metrics import counts, span_ms, with_possible_times
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Bools, Floats, Texts
from sidelight.rundir.fields import UNSET, Count, Reasons, doc
from sidelight.rundir.stats import Missing, Statistics, describe, finite, known

SHORTEST_GENERATION_MS = 10.0
ONE_RUN = "it is the spread over runs of the same prompts, and this is one run: `sidelight sweep --repeat 3` has it"
STABLE_CV_PERCENT, VARIABLE_CV_PERCENT = 5.0, 10.0
Stability = Literal["stable", "variable", "unstable"]


class AsiaiSources(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by the source of their numbers."""

    server_durations: Annotated[Count, doc("Requests timed by Ollama's durations.", "requests")]
    client_clock: Annotated[Count, doc("Requests timed by the client's clock.", "requests")]
    tokens_by_server: Annotated[Count, doc("Replies whose tokens the server counted.", "requests")]
    tokens_estimated: Annotated[Count, doc("Replies whose tokens are a quarter of their characters.", "requests")]


class TotalAtLeastTtft(msgspec.Struct, frozen=True, kw_only=True):
    """M3 >= M2, always."""

    checked: Annotated[Count, doc("Requests that have both.", "requests")]
    violated: Annotated[Count, doc("Requests for which it does not hold.", "requests")]


class TotalIsSum(msgspec.Struct, frozen=True, kw_only=True):
    """M3 = M2 + M5."""

    checked: Annotated[Count, doc("Requests that have all three.", "requests")]
    greatest_residual_ms: Annotated[float | None, doc("Greatest difference of the two sides.", "ms")]


class Invariants(msgspec.Struct, frozen=True, kw_only=True):
    """The invariants between the metrics of a request."""

    total_at_least_ttft: Annotated[TotalAtLeastTtft, doc("M3 >= M2, always.")]
    total_is_ttft_plus_generation: Annotated[TotalIsSum, doc("M3 = M2 + M5.")]


class Asiai(msgspec.Struct, frozen=True, kw_only=True):
    """M1 to M8 of asiai's specification."""

    tok_per_sec: Annotated[
        Statistics,
        doc(
            "M1: output tokens / generation duration; none below 10 ms (asiai writes 0.0)",
            "tokens/s",
        ),
    ]
    ttft_ms: Annotated[Statistics, doc("M2: Ollama's `prompt_eval_duration`, else first output - dispatch", "ms")]
    total_duration_ms: Annotated[Statistics, doc("M3: Ollama's `total_duration`, else end - dispatch", "ms")]
    tokens_generated: Annotated[
        Statistics,
        doc(
            "M4: the server's count, else a quarter of the characters, at least 1; never the number of chunks", "tokens"
        ),
    ]
    generation_duration_ms: Annotated[Statistics, doc("M5: Ollama's `eval_duration`, else total - ttft", "ms")]
    power_watts: Annotated[float | None, doc("M6: mean power of the engine's GPUs in the window", "W")]
    tok_per_sec_per_watt: Annotated[float | None, doc("M7: mean of M1 / M6", "tokens/s/W")]
    std_dev_tok_s: Annotated[
        float | None,
        doc(
            "M8: root of the mean of the population variances of M1 over the runs of each prompt type; null of one run",
            "tokens/s",
        ),
    ]
    cv_percent: Annotated[float | None, doc("M8 / mean of M1", "%")]
    stability: Annotated[
        Stability | None, doc("by `cv_percent`: below 5 % `stable`, below 10 % `variable`, else `unstable`")
    ]
    missing: Reasons = UNSET
    below_10_ms: Annotated[Count, doc("replies that generated for less than 10 ms, and so have no speed", "requests")]
    sources: Annotated[
        AsiaiSources,
        doc("requests by `server_durations` and `client_clock`; `tokens_by_server` and `tokens_estimated`", "requests"),
    ]
    invariants: Annotated[
        Invariants,
        doc(
            "`total_at_least_ttft`: M3 >= M2, always, `checked` and `violated`; `total_is_ttft_plus_generation`: "
            "M3 = M2 + M5, with the `greatest_residual_ms`"
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class AsiaiColumns:
    """M1 to M5 of each request, float64[n], NaN where missing. by_server and estimated are bool[n]."""

    tok_per_sec: Floats
    ttft_ms: Floats
    total_duration_ms: Floats
    tokens_generated: Floats
    generation_duration_ms: Floats
    by_server: Bools
    estimated: Bools


def asiai_columns(log: RequestLog) -> AsiaiColumns:
    """Return M1 to M5 of each request.

    M4 is the server's count, else the log's estimate from the text's characters, never the number of chunks.
    """
    log = with_possible_times(log)
    asked_ns = np.where(log.dispatch_ns >= 0, log.dispatch_ns, log.submit_ns)
    by_server = (log.timings_source == "ollama") & ~np.isnan(
        log.server_prefill_ms + log.server_decode_ms + log.server_e2e_ms
    )
    total_ms = np.where(by_server, log.server_e2e_ms, span_ms(asked_ns, log.end_ns))
    ttft_ms = np.where(by_server, log.server_prefill_ms, span_ms(asked_ns, log.first_output_ns))
    generation_ms = np.where(by_server, log.server_decode_ms, np.maximum(total_ms - ttft_ms, 0.0))
    tokens = counts(log.output_tokens)
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.where(generation_ms >= SHORTEST_GENERATION_MS, tokens / (generation_ms / 1e3), np.nan)
    return AsiaiColumns(
        tok_per_sec=speed,
        ttft_ms=ttft_ms,
        total_duration_ms=total_ms,
        tokens_generated=tokens,
        generation_duration_ms=generation_ms,
        by_server=by_server,
        estimated=log.output_tokens_source == "estimate",
    )


def pooled_std(values: Floats, groups: Texts) -> float | Missing:
    """Return M8 of runs: the root of the mean, over groups of two runs or more, of each one's population variance.

    values, groups [R]  a run's speed, and what it ran: runs of equal names repeat each other
    """
    timed = ~np.isnan(values)
    variances = [
        float(speeds.var())
        for group in sorted(set(groups[timed].tolist()))
        if len(speeds := values[timed & (groups == group)]) > 1
    ]
    if not variances:
        return Missing(reason="nothing was run twice with a speed")
    return float(np.sqrt(np.mean(variances)))


def stability(cv_percent: float) -> Stability:
    """Return its class: below 5 % stable, below 10 % variable, else unstable."""
    if cv_percent < STABLE_CV_PERCENT:
        return "stable"
    return "variable" if cv_percent < VARIABLE_CV_PERCENT else "unstable"


def asiai(ok: RequestLog, *, power_watts: float | Missing) -> Asiai:
    """Return M1 to M8 over the requests that ended ok; `power_watts` is the mean power of the GPUs during the run."""
    columns = asiai_columns(ok)
    speeds = known(columns.tok_per_sec)
    mean = float(speeds.mean()) if len(speeds) else float("nan")
    watts = float("nan") if isinstance(power_watts, Missing) else power_watts
    why_slow = "no reply generated for 10 ms or more with a known token count"
    return Asiai(
        tok_per_sec=describe(columns.tok_per_sec, why_slow),
        ttft_ms=describe(columns.ttft_ms, "no reply came in chunks"),
        total_duration_ms=describe(columns.total_duration_ms, "no request succeeded"),
        tokens_generated=describe(columns.tokens_generated, "no reply has a token count"),
        generation_duration_ms=describe(columns.generation_duration_ms, "no reply came in chunks"),
        power_watts=finite(watts),
        tok_per_sec_per_watt=finite(mean / watts) if watts > 0 else None,
        std_dev_tok_s=None,
        cv_percent=None,
        stability=None,
        missing=_missing(power_watts, mean),
        below_10_ms=int((columns.generation_duration_ms < SHORTEST_GENERATION_MS).sum()),
        sources=AsiaiSources(
            server_durations=int(columns.by_server.sum()),
            client_clock=int((~columns.by_server).sum()),
            tokens_by_server=int(((ok.output_tokens >= 0) & ~columns.estimated).sum()),
            tokens_estimated=int(columns.estimated.sum()),
        ),
        invariants=invariants(columns),
    )


def invariants(columns: AsiaiColumns) -> Invariants:
    """Check the invariants: total >= ttft, always, and total = ttft + generation.

    Each is checked for the requests that have its values.

    The second holds exactly by the client's clock; Ollama's total has its load time and other work besides, which
    `greatest_residual_ms` shows.
    """
    residual_ms = known(columns.total_duration_ms - columns.ttft_ms - columns.generation_duration_ms)
    margin_ms = known(columns.total_duration_ms - columns.ttft_ms)
    greatest_ms = float(np.abs(residual_ms).max()) if len(residual_ms) else None
    return Invariants(
        total_at_least_ttft=TotalAtLeastTtft(checked=len(margin_ms), violated=int((margin_ms < 0).sum())),
        total_is_ttft_plus_generation=TotalIsSum(checked=len(residual_ms), greatest_residual_ms=greatest_ms),
    )


def _missing(power_watts: float | Missing, mean: float) -> dict[str, str]:
    missing = dict.fromkeys(("std_dev_tok_s", "cv_percent", "stability"), ONE_RUN)
    if isinstance(power_watts, Missing):
        missing |= dict.fromkeys(("power_watts", "tok_per_sec_per_watt"), power_watts.reason)
    elif math.isnan(mean):
        missing["tok_per_sec_per_watt"] = "no reply had a speed"
    return missing
