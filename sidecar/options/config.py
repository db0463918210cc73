"""Options from a YAML file, and the recorded form of options."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import GenericAlias
from typing import Any, get_type_hints

from cyclopts import Parameter

from sidelight.loadgen.plan.workloads.fields import WorkloadError, read_yaml
from sidelight.recorded.errors import ConfigurationError
from sidelight.rundir.access import masked
from sidelight.rundir.printable.masking import MASK, without_secrets
from sidelight.sidecar.options.fields import Masked, ReadsMapping, declarations, declared, flag_of

# Options of earlier versions, each with what to use in its place.
REMOVED = {
    "--forward-keep": "exports wait in memory only; for a queue on disk put an OpenTelemetry Collector in front, which "
    "sends a copy here",
    "--save-requests": "each run keeps its requests: send them again with --replay-requests and its directory",
    **dict.fromkeys(("--ramp", "--ramp-to", "--ramp-duration"), "write a ramp over the whole load as --rate 4..20"),
    **dict.fromkeys(("--burst-on", "--burst-off"), "--arrival burst is on and off for 1 s each"),
    "--barrier": "with --concurrency each request that ends is replaced at once",
    "--replay-speed": "write --rate 2x for twice the speed of --trace",
    "--header-file": "write --header @FILE",
    "--request-id": "each request has an X-Request-Id, a UUID",
    "--world-readable": "let others read a directory afterwards: chmod -R a+rX DIR",
    "--keep-bytes": "a run is stopped when its logs reach 10 GB; a watch has --keep-bytes",
    "--max-reply-bytes": "a reply of more than 64 MB fails",
    "--linger": "a page that is scraped is served until it was scraped once more, a minute at most",
    "--memory": "the process that receives spans may take 512 MB; a watch has --memory",
    "--prometheus-native-histograms": "histograms are sent with their buckets; percentiles of a run are in its report",
}


def aliases(options: type) -> dict[str, str]:
    """Return the aliases of options in a file, each with the option's own name."""
    return {
        key: name
        for name, parameter in declarations(options, Parameter).items()
        for shown in parameter.name or ()
        if (key := shown.removeprefix("--").replace("-", "_")) != name
    }


def load_yaml(path: Path, options: type, *, elsewhere: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read a configuration file: a mapping of option names (with - or _) to values.

    `elsewhere` are names that options have in other programs, each with the option's own; they are not accepted.

    Raises ConfigurationError: unreadable, not YAML (with line and column), not a mapping, or an unknown key (names the
    key and the nearest valid one).
    """
    try:
        data = read_yaml(path)
    except WorkloadError as error:
        raise ConfigurationError(error.code, f"--config {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigurationError(
            "file.not-a-mapping", f"--config {path}: must be a mapping of options, but is a {type(data).__name__}"
        )
    named = {_option_name(str(key), options, path, elsewhere or {}): value for key, value in data.items()}
    # YAML 1.1 reads a bare off as false.
    named = {**named, "listen": "off"} if named.get("listen") is False else named
    return {name: _plain_value(value, name, options, path) for name, value in named.items()}


def _plain_value(value: object, name: str, options: type, path: Path) -> object:
    """Return a value as an option has it. Raises ConfigurationError for a list or mapping out of place."""
    if isinstance(value, dict):
        if name not in declarations(options, ReadsMapping):
            raise ConfigurationError("option.value", f"--config {path}: {name}: must be a value, but is a mapping")
        return json.dumps(value, default=str)  # of a date
    lists = next(isinstance(field.default, tuple) for field in dataclasses.fields(options) if field.name == name)
    lists = lists or declared(get_type_hints(options)[name], GenericAlias) is not None
    if isinstance(value, list) and not lists:
        raise ConfigurationError("option.value", f"--config {path}: {name}: must be one value, but is a list")
    return value


def _option_name(key: str, options: type, path: Path, elsewhere: Mapping[str, str]) -> str:
    names = {field.name for field in dataclasses.fields(options)} - {"config"}
    name = key.replace("-", "_")
    name = aliases(options).get(name, name)
    if name in names:
        return name
    if flag_of(name) in REMOVED:
        raise ConfigurationError(
            "option.removed", f"--config {path}: there is no '{key}' any more; {REMOVED[flag_of(name)]}"
        )
    same = elsewhere.get(flag_of(name), "").removeprefix("--").replace("-", "_")
    near = same if same in names else difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.0)[0]
    raise ConfigurationError("option.unknown", f"--config {path}: unknown key '{key}'; did you mean '{near}'?")


def as_recorded(options: Any) -> dict[str, Any]:
    """Return the options as they stand in the manifest: plain JSON values, secrets masked."""
    shown = {name: how.show for name, how in declarations(type(options), Masked).items()}
    values = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    return {
        name: _plain(value if value is None or name not in shown else shown[name](value))
        for name, value in values.items()
    }


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    return list(map(_plain, value)) if isinstance(value, tuple) else value


def command_as_recorded(arguments: Sequence[str], options: type) -> list[str]:
    """Return a command line as it stands in the manifest: secrets masked, also those of URLs."""
    known = {flag_of(name): how for name, how in declarations(options, Masked).items()}
    shown: list[str] = []
    awaiting: Masked | None = None  # the option that arguments belong to, and how many still do
    left = 0
    for argument in arguments:
        is_option = not left and argument.startswith("-")
        name, equals, value = argument.partition("=") if is_option else ("", "", argument)
        how = known.get(name.replace("_", "-")) if is_option else awaiting if left else None
        left = left - 1 if left else how.words if how is not None and not equals else 0
        awaiting = how
        if is_option and left:
            shown.append(argument)
        elif how is None:
            shown.append(f"{name}{equals}{masked(value)}" if "://" in value else argument)
        else:
            shown.append(f"{name}{equals}{MASK if how.secret else how.word(value)}")
    return [without_secrets(argument) for argument in shown]
