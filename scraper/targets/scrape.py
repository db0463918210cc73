"""One scrape of a target as it is logged and read back; nothing here needs an HTTP client."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

_TIMINGS, _CLOCK = "/perf_metrics", "/steady_clock_offset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One scrape: stamps are int64 ns Unix, `body` is the page after decompression, empty where `error` is not.

    `tick_ns` is the multiple of the scrape interval that it belongs to, shared by all targets of a worker. `url` is
    masked; `status` is that of HTTP, 0 where there was no reply.
    """

    url: str
    tick_ns: int
    request_ns: int
    response_ns: int
    status: int = 0
    content_type: str = ""
    body: bytes = b""
    error: str = ""


def clock_of(url: str) -> str:
    """Return the URL of the clock behind a TensorRT-LLM `/perf_metrics`, empty for other pages."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    prefix, separator, rest = parts.path.rpartition(_TIMINGS)
    if not separator or rest.strip("/"):
        return ""
    return urlunsplit(parts._replace(path=prefix + _CLOCK, query="", fragment=""))
