"""The load generator's own error in words."""

from __future__ import annotations

from sidelight.loadgen.requests.self_check.cause import Cause
from sidelight.loadgen.requests.self_check.stated_error import ErrorBound, StatedError

UNREPORTED = "How far off latencies may be is not known: no load worker reported on itself."
_LEAST_PERCENT = 0.0001
_TIMES = 2  # medians: from there on a percentage is hard to read


def excesses(error: StatedError) -> list[str]:
    """Return a sentence for each metric with an error over its limit. It states by how much the metric may be wrong."""
    return [_capitalised(f"{subject} may be wrong {extent}") for subject, extent in _exceeded(error)]


def distrust(error: StatedError, cause: Cause) -> str:
    """Return the sentences on metrics that may be too wrong to use. They state by how much and why, and what helps."""
    (subject, extent), *others = _exceeded(error)
    extents = ", ".join([f"{subject} may be wrong {extent}", *(f"{other} {by}" for other, by in others)])
    return f"{_capitalised(extents)}: {cause.text}. {cause.cure}"


def statement(error: StatedError) -> str:
    """Return a sentence on the error of each metric within its limit.

    It states the most by which each may be off; "" if there are none.
    """
    if error.ttft.p99 is None:
        return UNREPORTED
    within = [
        (subject, verb, f"to within {_error(bound, whose)}")
        for subject, verb, whose, bound in _metrics(error)
        if bound.median is not None and not bound.exceeded
    ]
    if not within:
        return ""
    (subject, verb, extent), *others = within
    extents = ", ".join([f"{subject} {verb} right {extent}", *(f"{other} {to}" for other, _, to in others)])
    return f"{_capitalised(extents)}."


def ms(value_ms: float) -> str:
    """Return milliseconds as a sentence has them, with about three digits."""
    decimals = 0 if value_ms >= 100 else 1 if value_ms >= 10 else 2
    return f"{value_ms:,.{decimals}f} ms"


def _exceeded(error: StatedError) -> list[tuple[str, str]]:
    """Return the metrics with an error over the limit, each with its extent."""
    return [
        (subject, f"by up to {_error(bound, whose, exactly=True)}")
        for subject, _, whose, bound in _metrics(error)
        if bound.exceeded
    ]


def _metrics(error: StatedError) -> tuple[tuple[str, str, str, ErrorBound], ...]:
    """Return each metric's name and grammar for sentences, and its error."""
    return ("TTFT", "is", "its", error.ttft), ("gaps between chunks", "are", "their", error.itl)


def _error(bound: ErrorBound, whose: str, *, exactly: bool = False) -> str:
    """Return an error and its share of the median; `exactly`: with the median itself."""
    amount = ms(bound.p99 or 0.0)
    if bound.share_of_median is None or bound.median is None:
        return f"{amount} ({whose} median is 0)"
    median = f"{whose} median{f' of {ms(bound.median)}' if exactly else ''}"
    return f"{amount} ({_share(bound.share_of_median)} {median})"


def _share(ratio: float) -> str:
    """Return a ratio as the beginning of "... the median": in percent, and from 2 on how many times."""
    if ratio >= _TIMES:
        return f"{ratio:,.2g} times" if ratio < 10 else f"{ratio:,.0f} times"
    percent = 100 * ratio
    share = f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}" if percent >= _LEAST_PERCENT else "below 0.0001"
    return f"{share} % of"


def _capitalised(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"
