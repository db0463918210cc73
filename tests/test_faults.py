"""The quick part of the fault suite (`make faults`): every kind of fault is met as it must be."""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
from faults.cases import (
    Case,
    Kind,
    NotReachedError,
    Outcome,
    Setting,
    TooLongError,
    Try,
    cpu_limit,
    long,
    quick,
    table_of,
    tried,
)
from faults.disk import fault_of
from faults.simulated import player
from faults.soak import virtual
from faults.suite import KINDS

SEED = 0


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS.values() if any(kind.rows.values())], ids=lambda kind: kind.name
)
def test_faults_are_met(kind: Kind, tmp_path: Path):
    """`make faults CASE=...` replays what went wrong."""
    table = table_of(quick(kind, Setting(place=tmp_path), SEED))
    if table.wrong:
        pytest.fail(str(table))


def test_a_case_draws_the_same_on_every_machine():
    """By its name alone, so that a case of last night can be replayed."""
    assert 0.0014508609666886718 == Case("logs", "flip", 17).random().random()
    assert Case("logs", "flip", 17) == Case.parse("logs/flip/17")


def test_a_schedule_in_virtual_time_is_the_same_again_to_the_byte(tmp_path: Path):
    """What was logged, with its stamps, what was forwarded and said: in another process too."""

    def digest() -> str:
        with player(tmp_path) as play:
            wrong, played = play(Case("time", "all", 1))
        assert "" == wrong
        return played

    assert digest() == digest() != ""


def opened(_: Setting) -> AbstractContextManager[Try]:
    """Open cases of which those with odd numbers are not reached."""

    def attempt(case: Case) -> str:
        if case.number % 2:
            raise NotReachedError
        return ""

    return nullcontext(attempt)


def test_a_fault_that_did_not_happen_is_counted_as_such(tmp_path: Path):
    """A thousand kills are a thousand that happened."""
    table = table_of(quick(Kind(name="crash", rows={"worker": 5}, opened=opened), Setting(place=tmp_path), SEED))
    _, row, last = str(table).splitlines()
    assert ["crash", "worker", "5", "2", "0"] == row.split()[:5]
    assert "5 cases, 2 of them not reached, 0 wrong" == last


def test_a_call_beyond_the_last_one_is_not_reached(tmp_path: Path):
    """Of a report, which replaces fewer than sixteen files."""
    fault = next(case for case in map(partial(Case, "disk", "report:rename"), range(64)) if nth(case) == 16)
    with KINDS["disk"].opened(Setting(place=tmp_path)) as attempt:
        assert not tried(attempt, fault).reached


def nth(case: Case) -> int:
    return fault_of(case, Path()).nth


def test_a_long_part_ends_once_each_row_has_had_all_of_its_cases(tmp_path: Path):
    """Or as many as were asked for."""
    kind = Kind(name="disk", rows={"write": 0, "open": 0}, opened=opened, sizes={"write": 6, "open": 2})
    setting = Setting(place=tmp_path, seconds=3600)
    assert [6, 2] == [row.cases for row in table_of(long(kind, setting, SEED)).rows.values()]
    assert [4, 2] == [row.cases for row in table_of(long(kind, setting, SEED, most=4)).rows.values()]


def test_what_goes_wrong_is_named_with_what_replays_it():
    outcomes = [
        Outcome(case=Case("logs", "flip", number), wrong="silent" * (number == 3), seconds=number)
        for number in range(5)
    ]
    *_, row, wrong, last = str(table_of(outcomes)).splitlines()
    assert ["logs", "flip", "5", "0", "1", "4.0"] == row.split()
    assert "CASE=logs/flip/3: silent" == wrong
    assert "5 cases, 0 of them not reached, 1 wrong" == last


def test_a_case_that_takes_long_is_ended():
    """By CPU time, which another's load does not use up."""
    with pytest.raises(TooLongError, match="CPU time"), cpu_limit(0.05):
        deque(each for each in itertools.count() if each < 0)


def test_a_watch_holds_no_more_after_a_while(tmp_path: Path):
    """In virtual time, with all that goes wrong in a soak: neither what is in use grows, nor garbage that waits."""
    assert "" == virtual(tmp_path, (8, 12))
