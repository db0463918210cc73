"""The unit of a metric, told from its description and its name: the table of AIPerf's export format.

Longer suffixes win; what a description says outright ("in milliseconds", "1 means 100 percent usage") wins over the
name.
"""

from __future__ import annotations

import re

_SUFFIXES = {
    "_seconds": "seconds",
    "_seconds_total": "seconds",
    "_milliseconds": "milliseconds",
    "_ms": "milliseconds",
    "_ms_total": "milliseconds",
    "_nanoseconds": "nanoseconds",
    "_ns": "nanoseconds",
    "_ns_total": "nanoseconds",
    "_bytes": "bytes",
    "_bytes_total": "bytes",
    "_kilobytes": "kilobytes",
    "_megabytes": "megabytes",
    "_gigabytes": "gigabytes",
    "_total": "count",
    "_count": "count",
    "_tokens": "tokens",
    "_tokens_total": "tokens",
    "_requests": "requests",
    "_requests_total": "requests",
    "_reqs": "requests",
    "request_success": "requests",
    "_errors": "errors",
    "_errors_total": "errors",
    "_error_count": "errors",
    "_error_count_total": "errors",
    "_blocks": "blocks",
    "_blocks_total": "blocks",
    "_block_count": "blocks",
    "_gb_s": "gb/s",
    "_ratio": "ratio",
    "_percent": "percent",
    "_perc": "percent",
    "_celsius": "celsius",
    "_joules": "joule",
    "_watts": "watt",
}
_LONGEST_FIRST = sorted(_SUFFIXES, key=len, reverse=True)

# vLLM's num_requests_running names its unit in the middle.
_INFIXES = (("num_requests_", "requests"),)

_WORDS = {
    "seconds": "seconds",
    "milliseconds": "milliseconds",
    "ms": "milliseconds",
    "nanoseconds": "nanoseconds",
    "bytes": "bytes",
    "kilobytes": "kilobytes",
    "megabytes": "megabytes",
    "gigabytes": "gigabytes",
    "gb/s": "gb/s",
    "percent": "percent",
    "celsius": "celsius",
    "joules": "joule",
    "watts": "watt",
    "tokens": "tokens",
}
_NUMBER_WORDS = "|".join(re.escape(word) for word in sorted(_WORDS, key=len, reverse=True))
_IN_WORDS = re.compile(rf"\bin ({_NUMBER_WORDS})\b|\((?:in )?({_NUMBER_WORDS})\)", re.IGNORECASE)
_HUNDRED_PERCENT = re.compile(r"\(0 ?(?:-|to) ?100 ?%?\)|\b0 ?- ?100 ?%", re.IGNORECASE)
# In parentheses or with its meaning only: "retries 0-1 per request" is no ratio.
_UNIT_RANGE = re.compile(
    r"[(\[]0(?:\.0)? ?(?:-|to|,|\.\.) ?1(?:\.0)?[)\]]|\b1(?:\.0)? means 100 ?(?:percent|%)", re.IGNORECASE
)


def infer_unit(name: str, description: str) -> str | None:
    """Return the unit of a metric by its name as exposed (with `_total`), None where nothing tells it.

    A counter's plain `_total` says `count` only when its name without that says nothing better.
    """
    if _UNIT_RANGE.search(description):
        return "ratio"
    if _HUNDRED_PERCENT.search(description):
        return "percent"
    said = _IN_WORDS.search(description)
    if said:
        return _WORDS[(said.group(1) or said.group(2)).lower()]
    return _by_name(name)


def _by_name(name: str) -> str | None:
    suffix = next((suffix for suffix in _LONGEST_FIRST if name.endswith(suffix)), None)
    if suffix == "_total":
        return _by_name(name.removesuffix("_total")) or _SUFFIXES[suffix]
    if suffix is not None:
        return _SUFFIXES[suffix]
    return next((unit for infix, unit in _INFIXES if infix in name), None)
