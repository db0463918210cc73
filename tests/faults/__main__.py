"""Hurt Sidelight in every way that is known, and print one table of what came of it.

    make faults [MINUTES=60] [FAULTS="--kinds logs,fuzz --seed 7"] [CASE=logs/flip/17]

Without MINUTES it is the quick part, which `make test` runs with seed 0. The seed is printed; a case that went wrong is
named with what replays it. Exit 1: something is not as it should be.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from faults.cases import Case, Kind, Outcome, Setting, Table, long, quick, table_of, tried
from faults.suite import KINDS, SHARES


def outcomes(kinds: list[Kind], seed: int, minutes: float, most: float, scratch: Path) -> Iterator[Outcome]:
    """Try cases of each kind, a kind in a directory of its own."""
    shares = sum(SHARES[kind.name] for kind in kinds)
    for kind in kinds:
        place = scratch / kind.name
        place.mkdir()
        if minutes:
            setting = Setting(place=place, seconds=60 * minutes * SHARES[kind.name] / shares)
            yield from shown(long(kind, setting, seed, most))
        else:
            yield from shown(quick(kind, Setting(place=place), seed))


def selected(names: str, rows: str) -> list[Kind]:
    """Return kinds, with those of their rows alone that are named; all of them where none is."""
    kinds, chosen = [KINDS[name] for name in names.split(",")], rows.split(",") if rows else ()
    return [
        replace(kind, rows={row: n for row, n in kind.rows.items() if not chosen or row in chosen}) for kind in kinds
    ]


def table_until_stopped(tries: Iterator[Outcome]) -> Table:
    """Return the table of what came of cases, until all are tried or Ctrl-C or SIGTERM comes."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    table = Table()
    with suppress(KeyboardInterrupt):
        for outcome in tries:
            table.add(outcome)
    return table


def shown(tries: Iterator[Outcome]) -> Iterator[Outcome]:
    """Say at once what is wrong: the table comes at the end."""
    for outcome in tries:
        if outcome.wrong:
            print(f"CASE={outcome.case}: {outcome.wrong}", file=sys.stderr, flush=True)
        yield outcome


def main() -> int:
    """Try, print."""
    parser = argparse.ArgumentParser(prog="make faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=None, help="number of the first case of each row")
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas")
    parser.add_argument("--rows", default="", help="faults of these kinds, separated by commas; all of them without it")
    parser.add_argument("--cases", type=float, default=math.inf, help="with --minutes: of each row this many at most")
    parser.add_argument("--case", type=Case.parse, default=None, help="KIND/FAULT/NUMBER: this one alone")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        if options.case is not None:
            with KINDS[options.case.kind].opened(Setting(place=Path(scratch), seconds=60 * options.minutes)) as attempt:
                outcome = tried(attempt, options.case)
            print(table_of([outcome]))
            return int(bool(outcome.wrong))
        seed = int(time.time()) if options.seed is None else options.seed
        print(f"seed {seed}", flush=True)
        table = table_until_stopped(
            outcomes(selected(options.kinds, options.rows), seed, options.minutes, options.cases, Path(scratch))
        )
    print(table)
    return int(table.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
