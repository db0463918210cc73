"""The unit of a metric, inferred from its description and its name: the table of AIPerf's export format, extended
(microseconds, minutes, SGLang's ratios, what a counter's `_total` hides).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SUFFIXES = {
    "_seconds": "seconds",
    "_milliseconds": "milliseconds",
    "_ms": "milliseconds",
    "_microseconds": "microseconds",
    "_us": "microseconds",
    "_nanoseconds": "nanoseconds",
    "_ns": "nanoseconds",
    "_minutes": "minutes",
    "_hours": "hours",
    "_bytes": "bytes",
    "_kilobytes": "kilobytes",
    "_megabytes": "megabytes",
    "_gigabytes": "gigabytes",
    "_total": "count",
    "_count": "count",
    "_tokens": "tokens",
    "_requests": "requests",
    "_reqs": "requests",
    "request_success": "requests",
    "_errors": "errors",
    "_error_count": "errors",
    "_blocks": "blocks",
    "_block_count": "blocks",
    "_gb_s": "gb/s",
    "_tokens_seconds": "tokens/s",
    "_tokens_per_second": "tokens/s",
    "_toks_per_s": "tokens/s",
    "_ratio": "ratio",
    "_hit_rate": "ratio",
    "_accept_rate": "ratio",
    "_acceptance_rate": "ratio",
    "token_usage": "ratio",
    "utilization": "ratio",
    "_percent": "percent",
    "_perc": "percent",
    "_celsius": "celsius",
    "_joules": "joule",
    "_watts": "watt",
}
_LONGEST_FIRST = sorted(_SUFFIXES, key=len, reverse=True)

# vLLM's num_requests_running and prompt_tokens_by_source name their units in the middle.
_INFIXES = (
    ("num_requests_", "requests"),
    ("prompt_tokens_", "tokens"),
    ("_tokens_per_", "tokens"),
    ("_tokens_histogram", "tokens"),
)

_WORDS = {
    **{word: word for word in ("seconds", "milliseconds", "microseconds", "nanoseconds", "minutes", "hours")},
    **{word: word for word in ("bytes", "kilobytes", "megabytes", "gigabytes", "gb/s", "percent", "celsius", "tokens")},
    "ms": "milliseconds",
    "us": "microseconds",
    "joules": "joule",
    "watts": "watt",
}
# Too short to be looked for outside parentheses.
_TAGS = {
    "%": "percent",
    "s": "seconds",
    "c": "celsius",
    "w": "watt",
    "j": "joule",
    "mj": "millijoule",
    "mhz": "megahertz",
    "mib": "mebibytes",
    "token/s": "tokens/s",
}


def _any_of(words: Iterable[str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_STATED = re.compile(
    rf"\bin ({_any_of(_WORDS)})\b( per second|/s)?|\((?:in )?({_any_of(_WORDS | _TAGS)})( per second|/s)?\)",
    re.IGNORECASE,
)
_HUNDRED_PERCENT = re.compile(r"\(0 ?(?:-|to) ?100 ?%?\)|\b0 ?- ?100 ?%", re.IGNORECASE)
# In parentheses or with its meaning only: "retries 0-1 per request" is not a ratio.
_UNIT_RANGE = re.compile(
    r"[(\[]0(?:\.0)? ?(?:-|to|,|\.\.) ?1(?:\.0)?[)\]]|\b1(?:\.0)? means 100 ?(?:percent|%)", re.IGNORECASE
)
# What a range may still be a ratio or a percentage of: "_seconds (0-1)" stays seconds.
_UNITLESS = (None, "ratio", "percent", "count")
_COUNTED = re.compile(
    r"\bnumber of (?:(?!of |per |in |for )[\w-]+ ){0,3}?(requests|tokens|blocks|errors)\b", re.IGNORECASE
)


def infer_unit(name: str, description: str) -> str | None:
    """Return the unit of a metric by its name and description, None if unknown. The name is as exposed (with `_total`).

    In this order: a range that the description gives, unless the name has a unit of its own; a unit that it gives ("in
    milliseconds", "(GB/s)"); the longest suffix of the name, that of a counter without its `_total`; what the
    description says is counted; `count` for what is left of counters.
    """
    by_name = _by_name(name)
    if by_name in _UNITLESS and _UNIT_RANGE.search(description):
        return "ratio"
    if by_name in _UNITLESS and _HUNDRED_PERCENT.search(description):
        return "percent"
    stated = _STATED.search(description)
    if stated:
        word, rate = stated.group(1) or stated.group(3), stated.group(2) or stated.group(4)
        return (_WORDS | _TAGS)[word.lower()] + ("/s" if rate else "")
    counted = _COUNTED.search(description)
    if by_name in (None, "count") and counted:
        return counted.group(1).lower()
    return by_name


def _by_name(name: str) -> str | None:
    suffix = next((suffix for suffix in _LONGEST_FIRST if name.endswith(suffix)), None)
    if suffix == "_total":
        return _by_name(name.removesuffix("_total")) or _SUFFIXES[suffix]
    if suffix is not None:
        return _SUFFIXES[suffix]
    return next((unit for infix, unit in _INFIXES if infix in name), None)
