"""Requirements of the draft, as `requirements.yaml` lists them: an entry for each normative statement or part of a
test.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Literal

import msgspec
from msgspec import Struct

Level = Literal["must", "should", "part"]
Scalar = str | float | int | bool | None


class Rule(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename={"with_": "with"}):
    """Condition on a value of each step; by default, neither null nor empty. `problem` is said with the value as {}."""

    of: str  # the path of the value, as `case.value_at` reads it
    at: str = ""  # where that stands; by default in the manifest
    problem: str
    least: float | None = None
    most: float | None = None
    among: tuple[Scalar, ...] = ()
    begins: tuple[str, ...] = ()  # how it, or a member of it, begins
    with_: tuple[Scalar, ...] = ()  # what a list must hold
    without: tuple[Scalar, ...] = ()  # and must not
    absent: bool = False  # null, false or 0
    known: bool = False  # not null


class When(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which steps a requirement is about: those where a value is among some, apart from others, or not known.

    Where there are none it does not apply, for the reason `otherwise`; without a reason it is not met.
    """

    of: str
    among: tuple[Scalar, ...] = ()
    apart: tuple[Scalar, ...] = ()
    otherwise: str = ""


class Requirement(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One requirement; `unless`: the tests that it does not apply to."""

    id: str
    level: Level
    scope: str
    section: str
    text: str
    cure: str
    unless: tuple[str, ...] = ()
    when: When | None = None
    rules: tuple[Rule, ...] = ()
    declared: tuple[str, ...] = ()
    reported: tuple[str, ...] = ()

    def all_rules(self) -> tuple[Rule, ...]:
        """Return its rules, with those of the values that must be known and reported."""
        known = (Rule(of=f"system.{name}", at=f"result.json: sut.{name}", known=True,
                      problem=f"neither declared nor seen: {name}") for name in self.declared)  # fmt: skip
        shown = (
            Rule(of="study.shown", at="report.html", begins=(name,), problem=f"not reported: {name}")
            if " " in name else Rule(of=f"results.{name}.value", at=f"result.json: results.{name}.value", known=True,
                                     problem=f"not reported: {name}") for name in self.reported)  # fmt: skip
        return (*self.rules, *known, *shown)


@cache
def requirements() -> tuple[Requirement, ...]:
    """Return all requirements, in the draft's order."""
    import yaml  # noqa: PLC0415  15 ms, and --help must not pay for it

    text = resources.files("sidelight.methodology.compliance").joinpath("requirements.yaml").read_text(encoding="utf-8")
    loaded = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  both are
    return msgspec.convert(loaded, tuple[Requirement, ...])


def applying(test: str) -> tuple[Requirement, ...]:
    """Return the requirements that a test is measured by: the load generator's, every report's, and its own."""
    return tuple(each for each in requirements() if each.scope in ("harness", "report", test))
