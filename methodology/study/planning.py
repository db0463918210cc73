"""Planning of the next step in a study, whatever its test: void steps are repeated once, and a sentinel ends it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from sidelight.methodology.study.model import Done, Finished, Procedure, Step, StudySettings

LEVEL = "level"  # of a step that results are of
SENTINEL = "sentinel"
POPULATE = "populate"  # of a step that fills a cache for the next one, and that no result is of
_PERCENT = "-percent"
DRAFT_WARMED_S = 30.0  # of a step: one that is shorter would take less than the draft's warm-up before it
REPEATS = 10_000  # contents from this number on are those of repeated steps


def decide(procedure: Procedure, asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    """Return the next step of a study.

    It is a pure function of what was asked and of the steps so far.

    - A void step is repeated once. Where that is void too, the study is not complete; it goes on with the steps that do
      not rest on it (`Procedure.independent`), and tries it again when it is resumed.
    - A step that is shorter than the draft's warm-up has a few requests in its place, unless all is by the draft.
    - After a complete test whose parameters ask for a sentinel, its first level is run again, or what it has instead.
    """
    step = _decided(procedure, asked, finished)
    by_draft = procedure.of_draft and asked.scale == "letter"
    if isinstance(step, Done) or by_draft or step.warm_up != "draft" or (step.duration or math.inf) >= DRAFT_WARMED_S:
        return step
    return replace(step, warm_up="short")


def _decided(procedure: Procedure, asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    last = finished[-1] if finished else None
    if last is not None and last.outcome.void and not last.again:
        if not last.step.repeat:
            return replace(_with_new_contents(asked, finished, last.step), repeat=1)
        if last.step.kind not in procedure.independent:
            return Done(reason=_void_twice([last]), complete=False)
    lost = given_up(finished)
    steps = [each for each in finished if each.step.kind != SENTINEL and (not each.outcome.void or each in lost)]
    decided = procedure.next_step(asked, steps)
    if isinstance(decided, Step):
        return _with_new_contents(asked, finished, decided)
    if decided.complete and lost:
        return Done(reason=_void_twice(lost), complete=False)
    first = repeated(procedure, finished)
    if not (decided.complete and asked.parameters.sentinel and first) or of_kind(valid(finished), SENTINEL):
        return decided
    seed = content_seed(asked, len(finished) + 1)
    return replace(first.step, kind=SENTINEL, label=f"{SENTINEL}-{first.step.label}", seed=seed, repeat=0)


def _with_new_contents(asked: StudySettings, finished: Sequence[Finished], step: Step) -> Step:
    """Return a step without prefix cache hits from an earlier try.

    It sends other requests, or the cache is emptied where another step sends the same.
    """
    tries = [each.step for each in finished if each.step.seed == step.seed]
    if not any((each.kind, each.variant) == (step.kind, step.variant) for each in tries):
        return step
    if step.unpaired:
        return replace(step, seed=content_seed(asked, REPEATS + len(finished)))
    return replace(step, reset_cache=True)


def given_up(finished: Sequence[Finished]) -> list[Finished]:
    """Return the steps that were void twice, and that the study went on without."""
    return [each for each in finished if each.outcome.void and each.step.repeat and not each.again]


def _void_twice(steps: Sequence[Finished]) -> str:
    named = ", ".join(f"step {each.number} ({each.step.label})" for each in steps)
    were, them = ("was", "it") if len(steps) == 1 else ("were", "them")
    return f"{named} {were} void twice: {steps[-1].outcome.void.rstrip('.')}. --resume tries {them} again"


def repeated(procedure: Procedure, finished: Sequence[Finished]) -> Finished | None:
    """Return the step that the sentinel of a test repeats; None where it has not been run, or does not count."""
    steps = counting(finished)
    return procedure.sentinel(steps) if procedure.sentinel else next(iter(of_kind(steps, LEVEL)), None)


def counting(finished: Sequence[Finished]) -> list[Finished]:
    """Return the steps that count, without void ones and sentinels."""
    return [each for each in valid(finished) if each.step.kind != SENTINEL]


def valid(finished: Sequence[Finished]) -> list[Finished]:
    """Return the steps that are not void, with the sentinel."""
    return [each for each in finished if not each.outcome.void]


def of_kind(finished: Sequence[Finished], kind: str) -> list[Finished]:
    """Return the steps of a kind."""
    return [each for each in finished if each.step.kind == kind]


def fresh(
    asked: StudySettings,
    finished: Sequence[Finished],
    label: str,
    load: Literal["open", "closed"],
    level: float,
    **given: Any,
) -> Step:
    """Return a step, by default a level, with requests that no other step sends."""
    seed = content_seed(asked, len(finished) + 1)
    return Step(**{"kind": LEVEL, **given}, label=label, load=load, level=level, seed=seed, unpaired=True)


def percents(share: float) -> str:
    """Return a share in percent as names of results have it: two shares of a study have two names."""
    return level_label(1.0, share).removesuffix(_PERCENT)


def level_label(level: float, share: float | None = None) -> str:
    """Return a level as a step's name has it: without exponent, shares in percent."""
    value, digits = (level, 3) if share is None else (100 * share, 6)
    rounded = Decimal(f"{value:.{digits}g}")
    text = f"{value:.0f}" if abs(rounded) >= 10**digits else f"{rounded:f}"
    return text if share is None else f"{text}{_PERCENT}"


def content_seed(asked: StudySettings, number: int) -> int:
    """Return the seed of a study's `number`-th content: each differs, so that no step warms another."""
    return _seed(asked.seed, number)


@lru_cache(maxsize=4096)
def _seed(study: int, number: int) -> int:
    return int(np.random.SeedSequence(study, spawn_key=(16, number)).generate_state(1, np.uint32)[0])
