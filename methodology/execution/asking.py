"""Resolution of a test's options: its numbers, the configurations, and the options of every step."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import msgspec
from msgspec.structs import replace

from sidelight.loadgen.plan.workloads.fields import nearest
from sidelight.methodology.options import HIDDEN, StudyOptions
from sidelight.methodology.study.model import Parameters, Procedure
from sidelight.recorded.errors import ConfigurationError
from sidelight.recorded.system import Declaration, System, read_system
from sidelight.rundir.access import masked
from sidelight.rundir.printable.errors import code_of
from sidelight.rundir.printable.masking import MASK, register_command, unmasked
from sidelight.sidecar.options.checks import check_run, extra_of
from sidelight.sidecar.options.config import as_recorded
from sidelight.sidecar.options.fields import VARIANT_NAME, flag_of, http_url, seconds
from sidelight.sidecar.options.load import RunOptions

# Options of `run` that a test decides itself: those that its own command hides, and the declaration.
DECIDED = {"sut"} | {
    name
    for name, hint in get_type_hints(StudyOptions, include_extras=True).items()
    if HIDDEN in getattr(hint, "__metadata__", ())
}
# Numbers whose option is that of `run` by the same name; of these, one of every workload.
_SHARED = ("duration", "requests", "slo", "concurrency", "output_tokens")
_WORKLOAD = ("output_tokens",)
_LISTEN = ("listen", "listen_tls", "listen_token", "listen_client_ca", "listen_open")
_OUTPUT = ("out", "formats", *_LISTEN, "quiet", "json", "verbose", "config")
# Options that are of one call, not of the study.
_OF_NOW = ("out", "resume", "plan", "budget", *_LISTEN, "quiet", "json", "verbose", "config", "require")
STEP_FORMATS = ("json", "text")
SomeOptions = TypeVar("SomeOptions", bound=RunOptions)


class Variant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """A configuration of the measured system, and its set-up."""

    url: str | tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    extra_body: dict[str, Any] | None = None
    before: str | tuple[str, ...] = ()
    before_timeout: float | str = 600.0

    @property
    def urls(self) -> tuple[str, ...]:
        """Return its addresses; none: those of all configurations."""
        return (self.url,) if isinstance(self.url, str) else self.url

    @property
    def before_s(self) -> float:
        """Return the time limit of `before`, s."""
        return seconds(self.before_timeout) if isinstance(self.before_timeout, str) else self.before_timeout


def variants_of(options: StudyOptions) -> dict[str, Variant]:
    """Return the configurations by name. Raises ConfigurationError naming the one that cannot be used."""
    variants: dict[str, Variant] = {}
    for text in options.variant:
        for name, declared in _declared(text).items():
            if not VARIANT_NAME.fullmatch(name):
                raise ConfigurationError(
                    "variant.name", f"--variant {name[:40]}: a name is of letters, digits, . _ and -"
                )
            if name in variants:
                raise ConfigurationError(
                    "variant.duplicate", f"--variant {name}: given more than once; each configuration has its own name"
                )
            try:
                variant = msgspec.convert(declared, Variant)
                bounded = variant.before_s > 0
            except (msgspec.ValidationError, ValueError) as error:
                raise ConfigurationError("variant.form", f"--variant {name}: {error}") from error
            if not bounded:
                raise ConfigurationError("option.value", f"--variant {name}: before-timeout: must be greater than 0")
            before = (variant.before,) if isinstance(variant.before, str) else variant.before
            register_command(shlex.join(before))
            urls = tuple(http_url(f"--variant {name}", url) for url in variant.urls)
            variants[name] = msgspec.structs.replace(variant, url=urls)
    return variants


def _declared(text: str) -> dict[str, Any]:
    if text.startswith("{"):
        try:
            declared = msgspec.json.decode(text)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(
                "variant.form", f"--variant: {error}; give NAME=URL, or a mapping in --config"
            ) from error
        return {name: {"url": of} if isinstance(of, str) else of for name, of in declared.items()}
    name, equals, url = text.partition("=")
    if not equals:
        raise ConfigurationError(
            "variant.form", f"--variant {masked(text)}: must be NAME=URL, as in cache-off=http://127.0.0.1:8001"
        )
    return {name: {"url": url}}


def as_declared(name: str, variant: Variant) -> str:
    """Return a configuration in the form of --variant."""
    declared = {key: value for key, value in msgspec.to_builtins(variant).items() if value}
    return json.dumps({name: declared})


def parameters_of(options: StudyOptions, procedure: Procedure) -> Parameters:
    """Return the numbers of a test: its preset, and what was given in its place.

    Raises ConfigurationError naming an option that the test does not have, and those that it has.
    """
    preset = procedure.presets[options.scale]
    has = options_of(procedure)
    given: dict[str, Any] = {}
    for name in Parameters.__struct_fields__:
        value = getattr(options, name, None)
        if value is None or value == ():
            continue
        if name in has:
            given[name] = _whole_tokens(value) if name == "output_tokens" else value
        elif name not in _WORKLOAD:
            raise ConfigurationError(
                "test.option",
                f"{flag_of(name)}: the test {procedure.name} has no such number; it has {', '.join(map(flag_of, has))}",
            )
    if {"rate", "concurrency"} & given.keys() and "rate" in has:
        preset = replace(preset, load=None)
    return replace(preset, **given)


def options_of(procedure: Procedure) -> list[str]:
    """Return the names of a test's numbers. They are those of its presets, and the capacity where its levels are shares
    of it.
    """
    presets = procedure.presets.values()
    has = [
        name
        for name in Parameters.__struct_fields__
        if name in procedure.optional or any(getattr(preset, name) is not None for preset in presets)
    ]
    of_capacity = {"load", "levels"} & set(has)
    return [*has, *(name for name in ("capacity", "capacity_tokens") if of_capacity and name not in has)]


def _whole_tokens(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,8}", text):
        raise ConfigurationError(
            "option.value", f"--output-tokens {text}: must be a whole number, which this test keeps fixed"
        )
    return int(text)


def common_options(options: StudyOptions, procedure: Procedure) -> RunOptions:
    """Return the options that every step has."""
    has = options_of(procedure)
    passed_on = {
        field.name: getattr(options, field.name)
        for field in dataclasses.fields(RunOptions)
        if field.name not in DECIDED and not (field.name in _SHARED and field.name in has)
    }
    workload = options.workload or procedure.workload
    return RunOptions(**{**passed_on, "workload": workload, "formats": STEP_FORMATS, "listen": options.listen or "off"})


def recorded_options(common: RunOptions) -> dict[str, Any]:
    """Return the recorded options of all steps: those that differ from `run`, secrets masked."""
    usual = as_recorded(RunOptions())
    return {
        name: value
        for name, value in as_recorded(common).items()
        if name == "workload" or (value != usual[name] and name not in (*_OUTPUT, "seed"))
    }


def with_values(options: SomeOptions, values: Mapping[str, Any]) -> SomeOptions:
    """Return options with others in their place, given as in a configuration file. Raises ConfigurationError."""
    hints = get_type_hints(RunOptions, include_extras=True)
    changed: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in hints:
            raise ConfigurationError("option.unknown", f"{flag_of(name)}: `run` has no such option")
        changed[name] = typed(name, value, hints[name])
    if "extra_body" in changed:  # a step's is made of the recorded one
        changed["extra_body"] = json.dumps(unmasked(json.loads(changed["extra_body"]), extra_of(options)))
    return dataclasses.replace(options, **changed)


def typed(name: str, value: Any, hint: Any) -> Any:
    """Return a JSON value as an option has it. Raises ConfigurationError."""
    if isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and name in ("input_tokens", "output_tokens"):
        return str(value)
    try:
        return msgspec.convert(value, hint, dec_hook=lambda _, text: Path(text))
    except msgspec.ValidationError as error:
        raise ConfigurationError("option.value", f"{flag_of(name)} {value}: {error}") from error


def targets(options: StudyOptions, procedure: Procedure) -> dict[str, RunOptions]:
    """Return the options of each configuration: of the only one, by the name "". Raises ConfigurationError."""
    common = common_options(options, procedure)
    variants = variants_of(options)
    if not variants:
        return {"": _checked(common)}
    return {name: _checked(of_variant(common, variant)) for name, variant in variants.items()}


def _checked(common: RunOptions) -> RunOptions:
    """Return options after a check of their target and workload alone. Raises ConfigurationError."""
    checked = check_run(dataclasses.replace(common, rate=1.0, requests=1, duration=None, concurrency=None))
    return dataclasses.replace(common, url=checked.url)


def of_variant(common: SomeOptions, variant: Variant) -> SomeOptions:
    """Return options with a configuration's own values."""
    values = {"extra_body": {**extra_of(common), **variant.extra_body}} if variant.extra_body else {}
    header = (*common.header, *variant.header)
    return dataclasses.replace(with_values(common, values), url=variant.urls or common.url, header=header)


def system_of(options: StudyOptions, variants: Collection[str], procedure: Procedure) -> System:
    """Return the declaration of the system from --sut and the test's configurations. The test gives its configurations
    names, and may declare them.

    Raises ConfigurationError; also for the name of a variant with a slip.
    """
    try:
        system = read_system(options.sut)
    except ValueError as error:
        raise ConfigurationError(code_of(error, "option.value"), f"--sut {error}") from error
    if options.isolated and system.isolated is False:
        raise ConfigurationError(
            "declaration.contradicted", "--isolated: --sut declares `isolated: false`; correct one of them"
        )
    undeclared = [name for name in variants if name not in system.variants]
    for name in system.variants:
        if name not in variants and (near := nearest(name, undeclared)):
            raise ConfigurationError("declaration.variant", f"--sut variants.{name}: there is no such --variant{near}")
    named = {
        name: msgspec.to_builtins(system.variants.get(name, {})) for name in variants if name in procedure.variants
    }
    named = {name: msgspec.convert(procedure.variants[name] | given, Declaration) for name, given in named.items()}
    system = replace(system, variants=system.variants | named)
    return replace(system, isolated=True) if options.isolated else system


def from_record(recorded: Mapping[str, object], given: StudyOptions) -> StudyOptions:
    """Return the options that a study was begun with. Secrets are not recorded, and are as given now.

    Raises ConfigurationError where such a one is missing, or one cannot be read.
    """
    kind = type(given)
    hints = get_type_hints(kind, include_extras=True)
    values: dict[str, Any] = {}
    for name in (field.name for field in dataclasses.fields(kind)):
        value = recorded.get(name)
        if name in _OF_NOW:
            values[name] = getattr(given, name)
        elif MASK in json.dumps(value):
            values[name] = getattr(given, name)
            if not values[name]:
                raise ConfigurationError(
                    "study.changed", f"--resume: {flag_of(name)} was given, and is not recorded; give it again"
                )
        elif name in recorded:
            values[name] = typed(name, value, hints[name])
    return kind(**values)


def require_same(path: Path, given: StudyOptions, then: StudyOptions) -> None:
    default = type(given)()
    for name in (field.name for field in dataclasses.fields(type(given))):
        now, before = getattr(given, name), getattr(then, name)
        if name not in _OF_NOW and now != getattr(default, name) and now != before:
            shown = as_recorded(then)[name]
            was = "not given" if shown in (None, []) else f"{shown}"
            raise ConfigurationError(
                "study.changed",
                f"--resume {path}: {flag_of(name)} was {was} when the study began; leave it out, or begin a new study",
            )
