"""The options of access to metrics pages, shared by `run`, `scrape` and `doctor`; and what is wrong with them."""

# No postponed annotations: cyclopts resolves those of a subclass where the subclass stands, without our names.
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from cyclopts import Group, Parameter

from rundir.access import MASK, Access, UnusableFile, basic, tls_context
from sidecar.errors import ConfigurationError

METRICS_ACCESS = Group("Metrics access", sort_key=4.5)  # after the group Scraping

_HEADER = re.compile(r"(?P<name>[!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*(?P<value>[^\x00-\x08\x0a-\x1f\x7f]*)")
_PEM = "give the path of a PEM file"


def option(group: Group, text: str, **more: Any) -> Parameter:
    """Return where an option stands in --help, and what is said of it there."""
    return Parameter(group=group, help=text, **more)


def given(group: Group, text: str, **more: Any) -> Parameter:
    """Return the same of a flag or a list: off or empty until it is given, so that no default is shown of it."""
    return option(group, text, negative="", show_default=False, **more)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class AccessOptions:
    """How metrics pages are asked; the same for all of them."""

    metrics_ca: Annotated[
        Path | None,
        option(
            METRICS_ACCESS,
            "Trust only what this authority signed (PEM). Default: for pages at the host of --url what --ca and "
            "the like say, else the system's.",
        ),
    ] = None
    metrics_cert: Annotated[
        Path | None, option(METRICS_ACCESS, "Client certificate (PEM; may hold its key as well).")
    ] = None
    metrics_key: Annotated[
        Path | None, option(METRICS_ACCESS, "Key of the client certificate (PEM, without a password).")
    ] = None
    metrics_token: Annotated[
        str | None,
        option(METRICS_ACCESS, "Bearer token. Prefer the environment variable.", env_var="SIDELIGHT_METRICS_TOKEN"),
    ] = None
    metrics_user: Annotated[
        str | None,
        option(
            METRICS_ACCESS,
            "USER:PASSWORD of basic authentication. Prefer the environment variable.",
            env_var="SIDELIGHT_METRICS_USER",
        ),
    ] = None
    metrics_header: Annotated[
        tuple[str, ...], given(METRICS_ACCESS, "A further header, 'Name: value' (repeatable).")
    ] = ()
    metrics_insecure: Annotated[bool, given(METRICS_ACCESS, "Take any certificate, whoever presents it.")] = False
    scrape_timeout: Annotated[
        float,
        option(METRICS_ACCESS, "Seconds until one scrape is given up.", name=("--metrics-timeout", "--scrape-timeout")),
    ] = 5.0


def flag_of(name: str) -> str:
    """Return how an option is written on the command line."""
    return "--" + name.replace("_", "-")


def check_access(options: AccessOptions) -> None:
    """Raise ConfigurationError, naming the option and the cure, where one cannot be used; no secret is shown."""
    _exclude_each_other(options, require_headers("--metrics-header", options.metrics_header))
    require_tls("--metrics-", ca=options.metrics_ca, cert=options.metrics_cert, key=options.metrics_key)


def metrics_access(options: AccessOptions, *, urls: Sequence[str] = (), api_key: str | None = None) -> Access:
    """Return the access of checked options. The API key goes to the hosts of `urls` alone, whose key it is, and only
    where nothing else was said of credentials.
    """
    headers = require_headers("--metrics-header", options.metrics_header)
    if options.metrics_token:
        headers["Authorization"] = f"Bearer {options.metrics_token}"
    if options.metrics_user:
        headers["Authorization"] = basic(options.metrics_user)
    own = {}
    if api_key and "authorization" not in map(str.lower, headers):
        own = {urlsplit(url).netloc.lower(): {"Authorization": f"Bearer {api_key}"} for url in urls}
    return Access(
        headers=headers,
        host_headers=own,
        ca=_text(options.metrics_ca),
        cert=_text(options.metrics_cert),
        key=_text(options.metrics_key),
        insecure=options.metrics_insecure,
    )


def header_names(headers: tuple[str, ...]) -> list[str]:
    """Return headers as they may be recorded: the names alone."""
    return [f"{header.partition(':')[0]}: {MASK}" if ":" in header else MASK for header in headers]


def require_tls(flags: str, *, ca: Path | None, cert: Path | None, key: Path | None) -> None:
    """Raise ConfigurationError where a file cannot be used; `flags` begins the options' names."""
    if key and not cert:
        raise ConfigurationError(f"{flags}key {key}: needs {flags}cert, the certificate it is of")
    if not (ca or cert):
        return  # the system's authorities take 25 ms to read, and are no option's
    try:
        tls_context(Access(ca=_text(ca), cert=_text(cert), key=_text(key)))
    except UnusableFile as error:
        path = {"ca": ca, "cert": cert, "key": key}[error.which] or cert
        raise ConfigurationError(f"{flags}{error.which} {path}: {error.reason}; {_PEM}") from error


def _text(path: Path | None) -> str:
    return str(path) if path else ""


def require_headers(flag: str, lines: tuple[str, ...]) -> dict[str, str]:
    """Take headers apart. Raises ConfigurationError; of a line without a name nothing is shown, it may be a secret."""
    headers: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _HEADER.fullmatch(line)
        if match is None:
            shown = line.partition(":")[0] if ":" in line else f"number {number}"
            raise ConfigurationError(
                f"{flag} {shown!r}: must be 'Name: value' in one line, e.g. 'X-Scope-OrgID: team-a'"
            )
        if match["name"].lower() in map(str.lower, headers):
            raise ConfigurationError(f"{flag} {match['name']}: stands there twice; give it once")
        headers[match["name"]] = match["value"].rstrip()
    return headers


def _exclude_each_other(options: AccessOptions, headers: Mapping[str, str]) -> None:
    if options.metrics_token and not re.fullmatch(r"[!-~]+", options.metrics_token):
        raise ConfigurationError(
            "--metrics-token: a token is without spaces and line breaks; look at SIDELIGHT_METRICS_TOKEN as well"
        )
    if options.metrics_user and (":" not in options.metrics_user or not options.metrics_user.isprintable()):
        raise ConfigurationError("--metrics-user: must be USER:PASSWORD in one line")
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
        raise ConfigurationError(f"{' and '.join(given)} exclude each other: a request has one Authorization; give one")
    if options.metrics_insecure and options.metrics_ca:
        raise ConfigurationError(
            f"--metrics-insecure and --metrics-ca {options.metrics_ca} exclude each other: one trusts everybody; "
            "leave out --metrics-insecure"
        )
