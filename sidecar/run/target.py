"""What answers at a URL, asked before any load goes there."""

from __future__ import annotations

import asyncio
import errno
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import numpy as np

from loadgen.http1 import ProtocolError, parse_head
from loadgen.protocols import PROTOCOLS
from loadgen.protocols.models import OPENAI
from loadgen.protocols.reading.failures import UNREADABLE
from loadgen.protocols.request import Prompt, Target
from loadgen.records import plan_end
from loadgen.transports import open_transport
from loadgen.transports.transport import Exchange, WorkerSpec
from rundir.access import Tls, aiohttp_tls, connection_cause, connection_problem, root_url
from rundir.clock import Clock
from scraper.engines import version_paths
from sidecar.errors import ConfigurationError, SidelightError, TargetIncompatible, TargetUnreachable

PROBE_TIMEOUT_S = 10.0
PREFLIGHT_TIMEOUT_S = 120.0  # a first request may compile kernels
CATCH_UP_S = 0.1
BODY_EXCERPT = 120


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """How a target is spoken to: which API, and what goes with every request."""

    endpoint: str = "chat"
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, object] = field(default_factory=dict)
    tls: Tls = field(default_factory=Tls)

    def session(self, timeout_s: float) -> aiohttp.ClientSession:
        """Open what questions are asked with; the caller's to close. Raises UnusableFile for a certificate."""
        connector = aiohttp.TCPConnector(ssl=aiohttp_tls(self.tls))
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        return aiohttp.ClientSession(timeout=timeout, headers=dict(self.headers), connector=connector)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a target said of itself: the chosen model, its length limit in tokens (None: not said)."""

    url: str
    model: str
    max_model_len: int | None


async def probe(url: str, *, model: str | None, contact: Contact) -> Served:
    """Ask which models there are, where the protocol says they are listed, and choose one.

    Raises TargetUnreachable (nothing listens, no answer), TargetIncompatible (a web page, no model list) and
    ConfigurationError (the model is not served, or none was named and there are several).
    """
    listing = PROTOCOLS[contact.endpoint].models
    if listing is None:
        if model is None:
            raise ConfigurationError(f"--model is missing; --endpoint {contact.endpoint} does not list models")
        return Served(url=root_url(url), model=model, max_model_len=None)
    address = f"{root_url(url)}{listing.path}"
    try:
        limits = listing.read(await _get(address, contact))
    except UNREADABLE:
        raise TargetIncompatible(f"{address}: JSON, but not a list of models; is this {_what(contact)}?") from None
    chosen = _choose(model, tuple(limits), address)
    return Served(url=root_url(url), model=chosen, max_model_len=limits.get(chosen))


def _choose(model: str | None, served: tuple[str, ...], listing: str) -> str:
    if model is None and len(served) == 1:
        return served[0]
    if model in served:
        return model
    what = "--model is missing" if model is None else f"--model {model}: not served"
    raise ConfigurationError(f"{what}; {listing} serves: {', '.join(served) or 'none'}")


async def _get(url: str, contact: Contact) -> bytes:
    host = urlsplit(url).netloc
    try:
        async with contact.session(PROBE_TIMEOUT_S) as session, session.get(url) as response:
            raw = await response.read()
    except TimeoutError as error:
        raise TargetUnreachable(f"{url}: no answer within {PROBE_TIMEOUT_S:g} s; is the server ready?") from error
    except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError, ConnectionError) as error:
        raise TargetUnreachable(f"cannot connect to {host}: {reason_of(error)}; {_cure(url, error)}") from error
    except aiohttp.ClientError as error:
        cure = "is it an https:// server?" if url.startswith("http:") else "check --url"
        raise TargetIncompatible(f"{url}: does not speak HTTP ({type(error).__name__}); {cure}") from error
    if response.status in {401, 403}:
        raise TargetIncompatible(
            f"{url}: HTTP {response.status}; set SIDELIGHT_API_KEY (or --api-key) to a key it accepts"
        )
    if response.status != 200:
        raise TargetIncompatible(f"{url}: HTTP {response.status}; this is not {_what(contact)}, check --url")
    try:
        msgspec.json.decode(raw)
    except UNREADABLE:
        raise TargetIncompatible(
            f"{url}: not JSON but {response.content_type} ({_excerpt(raw)!r}); this is a web page, not {_what(contact)}"
        ) from None
    return raw


def _what(contact: Contact) -> str:
    if PROTOCOLS[contact.endpoint].models is OPENAI:
        return "an OpenAI-compatible endpoint"
    return f"the API of --endpoint {contact.endpoint}"


def _excerpt(raw: bytes) -> str:
    return " ".join(raw[:BODY_EXCERPT].decode(errors="replace").split())


def reason_of(error: Exception) -> str:
    """Return why a connection failed, in the system's words: aiohttp's and asyncio's repeat the address instead."""
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
    # A server of TLS hangs up on what is no TLS; and on who does not say who he is, at times before he can read why.
    if isinstance(error, aiohttp.ServerDisconnectedError) and url.startswith("http:"):
        return "is it an https:// server?"
    if url.startswith("https:") and (
        isinstance(cause, aiohttp.ServerDisconnectedError)
        or getattr(cause, "errno", 0) in {errno.EPIPE, errno.ECONNRESET}
    ):
        return "does it require a client certificate (--cert)?"
    return "is the server up, and --url right?"


async def engine_version(url: str, contact: Contact) -> str | None:
    """Return the version that an engine tells at one of its `version_paths`, None where there is none of them.

    Nothing is asked of an API that has no list of models either.
    """
    for path in version_paths() if PROTOCOLS[contact.endpoint].models is not None else ():
        try:
            body: Any = json.loads(await _get(f"{url}{path}", contact))
        except SidelightError:
            continue
        version = body.get("version") if isinstance(body, dict) else None
        if version:
            return str(version)
    return None


async def preflight(served: Served, *, contact: Contact, ignore_eos: bool = False) -> None:
    """Send one request for one token, just as the load will be sent, and require a stream of what can be streamed.

    Raises TargetUnreachable, or TargetIncompatible with what came instead.
    """
    protocol = PROTOCOLS[contact.endpoint]
    target = Target(base_url=served.url, model=served.model, endpoint=contact.endpoint, extra=contact.extra)
    path, body = protocol.encode(target, Prompt(text="Hello"), 1, 0.0, ignore_eos=ignore_eos)
    exchange = await _exchanged(served.url, path, body, contact)
    url = f"{served.url}{path}"
    reads_ns, ends = np.array(exchange.reads_ns, np.int64), np.array(exchange.read_ends, np.int64)
    reply = protocol.read_reply(exchange.status, exchange.head, bytes(exchange.body), reads_ns, ends)
    if exchange.error.startswith("timeout"):
        took = f"took more than {PREFLIGHT_TIMEOUT_S:g} s; is the engine stuck?"
        open_ended = f"was announced as complete, but its response did not end within {PREFLIGHT_TIMEOUT_S:g} s"
        raise TargetUnreachable(f"{url}: one token {open_ended if reply.done else took}")
    if exchange.status == 0:
        said = "the model list answered, a completion did not" if protocol.models is not None else "check --url"
        raise TargetUnreachable(f"{url}: {exchange.error}; {said}")
    excerpt = _excerpt(bytes(exchange.body))
    if exchange.status != 200:
        said = reply.error.partition(": ")[2] or excerpt
        raise TargetIncompatible(f"{url}: HTTP {exchange.status} to a request for one token: {said}")
    kind = _content_type(exchange.head)
    if protocol.streams and kind in {"application/json", "text/html", "text/plain"}:
        raise TargetIncompatible(f"{url}: answers {kind}, not a stream: {excerpt}")
    if reply.error or not reply.complete:
        why = reply.error or f"the response is incomplete: {excerpt}"
        raise TargetIncompatible(f"{url}: a request for one token failed: {why}")


async def _exchanged(url: str, path: str, body: bytes, contact: Contact) -> Exchange:
    """Exchange one request over the load's own transport."""
    spec = WorkerSpec(
        worker=0,
        workers=1,
        run_id="preflight",
        clock_offset_ns=0,
        headers=dict(contact.headers),
        out="",
        request_timeout_s=PREFLIGHT_TIMEOUT_S,
        urls=[url],
        transport=PROTOCOLS[contact.endpoint].transport,
        protocol=contact.endpoint,
        tls=contact.tls,
    )
    clock = Clock(offset_ns=0)
    exchange = Exchange(index=0, scheduled_ns=-1, dispatch_ns=clock.now_ns())
    planned = msgspec.structs.replace(plan_end("preflight"), index=0, path=path, body=body)
    async with open_transport(spec, clock) as transport:
        performed = asyncio.ensure_future(transport.perform(exchange, planned, timeout_s=PREFLIGHT_TIMEOUT_S))
        try:
            while not performed.done():
                # The end of a body that has bytes behind it shows only to who asks; in a load the recorder does.
                await asyncio.wait([performed], timeout=CATCH_UP_S)
                exchange.catch_up()
        finally:
            performed.cancel()
    return exchange


def _content_type(head: bytes) -> str:
    try:
        return parse_head(head).headers.get("content-type", "").partition(";")[0].strip().lower()
    except ProtocolError:
        return ""
