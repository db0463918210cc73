"""Redirects that are not followed: to another host, since what goes with a request may be secret."""

from __future__ import annotations

from types import SimpleNamespace
from urllib.parse import urljoin

import aiohttp
from yarl import URL


class RedirectError(aiohttp.ClientError):
    """A server sends a request on to another host."""


def on_same_host() -> aiohttp.TraceConfig:
    """Return a trace of sessions that raises RedirectError at a redirect to another host.

    So it does at one from https to http. aiohttp leaves out the Authorization of a request there, and sends all other
    headers and the body.
    """
    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(_check)
    return trace


async def _check(_: aiohttp.ClientSession, _context: SimpleNamespace, sent: aiohttp.TraceRequestRedirectParams) -> None:
    headers = sent.response.headers
    here, there = sent.url, URL(urljoin(str(sent.url), headers.get("Location") or headers.get("URI") or ""))
    secured = (here.scheme, there.scheme) == ("http", "https")
    if here.host != there.host or not (secured or (here.scheme, here.port) == (there.scheme, there.port)):
        raise RedirectError(f"redirect to another host ({there.host}:{there.port})")
