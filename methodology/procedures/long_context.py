"""Long Context Scaling: how the TTFT grows with the input, and how much of that is the prefill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from sidelight.correlator.statistics.intervals import Ends
from sidelight.loadgen.requests.metrics import input_tokens, request_metrics
from sidelight.methodology.measures.scaling import AtLength, ScalingModel, exponent, models
from sidelight.methodology.study.findings import (
    Cell,
    Plot,
    PlotLine,
    ResultQuantity,
    ResultTable,
    StudyFindings,
    SupportingNumber,
    plot,
    table,
)
from sidelight.methodology.study.model import (
    Done,
    Finished,
    Parameters,
    Procedure,
    Reader,
    Step,
    StepData,
    StudySettings,
)
from sidelight.methodology.study.planning import LEVEL, counting, fresh, of_kind
from sidelight.methodology.study.quantities import cells, mean, number, percentiles, reported_times
from sidelight.rundir.columns import Floats
from sidelight.rundir.printable.numbers import figure
from sidelight.rundir.stats import Missing

WARM_UP = "warm-up"
# By the draft short contexts warm the system up: as many tokens as it asks for, in little time.
SHORT_TOKENS, SHORT_OUTPUT, SHORT_AT_ONCE, SHORT_REQUESTS = 256, 100, 4, 8
LENGTHS = tuple(1024 * 2**at for at in range(8))
OUTPUT_TOKENS, CONCURRENCY, REQUESTS = 256, 1, 20
_LETTER = Parameters(lengths=LENGTHS, requests=REQUESTS, output_tokens=OUTPUT_TOKENS, concurrency=CONCURRENCY)
_POINTS = 60  # of the plot's curve
_NOTES = (
    "The draft requires Long Context for lengths that it lacks (below 8K): its structure, in the test's lengths.",
    "The draft's `maximum throughput at each length` is no maximum at 1 to 4 in flight: it is the one at that many.",
    "ms/1K tokens is TTFT over input tokens, of which the draft's example table is not made.",
    "All requests of a length count, the first tenth too: so few in flight leave no queue to build up.",
    "Requests of a short context warmed the system up, as the draft has it; the first of a length may be slower.",
)


def _lengths(asked: StudySettings) -> tuple[list[int], list[int]]:
    """Return the lengths that the model takes, ascending, and those that it does not."""
    output = asked.parameters.output_tokens or OUTPUT_TOKENS
    lengths = sorted(set(asked.parameters.lengths or LENGTHS))
    fits = [length for length in lengths if not asked.max_model_len or length + output <= asked.max_model_len]
    return fits, lengths[len(fits) :]


def _next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    lengths, skipped = _lengths(asked)
    ended = {each.step.options["input_tokens"] for each in of_kind(finished, LEVEL)}
    length = next((each for each in lengths if str(each) not in ended), None)
    if length is None:
        if lengths:
            return Done(reason="all lengths were run" + (f"; {_skipped(asked, skipped)}" if skipped else ""))
        return Done(reason=f"no length fits: {_skipped(asked, skipped)}", complete=False)
    parameters = asked.parameters
    options = {
        "workload": asked.options.get("workload", "long-context"),
        "input_tokens": str(length),
        "output_tokens": str(parameters.output_tokens or OUTPUT_TOKENS),
    }
    if not finished:
        options |= {"input_tokens": str(SHORT_TOKENS), "output_tokens": str(SHORT_OUTPUT)}
        given = {"kind": WARM_UP, "requests": SHORT_REQUESTS, "options": options}
        return fresh(asked, finished, WARM_UP, "closed", SHORT_AT_ONCE, **given)
    label, in_flight = f"input-{length}", parameters.concurrency or CONCURRENCY
    return fresh(asked, finished, label, "closed", in_flight, requests=parameters.requests or REQUESTS, options=options)


def _skipped(asked: StudySettings, lengths: Sequence[int]) -> str:
    output = asked.parameters.output_tokens or OUTPUT_TOKENS
    return (
        f"{', '.join(map(str, lengths))} tokens and {output} of output are longer than the model takes "
        f"({asked.max_model_len})"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Length:
    """Measurements at a length: input tokens, TTFTs and prefills [n] of its requests, ms; NaN: not known."""

    finished: Finished
    target: int
    tokens: Floats
    ttft_ms: Floats
    prefill_ms: Floats

    def of(self, times_ms: Floats) -> AtLength:
        """Return the requests with a known time."""
        known = (times_ms > 0) & (self.tokens > 0)
        return AtLength(tokens=self.tokens[known], times_ms=times_ms[known])


def _length(finished: Finished, data: StepData) -> _Length:
    log, parts = data.requests, data.parts
    rows = np.argsort(log.submit_ns, kind="stable")
    rows = rows[(log.status == "ok")[rows]]
    # What was never observed by the engine says nothing of its prefill.
    known = parts.covered & ~np.isin(parts.quality, ("none", "prior"))
    return _Length(
        finished=finished,
        target=int(finished.step.options["input_tokens"]),
        tokens=input_tokens(log)[rows],
        ttft_ms=request_metrics(log).ttft_ms[rows],
        prefill_ms=np.where(known, 1e3 * parts.prefill_s, np.nan)[rows],
    )


def _findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    steps = of_kind(counting(finished), LEVEL)
    lengths = [length for each in steps if np.isfinite((length := _length(each, read(each))).ttft_ms).any()]
    if not lengths:
        missing = number(None, "1", missing="no length has a request with a TTFT")
        return StudyFindings(answer=("How the TTFT grows with the input is not known: no length counts.",),
                        results={"scaling_exponent": missing} | reported_times(None), notes=_NOTES)  # fmt: skip
    whole = [length.of(length.ttft_ms) for length in lengths]
    prefill = [at for length in lengths if len((at := length.of(length.prefill_ms)).times_ms)]
    results = {name: quantity for length in lengths for name, quantity in _at_length(length).items()}
    results |= reported_times(lengths[-1].finished, f"{lengths[-1].target:,} input tokens")
    results["scaling_exponent"] = _exponent(whole)
    results["prefill_scaling_exponent"] = _exponent(prefill) if prefill else number(
        None, "1", missing="the server does not tell the prefill of any request"
    )  # fmt: skip
    fitted = models(whole)
    if not isinstance(fitted, Missing):
        results["best_fit_r2"] = number(fitted[0].r2, "ratio", n=sum(len(at.times_ms) for at in whole))
    answer = _answer(lengths, results, fitted)
    return StudyFindings(
        answer=answer,
        results=results,
        evidence=tuple(_evidence(answer[0], length, results) for length in (lengths[0], lengths[-1])),
        tables=(_table(asked, lengths, results, fitted), *_model_table(fitted)),
        plots=(_plot(lengths, results, fitted),),
        notes=(*_NOTES, *_deviations(asked, lengths)),
    )


def _evidence(claim: str, length: _Length, results: dict[str, ResultQuantity]) -> SupportingNumber:
    name = f"ttft_mean_ms_{length.target}"
    return SupportingNumber(claim=claim, quantity=name, run=length.finished.run, value=results[name].value)


def _at_length(length: _Length) -> dict[str, ResultQuantity]:
    """Return the results at a length, by name and length."""
    outcome, per_token = length.finished.outcome, length.of(length.ttft_ms)
    results = {
        "ttft_mean_ms": mean(length.ttft_ms),
        **percentiles(length.ttft_ms, "ttft_{}_ms", ("p50", "p95"), least=1),
        "ttft_ms_per_1k_tokens": mean(1e3 * per_token.times_ms / per_token.tokens, unit="ms/1,000 tokens"),
        "prefill_mean_ms": mean(length.prefill_ms),
        "output_tokens_per_s": number(outcome.output_tokens_per_s, "tokens/s"),
        "input_tokens_per_s": number(outcome.input_tokens_per_s, "tokens/s"),
    }
    return {f"{name}_{length.target}": quantity for name, quantity in results.items()}


def _exponent(measured: Sequence[AtLength]) -> ResultQuantity:
    ends: Ends | Missing = exponent(measured)
    if isinstance(ends, Missing):
        return number(None, "1", missing=ends.reason)
    method = "slope of mean logarithms, Student's t of repetition"
    return number(ends[0], "1", ci95=ends[1:], n=sum(len(at.times_ms) for at in measured), method=method)


def _answer(
    lengths: Sequence[_Length], results: dict[str, ResultQuantity], fitted: list[ScalingModel] | Missing
) -> tuple[str, ...]:
    first, last = lengths[0].target, lengths[-1].target
    at_ends = [results[f"ttft_mean_ms_{each}"].value or 0 for each in (first, last)]
    what = f"The mean TTFT is {figure(at_ends[0])} ms at {first:,} input tokens"
    what += f" and {figure(at_ends[1])} ms at {last:,}." if last != first else "."
    k, prefill = results["scaling_exponent"], results["prefill_scaling_exponent"]
    if k.value is None:
        return what, f"How it grows with the input is not known: {k.missing}."
    sure = f"It grows as the length to the power of {k.value:.3f}{k.interval()}"
    if prefill.value is not None:
        sure += f", the prefill alone to the power of {prefill.value:.3f}{prefill.interval()}"
    fit = f"Which model fits is not known: {fitted.reason}." if isinstance(fitted, Missing) else (
        f"Best fit: {fitted[0].words}."
    )  # fmt: skip
    return what, f"{sure}.", fit


def _table(
    asked: StudySettings,
    lengths: Sequence[_Length],
    results: dict[str, ResultQuantity],
    fitted: list[ScalingModel] | Missing,
) -> ResultTable:
    shown = {
        "ttft_mean_ms": "TTFT Mean (ms)", "ttft_p50_ms": "TTFT P50 (ms)", "ttft_p95_ms": "TTFT P95 (ms)",
        "ttft_ms_per_1k_tokens": "ms/1K tokens", "prefill_mean_ms": "Prefill Mean (ms)",
        "output_tokens_per_s": f"Output tokens/s at concurrency {asked.parameters.concurrency or CONCURRENCY}",
        "input_tokens_per_s": "Input tokens/s",
    }  # fmt: skip
    titles = {"context_tokens": "Context (tokens)", "requests": "Requests", **shown}
    titles |= {"ttft_mean_low_ms": "Mean 95 % from", "ttft_mean_high_ms": "to"}
    rows: list[tuple[Cell, ...]] = []
    for length in lengths:
        ends = results[f"ttft_mean_ms_{length.target}"].ends
        of_length = cells(results, *(f"{name}_{length.target}" for name in shown))
        rows.append((length.target, int(np.isfinite(length.ttft_ms).sum()), *of_length, *ends))
    note = fitted.reason if isinstance(fitted, Missing) else f"Best fit: {fitted[0].words}"
    whole = dict.fromkeys(("context_tokens", "requests"))
    return table("long-context", "Long Context Scaling", titles, rows, note, whole)


def _model_table(fitted: list[ScalingModel] | Missing) -> tuple[ResultTable, ...]:
    if isinstance(fitted, Missing):
        return ()
    least = min(model.aicc for model in fitted)
    titles = {"model": "Model", "fit": "Fit", "r2": "R^2", "aicc_above_best": "AICc above the lowest"}
    rows = ((model.name, model.formula, model.r2, model.aicc - least) for model in fitted)
    note = "The best is the simplest within 4 of the lowest AICc."
    return (table("scaling-models", "Scaling Models", titles, rows, note),)


def _plot(lengths: Sequence[_Length], results: dict[str, ResultQuantity], fitted: list[ScalingModel] | Missing) -> Plot:
    means = [results[f"ttft_mean_ms_{length.target}"] for length in lengths]
    at = tuple(float(length.target) for length in lengths)
    lows, highs = zip(*(mean_ms.ends for mean_ms in means), strict=True)
    lines = [PlotLine(name="TTFT mean", x=at, y=tuple(each.value for each in means), low=lows, high=highs)]
    if not isinstance(fitted, Missing):
        curve = np.geomspace(at[0], at[-1], _POINTS)
        fit_ms = tuple(fitted[0].at(curve).tolist())
        lines.append(PlotLine(name=f"fit: {fitted[0].name}", x=tuple(curve.tolist()), y=fit_ms))
    axes = ("Context (tokens)", "TTFT (ms)")
    return plot("long-context-scaling", "TTFT by Context Length", axes, lines, log_x=True, log_y=True)


def _deviations(asked: StudySettings, lengths: Sequence[_Length]) -> list[str]:
    skipped = _lengths(asked)[1]
    notes = [f"Skipped: {_skipped(asked, skipped)}."] if skipped else []
    if len(lengths) < len(LENGTHS):
        notes.append(
            f"Of fewer than {len(LENGTHS)} lengths the best fit is often too simple: a weak quadratic term takes eight."
        )
    for length in lengths:
        failed = length.finished.outcome.sent - length.finished.outcome.ok
        if failed:
            notes.append(f"{length.target} tokens: {failed} of {length.finished.outcome.sent} requests did not end ok.")
    return notes


LONG_CONTEXT = Procedure(
    name="long-context",
    objective="How latency and throughput scale with the length of the context.",
    workload="long-context",
    rests_on=("ttft",),
    presets={"letter": _LETTER, "short": replace(_LETTER, lengths=LENGTHS[:4], requests=10)},
    next_step=_next_step,
    findings=_findings,
    independent=(LEVEL,),
)
