"""One metrics endpoint over HTTP: finding its path, and one scrape with its stamps.

A scrape that failed is data (a `ScrapeRecord` with an error), not an exception. The page itself is not parsed here.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit, urlunsplit

import aiohttp
import msgspec

from scraper.exposition import MalformedPage, parse
from scraper.missing import Missing
from scraper.series import ScrapeRecord

ACCEPT = (
    "text/plain;version=0.0.4, text/plain;version=1.0.0;q=0.9, "
    "application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1"
)
LIMIT_BYTES = 16 * 1024 * 1024
MAX_REDIRECTS = 3
PATHS = ("/metrics", "/prometheus/metrics")
_COMPRESSION_LEVEL = 1  # a page shrinks tenfold at a millisecond each
_WEB_PAGE = (b"<!doctype html", b"<html")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one scrape may cost: seconds until its body is complete, and bytes of its body after decompression."""

    timeout_s: float = 5.0
    body_bytes: int = LIMIT_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    status: int
    content_type: str
    body: bytes


class _RefusedError(Exception):
    """The reply cannot be used; the text says why."""


def open_session(headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """Open an HTTP session for scraping: no limit on connections (a target has one), stated headers on each request."""
    return aiohttp.ClientSession(
        headers={"Accept": ACCEPT, **(headers or {})},
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def scrape(
    session: aiohttp.ClientSession, url: str, *, due_ns: int, clock_offset_ns: int, limits: Limits
) -> ScrapeRecord:
    """Fetch one page, stamped before sending and when its body is complete or the attempt has failed.

    Never raises for what a server or the network does: the record's `error` says it, and its body is then empty.
    """
    request_ns = time.monotonic_ns() + clock_offset_ns
    reply, error = await _attempt(session, url, limits)
    response_ns = time.monotonic_ns() + clock_offset_ns
    if reply is not None and not error:
        error = foreign(reply.status, reply.content_type, reply.body)
    return ScrapeRecord(
        url=url,
        due_ns=due_ns,
        request_ns=request_ns,
        response_ns=response_ns,
        status=reply.status if reply else 0,
        content_type=reply.content_type if reply else "",
        body=zlib.compress(reply.body, _COMPRESSION_LEVEL) if reply and not error else b"",
        error=error,
    )


async def discover(
    base_url: str, *, headers: Mapping[str, str] | None = None, limits: Limits | None = None
) -> str | Missing:
    """Find the metrics page that belongs to a server's base URL; the answer is its URL, or why there is none.

    - A URL whose path has `metrics` in it is taken at its word: only that one is tried.
    - Else `/metrics` and `/prometheus/metrics` (TensorRT-LLM) are tried, beside the base path (`/v1` taken off) and at
      the root.
    """
    try:
        parts = urlsplit(base_url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and _port(parts) > 0
    except ValueError:
        valid = False
    if not valid:
        return Missing(f"{base_url} is not an http(s) URL")
    tried: list[str] = []
    async with open_session(headers) as session:
        for url in candidates(parts):
            problem = await _problem(session, url, limits or Limits())
            if not problem:
                return url
            tried.append(f"{url}: {problem}")
    return Missing("; ".join(tried))


def candidates(parts: SplitResult) -> tuple[str, ...]:
    """Return the URLs at which the metrics of a server at this base URL may be, the likeliest first."""
    if "metrics" in parts.path:
        return (urlunsplit(parts._replace(fragment="")),)
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    prefixes = (prefix, "") if prefix else ("",)
    paths = [before + path for before in prefixes for path in PATHS]
    return tuple(urlunsplit((parts.scheme, parts.netloc, path, "", "")) for path in paths)


def foreign(status: int, content_type: str, body: bytes) -> str:
    """Say what a reply is if it is no exposition (HTTP error, JSON, web page, binary); empty if it may be one."""
    if status != 200:
        return f"HTTP {status}"
    kind = content_type.partition(";")[0].strip().lower()
    start = body[:256].lstrip()
    if kind == "text/html" or start.lower().startswith(_WEB_PAGE):
        return "speaks something else: a web page (HTML)"
    if kind.endswith("json") or (start[:1] in (b"{", b"[") and _is_json(body)):  # text 1.0.0 may begin with {"name"}
        return "speaks something else: JSON"
    if kind == "application/vnd.google.protobuf" or b"\0" in body[:4096]:
        return "speaks something else: binary data"
    return ""


async def _problem(session: aiohttp.ClientSession, url: str, limits: Limits) -> str:
    reply, error = await _attempt(session, url, limits)
    if reply is None or error:
        return error
    error = foreign(reply.status, reply.content_type, reply.body)
    if error:
        return error
    # A server before its first request may have an empty page, declared as what it is.
    if not reply.body and "version=" not in reply.content_type:
        return "an empty page"
    try:
        parse(reply.body, openmetrics="openmetrics" in reply.content_type)
    except MalformedPage as bad:
        return f"speaks something else: {bad}"
    return ""


async def _attempt(session: aiohttp.ClientSession, url: str, limits: Limits) -> tuple[_Reply | None, str]:
    """Map every foreign exception to one line, here and nowhere else."""
    try:
        return await _fetch(session, url, limits), ""
    except TimeoutError:
        return None, f"timeout: no complete page within {limits.timeout_s:g} s"
    except _RefusedError as refused:
        return None, str(refused)
    except aiohttp.InvalidURL:
        return None, "protocol: not a URL"
    except UnicodeError:  # the idna codec's, for an empty or an overlong label
        return None, "protocol: not a host name"
    except aiohttp.ClientConnectorError as error:
        return None, f"connect: {_connecting(error.os_error)}"
    except aiohttp.ClientPayloadError:
        return None, "cut off: the connection ended before the page did"
    except (aiohttp.ClientError, OSError) as error:
        return None, f"protocol: {str(error) or type(error).__name__}"


def _connecting(error: OSError) -> str:
    """Say why there is no connection. asyncio's own text repeats the address and hides the reason.

    OpenSSL's and getaddrinfo's codes stand in `errno` as well, and mean something else there.
    """
    if isinstance(error, ssl.SSLError):
        reason = getattr(error, "reason", None)  # OpenSSL's; absent where Python raised it
        return f"TLS failed ({reason})" if reason else "TLS failed"
    if isinstance(error, socket.gaierror):
        return "no such host"
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


async def _fetch(session: aiohttp.ClientSession, url: str, limits: Limits) -> _Reply:
    timeout = aiohttp.ClientTimeout(total=limits.timeout_s)
    for _ in range(MAX_REDIRECTS + 1):
        async with session.get(url, allow_redirects=False, timeout=timeout) as response:
            target = response.headers.get("Location", "")
            if response.status in (301, 302, 303, 307, 308) and target:
                url = _same_host(url, target)
                continue
            body = await _body(response, limits.body_bytes)
            return _Reply(status=response.status, content_type=response.headers.get("Content-Type", ""), body=body)
    raise _RefusedError(f"redirect: more than {MAX_REDIRECTS} in a row")


def _same_host(url: str, target: str) -> str:
    """Follow a redirect on its own host only: headers with credentials must not leave it."""
    try:
        following = urljoin(url, target)
        here, there = urlsplit(url), urlsplit(following)
        same = there.hostname == here.hostname and (here.scheme != there.scheme or _port(there) == _port(here))
    except ValueError:
        raise _RefusedError("redirect: to something that is not a URL") from None
    if not same or there.scheme not in ("http", "https"):
        raise _RefusedError(f"redirect: to another host ({there.netloc})")
    if here.scheme == "https" and there.scheme == "http":
        raise _RefusedError("redirect: from https to plain http")
    return following


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


async def _body(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit_bytes:
            response.close()
            raise _RefusedError(f"too large: more than {limit_bytes} bytes")
    return bytes(body)


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except msgspec.DecodeError:
        return False
    return True
