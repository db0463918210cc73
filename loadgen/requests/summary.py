"""The `client` object of `summary.json`, from a `RequestLog`; all pure.

`metrics` defines the metrics of a request, `delivery` what a gap between chunks may be called, `slo` the objectives,
`other_benchmarks` the same run in the terms of other benchmarks.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import UnsetType

from sidelight.loadgen.requests.delivery import (
    Chunks,
    ContradictedUsage,
    Delivery,
    chunks,
    contradicted_usage,
    delivery,
    itl_option,
)
from sidelight.loadgen.requests.metrics import RequestMetrics, counts, in_one_read, request_metrics
from sidelight.loadgen.requests.other_benchmarks.asiai import Asiai, asiai
from sidelight.loadgen.requests.other_benchmarks.exo import Exo, exo
from sidelight.loadgen.requests.other_benchmarks.siclait import Siclait, siclait
from sidelight.loadgen.requests.rates import (
    TOO_MANY_FAILED,
    HeldBack,
    Outage,
    OutputCost,
    Rates,
    Speculation,
    SteadyThroughput,
    errors_by_kind,
    outage,
    rates,
    speculation,
)
from sidelight.loadgen.requests.self_check.nodes import NodeSummary
from sidelight.loadgen.requests.slo.objectives import Slo
from sidelight.loadgen.requests.slo.results import SloResult, goodput, slo_result
from sidelight.loadgen.requests.table.log import STATUSES, RequestLog
from sidelight.rundir.columns import Bools, Floats, Ints, Texts, take
from sidelight.rundir.fields import UNSET, Count, Reasons, StampNs, doc
from sidelight.rundir.stats import Missing, Statistics, describe, finite, known

# The draft's recommended ranges of input tokens (ttft-conditional), by their lower ends.
INPUT_TOKEN_EDGES = (0, 256, 512, 1024, 2048, 4096)
NO_POWER = Missing(reason="the power of the engine's GPUs was not measured")
CONTRADICTED = "the replies contradict their usage"
NONE_HAS_IT = "no successful reply has it"
ONLY_REASONING = "no reply got beyond its reasoning"
ONE_READ = "replies came in one read each, which shows no time between their tokens"
RATES = ("output_tokens_per_s", "input_tokens_per_s", "requests_per_s", "goodput_requests_per_s")


class RateWindow(msgspec.Struct, frozen=True, kw_only=True):
    """The time window of the rates."""

    start_ns: Annotated[StampNs | None, doc("its start", "ns")]
    end_ns: Annotated[StampNs | None, doc("its end", "ns")]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of the measured phase by their outcome."""

    sent: Annotated[Count, doc("dispatched", "requests", source="draft `output-recording`")]
    ok: Annotated[Count, doc("a status of success and a complete reply", "requests")]
    failed: Annotated[Count, doc("broken, timed out, incomplete or an HTTP 5xx", "requests")]
    refused: Annotated[Count, doc("HTTP 4xx or content filter", "requests")]
    left: Annotated[
        Count | UnsetType, doc("ended by their clients, as `--leave` asks; absent where none was", "requests")
    ] = UNSET
    cancelled: Annotated[Count, doc("ended by the load generator", "requests")]
    in_flight: Annotated[Count, doc("without an end on record", "requests")]


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of the requests that ended ok within the window, over its length."""

    duration_s: Annotated[float | None, doc("the window's length", "s")]
    output_tokens_per_s: Annotated[
        float | None,
        doc(
            "output tokens of the requests that ended ok within the window, over its length",
            "tokens/s",
            source="draft `throughput-measurements`",
        ),
    ]
    input_tokens_per_s: Annotated[
        float | None, doc("their input tokens", "tokens/s", source="draft `throughput-measurements`")
    ]
    requests_per_s: Annotated[float | None, doc("their number", "requests/s", source="draft `throughput-measurements`")]
    goodput_requests_per_s: Annotated[
        float | None, doc("the number of those that met every objective", "requests/s", source="`--slo`")
    ]
    missing: Reasons = UNSET


class TailRatios(msgspec.Struct, frozen=True, kw_only=True):
    """p99 over p50: how heavy a tail is; null without values, or for a median of 0."""

    ttft_ms: Annotated[float | None, doc("Of `ttft_ms`.", "ratio")]
    e2e_ms: Annotated[float | None, doc("Of `e2e_ms`.", "ratio")]
    itl_ms: Annotated[float | None, doc("Of all gaps between chunks.", "ratio")]


class InputTokensBin(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one range of input lengths."""

    from_tokens: Annotated[Count, doc("Least length.", "tokens")]
    below_tokens: Annotated[int | None, doc("First length beyond the range; null: it has no end.", "tokens")]
    requests: Annotated[Count, doc("Number of requests.", "requests")]
    ttft_ms: Annotated[Statistics, doc("first token - submit", "ms")]


class ByInputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """TTFT by input length: the server's `usage`, else the declared tokenizer's count; each request is in one range."""

    by_usage: Annotated[Count, doc("Requests placed by the server's `usage`.", "requests")]
    by_declared: Annotated[Count, doc("Requests placed by the declared tokenizer's count.", "requests")]
    unknown: Annotated[Count, doc("Requests of unknown length, in no range.", "requests")]
    bins: Annotated[list[InputTokensBin], doc("The draft's ranges.")]


class ClassSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The requests of one workload class."""

    requests: Annotated[RequestCounts, doc("Requests by what became of them.", "requests")]
    ttft_ms: Annotated[Statistics, doc("first token - submit", "ms")]
    tpot_ms: Annotated[Statistics, doc("(last output - first output) / (output tokens - 1)", "ms")]
    e2e_ms: Annotated[Statistics, doc("last token - submit", "ms")]
    input_tokens: Annotated[Statistics, doc("input tokens of a request", "tokens")]
    output_tokens: Annotated[Statistics, doc("output tokens of a request", "tokens")]
    throughput: Annotated[Throughput, doc("Rates of the class's requests.")]


class OtherBenchmarks(msgspec.Struct, frozen=True, kw_only=True):
    """The run in the terms of other benchmarks."""

    siclait: Annotated[Siclait, doc("The eight metrics of siclait's script.")]
    asiai: Annotated[Asiai, doc("M1 to M8 of asiai's specification.")]
    exo: Annotated[Exo, doc("The rates of exo's bench.")]


class ClientSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The client's measurements; statistics are over the requests that ended ok."""

    window: Annotated[RateWindow, doc("what rates are over: `start_ns`, `end_ns`", "ns")]
    requests: Annotated[
        RequestCounts,
        doc(
            "`sent`, and of those `ok`, `failed`, `refused`, `left`, `cancelled`, `in_flight`",
            "requests",
            source="draft `output-recording`",
        ),
    ]
    retried: Annotated[
        Count,
        doc(
            "of `sent`, those sent again on a new connection, since the server closed the kept one before any "
            "byte of a reply; stamps are of the second sending",
            "requests",
        ),
    ]
    errors: Annotated[
        dict[str, Count], doc("requests that did not succeed, by the kind of error, most frequent first", "requests")
    ]
    outage: Annotated[Outage | UnsetType, doc("since when the server answered nothing any more; else absent")] = UNSET
    ttft_ms: Annotated[Statistics, doc("first token - submit", "ms", source="draft `ttft-setup`")]
    first_visible_token_ms: Annotated[
        Statistics | UnsetType,
        doc(
            "first token that is not reasoning (text, or a call of a tool) - submit, of the replies that have one; "
            "absent where no reply began with reasoning: it is the TTFT",
            "ms",
        ),
    ] = UNSET
    tpot_ms: Annotated[
        Statistics,
        doc(
            "(last output - first output) / (output tokens - 1); none below two tokens, nor where all came in "
            "one read. Events without visible text count where their tokens do, else it is last and first token. "
            "Of several choices: their times added up / (output tokens - choices)",
            "ms",
            source="draft `itl-setup`",
        ),
    ]
    itl_ms: Annotated[
        Statistics | UnsetType,
        doc(
            "gaps between consecutive content chunks of a choice, where over 90 % of the chunks are certain to "
            "hold one token",
            "ms",
            source="draft `itl-sse-measurement`, `itl-procedure`",
        ),
    ] = UNSET
    time_between_chunks_ms: Annotated[
        Statistics | UnsetType,
        doc(
            "the same gaps, under this name where chunks may hold several tokens",
            "ms",
            source="draft `itl-chunked`, option A",
        ),
    ] = UNSET
    e2e_ms: Annotated[
        Statistics,
        doc(
            "last token - submit; of a reply that was not streamed, end - submit",
            "ms",
            source="draft `throughput-measurements`",
        ),
    ]
    request_output_tps: Annotated[Statistics, doc("output tokens / e2e", "tokens/s", source="siclait")]
    input_tokens: Annotated[
        Statistics, doc("input tokens by the server's `usage`", "tokens", source="draft `token-counting`")
    ]
    output_tokens: Annotated[
        Statistics, doc("output tokens by the server's `usage`", "tokens", source="draft `token-counting`")
    ]
    reasoning_tokens: Annotated[
        Statistics | UnsetType,
        doc(
            "of the output tokens those of reasoning, by the server's `usage`; absent where none states them", "tokens"
        ),
    ] = UNSET
    contradicted_usage: Annotated[
        ContradictedUsage | UnsetType,
        doc("what `usage` stated and the replies contradict; else absent"),
    ] = UNSET
    chunks: Annotated[Chunks, doc("what the draft wants noted of chunks")]
    throughput: Annotated[
        Throughput,
        doc("rates of the requests that ended ok within the window, over its length: ramp and drain count in"),
    ]
    rates: Annotated[Rates, doc("what was offered, sent and served while the load lasted, without the drain")]
    steady: Annotated[
        SteadyThroughput | None,
        doc(
            "what was served without the first tenth of the load and the drain; null below two requests",
            source="draft `steady-state`",
        ),
    ] = None
    cost: Annotated[OutputCost | UnsetType, doc("what its output cost, by `--price`; absent without")] = UNSET
    speculation: Annotated[
        Speculation | UnsetType, doc("speculative decoding, by the replies; absent where none states its drafts")
    ] = UNSET
    latency_adjustment: Annotated[
        Literal["none"],
        doc(
            "what was subtracted from latencies, or added: nothing, not the network's time either",
            source="draft `network-latency`",
        ),
    ] = "none"
    jitter_ms: Annotated[
        Statistics,
        doc("standard deviation of a request's gaps, from two gaps on", "ms", source="draft `itl-measurements`"),
    ]
    max_pause_ms: Annotated[Statistics, doc("a request's longest gap", "ms", source="draft `itl-measurements`")]
    tail_p99_over_p50: Annotated[
        TailRatios, doc("p99 / p50 of `ttft_ms`, `e2e_ms` and all gaps", "ratio", source="draft `itl-measurements`")
    ]
    delivery: Annotated[Delivery, doc("how tokens were delivered in chunks")]
    by_input_tokens: Annotated[
        ByInputTokens,
        doc(
            "`bins` of `ttft_ms` by input length: [0,256) [256,512) [512,1024) [1024,2048) [2048,4096) [4096,); "
            "`from_tokens` and `below_tokens` are the ends, `requests` those within. Lengths `by_usage`, else "
            "`by_declared` (the declared tokenizer's), else `unknown`",
            "ms",
            source="draft `ttft-conditional`",
        ),
    ]
    classes: Annotated[
        dict[str, ClassSummary],
        doc(
            "`requests`, latencies, tokens and `throughput` of each workload class, by its name; together they are "
            "the whole",
            source="draft `fairness-measurements`",
        ),
    ]
    models: Annotated[
        dict[str, ClassSummary] | UnsetType,
        doc("the same of each model that was asked, as of LoRA adapters; absent where there was only one"),
    ] = UNSET
    by_node: Annotated[
        list[NodeSummary] | UnsetType,
        doc("the requests of each node of `--ray`, and how punctual it was; else absent"),
    ] = UNSET
    held_back: Annotated[
        HeldBack | UnsetType,
        doc("what `--concurrency` held back of the schedule of `--rate` or `--trace`; else absent"),
    ] = UNSET
    slo: Annotated[SloResult | None, doc("the objectives, and whether they were met; null: none were given")]
    other_benchmarks: Annotated[OtherBenchmarks, doc("the run in the terms of other benchmarks")]


def client_summary(
    log: RequestLog,
    *,
    start_ns: int | None = None,
    end_ns: int | None = None,
    slo: Slo | None = None,
    power_watts: float | Missing = NO_POWER,
    concurrency: int | None = None,
    stopped: bool = False,
    held: HeldBack | UnsetType = UNSET,
) -> ClientSummary:
    """Return the client's results for the requests of `log`.

    Statistics are over requests with status ok. Throughput counts the ok requests that ended within the window, over
    its length; the window is from the first submission to the last response where it is not given.

    power_watts            mean power of the engine's GPUs over the window, or why it is not known
    concurrency            the closed loop's N; None in an open loop
    held                   what a cap on requests in flight held back, where there was one
    stopped                whether the user stopped the run, and so ended what was in flight
    """
    ok = take(log, log.status == "ok")
    metrics, why = request_metrics(ok), _why_none(ok)
    start_ns, end_ns = _window(log, start_ns, end_ns)
    in_one = ONE_READ if in_one_read(ok).any() else ""
    gaps, single = describe(metrics.itl_ms, in_one or why), itl_option(ok) == "direct"
    why_tokens = CONTRADICTED if (ok.usage_contradiction != "").any() else why
    throughput = _throughput(ok, metrics, start_ns, end_ns, slo)
    exos = exo(log, concurrency=concurrency)
    return ClientSummary(
        window=RateWindow(start_ns=start_ns, end_ns=end_ns),
        requests=_counts(log),
        retried=int(log.retried.sum()),
        errors=errors_by_kind(log),
        outage=outage(log) or UNSET,
        ttft_ms=describe(metrics.ttft_ms, why),
        first_visible_token_ms=_if_any(ok.first_kind == "reasoning", metrics.first_visible_token_ms, ONLY_REASONING),
        tpot_ms=describe(metrics.tpot_ms, in_one or why_tokens),
        itl_ms=gaps if single else UNSET,
        time_between_chunks_ms=UNSET if single else gaps,
        e2e_ms=describe(metrics.e2e_ms, why),
        request_output_tps=describe(metrics.request_output_tps, why_tokens),
        input_tokens=describe(counts(ok.input_tokens), why_tokens),
        output_tokens=describe(counts(ok.output_tokens), why_tokens),
        reasoning_tokens=_if_any(ok.reasoning_tokens >= 0, counts(ok.reasoning_tokens), why),
        contradicted_usage=contradicted_usage(ok, start_ns, end_ns),
        chunks=chunks(ok),
        throughput=throughput,
        rates=rates(log, end_ns=end_ns, open_loop=concurrency is None),
        jitter_ms=describe(metrics.jitter_ms, "no reply came in three chunks or more"),
        max_pause_ms=describe(metrics.max_pause_ms, "no reply came in two chunks or more"),
        tail_p99_over_p50=TailRatios(**{name: _tail(getattr(metrics, name)) for name in TailRatios.__struct_fields__}),
        speculation=speculation(ok) or UNSET,
        delivery=delivery(ok),
        by_input_tokens=by_input_tokens(ok, metrics),
        classes=grouped(log, log.workload_class, start_ns, end_ns, slo),
        held_back=held,
        slo=None if slo is None else slo_result(slo, log, request_metrics(log), _rates(throughput), stopped=stopped),
        other_benchmarks=OtherBenchmarks(siclait=siclait(ok), asiai=asiai(ok, power_watts=power_watts), exo=exos),
    )


def too_many_failed(requests: RequestCounts) -> bool:
    """Return whether too many requests failed or were refused.

    Then nothing is concluded from the times of the others.
    """
    return requests.failed + requests.refused >= TOO_MANY_FAILED * max(requests.sent, 1)


def grouped(
    log: RequestLog, names: Texts, start_ns: int | None, end_ns: int | None, slo: Slo | None
) -> dict[str, ClassSummary]:
    """Return counts, latencies and throughput by the name of each request's group; together they are the whole log."""
    groups = sorted(set(names.tolist()))
    return {name: _class(take(log, names == name), start_ns, end_ns, slo) for name in groups}


def _class(log: RequestLog, start_ns: int | None, end_ns: int | None, slo: Slo | None) -> ClassSummary:
    ok = take(log, log.status == "ok")
    metrics, why = request_metrics(ok), _why_none(ok)
    return ClassSummary(
        requests=_counts(log),
        ttft_ms=describe(metrics.ttft_ms, why),
        tpot_ms=describe(metrics.tpot_ms, why),
        e2e_ms=describe(metrics.e2e_ms, why),
        input_tokens=describe(counts(ok.input_tokens), why),
        output_tokens=describe(counts(ok.output_tokens), why),
        throughput=_throughput(ok, metrics, start_ns, end_ns, slo),
    )


def by_input_tokens(ok: RequestLog, metrics: RequestMetrics) -> ByInputTokens:
    """Return TTFT by input length, in the draft's ranges (ttft-conditional).

    A length is the server's usage, else the declared tokenizer's; a request without either is in no range.
    """
    tokens = np.where(ok.input_tokens >= 0, ok.input_tokens, ok.declared_input_tokens)
    place = np.searchsorted(INPUT_TOKEN_EDGES, tokens, side="right") - 1
    ranges = zip(INPUT_TOKEN_EDGES, (*INPUT_TOKEN_EDGES[1:], None), strict=True)
    return ByInputTokens(
        by_usage=int((ok.input_tokens >= 0).sum()),
        by_declared=int(((ok.input_tokens < 0) & (tokens >= 0)).sum()),
        unknown=int((tokens < 0).sum()),
        bins=[
            InputTokensBin(
                from_tokens=first,
                below_tokens=below,
                requests=int((place == at).sum()),
                ttft_ms=describe(metrics.ttft_ms[place == at], "no request of this length"),
            )
            for at, (first, below) in enumerate(ranges)
        ],
    )


def _window(log: RequestLog, start_ns: int | None, end_ns: int | None) -> tuple[int | None, int | None]:
    """Return the window of the throughput. It is as given, else from the first submission to the last response."""
    starts, ends = log.submit_ns[log.submit_ns >= 0], log.end_ns[log.end_ns >= 0]
    if start_ns is None and len(starts):
        start_ns = int(starts.min())
    if end_ns is None and len(ends):
        end_ns = int(ends.max())
    return start_ns, end_ns


def output_tokens_within(log: RequestLog, start_ns: int, end_ns: int) -> int | Missing:
    """Return the output tokens of the requests that ended ok within a window."""
    within = (log.status == "ok") & (log.end_ns >= start_ns) & (log.end_ns <= end_ns)
    return _sum(log, log.output_tokens[within])


def _why_none(ok: RequestLog) -> str:
    return NONE_HAS_IT if len(ok) else "no request succeeded"


def _if_any(concerned: Bools, values: Floats, why: str) -> Statistics | UnsetType:
    """Return statistics if any request is concerned, else nothing."""
    return describe(values, why) if concerned.any() else UNSET


def _counts(log: RequestLog) -> RequestCounts:
    counts = {name: int((log.status == name).sum()) for name in STATUSES}
    return RequestCounts(sent=len(log), **{name: count for name, count in counts.items() if count or name != "left"})


def _throughput(
    ok: RequestLog, metrics: RequestMetrics, start_ns: int | None, end_ns: int | None, slo: Slo | None
) -> Throughput:
    """Return rates over a window, of the requests that ended ok within it; what is not known is null, with a reason."""
    rates: dict[str, float | None] = dict.fromkeys(RATES)
    if start_ns is None or end_ns is None or end_ns <= start_ns:
        reason = "nothing was sent and answered within the window"
        return Throughput(duration_s=None, **rates, missing=dict.fromkeys(RATES, reason))
    duration_s = (end_ns - start_ns) / 1e9
    within = (ok.end_ns >= start_ns) & (ok.end_ns <= end_ns)
    amounts = (*(_sum(ok, tokens[within]) for tokens in (ok.output_tokens, ok.input_tokens)), int(within.sum()))
    missing: dict[str, str] = {}
    for name, amount in zip(RATES, (*amounts, _good(ok, metrics, within, slo)), strict=True):
        if isinstance(amount, Missing):
            missing[name] = amount.reason
        else:
            rates[name] = amount / duration_s
    return Throughput(duration_s=duration_s, **rates, missing=missing or UNSET)


def _rates(throughput: Throughput) -> dict[str, float | Missing]:
    """Return the rates by name, and why those that are null are missing."""
    reasons = throughput.missing or {}
    values: dict[str, float | None] = {name: getattr(throughput, name) for name in RATES}
    return {name: Missing(reason=reasons[name]) if value is None else value for name, value in values.items()}


def _sum(ok: RequestLog, tokens: Ints) -> int | Missing:
    if uncounted := int((tokens < 0).sum()):
        why = "contradict their usage, or report none" if (ok.usage_contradiction != "").any() else "report no usage"
        return Missing(reason=f"{uncounted} of {len(tokens)} replies {why}")
    return int(tokens.sum())


def _good(ok: RequestLog, metrics: RequestMetrics, within: Bools, slo: Slo | None) -> int | Missing:
    """Count the requests within the window that met the objectives."""
    if slo is None:
        return Missing(reason="no service level objective was given")
    good = goodput(slo, ok, metrics)
    if within.any() and good.unknown[within].all():
        return Missing(reason=f"no reply has what {slo.text} bounds")
    return int((within & good.met).sum())


def _tail(values: Floats) -> float | None:
    """Return p99 over p50: how heavy the tail is (itl-measurements); null for no values, or a median of 0."""
    flat = known(values)
    if not len(flat):
        return None
    p50, p99 = np.quantile(flat, [0.5, 0.99])
    return finite(p99 / p50) if p50 > 0 else None
