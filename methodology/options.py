"""The options of `sidelight test`: those of `run` for the target and the workload, and the numbers of a test."""

# No postponed annotations, as in sidecar.options.fields.
import difflib
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Group, Parameter
from msgspec import Meta

from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import masked
from sidelight.rundir.printable.masking import MASK, masked_command, masked_fields
from sidelight.sidecar.options.fields import (
    CRITERIA,
    MAPPING,
    Duration,
    Masked,
    declarations,
    flag,
    flag_of,
    header_shown,
    option,
    repeatable,
    seconds,
    time_option,
)
from sidelight.sidecar.options.load import LOAD, WORKLOAD, RunOptions

# Of all, in the order of what needs what of another.
TESTS = (
    "throughput", "ttft", "itl", "tradeoff", "capacity", "fairness", "prefix-cache", "memory-pressure", "long-context",
    "guardrail",
)  # fmt: skip
ALL = "all"
TEST = Group("Test", sort_key=1.2)
NUMBERS = Group("Numbers of the test", sort_key=1.4)
SHORT_NAMES = {"input": "input_tokens", "output": "output_tokens", "isl": "input_tokens", "osl": "output_tokens"}
HIDDEN = Parameter(parse=False, show=False)
MOST_SHARE = 10.0  # of the capacity


def share(text: str) -> float:
    """Return a share from a text like 70% or 0.7. Raises ValueError."""
    try:
        ratio = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise ValueError("must be a share, as in 70% or 0.7") from None
    if not 0 < ratio <= MOST_SHARE:
        hint = f"; write {text}%" if not text.endswith("%") and 0 < ratio <= 100 * MOST_SHARE else ""
        raise ValueError(f"must be more than 0 and at most {MOST_SHARE:.0%}{hint}")
    return ratio


def _read_share(_hint: Any, tokens: Any) -> float:
    return share(tokens[0].value)


def _read_shares(_hint: Any, tokens: Any) -> tuple[float, ...]:
    """Convert 25,50,75,90% and several tokens alike: a sign behind the last counts for all."""
    texts = [text.strip() for token in tokens for text in token.value.split(",") if text.strip()]
    sign = "%" if any(text.endswith("%") for text in texts) else ""
    return tuple(share(f"{text.removesuffix('%')}{sign}") for text in texts)


def _read_numbers(_hint: Any, tokens: Any) -> tuple[int, ...]:
    """Convert 1024,2048 and 1K,2K. Raises ValueError."""
    texts = [text.strip() for token in tokens for text in token.value.split(",") if text.strip()]
    try:
        lengths = tuple(
            int(text.upper().removesuffix("K")) * (1024 if text.upper().endswith("K") else 1) for text in texts
        )
    except ValueError:
        raise ValueError("must be whole numbers with commas between them, as in 1024,2048 or 1K,2K") from None
    if not all(0 < length <= 10_000_000 for length in lengths):
        raise ValueError("each must be from 1 to 10,000,000")
    return lengths


def _without_secrets(text: str) -> str:
    """Return the recorded form of a declaration: headers by their names, without secrets. These may be in a URL, a body
    or a command.
    """
    if not text.startswith("{"):
        name, equals, url = text.partition("=")
        return f"{name}{equals}{masked(url)}"
    try:
        declared = msgspec.json.decode(text)
    except (ValueError, RecursionError):  # it is refused where it is used
        return MASK
    return json.dumps({name: _shown(variant) for name, variant in declared.items()})


def _shown(variant: Any) -> Any:
    """Return the recorded form of a configuration's declaration, with secrets masked."""
    if isinstance(variant, str):
        return masked(variant)
    if not isinstance(variant, dict):
        return variant
    shown = {name: masked_fields(value) if name == "extra-body" else value for name, value in variant.items()}
    for name, show in (("url", masked), ("header", header_shown), ("before", masked_command)):
        if isinstance(shown.get(name), str):
            shown[name] = show(shown[name])
        elif shown.get(name):
            shown[name] = [show(str(item)) for item in shown[name]]
    return shown


Positive = Annotated[float, Meta(ge=1e-6, le=1e6)]
Share = Annotated[float, Meta(ge=1e-6, le=MOST_SHARE)]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class StudyOptions(RunOptions):
    """All of `sidelight test`."""

    scale: Annotated[
        Literal["letter", "short"],
        option(TEST, "letter: the draft's numbers. short: fewer and shorter steps, to see where one stands."),
    ] = "letter"
    plan: Annotated[
        bool, flag(TEST, "Print the steps, their time and tokens, and send nothing; with --capacity they are yours.")
    ] = False
    budget: Annotated[
        Duration | None,
        time_option(
            TEST,
            "Shorten the test until it takes no longer: without the sentinel, then shorter steps, fewer requests, "
            "fewer levels. What that costs of the draft's requirements is said.",
        ),
    ] = None
    resume: Annotated[
        Path | None,
        option(
            TEST, "Go on with the study in this directory. What was asked stands there; give the URL's secrets again."
        ),
    ] = None
    isolated: Annotated[
        bool, flag(TEST, "Declare that the system serves no others, and that it may be driven out of memory.")
    ] = False
    variant: Annotated[
        tuple[str, ...],
        repeatable(
            TEST,
            "A configuration to measure, NAME=URL (repeatable). In --config a mapping of names to url, header, "
            "extra-body and before, a command that sets the configuration up (before-timeout: 10m).",
        ),
        MAPPING,
        Masked(lambda variants: [_without_secrets(text) for text in variants], word=_without_secrets),
    ] = ()
    require: Annotated[
        Literal["conditional", "unconditional"] | None,
        option(
            CRITERIA, "Exit with 1 unless the test complies with the draft: with each MUST, or with each SHOULD too."
        ),
    ] = None
    load: Annotated[
        Share | None, option(NUMBERS, "Load as a share of the capacity, as in 70%.", converter=_read_share)
    ] = None
    levels: Annotated[
        tuple[float, ...],
        repeatable(NUMBERS, "Levels of load as shares of the capacity, as in 25,50,75,90%.", converter=_read_shares),
    ] = ()
    capacity: Annotated[
        Positive | None,
        option(NUMBERS, "Capacity of the system, requests/s. Default: that of --from, else one saturated step first."),
    ] = None
    capacity_tokens: Annotated[
        Positive | None, option(NUMBERS, "The same in output tokens/s; with --from it comes from there.")
    ] = None
    capacity_from: Annotated[
        Path | None, option(NUMBERS, "Take the capacity from the study in this directory.", name=("--from",))
    ] = None
    min: Annotated[Positive | None, option(NUMBERS, "Lowest level of the search.")] = None
    max: Annotated[Positive | None, option(NUMBERS, "Highest level of the search.")] = None
    increment: Annotated[Positive | None, option(NUMBERS, "Least difference of two levels of the search.")] = None
    completion: Annotated[
        Share | None, option(NUMBERS, "Least share of requests that must end ok, as in 99%.", converter=_read_share)
    ] = None
    per_slot: Annotated[
        Annotated[int, Meta(ge=1, le=100_000)] | None,
        option(NUMBERS, "Completions per request in flight that a step waits for."),
    ] = None
    lengths: Annotated[
        tuple[int, ...], repeatable(NUMBERS, "Input lengths in tokens, as in 1K,2K,4K.", converter=_read_numbers)
    ] = ()
    mix: Annotated[
        Share | None, option(NUMBERS, "Share of the short class among the requests.", converter=_read_share)
    ] = None
    until: Annotated[str | None, option(NUMBERS, "Go on until an interval is that narrow, as in 'ttft_p99±10%'.")] = (
        None
    )
    sentinel: Annotated[
        bool | None,
        option(
            NUMBERS,
            "Measure the first level again at the end, of throughput the saturated step, to see whether the system "
            "drifted.",
        ),
    ] = None
    workload: Annotated[
        str,
        option(WORKLOAD, "What to send, as in `sidelight run --workload`. Default: the test's.", show_default=False),
        MAPPING,
    ] = ""
    rate: Annotated[float | None, HIDDEN] = None
    warmup: Annotated[int | str, HIDDEN] = "draft"
    arrival: Annotated[Literal["poisson", "uniform", "gamma", "burst", "replay"], HIDDEN] = "poisson"
    burstiness: Annotated[float, HIDDEN] = 1.0
    trace: Annotated[Path | None, HIDDEN] = None
    deadline: Annotated[float | None, HIDDEN] = None
    replay_requests: Annotated[Path | None, HIDDEN] = None
    trace_url: Annotated[str | None, HIDDEN] = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions(StudyOptions):
    """All of `sidelight compare`."""

    pairs: Annotated[
        Annotated[int, Meta(ge=1, le=1000)] | None,
        option(NUMBERS, "Runs of each configuration, in turn and with the same requests; a claim needs 3."),
    ] = None
    margin: Annotated[
        Share | None,
        option(NUMBERS, "A difference that is surely smaller is called equivalent, as in 5%.", converter=_read_share),
    ] = None
    rate: Annotated[
        Positive | None, option(LOAD, "Requests per second for each. Default: --load of the first one's capacity.")
    ] = None
    gate: Annotated[
        bool | None,
        flag(CRITERIA, "Exit with 1 where a configuration is worse than the first; not where it is undecided."),
    ] = None
    anyway: Annotated[
        bool, flag(TEST, "Compare recorded runs of other requests, durations or endpoints; the checklist says so.")
    ] = False
    runs: Annotated[
        tuple[Path, ...],
        repeatable(
            TEST,
            "A recorded run, a study or a directory of runs, or NAME=DIRECTORY (repeatable); as a path alone.",
        ),
    ] = ()


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions(StudyOptions):
    """All of `sidelight sweep`."""

    varied: Annotated[
        tuple[str, ...],
        repeatable(
            NUMBERS,
            "An option of `run` and its values, as in input-tokens=512,4096 (repeatable; all are combined). Values "
            "that hold a comma are parted by |.",
            name=("--vary",),
        ),
    ] = ()
    repeat: Annotated[
        Annotated[int, Meta(ge=1, le=1000)] | None, option(NUMBERS, "Runs of each combination. Default: 3.")
    ] = None
    order: Annotated[
        Literal["random", "ascending"] | None,
        option(NUMBERS, "Order of the combinations within each repeat. Default: random, by --seed."),
    ] = None
    rate: Annotated[Positive | None, option(LOAD, "Requests per second, where --vary says no other.")] = None

    @property
    def vary(self) -> dict[str, tuple[float | str, ...]]:
        """Return the values of each option that is varied. Raises ConfigurationError."""
        vary: dict[str, tuple[float | str, ...]] = {}
        known = {field.name for field in fields(RunOptions)}
        for text in self.varied:
            name, equals, values = text.partition("=")
            key = name.strip().removeprefix("--").replace("-", "_")
            key = SHORT_NAMES.get(key, key)
            listed = [value.strip() for value in values.split("|" if "|" in values else ",") if value.strip()]
            if not equals or not listed:
                raise ConfigurationError(
                    "option.value", f"--vary {text}: must be NAME=VALUE,VALUE, as in concurrency=1,4,16"
                )
            if key not in known:
                near = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)[0]
                raise ConfigurationError(
                    "option.unknown", f"--vary {name}: `run` has no such option; did you mean {near}?"
                )
            secret = declarations(RunOptions, Masked).get(key)
            if secret is not None and (secret.secret or [secret.word(value) for value in listed] != listed):
                raise ConfigurationError(
                    "option.secret",
                    f"--vary {name}: holds a secret, which would stand in every table; give it once with "
                    f"{flag_of(key)}",
                )
            if key in vary:
                raise ConfigurationError(
                    "option.duplicate", f"--vary {name}: given more than once; write all its values in one"
                )
            vary[key] = tuple(_json_value(value) for value in listed)
        return vary


def _json_value(text: str) -> float | str:
    """Return a text as a JSON value: a number, a duration in seconds, or else the text."""
    try:
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else seconds(text)
    except ValueError:
        return text
