"""Commands of the benchmarking draft, by name: its building stands above this one, and no other command imports it."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

from cyclopts import App


class DraftCommand(NamedTuple):
    """A command: its function, its operands in the usage, the class of its options, the option of a bare value."""

    name: str
    function: str
    operands: str
    options: str
    bare: str


COMMANDS = (
    DraftCommand("test", "sidelight.methodology.commands:run_test", "NAME URL", "StudyOptions", "--url"),
    DraftCommand(
        "compare", "sidelight.methodology.commands:run_comparison", "A B [C ...]", "CompareOptions", "--variant"
    ),
    DraftCommand("sweep", "sidelight.methodology.commands:run_sweep", "URL", "SweepOptions", "--url"),
)
LOADING = ("run", *(command.name for command in COMMANDS))  # commands that send a load
OPTIONS = {command.name: command.options for command in COMMANDS}
PREDICT = "sidelight.sidecar.predict.commands:predict"
STUDY = "study.json"  # the file of a study's directory


def options_of(command: str) -> type:
    """Return the class of a command's options."""
    options: type = getattr(import_module("sidelight.methodology.options"), OPTIONS[command])
    return options


def describe(app: App) -> None:
    """Import the commands, so that the list of commands has their first lines."""
    for name in (*(command.name for command in COMMANDS), "predict"):
        app[name]


def report_study(path: Any, *, as_json: bool, outside: bool) -> int:
    """Derive a study again and print its report; see `methodology.commands.report_again`."""
    code: int = import_module("sidelight.methodology.commands").report_again(path, as_json=as_json, outside=outside)
    return code


def result_schema() -> dict[str, Any]:
    """Return the JSON Schema of a study's `result.json`."""
    schema: dict[str, Any] = import_module("sidelight.methodology.study.result").schema()
    return schema


def predicted_schema() -> dict[str, Any]:
    """Return the JSON Schema of `predict --json`."""
    schema: dict[str, Any] = import_module("sidelight.sidecar.predict.result").schema()
    return schema
