"""One metrics endpoint over HTTP: finding its path, and one scrape with its stamps.

A scrape that failed is data (a `Scrape` with an error), not an exception. The page itself is not parsed here.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit, urlunsplit

import aiohttp
import msgspec

from sidelight.rundir.access import Access, aiohttp_tls, bare, connection_problem, headers_for, masked, root_url
from sidelight.rundir.printable.masking import blanked, without_secrets
from sidelight.rundir.stats import Missing
from sidelight.scraper.exposition import UNREADABLE_JSON, MalformedPage, PageReader
from sidelight.scraper.targets.scrape import Scrape, clock_of

ACCEPT = (
    "text/plain;version=0.0.4, text/plain;version=1.0.0;q=0.9, "
    "application/openmetrics-text;version=1.0.0;q=0.5, */*;q=0.1"
)
LIMIT_BYTES = 16 * 1024 * 1024
MAX_REDIRECTS = 3
ANONYMOUS = Access()
_JSON = "JSON; an engine that empties it at each read (trtllm-serve) has lost what was read, so it is not read again"
_PROTOBUF = "application/vnd.google.protobuf"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_LONGEST_REASON = 200
_GZIP = 16 + zlib.MAX_WBITS
_WEB_PAGE = (b"<!doctype html", b"<html")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Limits of one scrape: seconds until its body is complete, and bytes after decompression."""

    timeout_s: float = 5.0
    body_bytes: int = LIMIT_BYTES


LIMITS = FetchLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class _HttpReply:
    status: int
    content_type: str
    body: bytes


class _RefusedError(Exception):
    """The reply cannot be used; the text says why."""


def open_session(access: Access = ANONYMOUS) -> aiohttp.ClientSession:
    """Open an HTTP session for scraping, with TLS as stated and no limit on connections: a target has one.

    Raises UnusableFile.
    """
    return aiohttp.ClientSession(
        headers={"Accept": ACCEPT},
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, ssl=aiohttp_tls(access)),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,  # a bomb is ours to bound, whichever aiohttp there is
    )


async def scrape(
    session: aiohttp.ClientSession,
    url: str,
    *,
    tick_ns: int,
    clock_offset_ns: int,
    limits: FetchLimits,
    access: Access = ANONYMOUS,
    any_json: bool = False,
) -> Scrape:
    """Fetch one page, with stamps of its sending and of its end.

    It ends when its body is complete or the attempt has failed.

    Never raises for what a server or the network does: the scrape's `error` says it, and its body is then empty. A page
    must be an exposition, but with `any_json`.
    """
    request_ns = time.monotonic_ns() + clock_offset_ns
    reply, error = await _attempt(session, url, access, limits)
    response_ns = time.monotonic_ns() + clock_offset_ns
    if reply is not None and not error:
        error = _not_200(reply.status) if any_json else not_an_exposition(reply.status, reply.content_type, reply.body)
    return Scrape(
        url=masked(url),
        tick_ns=tick_ns,
        request_ns=request_ns,
        response_ns=response_ns,
        status=reply.status if reply else 0,
        content_type=reply.content_type if reply else "",
        body=blanked(reply.body) if reply and not error else b"",
        error=without_secrets(error),
    )


async def discover(
    base_url: str, paths: Sequence[str], *, access: Access = ANONYMOUS, limits: FetchLimits = LIMITS
) -> str | Missing:
    """Find the metrics page that belongs to a server's base URL: return its URL, or why there is none.

    - Of a URL whose path has `metrics` in it, only that one is tried. Where it is that of
      TensorRT-LLM's iterations, or of its `/perf_metrics`, it is not even read: the first reader empties it, and
      that must be the one that records.
    - Another path that does not end in `/v1` is tried as it is, first.
    - Then `paths` are tried (see `engines.metrics_paths`), beside the base path (`/v1` taken off) and at the root. No
      address is asked twice, and none after one that asks for credentials.

    Raises UnusableFile.
    """
    try:
        parts = urlsplit(base_url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and _port(parts) > 0
    except ValueError:
        valid = False
    if not valid:
        return Missing(f"{masked(base_url)} is not an http(s) URL")
    tried: list[str] = []
    async with open_session(access) as session:
        urls = _candidates(parts, paths)
        if clock_of(urls[0]) or (len(urls) == 1 and await _hands_out_once(session, urls[0], access, limits)):
            return urls[0]
        for url in urls:
            problem = await _problem(session, url, access, limits, asked_for=len(urls) == 1)
            if not problem:
                return url
            tried.append(f"{masked(url)}: {problem}")
            if problem == "HTTP 401":  # it is there, and others would ask for the same credentials
                return Missing(tried[-1])
    return Missing("; ".join(tried))


def _candidates(parts: SplitResult, paths: Sequence[str]) -> tuple[str, ...]:
    """Return the possible metrics URLs of a server at a base URL, the likeliest first."""
    if "metrics" in parts.path:
        return (urlunsplit(parts._replace(fragment="")),)
    prefix = root_url(parts.path)
    as_given = () if prefix != parts.path.rstrip("/") or not prefix else (parts.path,)
    prefixes = (prefix, "") if prefix else ("",)
    whole = [*as_given, *(before + path for before in prefixes for path in paths)]
    return tuple(urlunsplit((parts.scheme, parts.netloc, path, "", "")) for path in whole)


def not_an_exposition(status: int, content_type: str, body: bytes, *, iterations_too: bool = True) -> str:
    """Return the reason why a response cannot be a metrics exposition, else "".

    The reason is an HTTP error, JSON, a web page or binary data. With `iterations_too`, a JSON list may be an
    exposition: the iterations of TensorRT-LLM. A JSON string may be a page in quotes (llama.cpp, issue 17384); the
    parser tells.
    """
    if status != 200:
        return _not_200(status)
    kind = content_type.partition(";")[0].strip().lower()
    start = body[:256].lstrip()
    if kind == "text/html" or start.lower().startswith(_WEB_PAGE):
        return "speaks something else: a web page (HTML)"
    if kind.endswith("json") and (start[:1] == b'"' or (start[:1] == b"[" and iterations_too)):
        return ""
    if kind.endswith("json") or (start[:1] in (b"{", b"[") and _is_json(body)):  # text 1.0.0 may begin with {"name"}
        return f"speaks something else: {_JSON}"
    if kind == _PROTOBUF:
        return "speaks something else: protobuf, though text was asked for"
    if b"\0" in body[:4096]:
        return "speaks something else: binary data"
    return ""


def _not_200(status: int) -> str:
    return f"HTTP {status}" if status != 200 else ""


def _headers(url: str, access: Access) -> dict[str, str]:
    # On its own machine the engine would spend milliseconds on compressing what need not travel.
    encoding = "identity" if urlsplit(url).hostname in _LOOPBACK else "gzip"
    return {"Accept-Encoding": encoding, **headers_for(access, url)}


async def _problem(
    session: aiohttp.ClientSession, url: str, access: Access, limits: FetchLimits, *, asked_for: bool
) -> str:
    """Return the reason for a missing metrics page at a URL, or "". Only one that was asked for by its whole URL may be
    JSON.
    """
    reply, error = await _attempt(session, url, access, limits)
    if reply is None or error:
        return error
    error = not_an_exposition(reply.status, reply.content_type, reply.body, iterations_too=asked_for)
    if error:
        return error
    # A server before its first request may have an empty page, declared as what it is.
    if reply.body in (b"", b'""') and "version=" not in reply.content_type:
        return "an empty page"
    try:
        PageReader().read(reply.body, reply.content_type)
    except MalformedPage as bad:
        return f"speaks something else: {bad}"
    return ""


async def _hands_out_once(session: aiohttp.ClientSession, url: str, access: Access, limits: FetchLimits) -> bool:
    """Return whether a URL is TensorRT-LLM's iterations, without reading it.

    It is known by the model list beside it.
    """
    parts = urlsplit(url)
    prefix = parts.path.removesuffix("/metrics")
    if prefix == parts.path or prefix.endswith("/prometheus"):
        return False
    models = urlunsplit(parts._replace(path=f"{prefix}/v1/models", query="", fragment=""))
    reply, _ = await _attempt(session, models, access, limits)
    return reply is not None and reply.status == 200 and b'"tensorrt_llm"' in reply.body


async def _attempt(
    session: aiohttp.ClientSession, url: str, access: Access, limits: FetchLimits
) -> tuple[_HttpReply | None, str]:
    """Map every foreign exception to one line, here and nowhere else."""
    try:
        return await _fetch(session, bare(url), _headers(url, access), limits), ""
    except TimeoutError:
        return None, f"timeout: no complete page within {limits.timeout_s:g} s"
    except _RefusedError as refused:
        return None, str(refused)
    except zlib.error:
        return None, "encoding: declared as gzip, but is not"
    except aiohttp.InvalidURL:
        return None, "protocol: not a URL"
    except UnicodeError:  # the idna codec's, for an empty or an overlong label
        return None, "protocol: not a host name"
    except aiohttp.ClientConnectorError as error:
        return None, f"connect: {connection_problem(error)}"
    except aiohttp.ClientPayloadError:
        return None, "cut off: the connection ended before the page did"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return None, f"protocol: {' '.join(str(error).split())[:_LONGEST_REASON] or type(error).__name__}"


async def _fetch(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], limits: FetchLimits
) -> _HttpReply:
    timeout = aiohttp.ClientTimeout(total=limits.timeout_s)
    for _ in range(MAX_REDIRECTS + 1):
        async with session.get(url, headers=headers, allow_redirects=False, timeout=timeout) as response:
            target = response.headers.get("Location", "")
            if response.status in (301, 302, 303, 307, 308) and target:
                url = _same_host(url, target)
                continue
            body = await _body(response, limits.body_bytes)
            return _HttpReply(status=response.status, content_type=response.headers.get("Content-Type", ""), body=body)
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
        raise _RefusedError(f"redirect: to another host ({there.netloc.rpartition('@')[2]})")
    if here.scheme == "https" and there.scheme == "http":
        raise _RefusedError("redirect: from https to plain http")
    return bare(following)


def _port(parts: SplitResult) -> int:
    return parts.port or (443 if parts.scheme == "https" else 80)


async def _body(response: aiohttp.ClientResponse, limit_bytes: int) -> bytes:
    """Read a body whole, decompressing as it comes: never more of it is in memory than the limit and one read."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    inflate = zlib.decompressobj(_GZIP) if encoding in ("gzip", "x-gzip") else None
    if inflate is None and encoding not in ("", "identity"):
        raise _RefusedError(f"encoding: {encoding!r}, which was not asked for")
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk if inflate is None else inflate.decompress(chunk, limit_bytes + 1 - len(body))
        if len(body) > limit_bytes:
            raise _RefusedError(f"too large: more than {limit_bytes} bytes")
    if inflate is not None and body and not inflate.eof:
        raise _RefusedError("cut off: the compressed page is not whole")
    return bytes(body)


def _is_json(body: bytes) -> bool:
    try:
        msgspec.json.decode(body)
    except RecursionError:  # no metric's name has that many brackets before it
        return True
    except UNREADABLE_JSON:
        return False
    return True
