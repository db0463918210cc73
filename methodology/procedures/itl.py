"""Inter-Token Latency Distribution: how evenly tokens come at several loads, and what ran in the steps of long gaps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace

from sidelight.loadgen.requests.delivery import STATEMENTS, itl_option
from sidelight.loadgen.requests.metrics import request_metrics
from sidelight.methodology.measures.gaps import Modes, TailShape, foreign_prefill, modes, tail, with_prefill
from sidelight.methodology.measures.paired import measured
from sidelight.methodology.study.findings import Cell, ResultQuantity, ResultTable, StudyFindings, evidence, table
from sidelight.methodology.study.model import Done, Finished, Parameters, Procedure, Reader, Step, StudySettings
from sidelight.methodology.study.outcome import QUANTILES
from sidelight.methodology.study.planning import LEVEL, counting, fresh, level_label, of_kind
from sidelight.methodology.study.quantities import (
    LABELS,
    mean,
    number,
    percentiles,
    plot_cumulative,
    reported_times,
    unknown,
)
from sidelight.methodology.study.saturation import Capacity, capacity
from sidelight.rundir.columns import Bools, Floats, take
from sidelight.rundir.printable.numbers import figure
from sidelight.rundir.stats import Missing

LEAST_TOKENS = 50
LEVELS = (0.25, 0.5, 0.75, 0.9)
_LETTER = Parameters(levels=LEVELS, requests=100, duration=60.0)
_SHAPE = ("p50", "p95", "p99")
_TITLES = {"itl": "ITL", "time_between_chunks": "Time Between Chunks"}
_NOTES = (
    f"Requests with fewer than {LEAST_TOKENS} output tokens are left out of all numbers, and counted.",
    "Modality: Silverman's test (at 1 %) on the logarithms of gaps, thinned to independent ones.",
    "Tail: generalised Pareto distribution beyond P95, exponential where the interval of its shape holds 0.",
    "A prefill ran in a step where another request's first token came with its tokens: of chunks, in that of the last.",
)


def _next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    known = capacity(asked, finished)
    if not isinstance(known, Capacity):
        return known
    shares = asked.parameters.levels or LEVELS
    # In an order of chance, so that a drift of the system is not taken for the load's doing.
    order = np.random.default_rng(np.random.SeedSequence(asked.seed, spawn_key=(16, 0))).permutation(len(shares))
    ended = {each.step.share for each in of_kind(finished, LEVEL)}
    share = next((shares[at] for at in order if shares[at] not in ended), None)
    if share is None:
        return Done(reason="all levels were run")
    requests = asked.parameters.requests or 100
    least_s = (requests + 3 * math.sqrt(requests)) / 0.9 / (share * known.per_s)
    duration_s = max(asked.parameters.duration or 60.0, float(math.ceil(least_s)))
    level = share * known.per_s
    label = f"open-{level_label(level, share)}"
    return fresh(asked, finished, label, "open", level, share=share, duration=duration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """Measurements at a level: gaps [n] in the order in which they ended, and by request [m]."""

    finished: Finished
    gaps_ms: Floats
    prefill: Bools  # whether the step of a gap had a prefill in it
    unknown: Bools  # its scrapes show one that was not ours
    jitter_ms: Floats
    pause_ms: Floats
    shorter: int
    statement: str
    is_single: bool
    modes: Modes | Missing
    tail: TailShape | Missing

    @property
    def suffix(self) -> str:
        return f"_{100 * (self.finished.step.share or 0):g}"

    @property
    def title(self) -> str:
        return f"{100 * (self.finished.step.share or 0):g} %"


def _level(finished: Finished, read: Reader) -> _Level:
    data, window = read(finished), finished.outcome.window
    log = measured(finished, data).requests
    ok = take(log, log.status == "ok")
    enough = ok.output_tokens >= LEAST_TOKENS
    metrics = request_metrics(take(ok, enough))
    end_ns = metrics.itl_end_ns
    begin_ns = end_ns - np.rint(1e6 * metrics.itl_ms).astype(np.int64)
    order = np.argsort(end_ns, kind="stable")
    if window:
        order = order[end_ns[order] <= window.end_ns]
    gaps_ms = metrics.itl_ms[order]
    prefill = with_prefill(begin_ns[order], end_ns[order], data.requests.first_token_ns)
    known = [values[np.isfinite(values)] for values in (metrics.jitter_ms, metrics.max_pause_ms)]
    option = itl_option(ok)
    return _Level(
        finished=finished,
        gaps_ms=gaps_ms,
        prefill=prefill,
        unknown=~prefill & foreign_prefill(data, begin_ns[order], end_ns[order]),
        jitter_ms=known[0],
        pause_ms=known[1],
        shorter=int((~enough).sum()),
        statement=STATEMENTS[option],
        is_single=option == "direct",
        modes=modes(gaps_ms),
        tail=tail(gaps_ms),
    )


def _findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    steps = sorted(of_kind(counting(finished), LEVEL), key=lambda each: each.step.level)
    levels = [level for level in (_level(each, read) for each in steps) if len(level.gaps_ms)]
    if not levels:
        results = unknown("no level has a reply of 50 tokens that came in chunks", "ms", "itl_p50_ms")
        results |= reported_times(steps[-1] if steps else None)
        return StudyFindings(answer=("Inter-token latency is not known: no level has gaps.",), results=results)
    name = "itl" if all(level.is_single for level in levels) else "time_between_chunks"
    results = {key + level.suffix: quantity for level in levels for key, quantity in _results(name, level).items()}
    results |= reported_times(levels[-1].finished, f"{levels[-1].title} of the capacity")
    suffix = levels[-1].suffix
    shown = {each: results[each].value for each in (f"{name}_modes{suffix}", f"{name}_with_prefill_ratio{suffix}")}
    by_level = {level.title: level.gaps_ms[level.gaps_ms > 0] for level in levels}
    return StudyFindings(
        answer=_answer(name, levels, results),
        results=results,
        evidence=tuple(evidence("what makes long gaps", levels[-1].finished.run, shown)),
        tables=_tables(name, levels, results),
        plots=plot_cumulative("itl-cdf", f"{_TITLES[name]} Distribution", by_level, "ms", "share of the gaps"),
        notes=(*_NOTES, *_deviations(asked, levels)),
    )


def _results(name: str, level: _Level) -> dict[str, ResultQuantity]:
    """Return the results of a level."""
    gaps_ms = level.gaps_ms
    results = percentiles(gaps_ms, f"{name}_{{}}_ms", least=1)
    # Gaps that long are of steps with a prefill in them, however the load changed: of 60 s at 50 to 90 % of capacity
    # such intervals of P99 hold the truth in 97 to 100 %; with tau of the median too there would be none.
    results |= percentiles(gaps_ms, f"{name}_{{}}_ms", ("p99", "p99_9"), least=1, of_itself=True)
    results |= {
        f"{name}_mean_ms": mean(gaps_ms),
        f"{name}_sd_ms": number(float(gaps_ms.std(ddof=1)) if len(gaps_ms) > 1 else None, "ms", n=len(gaps_ms)),
        f"{name}_samples": number(len(gaps_ms), "gaps"),
        "requests": number(len(level.pause_ms), "requests"),
    }
    p50, p99 = (float(np.quantile(gaps_ms, q)) for q in (0.5, 0.99))
    results[f"{name}_p99_over_p50_ratio"] = number(p99 / p50 if p50 else None, "ratio", missing="P50 is 0")
    results |= percentiles(level.jitter_ms, "jitter_{}_ms", _SHAPE, least=1)
    results |= percentiles(level.pause_ms, "max_pause_{}_ms", _SHAPE, least=1)
    return results | _shape_results(name, level)


def _shape_results(name: str, level: _Level) -> dict[str, ResultQuantity]:
    shape, tailed = level.modes, level.tail
    results = {
        f"{name}_modes": number(None, "modes", missing=shape.reason)
        if isinstance(shape, Missing)
        else number(len(shape.at_ms), "modes", n=shape.gaps, method=f"Silverman, Hall and York; p = {shape.p:.3g}"),
        f"{name}_tail_shape": number(None, "1", missing=tailed.reason)
        if isinstance(tailed, Missing)
        else number(tailed.shape, "1", ci95=tailed.ci95, method=f"generalised Pareto: {tailed.character}"),
        f"{name}_with_prefill_ratio": number(float(level.prefill.mean()), "ratio", n=len(level.prefill)),
    }
    decode = level.gaps_ms[~level.prefill & ~level.unknown]
    for kind, gaps_ms in (("prefill", level.gaps_ms[level.prefill]), ("decode", decode)):
        results |= percentiles(gaps_ms, f"{name}_of_{kind}_steps_{{}}_ms", _SHAPE, least=1)
    return results


def _answer(name: str, levels: Sequence[_Level], results: dict[str, ResultQuantity]) -> tuple[str, ...]:
    most, title = levels[-1], "inter-token latency" if name == "itl" else "time between chunks"
    p50, p99 = (results[f"{name}_{each}_ms{most.suffix}"] for each in ("p50", "p99"))
    said = [
        f"a {name} that is not known" if of.value is None else f"{name} {figure(of.value)} ms{of.interval()}"
        for name, of in (("P50", p50), ("P99", p99))
    ]
    of_what = f"by {p99.n:,} gaps of {len(most.pause_ms):,} requests"
    return f"At {most.title} of the capacity the {title} has {' and '.join(said)}, {of_what}.", _whose(most)


def _whose(level: _Level) -> str:
    """Return a sentence that explains the modes of a level."""
    share = f"a prefill ran in {100 * level.prefill.mean():.3g} % of the gaps' steps"
    if isinstance(level.modes, Missing):
        return f"How many modes the gaps have is not known ({level.modes.reason}); {share}."
    if len(level.modes.at_ms) == 1:
        return f"The gaps have one mode, at {figure(level.modes.at_ms[0])} ms; {share}."
    of = level.modes.of(level.gaps_ms)
    kinds = []
    for at, place_ms in enumerate(level.modes.at_ms):
        prefilled = float(level.prefill[of == at].mean()) if (of == at).any() else 0.0
        what = f"a prefill ran in {100 * prefilled:.3g} % of its steps"
        kinds.append(f"{figure(place_ms)} ms ({100 * level.modes.shares[at]:.3g} % of the gaps; {what})")
    return f"The gaps have {len(kinds)} modes: {', '.join(kinds)}."


def _tables(name: str, levels: Sequence[_Level], results: dict[str, ResultQuantity]) -> tuple[ResultTable, ...]:
    title = _TITLES[name]

    def by_level(file: str, heading: str, rows: Mapping[str, str]) -> ResultTable:
        """Return results as rows, by their names, and the levels as columns."""
        titles = {"metric": "Metric", **{f"value{level.suffix}": level.title for level in levels}}
        cells = ((text, *(results[key + level.suffix].shown for level in levels)) for key, text in rows.items())
        return table(file, heading, titles, cells)

    primary = {f"{name}_samples": f"{title} Samples"}
    primary |= {f"{name}_{each}_ms": f"{title} {LABELS[each]} (ms)" for each in QUANTILES}
    primary |= {f"{name}_mean_ms": f"{title} Mean (ms)", f"{name}_sd_ms": f"{title} Std Dev (ms)"}
    primary |= {f"{name}_p99_over_p50_ratio": "P99/P50 Ratio"}
    by_request = {"requests": "Requests"} | {f"jitter_{each}_ms": f"Jitter {LABELS[each]} (ms)" for each in _SHAPE}
    by_request |= {f"max_pause_{each}_ms": f"Maximum Pause {LABELS[each]} (ms)" for each in _SHAPE}
    kinds = {f"{name}_with_prefill_ratio": "Gaps with a prefill in their step (ratio)"}
    for kind, where in (("decode", "decode alone"), ("prefill", "prefill in them")):
        kinds |= {f"{name}_of_{kind}_steps_{each}_ms": f"{LABELS[each]} of steps with {where} (ms)" for each in _SHAPE}
    return (
        by_level("itl-results", f"{title} Results", primary),
        _intervals(name, levels, results),
        by_level("itl-per-request", "Per-Request Statistics", by_request),
        _shape_table(levels),
        by_level("itl-by-step", f"{title} by What Ran in the Step", kinds),
    )


def _intervals(name: str, levels: Sequence[_Level], results: dict[str, ResultQuantity]) -> ResultTable:
    rows = (
        (level.title, LABELS.get(each, "Mean"), of.shown, *of.ends, of.tau)
        for level in levels for each in (*QUANTILES, "mean") for of in [results[f"{name}_{each}_ms{level.suffix}"]]
    )  # fmt: skip
    titles = {"level": "Load Level", "metric": "Metric", "value_ms": "Value (ms)", "ci95_low_ms": "95 % from",
              "ci95_high_ms": "to", "tau": "tau (gaps)"}  # fmt: skip
    return table("itl-intervals", "95 % Intervals", titles, rows)


def _shape_table(levels: Sequence[_Level]) -> ResultTable:
    rows: list[tuple[Cell, ...]] = []
    for level in levels:
        shape, tailed = level.modes, level.tail
        modality: tuple[Cell, ...] = ("not known", None, None)
        if not isinstance(shape, Missing):
            kind = "unimodal" if len(shape.at_ms) == 1 else "multimodal"
            modality = (kind, ", ".join(f"{figure(at_ms)}" for at_ms in shape.at_ms), shape.p)
        behaviour: tuple[Cell, ...] = ("not known", None, None, None)
        if not isinstance(tailed, Missing):
            words = {"heavy": "heavy-tailed", "light": "lighter than exponential"}
            behaviour = (words.get(tailed.character, "exponential"), tailed.shape, *tailed.ci95)
        rows.append((level.title, *modality, *behaviour))
    titles = {"level": "Load Level", "modality": "Modality", "modes_ms": "Modes (ms)", "p": "p of one mode",
              "tail": "Tail", "shape": "Shape", "shape_low": "95 % from", "shape_high": "to"}  # fmt: skip
    reasons = {each.reason for level in levels for each in (level.modes, level.tail) if isinstance(each, Missing)}
    return table("itl-shape", "Distribution Shape", titles, rows, "; ".join(sorted(reasons)))


def _deviations(asked: StudySettings, levels: Sequence[_Level]) -> list[str]:
    notes = [f"Measurement method: {statement}." for statement in dict.fromkeys(level.statement for level in levels)]
    least = asked.parameters.requests or 100
    for level in levels:
        if level.shorter:
            notes.append(f"{level.title}: {level.shorter:,} requests had fewer than {LEAST_TOKENS} output tokens.")
        if len(level.pause_ms) < least or len(level.gaps_ms) < LEAST_TOKENS * least:
            notes.append(
                f"{level.title}: {len(level.pause_ms):,} requests and {len(level.gaps_ms):,} gaps, of {least:,} and "
                f"{LEAST_TOKENS * least:,}."
            )
    unknown = [f"{100 * level.unknown.mean():.2g} % (at {level.title})" for level in levels if level.unknown.any()]
    if unknown:
        notes.append(
            f"Of the gaps, {', '.join(unknown)} fell between scrapes that show a prefill while none of our requests "
            "began: they count for neither kind of step."
        )
    return notes


ITL = Procedure(
    name="itl",
    objective="How evenly tokens come while a reply streams, at several loads.",
    workload="synthetic-uniform",
    rests_on=("gaps",),
    presets={"letter": _LETTER, "short": replace(_LETTER, requests=40, duration=30.0)},
    next_step=_next_step,
    findings=_findings,
    independent=(LEVEL,),
)
