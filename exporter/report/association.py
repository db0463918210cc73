"""What moves with the TTFT, and what it varies by, in words for people."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UnsetType

from correlator.statistics.association import LAGS_S, Association
from correlator.statistics.bootstrap import FEW_BLOCKS
from exporter.summary.correlation import Correlation
from exporter.summary.tail import name_of_rest, part_names, percent, ranked

WORTH_NAMING = 0.05


def variance_rows(correlation: Correlation) -> Iterator[str]:
    """Yield a line of what the TTFT varies by; none where that is not known.

    The interval of a share between 0 and 1 is shown cut at them; the summary has it whole.
    """
    tail = correlation.tail_attribution
    shares, intervals, blocks, requests = tail.variance_share, tail.ci95, tail.blocks, tail.requests
    if (
        isinstance(shares, UnsetType)
        or isinstance(intervals, UnsetType)
        or isinstance(blocks, UnsetType)
        or isinstance(requests, UnsetType)
    ):
        return
    (name, share), *others = ranked(shares)
    names = part_names(shares, name_of_rest(tail.merged or {}, requests))
    words = [f"{names[name]} makes {percent(share)} of its variance"]
    interval = intervals[name]
    if interval is not None:
        low, high = (min(max(end, 0.0), 1.0) if 0 <= share <= 1 else end for end in interval)
        words[0] += f" (95 % interval {100 * low:.0f} to {100 * high:.0f} %{_guess(blocks)})"
    words += [f"{names[other]} {percent(part)}" for other, part in others if part >= WORTH_NAMING]
    yield f"How the TTFT varies: {', '.join(words)}."


def association_rows(correlation: Correlation) -> Iterator[str]:
    """Yield lines of associations: one for each that differs from chance, one for those of a measure that do
    not, and one for each reason why others are not known.
    """
    others: dict[tuple[str, str], list[str]] = {}
    for association in correlation.association:
        client, server = association.client, association.server
        if association.rho is None:
            others.setdefault((client, f"not known, {association.missing}"), []).append(server)
        elif _by_chance(association):
            rho = association.rho_lag0
            why = f"not distinguishable from chance{_guess(association.blocks)}"
            others.setdefault((client, why), []).append(server if rho is None else f"{server} ({rho:.2f})")
        else:
            yield _line(association)
    for (client, why), servers in others.items():
        yield f"{client} and {', '.join(servers)}: {why}"


def _by_chance(association: Association) -> bool:
    ci95 = association.ci95_lag0
    return ci95 is None or ci95[0] <= 0 <= ci95[1]


def _line(association: Association) -> str:
    low, high = association.ci95_lag0 or (0.0, 0.0)
    interval = f"95 % interval {low:.2f} to {high:.2f}{_guess(association.blocks)}"
    words = [f"rank correlation {association.rho_lag0:.2f} at submission ({interval})"]
    if association.partial_rho is not None:
        words.append(f"{association.partial_rho:.2f} given the rest ({', '.join(association.given)})")
    if lag_s := association.lag_s:
        when = f"{abs(lag_s):g} s {'after' if lag_s > 0 else 'before'} submission"
        words.append(f"{association.rho:.2f} {when} (the best of {len(LAGS_S)} lags, so optimistic)")
    return f"{association.client} and {association.server}: {'; '.join(words)}"


def _guess(blocks: int) -> str:
    return "" if blocks >= FEW_BLOCKS else f"; the interval is a guess, from {blocks} blocks"
