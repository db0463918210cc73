"""Checks of the options of a load and of its target, before any request; and the arrival process that they describe."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from sidelight.loadgen.plan.arrivals import Arrival
from sidelight.loadgen.plan.rates import pace_of
from sidelight.loadgen.plan.traces import ArrivalTrace, TraceError, read_trace
from sidelight.loadgen.plan.workloads import catalogue as workloads
from sidelight.loadgen.protocols.table import PROTOCOLS, split_endpoint
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import masked
from sidelight.rundir.printable.errors import code_of
from sidelight.sidecar.options.access import check_access, require_headers, require_tls
from sidelight.sidecar.options.fields import (
    check_bounds,
    check_formats,
    check_slo,
    check_trace_url,
    flag_of,
    http_url,
    plain,
)
from sidelight.sidecar.options.load import (
    DEFAULT_RATE_PER_S,
    MOST_REQUESTS,
    ContactOptions,
    DoctorOptions,
    RunOptions,
    tags_of,
)
from sidelight.sidecar.options.spans import SpanOptions, check_exports, check_spans

C = TypeVar("C", bound=ContactOptions)

DEFAULT_DURATION_S = 30.0
NAMED_TOKENIZERS = ("auto", "server", "cl100k_base")

# What series of the live page bear: no tag may have such a name.
# fmt: off
LABELS = frozenset((
    "of", "quantile", "status", "process", "endpoint", "outcome", "part", "source", "quality", "first_output", "reason",
    "kind", "what", "le", "run_id", "phase", "model", "workload", "url", "engine", "version", "gateway",
    "instance", "job",
))
# fmt: on
MOST_TAGS, MOST_TAG_CHARACTERS = 50, 2000
# Paths of endpoints without the /v1 that ours have.
_UNVERSIONED = ("/chat/completions", "/completions")
_OPEN_LOOP_ONLY = ("rate", "arrival", "burstiness", "trace")


def check_run(options: RunOptions) -> RunOptions:
    """Return the options with defaults that depend on each other filled in.

    Raises ConfigurationError naming the option, its value and what would be valid.
    """
    options = _check_target(_without_endless_rate(options))
    check_spans(options, listen=options.listen)
    check_exports(options)
    check_bounds(options)
    _check_load(options)
    check_formats(options.formats)
    check_trace_url(options.trace_url)
    check_tags(options.tag)
    duration_s = options.duration or 0
    if options.pace.most_per_s * duration_s > MOST_REQUESTS:
        raise ConfigurationError(
            "load.too-large",
            f"--rate {shown_rate(options.rate)} --duration {plain(duration_s)}: more than {MOST_REQUESTS:,} requests; "
            "lower one",
        )
    scheduled = options.concurrency is not None or options.trace is not None or options.replay_requests is not None
    files = (options.trace, options.replay_requests, options.prompts)
    ends = options.requests is not None or any(path is not None for path in files)
    return replace(
        options,
        rate=options.rate if options.rate is not None or scheduled else DEFAULT_RATE_PER_S,
        duration=DEFAULT_DURATION_S if options.duration is None and not ends else options.duration,
        sut=None if options.sut is None else _as_declared(options.sut),
    )


def _as_declared(sut: str) -> str:
    """Return the declaration of --sut as it is recorded. Raises ConfigurationError."""
    from sidelight.recorded.system import as_text, read_system  # noqa: PLC0415  most runs declare nothing

    try:
        return as_text(read_system(sut))
    except ValueError as error:
        raise ConfigurationError(code_of(error, "option.value"), f"--sut {error}") from error


def _without_endless_rate(options: RunOptions) -> RunOptions:
    """Return options with a closed loop in place of --rate inf. That is its meaning in vllm bench serve. The loop is as
    wide as the cap, else as the number of requests.
    """
    if options.rate != math.inf:
        return options
    width = options.concurrency if options.concurrency is not None else options.requests
    if width is not None:
        return replace(options, rate=None, concurrency=width)
    raise ConfigurationError(
        "option.contradictory",
        "--rate inf: all requests at once; add --requests N, or --concurrency N to have N in flight",
    )


def check_doctor(options: DoctorOptions) -> DoctorOptions:
    """Return the options of an examination. Raises ConfigurationError as `check_run` does."""
    if options.gateway is not None:
        gateway = http_url("--gateway", options.gateway)
        if options.otlp_listen is None:
            raise ConfigurationError(
                "option.contradictory",
                f"--gateway {options.gateway}: needs --otlp-listen HOST:PORT, to which the gateway and the engine send "
                "their spans, e.g. --otlp-listen 127.0.0.1:4317",
            )
        options = replace(options, gateway=base_url(gateway, options.endpoint, "--gateway"))
    check_spans(SpanOptions(otlp_listen=options.otlp_listen, listen_open=options.listen_open))
    options = _check_target(options, is_optional=options.gateway is not None)
    check_bounds(options)
    _check_contact(options)
    return options


def _check_target(options: C, *, is_optional: bool = False) -> C:
    """Return the options with base URLs. Raises ConfigurationError where an address or its access cannot be used."""
    if not options.url and not is_optional:
        raise ConfigurationError(
            "option.missing", "--url is missing; give the engine's base URL, e.g. --url http://127.0.0.1:8000"
        )
    urls = [http_url("--url", url) for url in options.url]
    pages = tuple(http_url("--metrics", url, user=True) for url in options.metrics)
    check_access(options)
    return replace(options, url=tuple(base_url(url, options.endpoint) for url in urls), metrics=pages)


def base_url(url: str, endpoint: str, flag: str = "--url") -> str:
    """Return the base URL, also where the endpoint's own address was given. Raises ConfigurationError for another's."""
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise ConfigurationError(
            "url.not-base", f"{flag} {masked(url)}: give the base URL, without what follows its path ('?' or '#')"
        )
    base, names = split_endpoint(url)
    if names and endpoint not in names:
        raise ConfigurationError(
            "url.not-base",
            f"{flag} {url}: is the address of --endpoint {names[0]}, but --endpoint is {endpoint}; give --endpoint "
            f"{names[0]}, or the base URL {base}",
        )
    if not names and base.rstrip("/").endswith(_UNVERSIONED):
        raise ConfigurationError(
            "url.not-base",
            f"{flag} {url}: give the base URL, to which {PROTOCOLS[endpoint].path} is added; this address has no /v1",
        )
    return base


def check_tags(tags: Sequence[str]) -> None:
    """Check the labels of --tag. Raises ConfigurationError naming the first that cannot be a label, or that there are
    too many.
    """
    if len(tags) > MOST_TAGS or sum(map(len, tags)) > MOST_TAG_CHARACTERS:
        raise ConfigurationError(
            "option.value",
            f"--tag: more than {MOST_TAGS} labels, or {MOST_TAG_CHARACTERS:,} characters: every series would bear them",
        )
    names = [tag.partition("=")[0] for tag in tags]
    for tag in tags:
        name, equals, value = tag.partition("=")
        if names.count(name) > 1:
            raise ConfigurationError(
                "option.duplicate", f"--tag {tag}: {name} is given more than once; a label has one value"
            )
        if not equals or not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__"):
            raise ConfigurationError(
                "option.value", f"--tag {tag}: must be NAME=VALUE, NAME of letters, digits and underscores"
            )
        if not value.isprintable():
            raise ConfigurationError("option.value", f"--tag {tag}: the value must be printable text, in UTF-8")
        if name in LABELS:
            raise ConfigurationError(
                "option.value", f"--tag {tag}: {name} is a label of the page itself; choose another name"
            )


def recorded_tags(tags: Sequence[str], manifest: Path) -> dict[str, str]:
    """Return the labels of a manifest's tags. Raises ConfigurationError for invalid ones."""
    try:
        check_tags(tags)
    except ConfigurationError as error:
        raise ConfigurationError("run.tags", f"{manifest}: {error}") from error
    return tags_of(tags)


def _check_load(options: RunOptions) -> None:
    """Check the options of the load. Raises ConfigurationError naming the first options that contradict each other, or
    a file that does not exist.
    """
    for problem in _contradictions(options):
        raise ConfigurationError("option.contradictory", problem)
    check_slo(options.slo)
    try:
        workloads.check(options.workload, dataset=options.dataset, trace=options.trace, lengths=lengths_of(options))
    except ValueError as error:
        raise ConfigurationError(
            code_of(error, "option.value"), named("--workload", options.workload, str(error))
        ) from error
    for flag, path in (
        ("--dataset", options.dataset),
        ("--prompts", options.prompts),
        ("--trace", options.trace),
    ):
        if path is not None and not path.is_file():
            why = "not a regular file" if path.exists() else "No such file or directory"
            raise ConfigurationError("file.unreadable", f"{flag} {path}: {why}; give the path of a readable file")
    if options.tokenizer not in NAMED_TOKENIZERS and not Path(options.tokenizer).exists():
        raise ConfigurationError(
            "file.unreadable",
            f"--tokenizer {options.tokenizer}: No such file or directory; give {', '.join(NAMED_TOKENIZERS)} or the "
            "path of a tokenizer.json",
        )
    _check_contact(options)


def _check_contact(options: ContactOptions) -> None:
    """Check the headers, fields and certificates of every request. Raises ConfigurationError where one cannot be
    used.
    """
    headers_of(options)
    extra_of(options)
    if options.insecure and options.ca is not None:
        raise ConfigurationError(
            "option.contradictory",
            f"--insecure and --ca {options.ca} exclude each other: one trusts any certificate; leave out --insecure",
        )
    require_tls("--", ca=options.ca, cert=options.cert, key=options.key)


def headers_of(options: ContactOptions) -> dict[str, str]:
    """Return the headers that every request has beside our own. Raises ConfigurationError."""
    return require_headers("--header", options.header)


def extra_of(options: ContactOptions) -> dict[str, object]:
    """Return the fields of `--extra-body`. Raises ConfigurationError where it is not a JSON object."""
    text = options.extra_body
    try:
        fields = msgspec.json.decode(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigurationError("option.value", f"--extra-body: {error}; give a JSON object") from error
    if not isinstance(fields, dict):
        raise ConfigurationError("option.value", "--extra-body: must be a JSON object, e.g. '{\"top_k\": 1}'")
    return fields


def lengths_of(options: RunOptions) -> workloads.Lengths:
    """Return the lengths given in place of the workload's."""
    return workloads.Lengths(input_tokens=options.input_tokens, output_tokens=options.output_tokens)


def named(flag: str, value: str, message: str) -> str:
    """Return a message with the option and its value first. Each is added only if the message does not name it."""
    if message.startswith("--"):
        return message
    return f"{flag} {message}" if message.startswith(value) else f"{flag} {value}: {message}"


def _contradictions(options: RunOptions) -> Iterator[str]:
    yield from _contradicting_arrivals(options)
    for name in ("nodes", "node_label"):
        if getattr(options, name) and options.ray is None:
            yield f"{flag_of(name)} needs --ray ADDRESS, the cluster whose nodes they are"
    if options.ray is not None and not options.workers:
        yield f"--ray {options.ray} and --workers 0 exclude each other: give the number of workers on each node"
    if options.replay_requests is not None and lengths_of(options):
        given = "--input-tokens" if options.input_tokens is not None else "--output-tokens"
        yield f"{given} and --replay-requests exclude each other: saved requests have their lengths; leave one out"
    yield from _contradicting_prompts(options)
    if options.sessions and options.dataset is None and options.prompts is None:
        yield (
            "--sessions needs --dataset or --prompts, whose conversations have later messages; a workload file sets "
            "turns itself"
        )
    if options.think_time and not options.sessions and options.prompts is None:
        yield (
            f"--think-time {plain(options.think_time)}: needs --sessions or --prompts; a workload file sets "
            "think_time_s itself"
        )


def _contradicting_prompts(options: RunOptions) -> Iterator[str]:
    if options.prompts is None:
        return
    given = {
        f"--workload {options.workload}": options.workload != RunOptions().workload,
        "--dataset": options.dataset is not None,
        "--replay-requests": options.replay_requests is not None,
        "--input-tokens": options.input_tokens is not None,
    }
    for name in (name for name, is_given in given.items() if is_given):
        yield f"--prompts and {name} exclude each other: each says what is sent; give one of them"
    if options.output_tokens is not None and not re.fullmatch("[1-9][0-9]{0,8}", options.output_tokens):
        yield f"--output-tokens {options.output_tokens}: must be a number where --prompts gives the prompts, like 128"
    if options.exact_tokens:
        yield "--prompts and --exact-tokens exclude each other: prompts of your own are sent as they are"


def _contradicting_arrivals(options: RunOptions) -> Iterator[str]:
    default = RunOptions()
    given = [name for name in _OPEN_LOOP_ONLY if getattr(options, name) != getattr(default, name)]
    if options.closed_loop:
        for name in given:
            yield (
                f"{flag_of(name)} and --concurrency exclude each other in a closed loop; with --rate too, "
                "--concurrency is the most requests of the schedule in flight"
            )
    if "burstiness" in given and options.arrival not in {"gamma", "burst"}:
        yield f"--burstiness {plain(options.burstiness)}: needs --arrival gamma or burst, not {options.arrival}"
    if (options.arrival == "replay") != (options.trace is not None):
        yield "--arrival replay and --trace FILE need each other: the file holds the arrival times"
    if isinstance(options.rate, str):
        yield from _contradicting_pace(options.rate, options)


def _contradicting_pace(rate: str, options: RunOptions) -> Iterator[str]:
    try:
        pace = pace_of(rate)
    except ValueError as error:
        yield f"--rate {rate}: {error}"
        return
    if pace.to_per_s is None and options.trace is None:
        yield f"--rate {rate}: is the speed of a trace; add --arrival replay --trace FILE, or give requests/s"
    if pace.to_per_s is not None and options.arrival not in {"poisson", "uniform", "gamma"}:
        yield f"--rate {rate}: {options.arrival} arrivals cannot ramp; poisson, uniform and gamma can"
    if not 1e-6 <= (pace.speed if pace.to_per_s is None else pace.to_per_s) <= 1e6 or pace.most_per_s > 1e6:
        yield f"--rate {rate}: must be greater than 0 and at most 1000000"


def shown_rate(rate: float | str | None) -> str:
    """Return a value of --rate as people type it."""
    return rate if isinstance(rate, str) else plain(rate or 0)


def read_arrivals(path: Path | None) -> ArrivalTrace | None:
    """Read the trace to replay, if there is one. Raises ConfigurationError naming file, line, field and value."""
    if path is None:
        return None
    try:
        return read_trace(path)
    except TraceError as error:
        raise ConfigurationError(error.code, f"--trace {error}") from error
    except OSError as error:
        raise ConfigurationError("file.unreadable", f"--trace {path}: {error.strerror}") from error


def arrival_of(options: RunOptions, trace: ArrivalTrace | None) -> Arrival | None:
    """Return the arrival process of checked options; None for a closed loop. Raises ConfigurationError."""
    if options.closed_loop:
        return None
    pace = options.pace
    try:
        return Arrival(
            kind=options.arrival,
            rate_per_s=pace.per_s if pace.per_s is not None else 0.0 if trace is not None else DEFAULT_RATE_PER_S,
            burstiness=options.burstiness,
            ramp_to_per_s=pace.to_per_s,
            trace_ns=None if trace is None else trace.offsets_ns,
            speed=pace.speed,
        )
    except ValueError as error:
        raise ConfigurationError("option.value", f"--arrival {options.arrival}: {error}") from error
