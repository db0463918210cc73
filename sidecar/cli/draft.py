"""Commands of the benchmarking draft, by name: its building stands above this one, and no other command imports it."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from cyclopts import App

# Name, function, and what stands behind the options.
COMMANDS = (
    ("test", "methodology.commands:run_test", "NAME URL"),
    ("compare", "methodology.commands:run_comparison", "A B [C ...]"),
    ("sweep", "methodology.commands:run_sweep", "URL"),
)
LOADING = ("run", *(name for name, _, _ in COMMANDS))  # commands that send a load
OPTIONS = {"test": "StudyOptions", "compare": "CompareOptions", "sweep": "SweepOptions"}
STUDY = "study.json"  # the file of a study's directory


def options_of(command: str) -> type:
    """Return the class of a command's options."""
    options: type = getattr(import_module("methodology.options"), OPTIONS[command])
    return options


def describe(app: App) -> None:
    """Import the commands, so that the list of commands has their first lines."""
    for name, _, _ in COMMANDS:
        app[name]


def report_study(path: Any, *, as_json: bool, outside: bool) -> int:
    """Derive a study again and print its report; see `methodology.commands.report_again`."""
    code: int = import_module("methodology.commands").report_again(path, as_json=as_json, outside=outside)
    return code


def result_schema() -> dict[str, Any]:
    """Return the JSON Schema of a study's `result.json`."""
    schema: dict[str, Any] = import_module("methodology.study.result").schema()
    return schema
