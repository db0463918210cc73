"""Options of access to metrics pages and to our own ports, and their checks. All commands that measure share the
former.
"""

# No postponed annotations: cyclopts resolves those of a subclass where the subclass stands, without our names.
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import Access, Guard, UnusableFile, basic, is_loopback, server_context, tls_context
from sidelight.rundir.printable.masking import register_headers
from sidelight.sidecar.options.fields import (
    HEADERS,
    SECRET,
    TLS_FILE,
    TLS_FILES,
    USER,
    Interval,
    flag,
    header_name,
    option,
    register_secrets,
    repeatable,
    secret_option,
    time_option,
)

METRICS_ACCESS = Group("Metrics access", sort_key=4.5)  # after the group Scraping
LISTENING = Group("Listening", sort_key=4.7)

_HEADER = re.compile(r"(?P<name>[!#$%&'*+\-.^_`|~0-9A-Za-z]+)[:=][ \t]*(?P<value>[^\x00-\x08\x0a-\x1f\x7f]*)")
_NAME = re.compile(r"(?:[A-Z][a-z]*|[Xx])(?:-[A-Za-z]+){0,4}")  # as people write the names of headers
_PEM = "give the path of a PEM file"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """Options of requests for metrics pages; the same for all of them."""

    metrics_ca: Annotated[
        Path | None,
        option(
            METRICS_ACCESS,
            "Trust only certificates signed by this authority (PEM). Default: the system's authorities; `run` and "
            "`doctor` apply --ca, --cert, --key and --insecure to pages on the host of --url.",
        ),
        TLS_FILE,
    ] = None
    metrics_cert: Annotated[
        Path | None, option(METRICS_ACCESS, "Client certificate (PEM; may include the key)."), TLS_FILE
    ] = None
    metrics_key: Annotated[
        Path | None, option(METRICS_ACCESS, "Key of the client certificate (PEM, unencrypted)."), TLS_FILE
    ] = None
    metrics_token: Annotated[
        str | None,
        secret_option(
            METRICS_ACCESS,
            "Bearer token. Preferably set the environment variable instead.",
            env_var="SIDELIGHT_METRICS_TOKEN",
        ),
        SECRET,
    ] = None
    metrics_user: Annotated[
        str | None,
        secret_option(
            METRICS_ACCESS,
            "USER:PASSWORD for basic authentication. Preferably set the environment variable instead.",
            env_var="SIDELIGHT_METRICS_USER",
        ),
        USER,
    ] = None
    metrics_header: Annotated[
        tuple[str, ...],
        repeatable(METRICS_ACCESS, "Additional header, 'Name: value', or @FILE with a header a line (repeatable)."),
        HEADERS,
    ] = ()
    metrics_insecure: Annotated[bool, flag(METRICS_ACCESS, "Disable certificate verification.")] = False
    scrape_timeout: Annotated[
        Interval,
        time_option(METRICS_ACCESS, "Timeout of one scrape.", name=("--metrics-timeout", "--scrape-timeout")),
    ] = 5.0


ListenOpen = Annotated[
    bool,
    flag(
        LISTENING,
        "Listen on addresses of the network without asking who connects: where a firewall, a network policy or a "
        "container's published ports keep others out.",
    ),
]


# No slots, as ContactOptions.
@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """Restrictions on access to the ports of --listen and --otlp-listen."""

    listen_tls: Annotated[
        tuple[Path, Path] | None,
        option(LISTENING, "CERT KEY: serve the live page and receive spans over TLS (PEM files, the key unencrypted)."),
        TLS_FILES,
    ] = None
    listen_token: Annotated[
        str | None,
        secret_option(
            LISTENING,
            "Bearer token that requests for the live page, for metrics and with spans must have; browsers ask for it "
            "as a password. /healthz and /readyz need none. Preferably set the environment variable instead.",
            env_var="SIDELIGHT_LISTEN_TOKEN",
        ),
        SECRET,
    ] = None
    listen_client_ca: Annotated[
        Path | None,
        option(LISTENING, "Ask for a client certificate that is signed by this authority (PEM). Needs --listen-tls."),
        TLS_FILE,
    ] = None
    listen_open: ListenOpen = False


def check_listening(options: ListenOptions, addresses: Mapping[str, str]) -> None:
    """Check the TLS files, the token and the addresses of our ports. Raises ConfigurationError, naming the option and
    the cure, where a file or token cannot be used, or where an address, named by its option, would serve anybody on the
    network without that being wanted.
    """
    if options.listen_token is not None and not re.fullmatch(r"[!-~]+", options.listen_token):
        raise ConfigurationError(
            "option.value", "--listen-token: must not be empty or contain spaces; check SIDELIGHT_LISTEN_TOKEN as well"
        )
    if options.listen_client_ca and not options.listen_tls:
        raise ConfigurationError(
            "option.contradictory",
            f"--listen-client-ca {options.listen_client_ca}: needs --listen-tls CERT KEY, the certificate of this port",
        )
    guard = guard_of(options)
    try:
        server_context(guard)
    except UnusableFile as error:
        flag, path = ("client-ca", guard.ca) if error.which == "ca" else ("tls", getattr(guard, error.which))
        raise ConfigurationError("certificate.unusable", f"--listen-{flag} {path}: {error.reason}; {_PEM}") from error
    is_guarded = bool(guard.cert and (guard.token or guard.ca))
    for name, address in addresses.items():
        if not (is_guarded or options.listen_open or is_loopback(address.rpartition(":")[0])):
            raise ConfigurationError(
                "listen.open",
                f"{name} {address}: other machines reach this address; add --listen-tls CERT KEY and --listen-token or "
                "--listen-client-ca, or --listen-open where your network keeps others out",
            )


def guard_of(options: ListenOptions) -> Guard:
    """Return the access restrictions of our ports, from checked options."""
    cert, key = options.listen_tls or ("", "")
    return Guard(cert=str(cert), key=str(key), ca=_text(options.listen_client_ca), token=options.listen_token or "")


def check_access(options: AccessOptions) -> None:
    """Check the options of access to pages. Raises ConfigurationError, naming the option and the cure, where one cannot
    be used; no secret is shown.
    """
    register_secrets(options)
    _exclude_each_other(options, require_headers("--metrics-header", options.metrics_header))
    require_tls("--metrics-", ca=options.metrics_ca, cert=options.metrics_cert, key=options.metrics_key)


def metrics_access(options: AccessOptions, *, urls: Sequence[str] = (), api_key: str | None = None) -> Access:
    """Return the access of checked options. The API key goes only to the hosts of `urls`, and only where no other
    credentials are given.
    """
    headers = require_headers("--metrics-header", options.metrics_header)
    if options.metrics_token:
        headers["Authorization"] = f"Bearer {options.metrics_token}"
    if options.metrics_user:
        headers["Authorization"] = basic(options.metrics_user)
    host_headers = {}
    if api_key and "authorization" not in map(str.lower, headers):
        host_headers = {urlsplit(url).netloc.lower(): {"Authorization": f"Bearer {api_key}"} for url in urls}
    return Access(
        headers=headers,
        host_headers=host_headers,
        ca=_text(options.metrics_ca),
        cert=_text(options.metrics_cert),
        key=_text(options.metrics_key),
        insecure=options.metrics_insecure,
    )


def require_tls(flags: str, *, ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Check TLS files. Raises ConfigurationError where a file cannot be used; `flags` begins the options' names."""
    if key and not cert:
        raise ConfigurationError(
            "option.contradictory",
            f"{flags}key {key}: needs {flags}cert, the certificate of this key",
        )
    if not (ca or cert):
        return  # reading the system's authorities takes 25 ms
    try:
        tls_context(Access(ca=_text(ca), cert=_text(cert), key=_text(key)))
    except UnusableFile as error:
        path = {"ca": ca, "cert": cert, "key": key}[error.which] or cert
        raise ConfigurationError(
            "certificate.unusable", f"{flags}{error.which} {path}: {error.reason}; {_PEM}"
        ) from error


def _text(path: Path | None) -> str:
    return str(path) if path else ""


def require_headers(flag: str, lines: Sequence[str]) -> dict[str, str]:
    """Return headers by name, those of lines like @FILE too; none of their values is written anywhere.

    Raises ConfigurationError, without the text of a line that may be a secret.
    """
    files = [Path(line[1:]) for line in lines if line.startswith("@")]
    given = [line for line in lines if not line.startswith("@")]
    headers: dict[str, str] = {}
    for line in (*given, *(line for path in files for line in _lines(flag, path))):
        match = _HEADER.fullmatch(line)
        if match is None:
            raise ConfigurationError(
                "option.value",
                f"{flag} {_shown(line)}: must be 'Name: value' in one line, in quotes, e.g. 'X-Team: blue'",
            )
        if match["name"].lower() in map(str.lower, headers):
            raise ConfigurationError("option.duplicate", f"{flag} {match['name']}: given twice; give it once")
        headers[match["name"]] = match["value"].rstrip()
    register_headers(headers.items())
    return headers


def _lines(flag: str, path: Path) -> list[str]:
    """Return the lines of a file of headers, but for empty ones."""
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ConfigurationError(
            "file.unreadable", f"{flag} @{path}: {reason}; give a file with a header a line"
        ) from error


def _shown(line: str) -> str:
    """Return the part of a header that cannot be a secret. It is the text before a colon, or text that looks like a
    name.
    """
    if ":" in line or "=" in line:
        return repr(header_name(line))
    word = line.split(maxsplit=1)[0] if line.split() else ""
    return repr(word) if _NAME.fullmatch(word) else f"({len(line)} characters without a colon)"


def _exclude_each_other(options: AccessOptions, headers: Mapping[str, str]) -> None:
    if options.metrics_token and not re.fullmatch(r"[!-~]+", options.metrics_token):
        raise ConfigurationError(
            "option.value",
            "--metrics-token: must not contain spaces or line breaks; check SIDELIGHT_METRICS_TOKEN as well",
        )
    if options.metrics_user and (":" not in options.metrics_user or not options.metrics_user.isprintable()):
        raise ConfigurationError("option.value", "--metrics-user: must be USER:PASSWORD in one line")
    given = [
        name
        for name, value in (
            ("--metrics-token (or SIDELIGHT_METRICS_TOKEN)", options.metrics_token),
            ("--metrics-user (or SIDELIGHT_METRICS_USER)", options.metrics_user),
            ("--metrics-header Authorization", "authorization" in map(str.lower, headers)),
        )
        if value
    ]
    if len(given) > 1:
        raise ConfigurationError(
            "option.contradictory",
            f"{' and '.join(given)} exclude each other: a request has one Authorization header; give one",
        )
    if options.metrics_insecure and options.metrics_ca:
        raise ConfigurationError(
            "option.contradictory",
            f"--metrics-insecure and --metrics-ca {options.metrics_ca} exclude each other: one trusts any certificate; "
            "leave out --metrics-insecure",
        )
