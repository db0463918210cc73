"""Kill a study of the simulated engine at random moments and go on with it until it ends, beside an undisturbed one.

    python tests/live/kill_study.py [--kills 20] [--test throughput] [-- OPTIONS of sidelight test]

Each study is of `--scale short` with short steps. Printed are the steps of both, which may differ as the engine's speed
does, and how many kills cost a step. Exits with 1 where a step of the killed one is not what those before it decide, or
a kill cost more than one. By hand; not by `make test`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import processes

from sidelight.methodology.execution.record import TORN, open_study
from sidelight.methodology.procedures import PROCEDURES
from sidelight.methodology.study.planning import decide

SHORT = ("--scale", "short", "--duration", "6s")


def command(*arguments: str | Path) -> list[str]:
    """Return the command line of a study whose load generator is trusted, on however busy a machine."""
    return [sys.executable, str(Path(__file__).parents[1] / "tiny_study.py"), "test", *map(str, arguments), "--quiet"]


def kinds(path: Path) -> list[str]:
    """Return the steps that count, in order."""
    return [each.step.kind for each in open_study(path).finished if not each.outcome.void]


def is_as_decided(path: Path) -> bool:
    """Tell whether each step of a study is what its test decides after the steps before it."""
    study = open_study(path)
    procedure, asked, finished = PROCEDURES[study.record.asked.test], study.record.asked, study.finished
    return all(each.step == decide(procedure, asked, finished[:at]) for at, each in enumerate(finished))


def killed(test: str, url: str, path: Path, options: list[str], kills: int, rng: random.Random) -> int:
    """Run a study, killing it so often; return how many steps were set aside."""
    begin = command(test, url, "--out", path, *options)
    for _ in range(kills):
        arguments = command(test, "--resume", path) if (path / "study.json").exists() else begin
        if not (path / "study.json").exists():
            shutil.rmtree(path, ignore_errors=True)
        with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(3.0, 25.0))
                break
            process.send_signal(signal.SIGKILL)
        time.sleep(1.0)  # what it had started ends
    subprocess.run(command(test, "--resume", path), stdout=subprocess.DEVNULL, check=False)
    return sum(TORN in each.name for each in (path / "steps").iterdir())


def main() -> int:
    """Run both studies and print what they have in common."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--test", default="throughput")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("options", nargs="*", default=SHORT)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, processes.engine() as (url, _):
        whole, broken = Path(scratch) / "whole", Path(scratch) / "broken"
        subprocess.run(command(asked.test, url, "--out", whole, *asked.options), stdout=subprocess.DEVNULL, check=False)
        torn = killed(asked.test, url, broken, list(asked.options), asked.kills, random.Random(asked.seed))
        print(f"undisturbed: {' '.join(kinds(whole))}")
        print(f"killed:      {' '.join(kinds(broken))}; {torn} of {asked.kills} kills cost a step")
        for name, path in (("undisturbed", whole), ("killed", broken)):
            print(f"{name}: {json.loads((path / 'result.json').read_text())['answer'][0]}")
        return int(not is_as_decided(broken) or torn > asked.kills)


if __name__ == "__main__":
    sys.exit(main())
