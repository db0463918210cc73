"""Formats of numbers for people: in sentences, tables and narrow panels. A missing one is "-"."""

from __future__ import annotations

import json
import math

ABSURD = 1e15  # a number of a server's that nothing real has: it must not take the width of all others
_NOTHING = 1e-9  # what is below is rounding
# Of the configuration, what is not a count.
_SECONDS = """
deadline drain_timeout duration request_timeout scrape_interval scrape_timeout slice_duration think_time
"""
_SETTING_UNITS = {**dict.fromkeys(_SECONDS.split(), "s"), "rate": "requests/s"}


def figure(value: float, digits: int = 3) -> str:
    """Return a number with `digits` significant digits, all of a large one, no exponent."""
    if not math.isfinite(value) or abs(value) >= ABSURD:
        return f"{value:.3g}"
    if isinstance(value, int) or abs(value) < _NOTHING:
        return f"{round(value):,}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(0, places)}f}" if places <= digits + 3 else f"{value:.{digits}g}"


def count_of(count: float, what: str) -> str:
    """Return a count with its noun, in the singular for one: 1 request, 2,000 requests."""
    return f"{count:,.15g} {what}{'' if count == 1 else 's'}"


def agree(count: float, singular: str, plural: str) -> str:
    """Return the verb of a count: "1 of 3 rows is left out", "2 of 3 rows are left out"."""
    return singular if count == 1 else plural


def cell(value: float | None) -> str:
    """Return a number of a table: whole ones whole, others with about three digits."""
    is_whole = value is not None and abs(value) < ABSURD and value == int(value)
    return f"{int(value):,}" if value is not None and is_whole else ms(value)


def ms(value: float | None) -> str:
    """Return milliseconds of a table, with about three digits."""
    if value is None:
        return "-"
    if abs(value) >= ABSURD:
        return f"{value:.3g}"
    # Adding nothing takes the sign from what rounds to zero.
    return f"{value:,.1f}" if abs(value) >= 10 else f"{round(value, 2) + 0.0:.2f}"


def spoken(value: float | None, *beside: float | None) -> str:
    """Return milliseconds of a sentence, in one unit with those `beside`: seconds where any has 10 s."""
    if value is None:
        return "-"
    if max(abs(each) for each in (value, *beside) if each is not None) >= 10_000:
        return f"{value / 1e3:,.1f} s" if abs(value) >= 10_000 else f"{value / 1e3:.3g} s"
    return f"{value:,.0f} ms" if abs(value) >= 100 else f"{value:.3g} ms"


def spoken_together(*values: float | None) -> list[str]:
    """Return times of one sentence, in one unit."""
    return [spoken(value, *values) for value in values]


def brief(value: float | None) -> str:
    """Return a number of a panel: whole from 100 on, else with one decimal."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"


def brief_ms(value: float | None) -> str:
    """Return milliseconds of a panel, with their unit, in at most seven characters."""
    if value is None:
        return "-"
    if value >= 9_999.5:
        return f"{value / 1e3:.1f} s"
    return f"{value:.0f} ms" if value >= 9.95 else f"{round(value, 3):.2g} ms"


def percent(ratio: float | None) -> str:
    """Return a ratio in whole percent."""
    return "-" if ratio is None else f"{100 * ratio:z.0f} %"


def percent_of_all(ratio: float) -> str:
    """Return a share in whole percent; what is not all is never called 100 %."""
    return "over 99 %" if 0.995 <= ratio < 1 - 1e-9 else percent(ratio)


def duration(seconds: float) -> str:
    """Return a stretch of time in its two largest units: 12.3 s, 4 min 5 s, 3 h 20 min, 2 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def minutes(seconds: float) -> str:
    """Return a stretch of time that is only expected, in its largest unit."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


def setting(name: str, value: object) -> str:
    """Return a value of the configuration in full, with its unit."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = str(value) if isinstance(value, int) else f"{value:.12g}"
        return f"{number} {_SETTING_UNITS.get(name, '')}".rstrip()
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return ", ".join(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
