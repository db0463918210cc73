"""Parse one metrics page with our parser and with prometheus-client's, in turn, and print the ratio.

    python benchmarks/parse.py [PAGE ...]

Without a page, the simulated engine's own is taken. A first parse meets a layout for the first time; a repeat meets it
again with other numbers, as nearly every scrape does.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from scraper import exposition
from simulator.metrics import EngineMetrics
from simulator.settings import EngineSettings

ROUNDS = 30


def main() -> None:
    """Print a line a page."""
    print(f"prometheus-client {version('prometheus-client')}, Python {platform.python_version()}, medians of {ROUNDS}")
    pages = [(path, Path(path).read_text(encoding="utf-8")) for path in sys.argv[1:]]
    for name, page in pages or [("simulated engine", EngineMetrics("sim-llama", EngineSettings()).page().decode())]:
        theirs, first, again = (statistics.median(times) for times in zip(*_rounds(page), strict=True))
        print(
            f"{name}: {len(page) / 1e3:.0f} kB; prometheus-client {1e3 * theirs:.2f} ms; "
            f"ours first {1e3 * first:.2f} ms ({theirs / first:.1f} x), "
            f"again {1e3 * again:.2f} ms ({theirs / again:.1f} x)"
        )


def _rounds(page: str) -> list[tuple[float, float, float]]:
    encoded = page.encode()

    def theirs() -> object:
        return list(text_string_to_metric_families(page))

    def ours() -> object:
        return exposition.parse(encoded)

    rounds = []
    for number in range(ROUNDS):
        # A label that never was makes every series text new, and so the layout.
        fresh = page.replace("{", f'{{round="{number}",').replace(",}", "}").encode()
        rounds.append((_timed(theirs), _timed(partial(exposition.parse, fresh)), _timed(ours)))
    return rounds


def _timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    main()
