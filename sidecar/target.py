"""What answers at a URL, asked before any load goes there."""

from __future__ import annotations

import json
import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp

from loadgen.protocols.openai import Target, encode_request, root_url
from sidecar.errors import ConfigurationError, SidelightError, TargetSpeaksElse, TargetUnreachable

PROBE_TIMEOUT_S = 10.0
PREFLIGHT_TIMEOUT_S = 120.0  # a first request may compile kernels
BODY_EXCERPT = 120


VERSION_PATHS = ("/version", "/server_info", "/get_server_info")


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a target said of itself: the chosen model, its length limit in tokens (None: not said)."""

    url: str
    model: str
    max_model_len: int | None


def auth_headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def probe(url: str, *, model: str | None, api_key: str | None) -> Served:
    """Ask `/v1/models` and choose the model.

    Raises TargetUnreachable (nothing listens, no answer), TargetSpeaksElse (a web page, no model list) and
    ConfigurationError (the model is not served, or none was named and there are several).
    """
    listing = f"{root_url(url)}/v1/models"
    body = await _get_json(listing, auth_headers(api_key))
    entries = body.get("data") if isinstance(body, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
        raise TargetSpeaksElse(f"{listing}: JSON, but not a list of models; is this an OpenAI-compatible endpoint?")
    limits = {str(entry["id"]): entry.get("max_model_len") for entry in entries}
    chosen = _choose(model, tuple(limits), listing)
    limit = limits.get(chosen)
    return Served(url=root_url(url), model=chosen, max_model_len=limit if isinstance(limit, int) else None)


def _choose(model: str | None, served: tuple[str, ...], listing: str) -> str:
    if model is None and len(served) == 1:
        return served[0]
    if model in served:
        return model
    names = ", ".join(served) or "none"
    if model is None:
        raise ConfigurationError(f"--model is missing; {listing} serves: {names}")
    raise ConfigurationError(f"--model {model}: not served; {listing} serves: {names}")


async def _get_json(url: str, headers: Mapping[str, str]) -> Any:
    host = urlsplit(url).netloc
    timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session, session.get(url) as response:
            raw = await response.read()
    except TimeoutError as error:
        raise TargetUnreachable(f"{url}: no answer within {PROBE_TIMEOUT_S:g} s; is the server ready?") from error
    except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, ConnectionError) as error:
        raise TargetUnreachable(
            f"cannot connect to {host}: {reason_of(error)}; is the server up, and --url right?"
        ) from error
    except aiohttp.ClientError as error:
        raise TargetSpeaksElse(f"{url}: does not speak HTTP ({type(error).__name__}); check --url") from error
    if response.status in {401, 403}:
        raise TargetSpeaksElse(
            f"{url}: HTTP {response.status}; set SIDELIGHT_API_KEY (or --api-key) to a key it accepts"
        )
    if response.status != 200:
        raise TargetSpeaksElse(f"{url}: HTTP {response.status}; this is not an OpenAI-compatible endpoint, check --url")
    try:
        return json.loads(raw)
    except ValueError:
        excerpt = " ".join(raw[:BODY_EXCERPT].decode(errors="replace").split())
        raise TargetSpeaksElse(
            f"{url}: not JSON but {response.content_type} ({excerpt!r}); "
            "this is a web page, not an OpenAI-compatible endpoint"
        ) from None


def reason_of(error: Exception) -> str:
    """Return why a connection failed, in the system's words: aiohttp's and asyncio's repeat the address instead."""
    cause = getattr(error, "os_error", error)
    if isinstance(cause, ssl.SSLError):
        return f"TLS failed ({cause.reason or cause}); is it an http:// server?"
    if isinstance(cause, socket.gaierror):
        return "no such host"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    return str(error) or type(error).__name__


async def engine_version(url: str, headers: Mapping[str, str]) -> str | None:
    """Return what `/version` (vLLM, TensorRT-LLM) or `/server_info` (SGLang) says, None where there is none of them."""
    for path in VERSION_PATHS:
        try:
            body = await _get_json(f"{url}{path}", headers)
        except SidelightError:
            continue
        found = body.get("version") if isinstance(body, dict) else None
        if found:
            return str(found)
    return None


async def preflight(
    served: Served, *, endpoint: Literal["chat", "completions"], headers: Mapping[str, str], ignore_eos: bool = False
) -> None:
    """Send one request for one token and require a stream. Raises TargetUnreachable or TargetSpeaksElse with what came
    instead.
    """
    target = Target(base_url=served.url, model=served.model, endpoint=endpoint)
    path, body = encode_request(target, "Hello", max_tokens=1, temperature=0.0, ignore_eos=ignore_eos)
    url = f"{served.url}{path}"
    timeout = aiohttp.ClientTimeout(total=PREFLIGHT_TIMEOUT_S)
    sent = {"Content-Type": "application/json", **headers}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=sent) as session,
            session.post(url, data=body) as response,
        ):
            raw = await response.read()
    except TimeoutError as error:
        raise TargetUnreachable(
            f"{url}: one token took more than {PREFLIGHT_TIMEOUT_S:g} s; is the engine stuck?"
        ) from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise TargetUnreachable(f"{url}: {reason_of(error)}; the model list answered, a completion did not") from error
    excerpt = " ".join(raw[:BODY_EXCERPT].decode(errors="replace").split())
    if response.status != 200:
        raise TargetSpeaksElse(f"{url}: HTTP {response.status} to a request for one token: {excerpt}")
    if response.content_type != "text/event-stream":
        raise TargetSpeaksElse(f"{url}: answers {response.content_type}, not a stream of server-sent events: {excerpt}")
