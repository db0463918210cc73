"""`report-minimum.txt`: the draft's Minimum Viable Report, with its headings, order and fields."""

from __future__ import annotations

from collections.abc import Sequence

from sidelight.methodology.report.content import LEVELS, StudyContent, load_model
from sidelight.methodology.report.system import system_in_words
from sidelight.methodology.study.result import StudyResult
from sidelight.rundir.printable.numbers import ms

_TEMPLATE = """=== LLM Benchmark Report (Minimum) ===

System Identification:
- Model: {model}
- Hardware: {hardware}
- Software: {software}
- SUT Boundary: {boundary}

Test Configuration:
- Workload: {workload}
- Load Model: {load_model}
- Request Count: {requests}
- Test Duration: {duration}

Key Results:
- TTFT P50: {ttft_p50_ms}
- TTFT P99: {ttft_p99_ms}
- TPOT P50: {tpot_p50_ms}
- TPOT P99: {tpot_p99_ms}
- Max Throughput: {max_output_tokens_per_s}
- Throughput at P99 TTFT < 500ms: {slo_output_tokens_per_s}

Notes:
{notes}

=== End Report ===
"""
TIMES = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
# By the names that tests give them.
RATES = (
    ("max_output_tokens_per_s", "peak_output_tokens_per_s"),
    ("slo_output_tokens_per_s", "optimal_output_tokens_per_s"),
)
DRAFT_SLO = "ttft_p99<500ms"


def minimum(study: StudyContent) -> str:
    """Return the report; what was not measured says so."""
    result = study.result
    system = system_in_words(study.compliance.system, result.reproduction)
    values = {name: _value(result, (name,), "ms") for name in TIMES}
    values |= {names[0]: _value(result, names, "tok/s") for names in RATES}
    objective = (result.parameters.slo or "").replace(" ", "")
    if objective and objective != DRAFT_SLO:
        values["slo_output_tokens_per_s"] = f"not measured (the objective of this study was {result.parameters.slo})"
    unmet = (
        f"Not met, {LEVELS[level]}: {', '.join(each.id for each in failing)}"
        for level in LEVELS
        if (failing := study.compliance.failing(level))
    )
    notes = [*result.notes, *unmet, f"Guardrails: {system['guardrails']}"]
    return _TEMPLATE.format(
        **system,
        **values,
        workload=result.reproduction.workload or "not known",
        load_model=load_model(result.steps),
        requests=f"{sum(step.requests for step in result.steps if not step.void):,}",
        duration=f"{result.cost.load_seconds:,.0f} seconds",
        notes="\n".join(f"- {note}" for note in notes),
    )


def _value(result: StudyResult, names: Sequence[str], unit: str) -> str:
    quantity = next((result.results[name] for name in names if name in result.results), None)
    if quantity is None:
        return f"not measured (the test {result.test} has no such result)"
    sure = quantity.interval().strip(" ()") if quantity.value is not None else ""
    about = [*filter(None, (sure, quantity.at and f"at {quantity.at}"))]
    full = result.results.get(f"limit{names[0].removeprefix('max')}")
    if full is not None and full.value is not None:
        about.append(f"saturated: {ms(full.value)} {unit}{full.interval()}")
    if quantity.value is not None:
        value = f"{ms(quantity.value)} {unit}"
    else:
        value = "not determined" if quantity.sample is None else quantity.in_sample()
        about = [*(about if quantity.sample is not None else []), quantity.missing or "no reason is known"]
    return f"{value} ({'; '.join(about)})" if about else value
