"""Requests for a URL's model, version and errors, before any load goes there."""

from __future__ import annotations

import errno
import json
import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

import aiohttp
import msgspec

from sidelight.loadgen.protocols.models import OPENAI, Listing, owner_of
from sidelight.loadgen.protocols.reading.failures import UNREADABLE
from sidelight.loadgen.protocols.table import PROTOCOLS
from sidelight.recorded.errors import ConfigurationError, SidelightError, TargetIncompatible, TargetUnreachable
from sidelight.rundir.access import Tls, aiohttp_tls, connection_cause, connection_problem, root_url
from sidelight.rundir.redirects import RedirectError, on_same_host
from sidelight.scraper.engines.catalogue import version_paths

PROBE_TIMEOUT_S = 10.0
BODY_EXCERPT = 120
MOST_NAMED = 8
UNAUTHORIZED = {401, 403}
NO_KEY = "set SIDELIGHT_API_KEY (or --api-key) to a key it accepts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Access to a target: the API, and the parts of every request."""

    endpoint: str = "chat"
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    tls: Tls = field(default_factory=Tls)

    def session(self, timeout_s: float) -> aiohttp.ClientSession:
        """Open a session for questions to a target; the caller's to close. Raises UnusableFile for a certificate."""
        connector = aiohttp.TCPConnector(ssl=aiohttp_tls(self.tls))
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        return aiohttp.ClientSession(
            timeout=timeout, headers=dict(self.headers), connector=connector, trace_configs=[on_same_host()]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """A target's own statements: the chosen model, its length limit in tokens (None: missing).

    others    further models that were named, for requests to be spread over
    listed    all models that it serves; none where it lists none
    owner     who owns them, as vllm or sglang; "" where it is not said
    version   what the engine says at one of its `version_paths`; "" where it was not asked
    unlisted  why the model, which was named, is not in that list: the list has other ones, or there is none
    """

    url: str
    model: str
    max_model_len: int | None
    others: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    owner: str = ""
    version: str = ""
    unlisted: SidelightError | None = None


async def probe(url: str, *, model: str | None, contact: Contact, any_model: bool = False) -> TargetInfo:
    """Ask a target for its models, and choose one. They are listed where the protocol says; with `any_model` the first
    is chosen.

    A model that was named is chosen whatever the list says: behind a gateway it may be empty, fail, or have other
    names. Raises TargetUnreachable (nothing listens, no answer); and unless one was named TargetIncompatible (a web
    page, no model list) and ConfigurationError (there are several, or none).
    """
    listing = PROTOCOLS[contact.endpoint].models
    first, *rest = [name.strip() for name in (model or "").split(",")]
    model, others = first or None, tuple(filter(None, rest))
    if listing is None:
        if model is None:
            raise ConfigurationError(
                "model.missing", f"--model is missing; --endpoint {contact.endpoint} does not list models"
            )
        return TargetInfo(url=root_url(url), model=model, max_model_len=None, others=others)
    address = f"{root_url(url)}{listing.path}"
    try:
        body = await _get(address, contact)
        limits = _limits(body, listing, address, contact)
    except TargetIncompatible as error:
        if model is None:
            raise
        return TargetInfo(url=root_url(url), model=model, max_model_len=None, others=others, unlisted=error)
    served = TargetInfo(
        url=root_url(url),
        model="",
        max_model_len=None,
        others=others,
        listed=tuple(limits),
        owner=owner_of(body),
    )
    if unknown := [name for name in others if name not in limits]:
        raise ConfigurationError(
            "model.not-served", f"--model {unknown[0]}: not served; {address} serves: {_names(served.listed)}"
        )
    chosen = _only(served.listed, address, any_model=any_model) if model is None else model
    if chosen not in limits:
        missing = ConfigurationError(
            "model.not-served", f"--model {chosen}: not served; {address} serves: {_names(served.listed)}"
        )
        return replace(served, model=chosen, unlisted=missing)
    return replace(served, model=chosen, max_model_len=limits[chosen])


def unlisted_note(served: TargetInfo) -> str | None:
    """Return a note on the use of a model that its server does not list; None where it does."""
    if served.unlisted is None:
        return None
    why = str(served.unlisted).replace(f"--model {served.model}: not served; ", "").partition("; ")[0]
    is_read = isinstance(served.unlisted, ConfigurationError)
    where = "is not in the server's list of models" if is_read else "cannot be looked up: no list of models can be read"
    return (
        f"--model {served.model} {where} ({why}); the server answered a request for it, so it is used. Its context "
        "length is not known"
    )


def _limits(body: bytes, listing: Listing, address: str, contact: Contact) -> dict[str, int | None]:
    try:
        return listing.read(body)
    except UNREADABLE:
        raise TargetIncompatible(
            "target.other-api", f"{address}: JSON, but not a list of models; is this {_what(contact)}?"
        ) from None


def _only(served: tuple[str, ...], listing: str, *, any_model: bool) -> str:
    if served and (any_model or len(served) == 1):
        return served[0]
    cure = "" if served else "; load a model there, or name one that it has with --model NAME"
    raise ConfigurationError("model.missing", f"--model is missing; {listing} serves: {_names(served)}{cure}")


def _names(served: tuple[str, ...]) -> str:
    return ", ".join(served[:MOST_NAMED]) + (", ..." if len(served) > MOST_NAMED else "") or "none"


async def _get(url: str, contact: Contact) -> bytes:
    host = urlsplit(url).netloc
    try:
        async with contact.session(PROBE_TIMEOUT_S) as session, session.get(url) as response:
            raw = await response.read()
    except TimeoutError as error:
        raise TargetUnreachable(
            "target.no-answer", f"{url}: no answer within {PROBE_TIMEOUT_S:g} s; is the server ready?"
        ) from error
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, ConnectionError) as error:
        raise TargetUnreachable(
            "target.unreachable", f"cannot connect to {host}: {reason_of(error)}; {_cure(url, error)}"
        ) from error
    except RedirectError as error:
        raise TargetIncompatible(
            "target.redirected", f"{url}: {error}; if that host is yours, give its address"
        ) from error
    except aiohttp.ClientError as error:
        cure = "is it an https:// server?" if url.startswith("http:") else "check --url"
        raise TargetIncompatible(
            "target.not-http", f"{url}: does not speak HTTP ({type(error).__name__}); {cure}"
        ) from error
    if response.status in UNAUTHORIZED:
        raise TargetIncompatible("target.unauthorized", f"{url}: HTTP {response.status}; {NO_KEY}")
    if response.status in (400, *range(500, 600)):
        keyless = "" if "authorization" in map(str.lower, contact.headers) else f"; where it needs a key, {NO_KEY}"
        reason = f": {excerpt}" if (excerpt := excerpt_of(raw)) else ""
        raise TargetIncompatible(
            "target.server-error", f"{url}: HTTP {response.status}, the server fails at it{reason}{keyless}"
        )
    if response.status != 200:
        raise TargetIncompatible(
            "target.other-api", f"{url}: HTTP {response.status}; this is not {_what(contact)}, check --url"
        )
    try:
        msgspec.json.decode(raw)
    except UNREADABLE:
        raise TargetIncompatible(
            "target.other-api",
            f"{url}: not JSON but {response.content_type} ({excerpt_of(raw)!r}); this is a web page, not "
            f"{_what(contact)}",
        ) from None
    return raw


def _what(contact: Contact) -> str:
    if PROTOCOLS[contact.endpoint].models is OPENAI:
        return "an OpenAI-compatible endpoint"
    return f"the API of --endpoint {contact.endpoint}"


def excerpt_of(raw: bytes) -> str:
    return " ".join(raw[:BODY_EXCERPT].decode(errors="replace").split())


def reason_of(error: Exception) -> str:
    """Return the reason of a failed connection in the system's words. Those of aiohttp and asyncio repeat the address
    instead.
    """
    problem = connection_problem(error)
    if problem.kind == "tls":
        return f"TLS failed ({problem.detail or (problem.reason or str(error)).replace('_', ' ').lower()})"
    return str(problem)


def _cure(url: str, error: Exception) -> str:
    cause = connection_cause(error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return "give its authority with --ca FILE, or disable verification with --insecure"
    if isinstance(cause, ssl.SSLError) and "CERTIFICATE_REQUIRED" in (cause.reason or ""):
        return "the server requires a client certificate: --cert FILE and --key FILE"
    if isinstance(cause, ssl.SSLError) and "ALERT" in (cause.reason or ""):
        return "does the server trust the certificate of --cert?"
    if isinstance(cause, ssl.SSLError):
        return "is it an http:// server?"
    # A TLS server hangs up on plain HTTP, and on a client without a certificate, at times before that can read why.
    if isinstance(error, aiohttp.ServerDisconnectedError) and url.startswith("http:"):
        return "is it an https:// server?"
    if url.startswith("https:") and (
        isinstance(cause, aiohttp.ServerDisconnectedError)
        or getattr(cause, "errno", 0) in {errno.EPIPE, errno.ECONNRESET}
    ):
        return "does it require a client certificate (--cert)?"
    if name := unused_proxy(url):
        return f"{name} is not used: Sidelight connects directly, so run it where the target can be reached"
    return "is the server up, and --url right?"


def proxy_note(urls: Iterable[str]) -> str | None:
    """Return a note on an unused proxy variable that applies to a target, or None."""
    for url in urls:
        if name := unused_proxy(url):
            return f"{name} is set, but Sidelight does not use it: requests go straight to {url}"
    return None


def unused_proxy(url: str) -> str | None:
    """Return the proxy variable that other clients would use for a URL, or None."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if host == "localhost" or host.startswith("127.") or host == "::1" or proxy_bypass(host):
        return None
    names = (f"{parts.scheme}_proxy", "all_proxy")
    return next((name for key in names for name in (key, key.upper()) if os.environ.get(name)), None)


async def engine_version(url: str, contact: Contact) -> str | None:
    """Return the engine's version from one of its `version_paths`, or None if all lack it.

    Nothing is asked of an API that has no list of models either.
    """
    for path in version_paths() if PROTOCOLS[contact.endpoint].models is not None else ():
        try:
            body: Any = json.loads(await _get(f"{url}{path}", contact))
        except SidelightError:
            continue
        version = body.get("version") if isinstance(body, dict) else None
        if version:
            frontend = body.get("rust_frontend_version")  # vllm's, which has other options
            return f"{version} (Rust frontend {frontend})" if frontend else str(version)
    return None
