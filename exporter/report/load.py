"""Sentences on the offered, sent and served load, and whether it was sustained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sidelight.exporter.summary.result import Summary
from sidelight.loadgen.plan.rates import pace_of
from sidelight.loadgen.requests.rates import HeldBack, OutputCost, Rates, SteadyThroughput
from sidelight.rundir.printable.numbers import agree, cell, spoken

LEAST_ENDED = 50  # requests: the rate at which fewer ended while the load lasted is mostly chance
DRAWN_OFF = 0.1  # of --rate: arrivals drawn at random that are further off are worth a sentence


def overload(summary: Summary) -> Iterator[str]:
    """Yield a sentence on an overloaded run, to read before any latency; nothing for another run."""
    stability, rates = summary.methodology.stability, summary.client.rates
    if summary.watch or stability.verdict != "growing":
        return
    held = summary.client.held_back
    if isinstance(held, HeldBack):
        unsent = f", and {held.not_sent} were not sent" if held.not_sent else ""
        yield (
            f"Overloaded: with at most {held.cap} in flight, requests were held back ever longer, up to "
            f"{spoken(held.held_ms.max)}{unsent}; TTFT does not include that wait."
        )
        return
    still = f"{agree(rates.open_at_end, 'was', 'were')} still"
    yield (
        f"Overloaded: {rates.open_at_end} of {summary.client.requests.sent} requests {still} open when the load ended, "
        f"after {cell(rates.load_s)} s; the longer a run, the longer its latencies."
    )


def sustained(summary: Summary) -> str:
    """Return a sentence on whether the load was sustained, with the reason."""
    stability = summary.methodology.stability
    heads = {
        "growing": "The load was not sustained",
        "stable": "The load was sustained",
        "undecided": "Whether the load was sustained is not decided",
        None: "Whether the load was sustained is not judged",
    }
    return f"{heads[stability.verdict]}: {stability.reason}."


def rate_lines(summary: Summary) -> Iterator[str]:
    """Yield the offered, sent and served rates during the load, then the throughput. The throughput includes the drain.
    Without a load of our own, it stands alone: others sent the requests.
    """
    rates, own_load = summary.client.rates, not summary.watch
    if own_load and rates.load_s is not None:
        yield from _flow(summary, rates)
    names = (
        ("requests_per_s", "requests/s"),
        ("input_tokens_per_s", "input tokens/s"),
        ("output_tokens_per_s", "output tokens/s"),
        ("goodput_requests_per_s", "requests/s that met every objective"),
    )
    known = ((getattr(summary.client.throughput, key), label) for key, label in names)
    shown = [f"{cell(rate)} {label}" for rate, label in known if rate is not None]
    if shown:
        drain = f" including {cell(rates.drain_s)} s of drain" if rates.drain_s and own_load else ""
        yield f"Throughput{drain}: {', '.join(shown)}"
    if own_load and (steady := summary.client.steady):
        yield from _steady(steady)
    if summary.client.cost:
        yield _cost(summary.client.cost)


def _cost(cost: OutputCost) -> str:
    """Return the cost of output, in the currency of `--price`."""
    ends = cost.million_output_tokens_ci95
    interval = f" (95 % interval {cost_cell(ends[0])} to {cost_cell(ends[1])})" if ends else ""
    of = (
        (cost.million_output_tokens, f" for a million output tokens{interval}"),
        (cost.request, " for a request"),
        (cost.good_request, " for a request that met every objective"),
    )
    shown = [f"{cost_cell(value)}{what}" for value, what in of if value is not None]
    return f"At {cost_cell(cost.price_per_h)} an hour: {', '.join(shown) or 'nothing was served'}"


def cost_cell(value: float) -> str:
    """Return an amount of money with three digits, however small."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _steady(steady: SteadyThroughput) -> Iterator[str]:
    """Yield the throughput of the steady part of the load, if its interval is known."""
    names = (
        (steady.requests_per_s, steady.requests_per_s_ci95, "requests/s"),
        (steady.output_tokens_per_s, steady.output_tokens_per_s_ci95, "output tokens/s"),
    )
    shown = [
        f"{cell(per_s)} {label} (95 % interval {cell(ends[0])} to {cell(ends[1])})"
        for per_s, ends, label in names
        if ends
    ]
    if shown:
        yield f"Without the first tenth of the load and without the drain: {', '.join(shown)}"


def _flow(summary: Summary, rates: Rates) -> Iterator[str]:
    offered, sent = cell(rates.offered_requests_per_s), cell(rates.realised_requests_per_s)
    asked = _asked_per_s(summary.config)
    rate = f" (--rate {cell(asked)})" if asked and cell(asked) != offered else ""
    steps = [f"{offered} offered{rate}"] if rates.offered_requests_per_s is not None else []
    steps += [f"{sent} sent"] if rates.realised_requests_per_s is not None else []
    growing = summary.methodology.stability.verdict == "growing"
    if (served_per_s := served_in_load(summary)) is not None:
        steps.append(
            f"{cell(served_per_s)} served (without the first {cell(rates.ramp_s)} s, while the "
            "requests in flight were still rising)"
        )
    elif rates.completed_requests_per_s is not None and not growing:
        requests = summary.client.requests
        served = "all" if requests.ok == requests.sent else f"{requests.ok:,} of {requests.sent:,} requests"
        late = f", the last {cell(rates.drain_s)} s after the load" if rates.drain_s else ""
        steps.append(f"{served} served in the end{late}")
    if steps:
        yield f"Requests/s in the {cell(rates.load_s)} s of load, first to last sent: {', '.join(steps)}"
    drawn = rates.offered_requests_per_s
    if asked and drawn is not None and abs(drawn - asked) > DRAWN_OFF * asked:
        yield (
            f"The arrivals that were drawn at random for {cell(asked)} requests/s came to {offered}: so few requests "
            "vary by chance, and a longer run comes nearer."
        )


def served_in_load(summary: Summary) -> float | None:
    """Return the requests served per second during the load, None if too few ended."""
    rates, growing = summary.client.rates, summary.methodology.stability.verdict == "growing"
    return rates.served_requests_per_s if growing or rates.ended_in_load >= LEAST_ENDED else None


def _asked_per_s(config: Mapping[str, Any]) -> float | None:
    """Return --rate, None where it is not one number."""
    pace = pace_of(config.get("rate"))
    is_ramp = pace.to_per_s is not None or config.get("ramp_to")  # an option of earlier versions
    return None if is_ramp or config.get("trace") or config.get("replay_requests") else pace.per_s
