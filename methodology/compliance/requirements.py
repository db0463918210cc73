"""What the draft requires, as `requirements.yaml` lists it: an entry for each normative statement or part of a test."""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Literal

import msgspec
from msgspec import Struct

Level = Literal["must", "should", "part"]
Scalar = str | float | int | bool | None


class Needs(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What of a study must be there: values of the system, results by name (of a|b either), tables and plots by how
    their names begin (of several, any).
    """

    system: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    plots: tuple[str, ...] = ()


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"with_": "with"}):
    """What a value of each step must be: by default, neither null nor empty. `problem` is said with the value as {}.

    of      the path of the value: of the manifest, or step., outcome., system., asked., facts.
    at      the file that it stands in
    with_, without  what a list must, and must not, hold
    """

    of: str
    at: str = "manifest.json"
    problem: str
    least: float | None = None
    most: float | None = None
    among: tuple[Scalar, ...] = ()
    begins: tuple[str, ...] = ()
    with_: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    absent: bool = False


class When(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which steps a requirement applies to: those where a value is one of some, or not known; `otherwise` says why it
    applies to none.
    """

    of: str
    among: tuple[Scalar, ...]
    otherwise: str


class Requirement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One requirement; by `needs` or `rules` unless a function in `checks` decides. `cure`: what to do if not met."""

    id: str
    level: Level
    scope: str
    section: str
    text: str
    cure: str
    when: When | None = None
    rules: tuple[Rule, ...] = ()
    needs: Needs | None = None


@cache
def requirements() -> tuple[Requirement, ...]:
    """Return all requirements, in the draft's order."""
    import yaml  # noqa: PLC0415  15 ms, and --help must not pay for it

    text = resources.files("methodology.compliance").joinpath("requirements.yaml").read_text(encoding="utf-8")
    loaded = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  both are
    return msgspec.convert(loaded, tuple[Requirement, ...])


def applying(test: str) -> tuple[Requirement, ...]:
    """Return the requirements that a test is measured by: the load generator's, every report's, and its own."""
    return tuple(each for each in requirements() if each.scope in ("harness", "report", test))
