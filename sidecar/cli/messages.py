"""One-line messages for errors in command lines and configuration files, with cause, place and cure; and the printing
of errors.

The parser's own sentences speak of its classes and tokens; these speak of options. A value that may be a secret is not
shown.
"""

from __future__ import annotations

import difflib
import errno
import logging
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import cyclopts

from sidelight.rundir.printable.text import printable, printable_lines
from sidelight.sidecar.cli.draft import LOADING
from sidelight.sidecar.cli.peers import COMMANDS
from sidelight.sidecar.options.config import REMOVED
from sidelight.sidecar.options.fields import Masked, declarations, flag_of
from sidelight.sidecar.options.load import RunOptions
from sidelight.sidecar.progress.reporter import discard

SHORT = 16  # characters: keys and tokens are longer
_MUST_BE = {
    float: "must be a number",
    int: "must be a whole number",
    bool: "is a flag and takes no value but true or false",
}
_NO_ROOM = ("can't start new thread", "failed to map segment", "cannot allocate memory", "Cannot allocate memory")
_MISSING = {
    "RUN": "report: the run directory is missing; give the one that a run wrote, e.g. sidelight report runs/NAME",
}

# An option of another command, and how the same is done here.
_OTHERWISE = {
    ("sidelight watch", "--duration"): "; a watch goes on until Ctrl-C or SIGTERM, as of `timeout -s INT 30s sidelight "
    "watch ...`; `sidelight scrape` has --duration",
    ("sidelight watch", "--url"): "; a metrics page stands alone, or behind --metrics: sidelight watch URL/metrics",
    ("sidelight run", "--timeout"): "; of one request it is --request-timeout, of those in flight at the end "
    "--drain-timeout",
}


def unexpected(error: Exception) -> str:
    """Return the message for an error that no code here raises on purpose."""
    text, number = " ".join(str(error).split()), getattr(error, "errno", None)
    # A library that finds no room for its code, or a thread none for its stack, says so in words of its own.
    no_room = number == errno.ENOMEM or any(words in text for words in _NO_ROOM)
    if isinstance(error, MemoryError) or no_room:
        return "the memory that this process may take is used up (ulimit -v, or the limit of a container); raise it"
    if number in (errno.EMFILE, errno.ENFILE):
        return "all files that this process may have open are (ulimit -n), or all of the machine; raise the limit"
    if isinstance(error, OSError):
        return f"{error.filename or 'input/output'}: {error.strerror or error}"
    return f"{type(error).__name__}: {text}; this is a defect, --verbose shows where"


def explained(error: cyclopts.CycloptsError) -> str:
    """Return the message for a command line that cannot be used."""
    command = " ".join(("sidelight", *(error.command_chain or ())))
    if isinstance(error, cyclopts.UnknownOptionError):
        return _unknown_option(error, command)
    if isinstance(error, cyclopts.UnknownCommandError):
        return _unknown_command(error)
    if isinstance(error, cyclopts.CoercionError):
        return _unusable_value(error)
    if isinstance(error, cyclopts.MissingArgumentError) and error.argument is not None:
        name = _name(error.argument, error.keyword)
        return _MISSING.get(name, f"{name}: needs a value; `{command} --help-all` says which")
    if isinstance(error, cyclopts.RepeatArgumentError):
        return f"{_name(error.argument, error.token.keyword)}: given more than once; give it once"
    if error.unused_tokens:
        return unused(error.unused_tokens[0], command)
    return " ".join(str(error).split())


def of_systems(text: str, arguments: Sequence[str]) -> str:
    """Return an error in the words of `compare`, which has systems and no --url."""
    if list(arguments[:1]) != ["compare"]:
        return text
    systems = [word for word in arguments if "@" not in word and urlsplit(word.partition("=")[2]).netloc]
    named = [word for word in systems if urlsplit(word.partition("=")[2]).netloc in text]
    return text.replace("--url", max(named, key=len, default="NAME=URL"))


class _Shown(logging.Formatter):
    """Formatter of printable log lines."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def log_to_stderr() -> None:
    """Log warnings of libraries and tasks to standard error, without secrets and control characters."""
    logs = logging.StreamHandler()
    logs.setFormatter(_Shown("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[logs])


def print_error(text: str, *, trace: bool = False) -> None:
    """Print an error as one line, with `trace` its traceback before it."""
    try:
        if trace:
            sys.stderr.write(printable_lines(traceback.format_exc()))
        sys.stderr.write(f"sidelight: {printable(text)}\n")
        sys.stderr.flush()
    except BrokenPipeError:
        discard(sys.stderr)


def unused(text: str, command: str) -> str:
    """Return the message for a word that belongs to no option. Of a word that may be a secret, only the beginning is
    shown.
    """
    scheme, _, behind = text.partition("://")
    if behind and len(scheme) <= SHORT:
        return f"{scheme}://...: a target of `{command}` must be an http:// or https:// URL"
    shown = text if len(text) <= SHORT and not set(text) & set(":=@") else f"{re.split('[:=@]', text)[0][:8]}..."
    return f"{shown!r} belongs to no option of `{command}`; put a value behind its option, in quotes if it has spaces"


def _unknown_option(error: cyclopts.UnknownOptionError, command: str) -> str:
    name = (error.token.keyword or error.token.value).partition("=")[0]
    names = [name for argument in error.argument_collection if argument.parse for name in argument.names]
    hint = hint_of(command, name, names)
    return f"{name}: {command} has no such option{hint or f'; `{command} --help-all` lists them'}"


def _unknown_command(error: cyclopts.UnknownCommandError) -> str:
    name = error.unused_tokens[0] if error.unused_tokens else ""
    commands = [command for command in (error.app or ()) if not command.startswith("-")]
    if name in COMMANDS:
        return f"{name}: there is no such command; a server is loaded with `sidelight run --url URL`"
    if name.startswith(("http://", "https://")):
        return "a URL alone is not a command; load the server with `sidelight run URL`"
    return f"{name}: there is no such command; commands: {', '.join(commands)}{nearest(name, commands)}"


def _unusable_value(error: cyclopts.CoercionError) -> str:
    token, argument = error.token, error.argument
    name = _name(argument, token.keyword if token else None)
    value = token.value if token else ""
    if token and token.source not in ("", "cli"):
        name = f"--config {token.source}: {name.strip('[]').replace('][', '.')}"
    shown = "" if _is_secret(name) else f" {value!r}" if not value or " " in value else f" {value}"
    return f"{name}{shown}: {_reason(error, value)}"


def _reason(error: cyclopts.CoercionError, value: str) -> str:
    is_load = (error.command_chain or ("",))[0] in LOADING
    if is_load and are_numbers(value.split(",")) and get_origin(error.target_type) is not tuple:
        name = _name(error.argument, None)
        if name in map(flag_of, RunOptions.__dataclass_fields__):
            return f"give one number; several are a sweep: sidelight sweep URL --vary {name.removeprefix('--')}={value}"
    if error.msg is not None:
        return str(error.msg).removeprefix(f"{value!r}: ")
    hint: Any = error.target_type
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        return f"choose from {', '.join(choices)}{nearest(value, choices)}"
    if isinstance(hint, type) and issubclass(hint, Enum):
        return f"choose from {', '.join(hint.__members__)}"
    return _MUST_BE.get(hint, "cannot be read")


def are_numbers(texts: Sequence[str]) -> bool:
    """Return whether these are several numbers."""
    return len(texts) > 1 and all(text.strip().replace(".", "", 1).isdecimal() for text in texts)


def _name(argument: Any, keyword: str | None) -> str:
    name = keyword or str(argument.name)
    return name.removeprefix("--") if name.isupper() else name


def _is_secret(name: str) -> bool:
    return any(name == flag_of(option) for option, how in declarations(RunOptions, Masked).items() if how.secret)


def hint_of(command: str, name: str, names: Iterable[str], *, elsewhere: str = "") -> str:
    """Return a hint at the replacement of an option that a command lacks, or "". It may be one `elsewhere`."""
    if (removed := name.replace("--no-", "--", 1)) in REMOVED:
        return f"; {REMOVED[removed]}"
    has_it = f"; `sidelight {elsewhere}` has it" if elsewhere else ""
    return _OTHERWISE.get((command, name)) or has_it or nearest(name, names)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return a hint at the known name nearest to a wrong one, or ""."""
    bare = {known.lstrip("-"): known for known in names}
    near = difflib.get_close_matches(name.lstrip("-"), bare, n=1, cutoff=0.6)
    return f"; did you mean {bare[near[0]]}?" if near else ""
