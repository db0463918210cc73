"""A test of the draft that is quick: one saturated step, two levels, and what they served."""

from __future__ import annotations

from collections.abc import Sequence

from sidelight.methodology.study.findings import ResultColumn, ResultQuantity, ResultTable, StudyFindings
from sidelight.methodology.study.model import Done, Finished, Parameters, Procedure, Reader, Step, StudySettings
from sidelight.methodology.study.planning import content_seed
from sidelight.methodology.study.saturation import Capacity, capacity


def next_step(asked: StudySettings, finished: Sequence[Finished]) -> Step | Done:
    """Saturate the system unless its capacity is stated, then go through the levels."""
    limit = capacity(asked, finished)
    if not isinstance(limit, Capacity):
        return limit
    levels = [each for each in finished if each.step.kind == "level"]
    shares = asked.parameters.levels or ()
    if len(levels) == len(shares):
        return Done(reason="all levels are measured")
    share = shares[len(levels)]
    return Step(
        kind="level",
        label=f"open-{share:.2f}",
        load="open",
        level=limit.per_s * share,
        share=share,
        duration=asked.parameters.duration,
        seed=content_seed(asked, len(finished) + 1),
    )


def findings(asked: StudySettings, finished: Sequence[Finished], read: Reader) -> StudyFindings:
    """Say what each level served, and how many requests its tables have."""
    levels = [each for each in finished if each.step.kind == "level" and not each.outcome.void]
    rows = tuple((each.step.level, each.outcome.completed_per_s, len(read(each).requests)) for each in levels)
    return StudyFindings(
        answer=(f"{len(levels)} of {len(asked.parameters.levels or ())} levels were measured.",),
        results={"levels": ResultQuantity(value=float(len(levels)), unit="levels")},
        tables=(
            ResultTable(
                name="levels",
                title="Levels",
                columns=tuple(ResultColumn(name=name, title=name) for name in ("level", "served", "requests")),
                rows=rows,
            ),
        ),
        passed=None,
    )


TINY = Procedure(
    name="tiny",
    objective="to be quick",
    workload="synthetic-uniform",
    presets={
        "letter": Parameters(duration=2.0, levels=(0.5, 0.8), sentinel=True),
        "short": Parameters(duration=1.0, levels=(0.5,), sentinel=False),
    },
    next_step=next_step,
    findings=findings,
)


def main() -> None:
    """Run the command line with this test, and with a load generator that is trusted: the machine may be busy."""
    from sidelight.methodology import commands as study  # noqa: PLC0415  as above
    from sidelight.methodology.execution import data  # noqa: PLC0415  as above
    from sidelight.methodology.procedures import PROCEDURES  # noqa: PLC0415  what the tests of other processes need not import
    from sidelight.sidecar.cli import app as cli  # noqa: PLC0415  as above

    PROCEDURES[TINY.name] = TINY
    study.TESTS = (*study.TESTS, TINY.name)
    data.doubts = lambda *_: {}
    cli.main()


if __name__ == "__main__":
    main()
