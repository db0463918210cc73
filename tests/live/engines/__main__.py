"""Load real engines on this machine and check what Sidelight says of them: `make engines`, by hand and nightly.

Each engine is loaded in an open and in a closed loop, where it sends spans with them and without. No request may fail,
tokens must equal those of the engine's page, and the parts of each TTFT must be the engine's own to a millisecond.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from tempfile import mkdtemp

from live.engines.checks import Checked, check
from live.engines.engines import ENGINES, Engine
from live.runs import measure
from live.tables import markdown

from sidelight.sidecar.cli.measuring import free_pair


def main() -> int:
    """Run and print a table; return 1 where something is not as it should be."""
    parser = argparse.ArgumentParser(prog="make engines", description=__doc__)
    parser.add_argument("engines", nargs="*", help=f"which: {', '.join(ENGINES)}; all where none is named")
    parser.add_argument("--requests", type=int, default=100, help="requests of each run")
    options = parser.parse_args()
    if unknown := set(options.engines) - ENGINES.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(ENGINES)}")
    out = Path(mkdtemp(prefix="engines-"))
    results: list[Checked] = []
    for name in options.engines or ENGINES:
        for with_spans in (False, True) if ENGINES[name].has_spans else (False,):
            results += _loaded(name, ENGINES[name], out, options.requests, with_spans=with_spans)
    print(markdown([result.row for result in results]), f"\nThe run directories are in {out}")
    wrong = [f"{result.row['engine']}, {result.row['load']}: {what}" for result in results for what in result.wrong]
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def _loaded(name: str, engine: Engine, out: Path, requests: int, *, with_spans: bool) -> list[Checked]:
    """Start an engine and run against it in an open and in a closed loop."""
    spans = free_pair() if with_spans else ""
    results = []
    with engine.serve(spans) as url:
        loads = {"open": ("--rate", engine.open_rate), "closed": ("--concurrency", engine.concurrency)}
        for seed, (load, (option, value)) in enumerate(loads.items()):
            directory = out / f"{name}-{load}{'-spans' if with_spans else ''}"
            more = ("--otlp-listen", spans) if with_spans else engine.without_spans
            # Prompts of their own: those of an earlier run are in the prefix cache.
            size = ("--warmup", "0", "--requests", str(requests), "--seed", str(seed))
            run = measure(directory, "--url", url, option, str(value), *engine.options, *more, *size)
            names = {"engine": name, "load": load, "spans": "yes" if with_spans else "no"}
            results.append(check(run, names, requests=requests, has_spans=with_spans))
            print(markdown([results[-1].row]), *results[-1].wrong, sep="\n", flush=True)
    return results


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
