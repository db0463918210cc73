"""Who we are to a target: TLS, credentials, headers; and its URL without what must not be shown.

What the options are called, and the cure for a bad one, is left to the sidecar.
"""

from __future__ import annotations

import base64
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit, urlunsplit

MASK = "***"


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How targets are asked. `headers` go to each of them, `host_headers` (by lower-case host:port) to that host alone.

    `ca`, `cert` and `key` are PEM files, empty for none; `insecure` takes any certificate for good.
    """

    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    host_headers: Mapping[str, Mapping[str, str]] = field(default_factory=dict, repr=False)
    ca: str = ""
    cert: str = ""
    key: str = ""
    insecure: bool = False


class UnusableFile(ValueError):
    """A file of TLS that cannot be used: which one (`ca`, `cert`, `key`), and why."""

    def __init__(self, which: str, reason: str) -> None:
        super().__init__(f"{which}: {reason}")
        self.which = which
        self.reason = reason


def tls_context(access: Access) -> ssl.SSLContext:
    """Build the client's side of TLS. Raises UnusableFile."""
    try:
        context = ssl.create_default_context(cafile=access.ca or None)
    except ssl.SSLError:  # an OSError too, whose number means something else
        raise UnusableFile("ca", "holds no certificate in PEM format") from None
    except OSError as error:
        raise UnusableFile("ca", str(error.strerror)) from error
    if access.cert:
        _identify(context, access)
    if access.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def basic(user: str) -> str:
    """Return the Authorization header's value for USER:PASSWORD (RFC 7617)."""
    return "Basic " + base64.b64encode(user.encode()).decode()


def headers_for(access: Access, url: str) -> dict[str, str]:
    """Return the headers for a request to a URL. What stands in the URL itself wins, then what is its host's own."""
    parts = urlsplit(url)
    _, at, host = parts.netloc.rpartition("@")
    own = access.host_headers.get(host.lower(), {})
    if at:
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        own = {**own, "Authorization": basic(f"{user}:{password}")}
    replaced = {name.lower() for name in own}
    return {**{name: value for name, value in access.headers.items() if name.lower() not in replaced}, **own}


def bare(url: str) -> str:
    """Return a URL without user name and password: the one to ask."""
    return _with_userinfo(url, "")


def masked(url: str) -> str:
    """Return a URL as it may be shown and recorded: `***` where it has a user name or password."""
    return _with_userinfo(url, f"{MASK}@")


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


def _identify(context: ssl.SSLContext, access: Access) -> None:
    """Load the client's certificate and key; without a key file the key is beside the certificate."""
    for which, path in (("cert", access.cert), ("key", access.key)):
        try:
            with open(path or access.cert, "rb"):  # noqa: PTH123  load_cert_chain does not say which one is missing
                pass
        except OSError as error:
            raise UnusableFile(which, str(error.strerror)) from error
    encrypted = False

    def no_password() -> str:  # else OpenSSL asks at the terminal
        nonlocal encrypted
        encrypted = True
        return ""

    try:
        context.load_cert_chain(access.cert, access.key or None, password=no_password)
    except ssl.SSLError as error:
        which = "key" if access.key else "cert"
        if encrypted:
            raise UnusableFile(which, "is encrypted with a password") from None
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UnusableFile(which, "is not the key of this certificate") from None
        raise UnusableFile(which, "no certificate with its key in PEM format") from None
