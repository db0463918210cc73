"""Client identity towards a target: TLS, credentials and headers.

Also its URL without secrets, the reason for a failed connection, and access control of Sidelight's ports.

What the options are called, and the cure for a bad one, is left to the sidecar.
"""

from __future__ import annotations

import base64
import hmac
import os
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from ipaddress import ip_address
from typing import Literal
from urllib.parse import unquote, urlsplit, urlunsplit

import msgspec

from sidelight.rundir.printable.masking import MASK, SECRET_NAME, without_secrets

# Fields of a query whose values are shown: what exporters and federated servers are asked for, and which page it is.
# fmt: off
HARMLESS = frozenset((
    "target", "targets", "module", "name", "name[]", "names", "collect[]", "exclude[]", "match", "match[]", "query",
    "metric", "metrics", "format", "job", "instance", "service", "namespace", "pod", "node", "host", "port", "path",
    "id", "engine", "model", "replica", "rank", "worker", "x", "debug", "verbose", "time", "start", "end", "step",
    "timeout", "limit", "version", "api-version",
))
# fmt: on


class Tls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS settings towards a server: verification and client identity, as paths of PEM files.

    "" stands for none.

    ca        authorities to trust instead of the system's
    cert      the client's certificate, with its key where `key` names no other file
    insecure  disables certificate verification
    """

    ca: str = ""
    cert: str = ""
    key: str = ""
    insecure: bool = False


class Access(Tls, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of requests to targets.

    `headers` go to all targets, `host_headers` (by lower-case host:port) to one host.
    """

    headers: Mapping[str, str] = {}
    host_headers: Mapping[str, Mapping[str, str]] = {}

    def __repr__(self) -> str:
        """Leave out the headers, which may be secrets."""
        return f"Access(ca={self.ca!r}, cert={self.cert!r}, key={self.key!r}, insecure={self.insecure!r})"


class Guard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Access control of a Sidelight port: TLS files and a bearer token.

    Paths of PEM files, "" for none.

    cert, key  our certificate and its key: the port speaks TLS
    ca         the authority of the clients' certificates, which are asked for
    """

    cert: str = ""
    key: str = ""
    ca: str = ""
    token: str = ""

    def __repr__(self) -> str:
        """Leave out the token."""
        return f"Guard(cert={self.cert!r}, key={self.key!r}, ca={self.ca!r})"

    def admits(self, authorization: str) -> bool:
        """Return whether an Authorization header has the token.

        As a bearer token or, as browsers send it, as a password.
        """
        kind, _, stated = authorization.partition(" ")
        if kind.lower() == "basic":
            with suppress(ValueError):
                stated = base64.b64decode(stated).decode(errors="replace").partition(":")[2]
        return not self.token or hmac.compare_digest(stated.strip().encode(), self.token.encode())


class UnusableFile(ValueError):
    """An unusable TLS file: its role (`ca`, `cert`, `key`) and the reason."""

    def __init__(self, which: str, reason: str) -> None:
        super().__init__(f"{which}: {reason}")
        self.which = which
        self.reason = reason


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Build the TLS context of a client, once for equal files.

    Reading the system's authorities takes some 30 ms. Raises UnusableFile.
    """
    return _context(Tls(ca=tls.ca, cert=tls.cert, key=tls.key, insecure=tls.insecure))


def aiohttp_tls(tls: Tls) -> ssl.SSLContext | bool:
    """Return the `ssl` argument for aiohttp.

    Without TLS options it is aiohttp's own context, which exists already. Raises UnusableFile.
    """
    return tls_context(tls) if tls.ca or tls.cert or tls.insecure else True


@cache
def _context(tls: Tls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca or None)
    except ssl.SSLError:  # an OSError too, whose number means something else
        raise UnusableFile("ca", "holds no certificate in PEM format") from None
    except OSError as error:
        raise UnusableFile("ca", str(error.strerror)) from error
    if tls.cert:
        _identify(context, tls)
    if tls.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def server_context(guard: Guard, *, is_client_optional: bool = False) -> ssl.SSLContext | None:
    """Build the server's side of TLS; None where the port has none. Raises UnusableFile."""
    if not guard.cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _identify(context, Tls(cert=guard.cert, key=guard.key))
    if guard.ca:
        try:
            context.load_verify_locations(guard.ca)
        except ssl.SSLError:
            raise UnusableFile("ca", "holds no certificate in PEM format") from None
        except OSError as error:
            raise UnusableFile("ca", str(error.strerror)) from error
        context.verify_mode = ssl.CERT_OPTIONAL if is_client_optional else ssl.CERT_REQUIRED
    return context


def is_loopback(host: str) -> bool:
    """Return whether a listening host is a loopback address."""
    name = host.strip("[]").lower()
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def basic(user: str) -> str:
    """Return the Authorization header's value for USER:PASSWORD (RFC 7617)."""
    return "Basic " + base64.b64encode(user.encode()).decode()


def headers_for(access: Access, url: str) -> dict[str, str]:
    """Return the headers for a request to a URL: credentials in it first, then its host's headers."""
    parts = urlsplit(url)
    _, at, host = parts.netloc.rpartition("@")
    specific = access.host_headers.get(host.lower(), {})
    if at:
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        specific = {**specific, "Authorization": basic(f"{user}:{password}")}
    replaced = {name.lower() for name in specific}
    return {**{name: value for name, value in access.headers.items() if name.lower() not in replaced}, **specific}


def root_url(base_url: str) -> str:
    """Return a server's root, with /tokenize and /metrics: the base without a trailing slash or /v1."""
    return base_url.rstrip("/").removesuffix("/v1").rstrip("/")


def bare(url: str) -> str:
    """Return a URL without user name and password, for requests."""
    return _with_userinfo(url, "")


def masked(url: str) -> str:
    """Return a URL without secrets, for display and logs.

    `***` stands for a user name or password, and for the values of its query but those of HARMLESS names. Of a value
    whose name does not say that it is secret four digits of its hash stay, which keep pages of one address apart.
    """
    address, asks, query = _with_userinfo(url, f"{MASK}@").partition("?")
    query, hashes, fragment = query.partition("#")
    return without_secrets(f"{address}{asks}{'&'.join(map(_masked_field, query.split('&')))}{hashes}{fragment}")


def _masked_field(field: str) -> str:
    name, equals, value = field.partition("=")
    plain = unquote(name)
    if not value or plain.lower() in HARMLESS or value.startswith(MASK):
        return field
    digest = "" if SECRET_NAME.search(plain) else blake2b(value.encode(errors="replace"), digest_size=2).hexdigest()
    return f"{name}{equals}{MASK}{digest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionProblem:
    """The reason for a failed connection, or for a missing address to listen on.

    kind    TLS, an unknown host name, an error of the system, or anything else
    reason  OpenSSL's code ("" where it gave none), the system's text, or that of the exception
    detail  what verification found wrong with a certificate; what the resolver said of a name
    """

    kind: Literal["tls", "name", "system", "other"]
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        if self.kind == "tls":
            return f"TLS failed ({self.reason})" if self.reason else "TLS failed"
        return "no such host" if self.kind == "name" else self.reason


def connection_problem(error: BaseException) -> ConnectionProblem:
    """Return the reason for a failed connection.

    The texts of asyncio and aiohttp repeat the address and hide the reason. OpenSSL's and getaddrinfo's codes stand in
    `errno` as well, and mean something else there.
    """
    cause = connection_cause(error)
    if isinstance(cause, ssl.SSLError):
        # Both are absent where Python raised the error and not OpenSSL.
        reason, detail = getattr(cause, "reason", None), getattr(cause, "verify_message", None)
        return ConnectionProblem(kind="tls", reason=reason or "", detail=detail or "")
    if isinstance(cause, socket.gaierror):
        return ConnectionProblem(kind="name", reason=str(cause), detail=cause.strerror or "")
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        return ConnectionProblem(kind="system", reason=os.strerror(cause.errno))
    return ConnectionProblem(kind="other", reason=" ".join(str(cause).split()) or type(cause).__name__)


def connection_cause(error: BaseException) -> BaseException:
    """Return the cause below an exception of aiohttp.

    A server may reject our certificate after the handshake only.
    """
    below = error.__cause__
    cause = below if isinstance(below, ssl.SSLError) else getattr(error, "os_error", error)
    return cause if isinstance(cause, BaseException) else error


def _with_userinfo(url: str, userinfo: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:  # no URL, but it may hold a password all the same
        return userinfo + url.rpartition("@")[2] if "@" in url else url
    _, at, host = parts.netloc.rpartition("@")
    if at:
        return urlunsplit(parts._replace(netloc=userinfo + host))
    # http:user:password@host and the like: no host by the standard, and a slip that shows a password
    return userinfo + url.rpartition("@")[2] if not parts.netloc and "@" in url else url


def _identify(context: ssl.SSLContext, tls: Tls) -> None:
    """Load the client's certificate and key; without a key file, both from one file."""
    for which, path in (("cert", tls.cert), ("key", tls.key)):
        try:
            with open(path or tls.cert, "rb"):  # noqa: PTH123  load_cert_chain does not say which one is missing
                pass
        except OSError as error:
            raise UnusableFile(which, str(error.strerror)) from error
    encrypted = False

    def no_password() -> str:  # else OpenSSL asks at the terminal
        nonlocal encrypted
        encrypted = True
        return ""

    try:
        context.load_cert_chain(tls.cert, tls.key or None, password=no_password)
    except ssl.SSLError as error:
        which = "key" if tls.key else "cert"
        if encrypted:
            raise UnusableFile(which, "is encrypted with a password") from None
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UnusableFile(which, "is not the key of this certificate") from None
        raise UnusableFile(which, "no certificate with its key in PEM format") from None
