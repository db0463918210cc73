"""Start gateways of other hands for real, and check what Sidelight says of a delay that is known.

    make gateways [GATEWAYS="[NAME ...] [--held-ms 300] [--out DIR]"]

Each stands between users and the simulated engine. LiteLLM and a home-made gateway hold each request by themselves;
behind Envoy and sglang-router a proxy does, so that the most that they can have taken holds it. Exit 1: something is
not as it should be.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from live.gateways.measured import Result, by_run, by_watch, standing
from live.gateways.setups import SETUPS
from live.tables import markdown


def rows(names: Sequence[str], folder: Path, held_ms: float) -> Iterator[dict[str, object]]:
    """Give a row of the table for each gateway and command, as it is measured."""
    for name in names:
        with standing(name, SETUPS[name], held_ms=held_ms, folder=folder / name) as stand:
            for command in (by_run, by_watch):
                result = command(stand)
                yield {
                    "gateway": name,
                    "by": result.command,
                    "requests": result.requests,
                    "joined": result.joined,
                    "gateway's spans": result.passed,
                    "counted": result.counted,
                    "part p50 ms": part(result),
                    "share %": 100 * result.share,
                    "true share %": 100 * result.true_share,
                    "load average": os.getloadavg()[0],
                    "faults": "; ".join(result.faults(held_ms)),
                }


def part(result: Result) -> str:
    """Return the part, or the bounds that it is between."""
    if result.known_ms == result.most_ms:
        return f"{result.known_ms:.1f}"
    least = "" if math.isnan(result.known_ms) else f"{result.known_ms:.1f} to "
    return f"{least or 'at most '}{result.most_ms:.1f}"


def main() -> int:
    """Measure, print."""
    parser = argparse.ArgumentParser(prog="make gateways", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=[*SETUPS], metavar="NAME", help=", ".join(SETUPS))
    parser.add_argument("--held-ms", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=None, help="keep run directories and logs there; it must be new")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SETUPS):
        parser.error(f"there is no setup of {', '.join(sorted(unknown))}, only of {', '.join(SETUPS)}")
    measured = []
    with tempfile.TemporaryDirectory(prefix="sidelight-") as scratch:
        for row in rows(options.names, options.out or Path(scratch) / "gateways", options.held_ms):
            print(row["gateway"], row["by"], row["faults"] or "as it should be", file=sys.stderr, flush=True)
            measured.append(row)
    print(f"Each request was held for {options.held_ms:g} ms.\n\n{markdown(measured)}")
    return int(any(row["faults"] for row in measured))


if __name__ == "__main__":
    sys.exit(main())
