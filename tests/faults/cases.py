"""What a fault suite is made of: kinds of faults, cases that a number decides, and one table of what came of them."""

from __future__ import annotations

import itertools
import math
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SHOWN_CHARACTERS, SHOWN_CASES = 400, 3


@dataclass(frozen=True, slots=True)
class Case:
    """One fault: its number decides all of it that is drawn at random."""

    kind: str
    row: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.row}/{self.number}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read what `str` gives. Raises ValueError."""
        kind, row, number = text.split("/")
        return cls(kind, row, int(number))

    def random(self) -> random.Random:
        """Return a generator that gives the same draws for the same case, on every machine."""
        return random.Random(str(self))


Try = Callable[[Case], str]  # what is wrong, "" where the fault was met as it must be


class NotReachedError(Exception):
    """The fault of a case did not happen, as where its victim had ended; and nothing is wrong without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a kind's cases may write, and how long it may take; 0: the quick part."""

    place: Path
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Faults of one kind: what holds for all of its cases is opened once.

    rows   what is done, each with how many cases of it the quick part has
    sizes  of rows that have so many different cases and no more, how many: as many numbers one after another are all
    """

    name: str
    rows: Mapping[str, int]
    opened: Callable[[Setting], AbstractContextManager[Try]]
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a case: what is wrong, or nothing, and whether its fault happened at all."""

    case: Case
    wrong: str
    seconds: float
    reached: bool = True


def tried(attempt: Try, case: Case) -> Outcome:
    """Try a case; what it raises is wrong, too."""
    begun_s, wrong, reached = time.monotonic(), "", True
    try:
        wrong = attempt(case)
    except NotReachedError:
        reached = False
    except Exception as raised:  # noqa: BLE001  whatever it is goes into the table
        error: BaseException = raised
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        last = traceback.extract_tb(error.__traceback__)[-1]
        wrong = f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"
    return Outcome(case=case, wrong=wrong, seconds=time.monotonic() - begun_s, reached=reached)


def quick(kind: Kind, setting: Setting, seed: int) -> Iterator[Outcome]:
    """Try as many cases of each row as the quick part has."""
    if not any(kind.rows.values()):
        return
    with kind.opened(setting) as attempt:
        for row, count in kind.rows.items():
            for number in range(count):
                yield tried(attempt, Case(kind.name, row, seed + number))


def long(kind: Kind, setting: Setting, seed: int, most: float = math.inf) -> Iterator[Outcome]:
    """Try one case of each row after another until the time is over, or each row has had all of its cases, or `most`;
    each row once at least.
    """
    ends_s = time.monotonic() + setting.seconds
    sizes = {row: min(most, kind.sizes.get(row, math.inf)) for row in kind.rows}
    with kind.opened(setting) as attempt:
        for count in itertools.count():
            rows = [row for row, size in sizes.items() if count < size]
            for row in rows:
                if count and time.monotonic() > ends_s:
                    return
                yield tried(attempt, Case(kind.name, row, seed + count))
            if not rows:
                return


@dataclass(slots=True)
class _Row:
    cases: int = 0
    not_reached: int = 0
    wrong: int = 0
    slowest_s: float = 0.0


@dataclass(slots=True)
class Table:
    """A line for each row of each kind, with how many of its faults did not happen; under it the first that were wrong,
    with what replays them.
    """

    rows: dict[tuple[str, str], _Row] = field(default_factory=dict)
    shown: list[Outcome] = field(default_factory=list)
    wrong: int = 0

    def add(self, outcome: Outcome) -> None:
        """Count a case."""
        row = self.rows.setdefault((outcome.case.kind, outcome.case.row), _Row())
        row.cases += 1
        row.not_reached += not outcome.reached
        row.slowest_s = max(row.slowest_s, outcome.seconds)
        if outcome.wrong:
            row.wrong += 1
            self.wrong += 1
            if row.wrong <= SHOWN_CASES:
                self.shown.append(outcome)

    def __str__(self) -> str:
        lines = [f"{'kind':<9} {'fault':<28} {'cases':>7} {'not reached':>12} {'wrong':>6} {'slowest s':>10}"]
        for (kind, name), row in self.rows.items():
            counts = f"{row.cases:>7} {row.not_reached:>12} {row.wrong:>6}"
            lines.append(f"{kind:<9} {name:<28} {counts} {row.slowest_s:>10.1f}")
        lines += [f"CASE={outcome.case}: {outcome.wrong[:SHOWN_CHARACTERS]}" for outcome in self.shown]
        cases, not_reached = (
            sum(getattr(row, name) for row in self.rows.values()) for name in ("cases", "not_reached")
        )
        return "\n".join([*lines, f"{cases} cases, {not_reached} of them not reached, {self.wrong} wrong"])


def table_of(outcomes: Iterable[Outcome]) -> Table:
    """Return the table of what came of cases."""
    table = Table()
    for outcome in outcomes:
        table.add(outcome)
    return table


class TooLongError(BaseException):
    """A case took more CPU time than it may; no `except Exception` of what is tested takes it."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raise TooLongError in a block that takes more CPU time of this process; on a busy machine as on a quiet one."""

    def stop(*_: object) -> None:
        raise TooLongError(f"over {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def peak_mib() -> float:
    """Return the most memory that this process has held so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def held_mib() -> float:
    """Return the memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
