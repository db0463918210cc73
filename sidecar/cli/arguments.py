"""Translation of typed arguments to our options. Other benchmarks' names become ours, a URL that stands alone the
target's.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from cyclopts import Parameter

from sidelight.recorded.errors import ConfigurationError
from sidelight.sidecar.cli import draft
from sidelight.sidecar.cli.help import ALL, FLAGS
from sidelight.sidecar.cli.loads import STREAMS, defaults_of, meant, sweep_note, with_streams
from sidelight.sidecar.cli.messages import are_numbers, hint_of, unused
from sidelight.sidecar.cli.peers import HINTS, RENAMED
from sidelight.sidecar.options.fields import HOST_PORT, SYSTEMS, declarations, flag_of
from sidelight.sidecar.options.load import DoctorOptions, RunOptions
from sidelight.sidecar.options.watch import ScrapeOptions, WatchOptions

# Commands with their options (None: the draft's) and the option that a URL which stands alone is.
_COMMANDS: dict[str, tuple[type | None, str]] = {
    "run": (RunOptions, "--url"),
    "doctor": (DoctorOptions, "--url"),
    "scrape": (ScrapeOptions, "--url"),
    **{command.name: (None, command.bare) for command in draft.COMMANDS},
    "watch": (WatchOptions, "--metrics"),
}
# Options that take all values up to the next option.
_SEVERAL = ("--header", "--metrics-header", "--otlp-header", "--prometheus-header", "--tag", "--formats")
_PAIRS = ("--listen-tls",)  # options of two values
_HTTP = re.compile("https?://")


@dataclass(frozen=True, slots=True)
class _Option:
    """A typed option: its name with dashes, and its values up to the next option."""

    typed: str
    name: str
    values: list[str]


@dataclass(slots=True)
class Translation:
    """A command line in our options' names.

    words       what stands alone, behind no option
    implied     the load that options of other benchmarks mean where none is typed, and whose they are
    profile     what GuideLLM's --profile says, where its --rate is a number of streams
    problems    options that need another form here, each with that form
    """

    arguments: list[str]
    words: list[str] = field(default_factory=list)
    implied: str = ""
    profile: str = ""
    problems: list[str] = field(default_factory=list)

    def add(self, option: _Option, flags: frozenset[str]) -> None:
        """Add an option and its values."""
        name, values = option.name, option.values
        typed, value = option.typed.partition("=")[0], " ".join(values[:1])
        if hint := HINTS.get(f"{name} {value}"):
            self.problems.append(f"{typed} {value}: {hint}")
        elif hint := HINTS.get(name):
            self.problems.append(f"{typed}: {hint}")
        elif RENAMED.get(name) == "--arrival" and values and values[0] in STREAMS:
            self.profile = values[0]
            self.words += values[1:]
        elif name in flags:
            self.arguments.append(option.typed)
            self.words += values["=" in option.typed :]
        elif name in _PAIRS:
            self.arguments += [name, *values[:2]]
            self.words += values[2:]
        else:
            ours = RENAMED.get(name, name)
            value_count = _own_values(values) if ours in _SEVERAL else 1
            for value in values[:value_count]:
                self.arguments += [ours, value]
            self.arguments += [] if values else [ours]
            self.words += values[value_count:]

    def take_load(self, typed: Sequence[str]) -> None:
        """Add the load that other benchmarks' options imply."""
        if self.profile:
            try:
                self.arguments = with_streams(self.profile, self.arguments)
            except ValueError as error:
                self.problems.append(f"--profile {self.profile}: {error}")
        if not {"--arrival", "--config"} & {*self.arguments} and _shape(self.arguments) != 1:
            self.arguments += ["--arrival", "gamma"]
        self.implied = sweep_note(typed, self.arguments)
        added, theirs = defaults_of(typed, self.arguments)
        if added:
            self.arguments += added
            self.implied = f"as {theirs} does without a rate: {' '.join(added)}"

    def take_levels(self) -> None:
        """Make a `run` at several rates or concurrencies the `sweep` that it means."""
        for name in ("--rate", "--concurrency"):
            at = self.arguments.index(name) + 1 if name in self.arguments else 0
            values = self.arguments[at : at + 1] if at else []
            if values and are_numbers(values[0].split(",")):
                varied = ["--vary", f"{name.removeprefix('--')}={values[0]}"]
                self.arguments = ["sweep", *self.arguments[1 : at - 1], *varied, *self.arguments[at + 1 :]]
                self.implied = f"several levels are a sweep: sidelight sweep URL {' '.join(varied)}"

    def refuse_unknown(self, options: type) -> None:
        """Add a problem that names all options that a command does not have."""
        names = _names(options)
        typed = (name for name in self.arguments if re.fullmatch(r"--[A-Za-z][\w-]*", name))
        # --no-sentinel too, of a choice that is neither on nor off by default.
        known = {*names, *(name.replace("--", "--no-", 1) for name in names)}
        unknown = [name for name in dict.fromkeys(typed) if name not in known and not name.startswith("--empty-")]
        command = f"sidelight {self.arguments[0]}"
        near = {name: hint for name in unknown if (hint := hint_of(command, name, names, elsewhere=_owner(name)))}
        said = f"{command} has no such option"
        self.problems += [f"{name}: {said}{hint}" for name, hint in near.items()]
        far = ", ".join(name for name in unknown if name not in near)
        self.problems += [f"{far}: {said}; `{command} {ALL}` lists them"] if far else []

    def take_name(self) -> None:
        """Insert the name of a test behind the command: the first positional argument but URLs."""
        name = next((word for word in self.words if not _is_url(word)), None)
        if name is not None:
            self.words.remove(name)
            self.arguments.insert(1, name)

    def take_systems(self) -> None:
        """Add an option for each positional argument. A URL, by itself or as NAME=URL, becomes a configuration;
        anything else is the path of recorded runs.
        """
        for place, word in enumerate(self.words):
            name, equals, url = word.partition("=")
            if _is_url(word):
                self.arguments += ["--variant", f"{SYSTEMS[min(place, len(SYSTEMS) - 1)]}={word}"]
            elif equals and _is_url(url) and name:
                self.arguments += ["--variant", word]
            else:
                self.arguments += ["--runs", word]
        self.words = []

    def take_urls(self, command: str, option: str) -> None:
        """Add positional URLs as values of the option. Raises ConfigurationError for any other positional argument."""
        for word in self.words:
            if not _is_url(word):
                raise ConfigurationError("option.unknown", unused(word, f"sidelight {command}"))
            self.arguments += [option, word]


def translate(arguments: Sequence[str]) -> Translation:
    """Return a command line in our options' names.

    Raises ConfigurationError naming every option that needs another form here, and that form.
    """
    if not arguments or arguments[0] not in _COMMANDS:
        return Translation(list(arguments))
    options, url = _options_of(arguments[0]), _COMMANDS[arguments[0]][1]
    flags = _flags(options)
    first, *typed = _options(arguments[1:])
    translation = Translation([arguments[0]], first.values)
    names = [option.name for option in typed]
    typed = [dataclasses.replace(option, name=meant(option.name, names)) for option in typed]
    for option in typed:
        translation.add(option, flags)
    if options is RunOptions:
        translation.take_load([option.name for option in typed])
        translation.take_levels()
    translation.refuse_unknown(_options_of(translation.arguments[0]))
    if translation.problems:
        raise ConfigurationError("option.unknown", "; ".join(translation.problems))
    if arguments[0] == "test":
        translation.take_name()
    if arguments[0] == "compare":
        translation.take_systems()
    translation.take_urls(arguments[0], url)
    return translation


def _flags(options: type) -> frozenset[str]:
    """Return the options that take no value."""
    names = [flag_of(field.name) for field in dataclasses.fields(options) if isinstance(field.default, bool)]
    return frozenset({*FLAGS, "--version", *names, *(name.replace("--", "--no-", 1) for name in names)})


def _names(options: type) -> frozenset[str]:
    """Return all options of a command. A field that is not parsed, as a step's alone, is none."""
    given = declarations(options, Parameter)
    unparsed = {flag_of(name) for name, parameter in given.items() if parameter.parse is False}
    fields = {flag_of(field.name) for field in dataclasses.fields(options)} - unparsed
    return frozenset({*_flags(options), *fields, *chain.from_iterable(how.name or () for how in given.values())})


def _options_of(command: str) -> type:
    return _COMMANDS[command][0] or draft.options_of(command)


def _owner(name: str) -> str:
    """Return the first command that has an option, or ""."""
    return next((command for command in _COMMANDS if name in _names(_options_of(command))), "")


def _options(arguments: Sequence[str]) -> Iterator[_Option]:
    """Yield the words before the first option, without a name, and then each option."""
    option = _Option("", "", [])
    for argument in arguments:
        if re.match(r"--?[A-Za-z]", argument):
            yield option
            name, separator, value = argument.partition("=")
            option = _Option(argument, name.replace("_", "-"), [value] if separator else [])
        else:
            option.values.append(argument)
    yield option


def _own_values(values: Sequence[str]) -> int:
    """Return the number of an option's own values. Of an option that takes several, those before a URL are its own."""
    return 1 + next((at for at, value in enumerate(values[1:]) if _HTTP.match(value)), len(values) - 1)


def _shape(arguments: Sequence[str]) -> float:
    """Return the value of --burstiness, 1 where it is missing or unreadable."""
    try:
        return float(arguments[arguments.index("--burstiness") + 1])
    except (ValueError, IndexError):
        return 1.0


def _is_url(value: str) -> bool:
    return _HTTP.match(value) is not None or HOST_PORT.fullmatch(value) is not None
