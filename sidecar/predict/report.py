"""Report of predictions: tables of times and of load, and the fit that they rest on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import UNSET

from sidelight.exporter.document import BLANK, Block, Line, Prose, numbers, table, words
from sidelight.rundir.printable.numbers import brief_ms, duration, figure, percent, percent_of_all
from sidelight.sidecar.predict.result import LEVELS, Predicted, PredictedLoad, TwinFit
from sidelight.twin.limits import HighestRate
from sidelight.twin.seats import PredictedTime

NAMES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}
_TITLES = {name: f"{title}, ms (90 % interval)" for name, title in NAMES.items()}
_LABEL = 14
_MET = {True: "met", False: "missed", None: "open"}


def report(predicted: Predicted) -> Iterator[Block]:
    yield Line((("What if", "headline"),))
    yield from answer_lines(predicted)
    yield Prose(rests_on(predicted))
    yield BLANK
    yield from details(predicted)


def answer_lines(predicted: Predicted) -> Iterator[Prose]:
    """Yield the highest rate that meets the objectives in a sentence, if there are objectives."""
    if predicted.highest_rate is not UNSET:
        yield Prose(_highest(predicted.highest_rate, predicted), "strong")


def details(predicted: Predicted) -> Iterator[Block]:
    if any(load.refused is UNSET for load in predicted.loads):
        yield from _tables(predicted)
    yield from _notes(predicted.loads)
    for fit in predicted.fits:
        yield Prose(_engine(fit))
        yield Prose(_misfit(fit))


def _tables(predicted: Predicted) -> Iterator[Block]:
    shown = [load for load in predicted.loads if load.refused is UNSET]
    for name, title in _TITLES.items():
        rows = [row for load in shown for row in _rows(load, name)]
        yield table(title, [words("p50"), words("p90"), words("p99")], rows, label_width=_LABEL, kept_in="")
        yield BLANK
    has_price = any(load.price_per_h is not UNSET for load in predicted.loads)
    price = numbers("price/h", "M tokens", show=_number) if has_price else []
    columns = [
        *numbers("served/s", "tokens/s", show=_number), words("busy"), words("binds"),
        *([words("SLO")] if predicted.slo else []), *price,
    ]  # fmt: skip
    yield table("Load", columns, [_load_row(load) for load in shown], label_width=_LABEL, kept_in="")
    yield BLANK


def rests_on(predicted: Predicted) -> str:
    """Return the run and the time that predictions rest on, in words."""
    fits, lasts = predicted.fits, duration(predicted.duration_s)
    sent = f"; each load lasts {lasts}, as the run's did."
    if predicted.traffic:
        sent = f"; sent are those of {predicted.traffic}, for {lasts}."
    if any(load.replicas > 1 and load.router == "least-requests" for load in predicted.loads):
        sent += " Of several replicas the one that has the fewest requests gets the next."
    return (
        f"By {sum(fit.requests for fit in fits):,} requests and {sum(fit.steps for fit in fits):,} steps of run "
        f"{predicted.run_id}{sent} An interval holds what nine of ten such runs would show."
    )


def _rows(load: PredictedLoad, name: str) -> Iterator[list[str]]:
    times: dict[str, PredictedTime] = getattr(load, name)
    yield [load.label, *(_time(times[each]) if each in times else "-" for each in LEVELS)]
    if load.measured is not UNSET:
        measured: dict[str, float] = getattr(load.measured, name)
        yield ["  measured", *(_beside(measured.get(each), times.get(each)) for each in LEVELS)]


def _beside(value: float | None, time: PredictedTime | None) -> str:
    if value is None or time is None:
        return "-"
    return f"{_short(value)}{'' if time.low <= value <= time.high else ' outside'}"


def _time(time: PredictedTime) -> str:
    return f"{_short(time.estimate)} ({_short(time.low)}-{_short(time.high)})"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def _number(value: float | None) -> str:
    return "-" if value is None else figure(value)


def _load_row(load: PredictedLoad) -> list[str | float | None]:
    return [
        load.label,
        load.requests_per_s or 0.0,
        load.output_tokens_per_s or 0.0,
        percent_of_all(load.busy or 0.0),
        load.binds or "",
        *([] if load.met is UNSET else [_MET[load.met]]),
        *([] if load.price_per_h is UNSET else [load.price_per_h, load.million_output_tokens or None]),
    ]


def _notes(loads: Sequence[PredictedLoad]) -> Iterator[Prose]:
    for load in loads:
        if load.refused is not UNSET:
            yield Prose(f"! {load.label}: no prediction: {load.refused}", "warning")
        if load.measured is not UNSET:
            yield Prose(f"{load.label}: {load.measured.inside} of 9 values inside, by {load.measured.directory}.")
    for note in dict.fromkeys(note for load in loads for note in load.notes):
        labels = [load.label for load in loads if note in load.notes]
        which = "all loads" if 1 < len(labels) == len(loads) else " | ".join(labels)
        yield Prose(f"! {which}: {note}", "warning")


def _highest(highest: HighestRate, predicted: Predicted) -> str:
    if highest.estimate is None:
        return f"No rate that can be predicted meets {predicted.slo}."
    surely = "at no rate surely" if highest.low is None else f"surely up to {figure(highest.low)}"
    perhaps = "; beyond, there is no prediction"
    if highest.high is not None:
        perhaps = f", and surely not beyond {figure(highest.high)}"
    of = " by the engine as it was" if any(load.settings for load in predicted.loads) else ""
    line = f"Highest rate that meets {predicted.slo}{of}: {figure(highest.estimate)} requests/s ({surely}{perhaps})."
    if highest.replicas is UNSET:
        return line
    many = "1 replica surely meets" if highest.replicas == 1 else f"{highest.replicas} replicas surely meet"
    return f"{line} {many} it at {predicted.loads[0].label}."


def _engine(fit: TwinFit) -> str:
    seats = "did not show" if fit.max_num_seqs is None else str(fit.max_num_seqs)
    budget = f"at most {fit.max_num_batched_tokens:,} tokens a step"
    if not fit.shows_budget:
        budget = f"its most tokens a step did not show, and are taken as {fit.max_num_batched_tokens:,}"
    return (
        f"{fit.engine or 'The engine'}: {fit.step_ms:.2f} ms a step, {fit.prefill_token_us:.1f} us a prompt token, "
        f"{fit.sequence_us:.0f} us a sequence, {fit.kv_token_ns:.1f} ns a token held, ±{percent(fit.jitter)} from step "
        f"to step; front end {brief_ms(fit.frontend_ms)}; most sequences at a time: {seats}; {budget}."
    )


def _misfit(fit: TwinFit) -> str:
    shown = ", ".join(
        f"{NAMES[name]} {_ratio(values[0])} and {_ratio(values[1])}" for name, values in fit.misfit.items()
    )
    return (
        f"Fitted to the first 60 % of the run, it shows the rest with p50 and p90 of {shown} off. That is part of each "
        "interval."
    )


def _ratio(value: float) -> str:
    return f"{100 * (value - 1):+z.0f} %"
