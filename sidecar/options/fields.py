"""How an option is declared: its group, help and bounds, and what of it is recorded; and the options that several
commands share. The checks, --help, the manifest and the schema of a configuration file read these declarations.
"""

# No postponed annotations: cyclopts resolves those of a subclass where the subclass stands, without our names.
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_type_hints
from urllib.parse import urlsplit

from cyclopts import Group, Parameter
from msgspec import Meta

from sidelight.loadgen.requests.slo.objectives import parse_typed_slo
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import masked
from sidelight.rundir.printable.masking import MASK, masked_body, register, register_fields, register_url, register_user
from sidelight.sidecar.formats import FORMATS, files_of_formats

TARGET = Group("Target", sort_key=1)
SCRAPING = Group("Scraping", sort_key=4)
CRITERIA = Group("Criteria", sort_key=4.8)
OUTPUT = Group("Output", sort_key=5)

LONGEST_S = 1e7  # four months
Duration = Annotated[float, Meta(ge=1e-3, le=LONGEST_S)]
Pause = Annotated[float, Meta(ge=0.0, le=LONGEST_S)]
Interval = Annotated[float, Meta(ge=0.01, le=3600.0)]
Rate = Annotated[float, Meta(ge=1e-6, le=1e6)]

HOST_PORT = re.compile(r"(\[[\da-fA-F:.]+\]|[\w.-]+):\d{1,5}(/[^\s@]*)?")  # a URL without its scheme
VARIANT_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,39}")

D = TypeVar("D")

UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

UNITS_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

SYSTEMS = "ABCDEFGH"  # names of systems that `compare` is given without one

DEFAULT_FORMATS = ("json", "csv", "text", "html")


@dataclass(frozen=True, slots=True)
class Masked:
    """The recorded form of an option. It is its value as `show` returns it; on the command line, each of its `words` is
    recorded as `word` returns it. `secret` options never show their value. `register` takes in values that must be
    written nowhere.
    """

    show: Callable[[Any], object]
    secret: bool = False
    words: int = 1
    word: Callable[[str], str] = masked
    register: Callable[[Any], None] = lambda _: None


def register_secrets(options: object) -> None:
    """Register the secrets of options, before anything is written."""
    for name, how in declarations(type(options), Masked).items():
        if (value := getattr(options, name)) is not None:
            how.register(value)


def header_names(headers: Sequence[str]) -> list[str]:
    """Return headers as they may be recorded: the names alone."""
    return list(map(header_shown, headers))


def header_shown(header: str) -> str:
    """Return a header as it may be recorded: its name alone."""
    return f"{header_name(header)}: {MASK}" if header_name(header) else MASK


def header_name(header: str) -> str:
    """Return the name of a header, the text before the first colon or =. It is "" without either, since the text may be
    a secret.
    """
    match = re.match(r"([^:=]*)[:=]", header)
    return match[1] if match else ""


@dataclass(frozen=True, slots=True)
class ReadsMapping:
    """A configuration file may give a mapping, which reaches the option as JSON."""


MAPPING = ReadsMapping()


def _register_fields(text: str) -> None:
    with suppress(ValueError, RecursionError):
        register_fields(json.loads(text))


def _register_urls(urls: Sequence[str]) -> None:
    for url in urls:
        register_url(url)


SECRET = Masked(lambda _: MASK, secret=True, register=register)
USER = Masked(lambda _: MASK, secret=True, register=register_user)
HEADERS = Masked(header_names, secret=True)
TLS_FILE = Masked(lambda _: MASK, secret=True)
TLS_FILES = Masked(lambda _: [MASK, MASK], secret=True, words=2)
BODY = Masked(masked_body, word=masked_body, register=_register_fields)
MASKED_URL = Masked(masked, register=register_url)
MASKED_URLS = Masked(lambda urls: [masked(url) for url in urls], register=_register_urls)


def option(group: Group, text: str, **more: Any) -> Parameter:
    """Return an option's place in --help, and its description there."""
    return Parameter(group=group, help=text, **more)


def _from_file(_hint: Any, tokens: Any) -> str:
    """Convert a secret: itself, or with @ before it the file that holds it. Raises ValueError."""
    text = str(tokens[0].value)
    if not text.startswith("@"):
        return text
    try:
        secret = Path(text[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ValueError(f"{text[1:]}: {reason}; behind @ give the path of a file that holds it") from None
    if not secret or "\n" in secret:
        raise ValueError(f"{text[1:]}: must hold one line, and nothing else")
    return secret


def secret_option(group: Group, text: str, **more: Any) -> Parameter:
    """Return the same as `option` for a secret, which may stand in a file."""
    return option(group, f"{text} @FILE reads it from a file.", converter=_from_file, **more)


def flag(group: Group, text: str, **more: Any) -> Parameter:
    """Return the same for a flag: off until it is given, so that its default is not shown."""
    return option(group, text, negative="", show_default=False, **more)


def repeatable(group: Group, text: str, **more: Any) -> Parameter:
    """Return the same for a list: empty until a value is given, so that its default is not shown."""
    return flag(group, text, **more)


def _urls(_hint: Any, tokens: Any) -> tuple[str, ...]:
    """Convert URLs in a row, with commas between them or each after its own option; a URL may hold commas itself."""
    return tuple(url.strip() for token in tokens for url in re.split(r",\s*(?=https?://)", token.value) if url.strip())


def several(group: Group, text: str, **more: Any) -> Parameter:
    """Return the same as `repeatable` for URLs, between which there may be commas."""
    return repeatable(group, text, converter=_urls, **more)


def seconds(text: str) -> float:
    """Return a duration in seconds from a number, or numbers with units. Examples: 500ms, 30s and 1h30m. Raises
    ValueError.
    """
    try:
        return float(text)
    except ValueError:
        parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smhd])", text)
        if not parts or "".join(map("".join, parts)) != text:
            raise ValueError("must be seconds, or a number with ms, s, m, h or d, like 30s") from None
        return sum(float(number) * UNITS_S[unit] for number, unit in parts)


def read_seconds(_hint: Any, tokens: Any) -> float:
    """Convert a duration. Raises ValueError."""
    return seconds(tokens[0].value)


def size_bytes(name: str, text: str, *, least: str) -> int:
    """Return a size in bytes from a text like 500MB or 2GiB. Raises ConfigurationError, also below `least`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(|k|M|G|Ki|Mi|Gi)B?", text)
    if not match:
        raise ConfigurationError(
            "option.value", f"{flag_of(name)} {text}: must be a number and kB, MB, GB, MiB or GiB, e.g. 500MB"
        )
    size = int(float(match[1]) * UNITS_BYTES[match[2]])
    if text != least and size < size_bytes(name, least, least=least):
        raise ConfigurationError("option.value", f"{flag_of(name)} {text}: must be at least {least}")
    return size


def time_option(group: Group, text: str, **more: Any) -> Parameter:
    """Return the same as `option` for a duration, which may have a unit."""
    return option(group, text, converter=read_seconds, **more)


def _split(_hint: Any, tokens: Any) -> tuple[str, ...]:
    """Convert a,b and several tokens alike; `check_formats` says which names are valid."""
    return tuple(name.strip() for token in tokens for name in token.value.split(",") if name.strip())


Metrics = Annotated[
    tuple[str, ...],
    several(
        SCRAPING,
        "Prometheus URL of an engine or gateway (repeatable). Default: discovered from --url. TensorRT-LLM's "
        "/perf_metrics is read in addition: times of each request, which only one reader can have.",
    ),
    MASKED_URLS,
]
ScrapeInterval = Annotated[Interval, time_option(SCRAPING, "Time between scrapes.")]
SliceDuration = Annotated[
    Annotated[float, Meta(ge=0.01, le=LONGEST_S)],
    time_option(
        SCRAPING,
        "Length of the slices in timeslices.parquet. It is longer where there would be more than 20,000, or many more "
        "than requests and scrapes.",
    ),
]
Out = Annotated[
    Path | None, option(OUTPUT, "Run directory; must not contain a run yet. Default: a new one under runs/.")
]
Listen = Annotated[
    str | None,
    option(
        OUTPUT,
        "HOST:PORT of the live page for browsers (/) and for Prometheus (/metrics); port 0 picks a free port, 'off' "
        "disables it. Default: 127.0.0.1:9464, or a free port if that one is taken.",
    ),
]
Formats = Annotated[
    tuple[str, ...],
    repeatable(
        OUTPUT,
        f"Files besides summary.json, comma-separated: {', '.join(FORMATS)}. {files_of_formats()}. "
        f"Default: {','.join(DEFAULT_FORMATS)}.",
        converter=_split,
    ),
]
TraceUrl = Annotated[
    str | None,
    option(
        OUTPUT,
        "Where report.html links each request's trace to, with {trace_id} in it, e.g. "
        "'https://tempo.example/trace/{trace_id}'.",
    ),
]
Outside = Annotated[
    bool, flag(OUTPUT, "Of a comparison of recorded runs: read these runs, which lie outside of its directory.")
]
Untrusted = Annotated[
    bool,
    option(
        OUTPUT,
        "Evaluate with at most 2 GiB of memory, for a directory from people you do not know; without it the bound "
        "grows by 512 MB for each MB of files. Of the processor's time, 20 s are the bound, and 4 s more for each MB. "
        "--no-untrusted lifts both.",
        negative="--no-untrusted",
        show_default=False,
    ),
]
OBJECTIVES = (
    'Objectives, e.g. "ttft_p99<500ms,error_rate<1%,goodput>3" (docs/reference/metrics/objectives.md). '
    "A failed request misses each objective of a latency. "
)
Quiet = Annotated[bool, flag(OUTPUT, "Print the result only, without progress.")]
JsonProgress = Annotated[bool, flag(OUTPUT, "Machine-readable progress on stderr: one JSON object per line.")]
Verbose = Annotated[bool, flag(OUTPUT, "Print the traceback of an error.")]
ConfigFile = Annotated[
    Path | None, option(OUTPUT, "YAML file with any of these options; the command line takes precedence.")
]


def declarations(options: type, kind: type[D]) -> dict[str, D]:
    """Return the declarations of one kind on the options of a dataclass, by option name."""
    hints = get_type_hints(options, include_extras=True)
    each = ((field.name, declared(hints[field.name], kind)) for field in dataclasses.fields(options))
    return {name: declaration for name, declaration in each if declaration is not None}


def declared(hint: Any, kind: type[D]) -> D | None:
    """Return the first declaration of a kind in a type hint, or None."""
    if isinstance(hint, kind):
        return hint
    return next((inner for part in get_args(hint) if (inner := declared(part, kind)) is not None), None)


def flag_of(name: str) -> str:
    """Return an option as it is written on the command line."""
    return "--" + name.replace("_", "-")


def check_bounds(options: object) -> None:
    """Check options against their declared bounds. Raises ConfigurationError naming the first that is out of bounds,
    and the bound.
    """
    for name, bounds in declarations(type(options), Meta).items():
        value = getattr(options, name)
        least, most = cast("tuple[float, float]", (bounds.ge, bounds.le))
        if value is None or isinstance(value, str) or least <= value <= most:
            continue
        if value > most:
            raise ConfigurationError("option.value", f"{flag_of(name)} {plain(value)}: must be at most {plain(most)}")
        positive = isinstance(value, float) and least > 0 and not value > 0
        need = "greater than 0" if positive else f"at least {plain(least)}"
        raise ConfigurationError("option.value", f"{flag_of(name)} {plain(value)}: must be {need}")


def plain(value: float) -> str:
    """Return a number as people type it: all digits, an exponent as in 1e20."""
    return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.15g}")


def check_formats(formats: Sequence[str]) -> None:
    """Check the names of formats. Raises ConfigurationError naming the first that does not exist."""
    for name in formats:
        if name not in FORMATS:
            raise ConfigurationError(
                "option.value", f"--formats {name}: no such format; choose from {', '.join(FORMATS)}"
            )


def check_slo(text: str | None) -> None:
    """Check objectives; None is valid. Raises ConfigurationError naming the term, what is wrong, and the cure."""
    try:
        _ = text is None or parse_typed_slo(text)
    except ValueError as error:
        raise ConfigurationError("option.value", str(error)) from error


def check_trace_url(url: str | None) -> None:
    """Check that a link to traces can be made of the URL; None is valid. Raises ConfigurationError."""
    if url is not None and ("{trace_id}" not in url or not url.startswith(("http://", "https://"))):
        raise ConfigurationError(
            "option.value", f"--trace-url {url}: must be an http:// or https:// URL with {{trace_id}} in it"
        )


def listen_address(listen: str) -> tuple[str, int] | None:
    """Return host and port of a HOST:PORT option, or None for 'off'. Raises ConfigurationError."""
    if listen == "off":
        return None
    host, separator, port = listen.rpartition(":")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(
            "option.value", f"--listen {listen}: must be HOST:PORT (port 0 picks a free one) or 'off'"
        )
    return host.strip("[]"), int(port)


def http_url(
    name: str, url: str, *, user: bool = False, bare: bool = True, example: str = "http://127.0.0.1:8000"
) -> str:
    """Return the URL, with `bare` that of http:// for a HOST:PORT.

    Raises ConfigurationError unless it is http(s) with a host; a password in it only with `user`.
    """
    secret = False
    if bare and HOST_PORT.fullmatch(url):
        url = f"http://{url}"
    try:
        parts = urlsplit(url)
        secret = bool(parts.username or parts.password)
        (parts.hostname or "").encode("idna")  # UnicodeError, a ValueError: a label that is empty or too long
        usable = parts.scheme in {"http", "https"} and parts.hostname is not None and (parts.port or 1) > 0
    except ValueError:
        usable = False
    if secret and not user:
        raise ConfigurationError(
            "url.password",
            f"{name}: a user name or password in the URL would be written to every file of the run; "
            "set SIDELIGHT_API_KEY instead",
        )
    if not usable:
        raise ConfigurationError(
            "option.value", f"{name} {masked(url)}: must be an http:// or https:// URL, e.g. {example}"
        )
    return url


def named_path(given: Path, otherwise: str) -> tuple[str, Path]:
    """Return name and path of NAME=DIRECTORY, else `otherwise` and the path; one that exists is taken as it stands."""
    name, equals, path = str(given).partition("=")
    if not equals or given.exists() or not VARIANT_NAME.fullmatch(name):
        return otherwise, given
    return name, Path(path)
