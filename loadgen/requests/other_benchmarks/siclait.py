"""The eight metrics of P. Siclait's "LLM Inference Performance Benchmarking from Scratch", by its script.

The clock of a request starts before its connection is opened, the first response is the first content that is not
empty (blanks count), and deviations are those of a population. Its script tokenizes prompts and outputs itself; here
the input's length is the declared tokenizer's, which it was made with, and the output's the server's usage.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from sidelight.loadgen.requests.metrics import counts, span_ms
from sidelight.loadgen.requests.table.log import RequestLog
from sidelight.rundir.columns import Floats
from sidelight.rundir.fields import UNSET, Count, Missing, Reasons, doc
from sidelight.rundir.stats import OF_VALUES, known

PERCENTILES = {"p75": 0.75, "p90": 0.90, "p99": 0.99}


class PopulationStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics as the script writes them; null where missing, and `missing` says why."""

    count: Annotated[Count, doc("Number of values.", "values")]
    mean: Annotated[float | None, doc("Arithmetic mean.", OF_VALUES)]
    std: Annotated[float | None, doc("Standard deviation of the population (ddof 0).", OF_VALUES)]
    min: Annotated[float | None, doc("Smallest value.", OF_VALUES)]
    max: Annotated[float | None, doc("Largest value.", OF_VALUES)]
    p75: Annotated[float | None, doc("75th percentile.", OF_VALUES)]
    p90: Annotated[float | None, doc("90th percentile.", OF_VALUES)]
    p99: Annotated[float | None, doc("99th percentile.", OF_VALUES)]
    missing: Missing = UNSET


class Siclait(msgspec.Struct, frozen=True, kw_only=True):
    """The eight metrics of siclait's script."""

    ttft_ms: Annotated[PopulationStatistics, doc("first output - dispatch", "ms")]
    request_latency_ms: Annotated[PopulationStatistics, doc("last token - dispatch", "ms")]
    itl_ms: Annotated[PopulationStatistics, doc("(latency - ttft) / (output tokens - 1)", "ms")]
    request_output_tps: Annotated[PopulationStatistics, doc("output tokens / latency", "tokens/s")]
    input_tokens: Annotated[PopulationStatistics, doc("input length by the declared tokenizer", "tokens")]
    output_tokens: Annotated[PopulationStatistics, doc("output length by the server's `usage`", "tokens")]
    duration_s: Annotated[float | None, doc("from the first dispatch to the last token", "s")]
    output_tps: Annotated[float | None, doc("all output tokens / `duration_s`", "tokens/s")]
    requests_per_s: Annotated[float | None, doc("all requests / `duration_s`", "1/s")]
    missing: Reasons = UNSET


def siclait(ok: RequestLog) -> Siclait:
    """Return the eight metrics over the requests that ended ok."""
    asked_ns = np.where(ok.dispatch_ns >= 0, ok.dispatch_ns, ok.submit_ns)
    inputs = np.where(ok.declared_input_tokens >= 0, counts(ok.declared_input_tokens), counts(ok.input_tokens))
    tokens = counts(ok.output_tokens)
    ttft_ms, latency_ms = span_ms(asked_ns, ok.first_output_ns), span_ms(asked_ns, ok.last_token_ns)
    with np.errstate(divide="ignore", invalid="ignore"):
        itl_ms = np.where(tokens >= 2, (latency_ms - ttft_ms) / (tokens - 1), np.nan)
        tps = np.where(latency_ms > 0, tokens / (latency_ms / 1e3), np.nan)
    answered = (asked_ns >= 0) & (ok.last_token_ns >= 0)
    duration_s = (
        float(np.ptp([asked_ns[answered].min(), ok.last_token_ns[answered].max()]) / 1e9) if answered.any() else 0.0
    )
    output_tps, requests_per_s, missing = _rates(tokens[answered], duration_s)
    return Siclait(
        ttft_ms=_statistics(ttft_ms, "no reply came in chunks"),
        request_latency_ms=_statistics(latency_ms, "no reply came in chunks"),
        itl_ms=_statistics(itl_ms, "no reply in chunks reports two tokens or more"),
        request_output_tps=_statistics(tps, "no reply in chunks reports its usage"),
        input_tokens=_statistics(inputs, "neither the plan nor a reply states it"),
        output_tokens=_statistics(tokens, "no reply reports its usage"),
        duration_s=duration_s or None,
        output_tps=output_tps,
        requests_per_s=requests_per_s,
        missing=missing or UNSET,
    )


def _rates(tokens: Floats, duration_s: float) -> tuple[float | None, float | None, dict[str, str]]:
    """Return output tokens and requests per second, and why one is not known."""
    if not duration_s:
        return None, None, dict.fromkeys(("output_tps", "requests_per_s"), "no reply came in chunks")
    requests_per_s = len(tokens) / duration_s
    if uncounted := int(np.isnan(tokens).sum()):
        return None, requests_per_s, {"output_tps": f"{uncounted} of {len(tokens)} replies report no usage"}
    return float(tokens.sum()) / duration_s, requests_per_s, {}


def _statistics(values: Floats, why_empty: str) -> PopulationStatistics:
    flat = known(values)
    if not len(flat):
        nothing = dict.fromkeys(["mean", "std", "min", "max", *PERCENTILES])
        return PopulationStatistics(count=0, **nothing, missing=why_empty)
    quantiles = np.quantile(flat, list(PERCENTILES.values())).tolist()
    return PopulationStatistics(
        count=len(flat),
        mean=float(flat.mean()),
        std=float(flat.std()),
        min=float(flat.min()),
        max=float(flat.max()),
        **dict(zip(PERCENTILES, quantiles, strict=True)),
    )
