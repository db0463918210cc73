"""What comes next in a study, whatever its test: void steps are repeated once, and a sentinel ends it."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Literal

import numpy as np
from msgspec.structs import replace

from methodology.study.model import Asked, Done, Finished, Procedure, Step

LEVEL = "level"  # of a step that results are of
SENTINEL = "sentinel"
POPULATE = "populate"  # of a step that fills a cache for the next one, and that no result is of
_PERCENT = "-percent"
REPEATS = 10_000  # contents from this number on are those of repeated steps


def decide(procedure: Procedure, asked: Asked, finished: Sequence[Finished]) -> Step | Done:
    """Return the next step of a study, a pure function of what was asked and of the steps so far.

    - A void step is repeated once; where that is void too, the study is not complete. It sends other requests, which no
      prefix cache holds from the first time; where other steps have to send the same, the cache is emptied.
    - After a complete test whose parameters ask for a sentinel, its first level is run again, or what it has instead.
    """
    if finished and finished[-1].outcome.void:
        last = finished[-1]
        if last.step.repeat:
            reason = f"step {last.number} ({last.step.label}) was void twice: {last.outcome.void}"
            return Done(reason=reason, complete=False)
        seed = content_seed(asked, REPEATS + len(finished)) if last.step.unpaired else last.step.seed
        empties = last.step.reset_cache or not last.step.unpaired
        return replace(last.step, repeat=1, seed=seed, reset_cache=empties)
    decided = procedure.next_step(asked, counting(finished))
    first = repeated(procedure, finished)
    if isinstance(decided, Step) or not (decided.complete and asked.parameters.sentinel and first):
        return decided
    if any(each.step.kind == SENTINEL for each in finished):
        return decided
    seed = content_seed(asked, len(finished) + 1)
    return replace(first.step, kind=SENTINEL, label=f"{SENTINEL}-{first.step.label}", seed=seed, repeat=0)


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
    asked: Asked, finished: Sequence[Finished], label: str, load: Literal["open", "closed"], level: float, **given: Any
) -> Step:
    """Return a step, by default a level, that sends what no other step of the study does."""
    seed = content_seed(asked, len(finished) + 1)
    return Step(**{"kind": LEVEL, **given}, label=label, load=load, level=level, seed=seed, unpaired=True)


def percents(share: float) -> str:
    """Return a share in percent as names of results have it: two shares of a study have two names."""
    return level_label(1.0, share).removesuffix(_PERCENT)


def level_label(level: float, share: float | None = None) -> str:
    """Return a level as the names of steps have it, without an exponent: of a share of the capacity in percent."""
    value, digits = (level, 3) if share is None else (100 * share, 6)
    rounded = Decimal(f"{value:.{digits}g}")
    text = f"{value:.0f}" if abs(rounded) >= 10**digits else f"{rounded:f}"
    return text if share is None else f"{text}{_PERCENT}"


def content_seed(asked: Asked, number: int) -> int:
    """Return the seed of what the `number`-th content of a study sends: each differs, so that no step warms another."""
    return int(np.random.SeedSequence(asked.seed, spawn_key=(16, number)).generate_state(1, np.uint32)[0])
